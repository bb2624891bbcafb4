#!/usr/bin/env bash
# usage: scripts/release.sh [--output DIR] [--target TRIPLE]... [--check | --verify]
#
# Makes a release of what is committed, and prints its files: the static berth with man pages, completions, systemd units and
# documents (.tar.gz), the same as a Debian package and an RPM, which need no other package, and what berth is made of (CycloneDX), for
# each target; the image (scripts/image.sh), the Helm chart, and SHA256SUMS.
# And tries them: each package is installed into an empty root, and berth runs out of it; that of another architecture under QEMU, if
# Debian's qemu-user-static or qemu-user is there. The bytes depend on the commit, Rust, Debian's packages and the machine's own
# architecture, not on directories or the time. Needs Debian, git, jq, rpm and umoci, and what scripts/static.sh says; no root.
#
#   --output DIR      where to (release-VERSION in Cargo's target directory)
#   --target TRIPLE   for this one only (x86_64-unknown-linux-gnu and aarch64-unknown-linux-gnu)
#   --check           build nothing: try what is in DIR
#   --verify          build once more, from a clone, in another directory and with another CARGO_HOME: exit with 1 if a file differs
#
# Variables: SOURCE_DATE_EPOCH, the time of the files, if not that of the commit; and those of scripts/static.sh.
# Exit status 1: a file is not as it should be, or --verify found another. 64, too: something is not committed.

umask 022

. "$(dirname "${BASH_SOURCE[0]}")/release/common.sh"
. "$root/scripts/release/pack.sh"
. "$root/scripts/release/try.sh"

main() {
    local check=false verify=false target=() of all=()
    output=''
    parse_options check verify output=. target+=. -- "$@"
    ! $check || ! $verify || die $EX_USAGE "--check or --verify, not both"
    ((${#target[@]})) || target=({x86_64,aarch64}-unknown-linux-gnu)
    readonly TARGETS=("${target[@]}")
    each_once "${TARGETS[@]}"
    need_package git jq umoci dpkg dpkg-deb dpkg-query rpm rpmbuild rustc cc
    version=$(about version)
    output=$(realpath -m -- "${output:-${CARGO_TARGET_DIR:-$root/target}/release-$version}")
    for of in "${TARGETS[@]}"; do
        of_target "$of"
        all+=("${FILES[@]}")
        options+=(--target "$of")
    done
    readonly IMAGE=berth-$version.oci.tar
    readonly CHART=berth-chart-$version.tgz
    readonly ALL=("${all[@]}" "$IMAGE" "$CHART")
    scratch=$(mktemp -d -t berth-release.XXXXXX)
    trap 'rm -rf -- "$scratch"' EXIT

    $check || make
    try
    ! $verify || verify
    printf '%s\n' "${ALL[@]/#/$output/}" "$output/SHA256SUMS"
}

# of_target TARGET: what its files are called, and what makes them
of_target() {
    triple=$1
    arch=$(architecture "$triple")
    name=berth-$version-$triple
    # The order of Debian and RPM puts 1.0.0~rc.1 before 1.0.0.
    FILES=("$name.tar.gz" "berth_${version/-/\~}_$arch.deb" "$name.cdx.json" "berth-${version/-/\~}-1.${triple%%-*}.rpm")
}

make() {
    local native of directory
    [[ -z $(git -C "$root" status --porcelain) ]] || die $EX_USAGE "a release is of what is committed: commit first"
    # Not exported: ring's build looks at it, and scripts/image.sh would build everything once more.
    time=$(epoch)
    # It prints pages and completions, those of another architecture, too.
    native=$("$root/scripts/static.sh")
    mkdir -p -- "$output" "$scratch/made"
    cd "$scratch/made"
    for of in "${TARGETS[@]}"; do
        of_target "$of"
        compiler=$(compiler "$of")
        directory=$("$root/scripts/static.sh" --target "$of")
        bill_of_materials >"${FILES[2]}"
        gather "$directory/berth" "${FILES[2]}" "$native/berth"
        tarball "$scratch" "$name" "${FILES[0]}"
        package "${FILES[1]}"
        rpm_package "${FILES[3]}"
    done
    "$root/scripts/image.sh" "${options[@]}" --output "$IMAGE" >/dev/null
    tarball "$root/charts" berth "$CHART"
    sha256sum -- "${ALL[@]}" >SHA256SUMS
    mv -- "${ALL[@]}" SHA256SUMS "$output"
    cd "$root"
}

# From a clone of what is committed, in another directory and with another CARGO_HOME.
verify() {
    local home=${CARGO_HOME:-$HOME/.cargo} again=$scratch/again name
    git clone --quiet -- "$root" "$again/clone"
    # What was downloaded before, to be unpacked into another directory.
    mkdir -p -- "$again/cargo/registry"
    for name in config.toml registry/index registry/cache; do
        [[ ! -e $home/$name ]] || ln -s -- "$(realpath -- "$home/$name")" "$again/cargo/$name"
    done
    env -u CARGO_TARGET_DIR CARGO_HOME="$again/cargo" "$again/clone/scripts/release.sh" "${options[@]}" --output "$scratch/other" >/dev/null
    diff -- "$output/SHA256SUMS" "$scratch/other/SHA256SUMS" >&2 || die 1 "the second build differs"
    say "two builds in two directories, the same bytes"
}

main "$@"
