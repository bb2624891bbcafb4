#!/usr/bin/env bash
# usage: scripts/release.sh [--output DIR] [--check | --verify]
#
# Makes a release of what is committed, for this machine's architecture, and prints its files:
#
#   berth-VERSION-TARGET.tar.gz      the static berth, man pages, completions, systemd units, documents
#   berth_VERSION_ARCH.deb           the same as a Debian package that needs no other
#   berth-VERSION-TARGET.oci.tar     the image (scripts/image.sh)
#   berth-VERSION-TARGET.cdx.json    what berth is made of, as CycloneDX
#   SHA256SUMS                       of these four
#
# and tries them: the package is installed into an empty root, and berth runs out of it. The bytes depend on
# the commit, Rust and Debian's packages, not on directories or the time. Needs Debian, git, jq and umoci; no root.
#
#   --output DIR   where to (release-VERSION in Cargo's target directory)
#   --check        build nothing: try what is in DIR
#   --verify       build a second time, from a clone, in another directory and with another CARGO_HOME: exit
#                  with 1 if a file differs
#   --help         this text
#
# Variables:
#   SOURCE_DATE_EPOCH   the time of the files, in seconds since 1970, if not that of the commit
#   and those of scripts/static.sh
#
# Exit status: 0 done; 1 a file is not as it should be, or --verify found another; 64 a wrong argument, or
# something is not committed; 69 something is missing; 70 the build failed.

umask 022

# shellcheck source=scripts/release/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/release/common.sh"
# shellcheck source=scripts/release/pack.sh
. "$root/scripts/release/pack.sh"
# shellcheck source=scripts/release/try.sh
. "$root/scripts/release/try.sh"

main() {
    local check=false verify=false
    output=''
    parse_options check verify output=. -- "$@"
    ! $check || ! $verify || die $EX_USAGE "--check or --verify, not both"
    need_package git jq umoci dpkg dpkg-deb dpkg-query rustc cc
    version=$(about version)
    target=$("${RUSTC:-rustc}" -vV | sed -n 's/^host: //p')
    arch=$(dpkg --print-architecture)
    output=$(realpath -m -- "${output:-${CARGO_TARGET_DIR:-$root/target}/release-$version}")
    name=berth-$version-$target
    # Debian's order puts 1.0.0~rc.1 before 1.0.0.
    readonly FILES=("$name.tar.gz" "berth_${version/-/\~}_$arch.deb" "$name.oci.tar" "$name.cdx.json")
    scratch=$(mktemp -d -t berth-release.XXXXXX)
    trap 'rm -rf -- "$scratch"' EXIT

    $check || make
    try
    ! $verify || verify
    printf '%s\n' "${FILES[@]/#/$output/}" "$output/SHA256SUMS"
}

make() {
    local directory
    committed "a release"
    # Not exported: ring's build looks at it, and scripts/image.sh would build everything once more.
    time=$(epoch)
    directory=$("$root/scripts/static.sh")
    mkdir -p -- "$output" "$scratch/made"
    cd "$scratch/made"
    bill_of_materials >"${FILES[3]}"
    gather "$directory/berth" "${FILES[3]}"
    tarball "${FILES[0]}"
    package "${FILES[1]}"
    "$root/scripts/image.sh" --output "${FILES[2]}" >/dev/null
    sha256sum -- "${FILES[@]}" >SHA256SUMS
    mv -- "${FILES[@]}" SHA256SUMS "$output"
    cd "$root"
}

verify() {
    build_again --output "$scratch/other" >/dev/null
    diff -- "$output/SHA256SUMS" "$scratch/other/SHA256SUMS" >&2 || {
        say "the second build differs"
        exit 1
    }
    say "two builds in two directories, the same bytes"
}

main "$@"
