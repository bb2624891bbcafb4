# shellcheck shell=bash
# Part of scripts/release.sh: tests the files of a release as a user would use them.

wrong() {
    say "$@"
    exit 1
}

# is_berth COMMAND...: it runs, and is this version
is_berth() {
    local said
    said=$(env -i "$@" --version 2>&1) || wrong "$*: $said"
    [[ $said == "berth $version" ]] || wrong "$* says '$said', not 'berth $version'"
}

try() {
    local file
    for file in "${FILES[@]}" SHA256SUMS; do
        [[ -f $output/$file ]] || die $EX_UNAVAILABLE "no $output/$file: run scripts/release.sh"
    done
    (cd "$output" && sha256sum --check --strict --quiet SHA256SUMS >&2) || wrong "a file is not what SHA256SUMS says"
    try_tarball
    try_package
    try_bill_of_materials
}

try_tarball() {
    mkdir -- "$scratch/unpacked"
    tar -C "$scratch/unpacked" -xzf "$output/${FILES[0]}"
    is_berth "$scratch/unpacked/$name/berth"
}

# In a root that has nothing, as dpkg installs it: it needs no other package, nor a C library.
try_package() {
    local empty=$scratch/empty file left
    mkdir -p -- "$empty"/var/lib/dpkg/{info,updates,triggers}
    touch -- "$empty/var/lib/dpkg/status"
    in_empty --install "$output/${FILES[1]}"
    in_empty --verify berth
    cmp -- "$empty/usr/bin/berth" "$scratch/unpacked/$name/berth" >&2 || wrong "the package has another berth than the tarball"
    is_berth "$empty/usr/bin/berth"
    ((EUID)) || is_berth /usr/sbin/chroot "$empty" /usr/bin/berth
    for file in share/man/man1/berth-serve.1.gz share/bash-completion/completions/berth share/zsh/vendor-completions/_berth \
        share/fish/vendor_completions.d/berth.fish share/doc/berth/copyright lib/systemd/system/berth-run@.service; do
        [[ -s $empty/usr/$file ]] || wrong "the package has no /usr/$file"
    done
    [[ ! -e $empty/etc ]] || wrong "the package enables or configures something: $(find "$empty/etc")"
    ! grep -r "=/usr/local/bin/berth" "$empty/usr/lib/systemd" >&2 || wrong "a unit starts a berth that is not the package's"
    in_empty --purge berth
    left=$(find "$empty" -path "$empty/var" -prune -o ! -type d -print)
    [[ -z $left ]] || wrong "the package leaves behind: $left"
}

# in_empty ACTION...: of dpkg; without root, its files belong to whoever tries it
in_empty() {
    dpkg --root="$scratch/empty" --log=/dev/null --force-not-root --force-bad-path "$@" >"$scratch/dpkg" 2>&1 &&
        [[ $1 != --verify || ! -s $scratch/dpkg ]] || wrong "dpkg $*: $(cat "$scratch/dpkg")"
}

# Panics name the file that they are in: each crate that is seen in the binary has to be there.
try_bill_of_materials() {
    local bill=$output/${FILES[3]} seen unknown
    seen=$(grep -aoE '/cargo/[A-Za-z0-9_-]+-[0-9]+\.[0-9]+\.[0-9]+[^/]*/src' "$scratch/unpacked/$name/berth" |
        sed -E 's|/cargo/(.*)-([0-9]+\.[0-9]+\.[0-9]+[^/]*)/src|\1@\2|' | sort -u)
    (($(wc -l <<<"$seen") > 10)) || wrong "the binary names too few crates to compare: $seen"
    unknown=$(comm -23 <(echo "$seen") <(jq -r '.components[]["bom-ref"]' "$bill" | sort -u))
    [[ -z $unknown ]] || wrong "the binary has crates that ${FILES[3]} has not: $unknown"
}
