# shellcheck shell=bash
# What the scripts share: sets $root and $program, and gives messages, exit statuses, checks for tools and cargo's builds.

# shellcheck disable=SC2034
readonly EX_USAGE=64 EX_UNAVAILABLE=69 EX_SOFTWARE=70

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# The name that messages begin with.
program=${0##*/}
# The descriptor that messages go to.
stderr=2

say() { printf '%s: %s\n' "$program" "$*" >&"$stderr"; }

# die STATUS MESSAGE…
die() {
    local status=$1
    shift
    say "$@"
    exit "$status"
}

unavailable() { die $EX_UNAVAILABLE "$@"; }

# wrong_usage: an exit with the script's own usage
wrong_usage() {
    usage >&2
    exit $EX_USAGE
}

# need_root WHAT: since WHAT need root
need_root() { ((EUID == 0)) || unavailable "$1 need root"; }

# need_tools TOOL…
need_tools() {
    local tool missing=()
    for tool in "$@"; do
        type -P "$tool" >/dev/null || missing+=("$tool")
    done
    ((!${#missing[@]})) || unavailable "missing: ${missing[*]}"
}

# need_cargo: CARGO, as a path
need_cargo() { CARGO=$(command -v -- "${CARGO:-cargo}") || unavailable "no cargo here: put it on PATH or set CARGO"; }

# build CARGO-OPTION…: what tests and measurements run, in this repository
build() { (cd "$root" && "${CARGO:-cargo}" build --locked "$@") >&2; }

# target_directory: cargo's, as a path
target_directory() {
    (cd "$root" && "${CARGO:-cargo}" metadata --locked --no-deps --format-version 1) | sed -E 's/.*"target_directory":"([^"]+)".*/\1/'
}

# need_berth: BERTH as a path, built for release if it is not given
need_berth() {
    [[ -n ${BERTH:-} ]] || {
        build --release --bin berth
        BERTH=$(target_directory)/release/berth
    }
    [[ -x $BERTH ]] || unavailable "BERTH=$BERTH cannot be run"
    BERTH=$(realpath -- "$BERTH")
}

# What an option does not set is to be the default, and no proxy may be between clients and servers.
clean_environment() { unset "${!BERTH_@}" "${!ETCD_@}" KUBECONFIG {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY; }

# no_options ARGUMENTS…: a script that has none but --help
no_options() {
    case ${1:-} in
        '') ;;
        -h | --help) usage && exit 0 ;;
        *) die $EX_USAGE "unknown argument $1; see --help" ;;
    esac
}
