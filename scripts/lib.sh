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

# usage: prints the comment at the head of the script, and what holds for all
usage() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$root/scripts/${0##*/}"
    echo "
--help prints this text. The variable CARGO names another cargo than that on PATH. Exit status, if nothing else is said: 0 all is well;
1 something is not; 64 a wrong argument; 69 something is missing; 70 a build failed."
}

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
                        if [[ ${patterns[$name+]-} ]]; then eval "$name+=(\"\$2\")"; else printf -v "$name" %s "$2"; fi
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

# need_image: IMAGE and ARCHIVE, berth's image, as scripts/image.sh prints them
need_image() {
    local found
    [[ -z ${ARCHIVE:-} ]] || return 0
    found=$("$root/scripts/image.sh" --check 2>/dev/null) || found=$("$root/scripts/image.sh") || exit
    eval "$found"
}

# go_build NAME MODULE OUTPUT OPTION…: sets `built`, the directory with what a Go module makes. It is in the cache, under this name, once all
# of it is there; with $check nothing is built. $go_command is another command of Go's than `build`.
go_build() {
    local name=$1 module=$2 output=$3 go cache=${BERTH_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/berth-e2e}
    built=$(realpath -m -- "$cache/$name")
    [[ ! -d $built ]] || return 0
    ! ${check:-false} || unavailable "missing: $name, which scripts/${0##*/} builds with Go"
    go=$(command -v -- "${GO:-go}") || unavailable "no Go here, which builds $name: put Go on PATH"
    mkdir -p "$cache"
    exec 9>"$cache/.lock"
    flock 9
    # Another may have built it meanwhile.
    [[ ! -d $built ]] || return 0
    say "building $name"
    rm -rf -- "$built.new"
    mkdir -- "$built.new"
    # Without the lock's descriptor: what Go leaves running must not keep others waiting.
    env -u GOOS -u GOARCH CGO_ENABLED=0 GOWORK=off "$go" -C "$module" "${go_command[@]:-build}" -o "$built.new/$output" "${@:4}" >&2 9>&- ||
        die $EX_SOFTWARE "$name: no build; Go's reason is above"
    mv -T -- "$built.new" "$built"
    exec 9>&-
}

# need_module MODULE NAME PROGRAM: sets `built`, with the program of a Go module of this repository
need_module() {
    local hash
    hash=$(cd "$1" && { uname -sm && cat go.* ./*.go; } | sha256sum | cut -c 1-12)
    go_build "$2-$hash" "$1" "$3" -trimpath -buildvcs=false -mod=readonly -ldflags="-s -w" .
}

# need_kubernetes [VERSION]: sets the variables of scripts/kube-apiserver.sh, which builds what is not there
need_kubernetes() {
    local found
    found=$("$root/scripts/kube-apiserver.sh" "$@") || exit
    eval "$found"
}

# need_versions: for the newest version, OLD_KUBE_APISERVER of the version before, and OLD and NEW, what the two call themselves
need_versions() {
    need_kubernetes "$(previous_version)"
    OLD_KUBE_APISERVER=$KUBE_APISERVER
    need_kubernetes
    # shellcheck disable=SC2034
    OLD=$(kubernetes_version "$OLD_KUBE_APISERVER") NEW=$(kubernetes_version "$KUBE_APISERVER")
}

# kubernetes_version KUBE_APISERVER
kubernetes_version() { "$1" --version | sed 's/^Kubernetes //'; }

previous_version() { pinned_versions | tail -n 2 | head -n 1; }

# What an option does not set is to be the default, and no proxy may be between clients and servers.
clean_environment() { unset "${!BERTH_@}" "${!ETCD_@}" KUBECONFIG {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY; }
