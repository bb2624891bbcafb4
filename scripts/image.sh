#!/usr/bin/env bash
# usage: scripts/image.sh [--tag NAME] [--output FILE] [--target TRIPLE]... [--check]
#
# Builds berth with scripts/static.sh and packs it as an OCI image, with berth as its entrypoint: an archive (oci-archive) that ctr,
# podman and skopeo read. For more than one target it has an image of each, and an index that names them by platform. Prints IMAGE=,
# ARCHIVE= and DIGEST= (of the manifest, or the index), for a shell's eval. The same sources and tools give the same digest, on any
# machine and in any directory. Needs umoci, jq and git; no root, no daemon. Exit status 70, too: an image is larger than 8 MB.
#
#   --tag NAME        the image's name (localhost/berth:vVERSION)
#   --output FILE     the archive (berth-image.tar in Cargo's target directory)
#   --target TRIPLE   as scripts/static.sh takes it (this machine's); of x86_64 or aarch64, and each once
#   --check           build nothing: exit with 69 if there is no archive, or one older than the sources
#
# Variables: SOURCE_DATE_EPOCH, the image's time, if not the time of the commit; and those of scripts/static.sh

. "$(dirname "${BASH_SOURCE[0]}")/release/common.sh"

# Bytes of an image in the archive: a node pulls it while its control plane may be down.
readonly LIMIT=8000000

main() {
    local check=false target=()
    tag='' output=''
    parse_options check tag=. output=. target+=. -- "$@"
    ((${#target[@]})) || target=("$(host)")
    readonly TARGETS=("${target[@]}")
    each_once "${TARGETS[@]}"
    need_package umoci jq git
    tag=${tag:-localhost/berth:v$(about version)}
    [[ $tag =~ ^[a-z0-9][a-z0-9.:/_-]*:[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] ||
        die $EX_USAGE "--tag $tag is not like registry.example/berth:v0.1.0"
    output=$(realpath -m -- "${output:-${CARGO_TARGET_DIR:-$root/target}/berth-image.tar}")

    if $check; then
        check
    else
        scratch=$(mktemp -d -t berth-image.XXXXXX)
        trap 'rm -rf -- "$scratch"' EXIT
        pack
    fi
    printf '%s=%q\n' IMAGE "$tag" ARCHIVE "$output" DIGEST "$(digest)"
}

check() {
    local newer
    [[ -f $output ]] || unavailable "no $output: run scripts/image.sh"
    newer=$(cd "$root" && find src crates Cargo.toml Cargo.lock scripts/static.sh scripts/image.sh scripts/lib.sh scripts/release/common.sh -newer "$output" -print -quit)
    [[ -z $newer ]] || unavailable "$output is older than $newer: run scripts/image.sh"
}

# digest: of the archive's manifest, by which registries and kubelets know the image
digest() { tar -xOf "$output" index.json | jq -r '.manifests[0].digest'; }

# The image of each target, and the index.
pack() {
    local layout=$scratch/layout created target size
    created=$(epoch)
    created=$(iso "$created")
    umoci init --layout "$layout"
    for target in "${TARGETS[@]}"; do add "$target"; done
    ((${#TARGETS[@]} == 1)) || join
    umoci gc --layout "$layout"
    # By this name containerd imports it; of OCI's own annotation it takes no more than the tag.
    jq -c --arg name "$tag" '.manifests[0].annotations["io.containerd.image.name"] = $name' \
        "$layout/index.json" >"$scratch/index.json"
    mv -- "$scratch/index.json" "$layout"
    tar -C "$layout" --sort=name --mtime="$created" --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w \
        -cf "$scratch/image.tar" oci-layout index.json blobs
    size=$(stat -c %s "$scratch/image.tar")
    ((size <= LIMIT * ${#TARGETS[@]})) ||
        die $EX_SOFTWARE "the archive has $size bytes, more than $LIMIT for each of ${TARGETS[*]}"
    mkdir -p -- "$(dirname -- "$output")"
    mv -- "$scratch/image.tar" "$output"
    say "$tag: $size bytes for ${TARGETS[*]}"
}

# add TARGET: its image to the layout
add() {
    local image=$layout:${tag##*:} architecture directory label labels=()
    architecture=$(architecture "$1")
    directory=$("$root/scripts/static.sh" --target "$1")
    while read -r label; do labels+=(--config.label "org.opencontainers.image.$label"); done < <(labels "$created")
    install -m 0755 -- "$directory/berth" "$scratch/berth"
    tar -C "$scratch" --mtime="$created" --owner=0 --group=0 --numeric-owner -cf "$scratch/layer.tar" berth
    say "$1: $(stat -c %s "$scratch/berth") bytes unpacked"
    ((${#TARGETS[@]} == 1)) || image+=-$architecture
    umoci new --image "$image"
    # `umoci insert` leaves the archive without its end, which not every reader takes.
    umoci raw add-layer --image "$image" --history.created "$created" --history.created_by scripts/image.sh "$scratch/layer.tar"
    # No user: the pod names it, since it has to be the apiserver's.
    umoci config --image "$image" --architecture "$architecture" --os linux --created "$created" --no-history \
        --config.entrypoint /berth "${labels[@]}"
}

# Puts all that is in the layout into an index, which has the tag.
join() {
    local index=$scratch/joined digest
    jq -c --arg tag "${tag##*:}" '{schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json", manifests: [
        .manifests[] | (.annotations["org.opencontainers.image.ref.name"] | ltrimstr($tag + "-")) as $architecture |
        {mediaType, digest, size, platform: {architecture: $architecture, os: "linux"}}]}' "$layout/index.json" >"$index"
    digest=$(sha256sum <"$index")
    digest=${digest%% *}
    jq -nc --arg digest "$digest" --argjson size "$(stat -c %s "$index")" --arg tag "${tag##*:}" '{schemaVersion: 2,
        manifests: [{mediaType: "application/vnd.oci.image.index.v1+json", digest: "sha256:\($digest)", size: $size,
        annotations: {"org.opencontainers.image.ref.name": $tag}}]}' >"$layout/index.json"
    mv -- "$index" "$layout/blobs/sha256/$digest"
}

# labels CREATED: one a line
labels() {
    local revision repository
    revision=$(revision)
    repository=$(about repository)
    printf '%s\n' title=berth "description=$(about description)" "version=$(about version)" "licenses=$(about license)" \
        "created=$1" ${revision:+"revision=$revision"} ${repository:+"source=$repository"}
}

main "$@"
