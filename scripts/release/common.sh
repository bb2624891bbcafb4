# shellcheck shell=bash
# Part of scripts/static.sh, image.sh and release.sh: what ships, how they speak, what time they write into files, and
# how they build a second time.

readonly EX_USAGE=64 EX_UNAVAILABLE=69 EX_SOFTWARE=70
# What ships, for cargo: all features of berth but rehearse.
readonly BERTH=(--package berth --no-default-features --features operate)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

die() {
    local status=$1
    shift
    say "$@"
    exit "$status"
}

# need_tools TOOL...: and cargo, and what Cargo.toml says of berth
need_tools() {
    local tool missing=()
    cargo=$(command -v -- "${CARGO:-cargo}") || missing+=(cargo)
    for tool; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    ((!${#missing[@]})) || die $EX_UNAVAILABLE "missing: ${missing[*]} (all but cargo are in Debian packages: umoci, jq, git, dpkg)"
    package=$("$cargo" metadata --manifest-path "$root/Cargo.toml" --locked --no-deps --format-version 1) ||
        die $EX_UNAVAILABLE "cargo metadata failed; its reason is above"
}

# about KEY: what Cargo.toml says of berth
about() { jq -r ".packages[] | select(.name == \"berth\") | .$1 // empty" <<<"$package"; }

# epoch: the time of the commit, since that of the build is another each time
epoch() {
    local seconds=${SOURCE_DATE_EPOCH:-}
    [[ -n $seconds ]] || seconds=$(git -C "$root" log -1 --format=%ct) ||
        die $EX_UNAVAILABLE "git cannot tell the time of the commit: set SOURCE_DATE_EPOCH"
    [[ $seconds =~ ^[0-9]+$ ]] || die $EX_USAGE "SOURCE_DATE_EPOCH=$seconds is no number of seconds"
    echo "$seconds"
}

# iso SECONDS: that time as OCI and CycloneDX write it
iso() { date -u -d "@$1" +%Y-%m-%dT%H:%M:%SZ; }

# committed OPTION: dies if there is more than what a clone would have
committed() {
    [[ -z $(git -C "$root" status --porcelain) ]] || die $EX_USAGE "$1 is of what is committed: commit first"
}

# build_again OPTION...: the script that runs, from a clone of what is committed, in another directory and with
# another CARGO_HOME
build_again() {
    local home=${CARGO_HOME:-$HOME/.cargo} again=$scratch/again name
    git clone --quiet -- "$root" "$again/clone"
    # What was downloaded before, to be unpacked into another directory.
    mkdir -p -- "$again/cargo/registry"
    for name in config.toml registry/index registry/cache; do
        [[ ! -e $home/$name ]] || ln -s -- "$(realpath -- "$home/$name")" "$again/cargo/$name"
    done
    env -u CARGO_TARGET_DIR CARGO_HOME="$again/cargo" "$again/clone/scripts/${0##*/}" "$@"
}
