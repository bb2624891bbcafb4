# shellcheck shell=bash
# What the scripts share: messages, exit statuses, usage and options, checks for tools, cargo's builds. Sets $root and $program.
set -Eeuo pipefail
export LC_ALL=C

# shellcheck disable=SC2034
readonly EX_USAGE=64 EX_UNAVAILABLE=69 EX_SOFTWARE=70

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
# The name that messages begin with.
program=${0##*/} program=${program%.sh}
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

# usage: prints the comment at the head of the script
usage() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$root/scripts/${0##*/}"; }

# wrong_usage MESSAGE…
wrong_usage() { die $EX_USAGE "$*; see --help"; }

# parse_options DEFINITION… -- ARGUMENT…: sets a variable for each option. A DEFINITION is NAME (`--NAME` sets it to true), NAME=REGEX
# (`--NAME VALUE`, where VALUE matches) or NAME+=REGEX (the same, and each VALUE is appended to an array). What is no option goes into the
# array `arguments`, and has to match the REGEX of ARGUMENT, if that is defined; what follows `--` goes into the array `command`.
parse_options() {
    local definition name
    local -A patterns=()
    # shellcheck disable=SC2034
    arguments=() command=()
    for definition; do
        shift
        [[ $definition != -- ]] || break
        patterns[${definition%%=*}]=${definition#"${definition%%=*}"}
    done
    while (($#)); do
        name=${1#--}
        case $1 in
            -h | --help) usage && exit 0 ;;
            --)
                (($# > 1)) || wrong_usage "no COMMAND"
                # shellcheck disable=SC2034
                command=("${@:2}")
                return
                ;;
            -*[!a-z-]* | -[!-]*) wrong_usage "unknown option $1" ;;
            --*)
                definition=${patterns[$name]-${patterns[$name+]-unknown}}
                case $definition in
                    unknown) wrong_usage "unknown option $1" ;;
                    '') printf -v "$name" true ;;
                    *)
                        [[ ${2:-} =~ ${definition#=} ]] || wrong_usage "$1 needs a value${2:+, and not $2}"
                        if [[ ${patterns[$name+]-} ]]; then set_next "$name" "$2"; else printf -v "$name" %s "$2"; fi
                        shift
                        ;;
                esac
                ;;
            *)
                [[ ${patterns[ARGUMENT]-} && $1 =~ ${patterns[ARGUMENT]#=} ]] ||
                    wrong_usage "unknown argument $1${patterns[ARGUMENT]+: it has to match ${patterns[ARGUMENT]#=}}"
                arguments+=("$1")
                ;;
        esac
        shift
    done
}

# set_next ARRAY VALUE: appends it
set_next() {
    local -n array=$1
    array+=("$2")
}

# one_of WORD…: a regular expression that matches each of them
one_of() { (IFS='|' words="$*" && echo "^(${words//./\\.})\$"); }

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
build() {
    (cd "$root" && "${CARGO:-cargo}" build --locked "$@") >&2 || die $EX_SOFTWARE "cargo build failed; the reason is above"
}

# pinned_versions: the minor versions of Kubernetes in tests/kube-apiserver, the newest one last
pinned_versions() { find "$root/tests/kube-apiserver" -maxdepth 1 -name 'v1.*' -printf '%f\n' | sort -V; }

# target_directory: cargo's, as a path
target_directory() {
    (cd "$root" && "${CARGO:-cargo}" metadata --locked --no-deps --format-version 1) | sed -E 's/.*"target_directory":"([^"]+)".*/\1/'
}

# need_program VARIABLE NAME [debug]: VARIABLE as the path of this program of the repository, built, for release unless `debug` is given,
# if it is not set. Without --package, so that all builds have the same features and nothing is built twice.
need_program() {
    local profile=${3:-release}
    [[ -n ${!1:-} ]] || {
        if [[ $profile == debug ]]; then build --bin "$2"; else build --release --bin "$2"; fi
        printf -v "$1" %s "$(target_directory)/$profile/$2"
    }
    [[ -x ${!1} ]] || unavailable "$1=${!1} cannot be run"
    printf -v "$1" %s "$(realpath -- "${!1}")"
}

# need_kubernetes: sets the variables of scripts/kube-apiserver.sh for the newest version, which it builds if it is not there
need_kubernetes() {
    local found
    found=$("$root/scripts/kube-apiserver.sh") || exit
    eval "$found"
}

# need_versions: the same, OLD_KUBE_APISERVER of the version before, and OLD and NEW, what the two call themselves
need_versions() {
    local found
    found=$(kubernetes_of "$(previous_version)") || exit
    OLD_KUBE_APISERVER=$(eval "$found" && echo "$KUBE_APISERVER")
    need_kubernetes
    # shellcheck disable=SC2034
    OLD=$(kubernetes_version "$OLD_KUBE_APISERVER") NEW=$(kubernetes_version "$KUBE_APISERVER")
}

# kubernetes_version KUBE_APISERVER
kubernetes_version() { "$1" --version | sed 's/^Kubernetes //'; }

previous_version() { pinned_versions | tail -n 2 | head -n 1; }

# kubernetes_of VERSION [--check]: scripts/kube-apiserver.sh without the variables, which are for the newest version
kubernetes_of() (
    unset "${!KUBE@}"
    "$root/scripts/kube-apiserver.sh" "$@"
)

# What an option does not set is to be the default, and no proxy may be between clients and servers.
clean_environment() { unset "${!BERTH_@}" "${!ETCD_@}" KUBECONFIG {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY; }
