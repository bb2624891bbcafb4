# shellcheck shell=bash
# Part of scripts/release.sh: tests the files of a release as a user would use them.

# is_berth COMMAND...: it runs, and is this version
is_berth() {
    local said
    [[ ${run[*]} != false ]] || return 0
    said=$(env -i "${run[@]}" "$@" --version 2>&1) || die 1 "$*: $said"
    [[ $said == "berth $version" ]] || die 1 "$* says '$said', not 'berth $version'"
}

try() {
    local file of
    for file in "${ALL[@]}" SHA256SUMS; do
        [[ -f $output/$file ]] || die $EX_UNAVAILABLE "no $output/$file: run scripts/release.sh"
    done
    (cd "$output" && sha256sum --check --strict --quiet SHA256SUMS >&2) || die 1 "a file is not what SHA256SUMS says"
    mkdir -- "$scratch/layout" "$scratch/unpacked"
    tar -C "$scratch/layout" -xf "$output/$IMAGE"
    for of in "${TARGETS[@]}"; do
        of_target "$of"
        emulate
        try_tarball
        try_packages
        try_image
        try_bill_of_materials
    done
    try_chart
}

# Sets $run, before a command of this target: nothing, an emulator, or, where there is none, what is not false.
emulate() {
    local machine=${triple%%-*}
    run=()
    if [[ $machine != "$(uname -m)" ]]; then
        run=("$({ type -P "qemu-$machine-static" "qemu-$machine" || :; } | head -n 1)")
        [[ ${run[0]} ]] || {
            run=(false)
            say "skipped: berth of $triple is not run: no qemu-$machine-static (Debian's qemu-user-static)"
        }
    fi
}

try_tarball() {
    tar -C "$scratch/unpacked" -xzf "$output/${FILES[0]}"
    is_berth "$scratch/unpacked/$name/berth"
}

# In a root that has nothing, as dpkg and rpm install them: the packages need no other, nor a C library.
try_packages() {
    empty=$scratch/deb-$arch installer=(dpkg --log=/dev/null --force-not-root --force-bad-path --force-architecture)
    mkdir -p -- "$empty"/var/lib/dpkg/{info,updates,triggers}
    touch -- "$empty/var/lib/dpkg/status"
    in_empty --install "$output/${FILES[1]}"
    is_installed zsh/vendor-completions/_berth doc/berth/copyright
    remove --purge
    # Debian's rpm has its database elsewhere. The RPM has no signature.
    empty=$scratch/rpm-$arch installer=(rpm --dbpath=/var/lib/rpm --nosignature)
    mkdir -- "$empty"
    in_empty --checksig "$output/${FILES[3]}"
    in_empty --install --ignorearch "$output/${FILES[3]}"
    is_installed zsh/site-functions/_berth licenses/berth/LICENSE
    remove --erase
}

# is_installed FILE...: $empty has berth with its files, and these below usr/share; nothing is enabled
is_installed() {
    local file
    in_empty --verify berth
    cmp -- "$empty/usr/bin/berth" "$scratch/unpacked/$name/berth" >&2 || die 1 "the package has another berth than the tarball"
    is_berth "$empty/usr/bin/berth"
    # An emulator would have to be in there.
    ((EUID || ${#run[@]})) || is_berth /usr/sbin/chroot "$empty" /usr/bin/berth
    for file in share/man/man1/berth-serve.1.gz share/bash-completion/completions/berth share/fish/vendor_completions.d/berth.fish \
        lib/systemd/system/berth-run@.service "${@/#/share/}"; do
        [[ -s $empty/usr/$file ]] || die 1 "the package has no /usr/$file"
    done
    [[ ! -e $empty/etc ]] || die 1 "the package enables or configures something: $(find "$empty/etc")"
    ! grep -r "=/usr/local/bin/berth" "$empty/usr/lib/systemd" >&2 || die 1 "a unit starts a berth that is not the package's"
}

# remove ACTION: of the installer; no file is left
remove() {
    local left
    in_empty "$1" berth
    left=$(find "$empty" -path "$empty/var" -prune -o ! -type d -print)
    [[ -z $left ]] || die 1 "the package leaves behind: $left"
}

# in_empty ACTION...: of the installer. Without root, dpkg's files belong to whoever tries it, and rpm makes a user namespace.
in_empty() {
    "${installer[@]}" --root="$empty" "$@" >"$scratch/installer" 2>&1 &&
        [[ $1 != --verify || ! -s $scratch/installer ]] || die 1 "${installer[0]} $*: $(cat "$scratch/installer")"
}

# It has the tarball's berth, where a node of this architecture looks for it.
try_image() {
    local manifest config
    manifest=$(jq -r '.manifests[0].digest' "$scratch/layout/index.json")
    ((${#TARGETS[@]} == 1)) || manifest=$(blob "$manifest" |
        jq -r --arg arch "$arch" '.manifests[] | select(.platform == {architecture: $arch, os: "linux"}).digest')
    config=$(blob "$(blob "$manifest" | jq -r .config.digest)" | jq -r .architecture)
    [[ $config == "$arch" ]] || die 1 "$IMAGE has an image of $config where $arch was to be"
    blob "$(blob "$manifest" | jq -r '.layers[0].digest')" | tar -xzO berth |
        cmp -- - "$scratch/unpacked/$name/berth" >&2 || die 1 "the image for $arch has another berth than the tarball"
}

# blob DIGEST: of the image's layout
blob() { cat -- "$scratch/layout/blobs/${1/:/\/}"; }

# Panics name the file that they are in: each crate that is seen in the binary has to be there.
try_bill_of_materials() {
    local bill=$output/${FILES[2]} seen unknown
    seen=$(grep -aoE '/cargo/[A-Za-z0-9_-]+-[0-9]+\.[0-9]+\.[0-9]+[^/]*/src' "$scratch/unpacked/$name/berth" |
        sed -E 's|/cargo/(.*)-([0-9]+\.[0-9]+\.[0-9]+[^/]*)/src|\1@\2|' | sort -u)
    (($(wc -l <<<"$seen") > 10)) || die 1 "the binary names too few crates to compare: $seen"
    unknown=$(comm -23 <(echo "$seen") <(jq -r '.components[]["bom-ref"]' "$bill" | sort -u))
    [[ -z $unknown ]] || die 1 "the binary has crates that ${FILES[2]} has not: $unknown"
}

# Helm, where there is one, reads it as it lies there.
try_chart() {
    tar -C "$scratch" -xzf "$output/$CHART"
    diff -r -- "$root/charts/berth" "$scratch/berth" >&2 || die 1 "$CHART is not charts/berth"
    ! type -P helm >/dev/null || helm lint --strict --quiet --set image=a:b --set kubeApiserver.image=a:b "$output/$CHART" >&2 ||
        die 1 "helm does not take $CHART"
}
