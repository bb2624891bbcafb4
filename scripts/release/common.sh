# shellcheck shell=bash
# Part of scripts/static.sh, image.sh and release.sh: what ships, and the time of files.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
# What ships, for cargo: all features of berth but rehearse.
readonly BERTH=(--package berth --no-default-features --features operate)

# need_package TOOL...: and cargo; sets $package, cargo's metadata of berth
need_package() {
    need_tools "$@"
    need_cargo
    package=$("$CARGO" metadata --manifest-path "$root/Cargo.toml" --locked --no-deps --format-version 1) ||
        unavailable "cargo metadata failed; its reason is above"
}

# host: this machine's target, as Rust names it
host() { "${RUSTC:-rustc}" -vV | sed -n 's/^host: //p'; }

# architecture TARGET: as Debian and OCI name it
architecture() {
    case $1 in
        x86_64-*) echo amd64 ;;
        aarch64-*) echo arm64 ;;
        *) die $EX_USAGE "--target $1: releases and images are for x86_64 and aarch64" ;;
    esac
}

# each_once TARGET...: dies if two are of one architecture
each_once() {
    local target twice
    twice=$(for target; do architecture "$target"; done | sort | uniq -d)
    [[ -z $twice ]] || die $EX_USAGE "--target: two of $twice"
}

# compiler TARGET: the C compiler that links for it
compiler() {
    local machine=${1%%-*}
    if [[ $machine == "$(uname -m)" ]]; then
        echo cc
    else
        type -P "$machine-linux-gnu-gcc" >/dev/null ||
            unavailable "no $machine-linux-gnu-gcc here, which links for $1: Debian's gcc-${machine/_/-}-linux-gnu"
        echo "$machine-linux-gnu-gcc"
    fi
}

# about KEY: berth's value in Cargo.toml
about() { jq -r ".packages[] | select(.name == \"berth\") | .$1 // empty" <<<"$package"; }

# epoch: the time of the commit, since that of the build is another each time
epoch() {
    local seconds=${SOURCE_DATE_EPOCH:-}
    [[ -n $seconds ]] || seconds=$(git -C "$root" log -1 --format=%ct) ||
        unavailable "git cannot tell the time of the commit: set SOURCE_DATE_EPOCH"
    [[ $seconds =~ ^[0-9]+$ ]] || die $EX_USAGE "SOURCE_DATE_EPOCH=$seconds is no number of seconds"
    echo "$seconds"
}

# iso SECONDS: that time as OCI and CycloneDX write it
iso() { date -u -d "@$1" +%Y-%m-%dT%H:%M:%SZ; }

# revision: of the sources: BERTH_REVISION, or git's; nothing where there is neither
revision() {
    if [[ -n ${BERTH_REVISION:-} ]]; then
        echo "$BERTH_REVISION"
    else
        git -C "$root" describe --always --abbrev=40 --exclude='*' --dirty 2>/dev/null || true
    fi
}
