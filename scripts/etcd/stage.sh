# shellcheck shell=bash
# Part of scripts/etcd-history.sh and scripts/etcd-power.sh: what they build, and the namespaces that they run in.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly MODULE=$root/tests/etcd-history
# An address of the node that is not of loopback.
readonly NODE_IP=10.77.0.1

# need_etcds: ETCD and OLD_ETCD of the version before, HISTORY, which makes histories and judges them, and BERTH
need_etcds() {
    local cache=${BERTH_TEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/berth-e2e}
    need_kubernetes
    need_module OLD_ETCD "$cache" "$MODULE/v3.5" etcd-v3.5 etcd
    need_module HISTORY "$cache" "$MODULE" etcd-history etcd-history
    need_cargo
    need_program BERTH berth "$1"
    # Only now: the builds may need a proxy.
    clean_environment
}

# need_module VARIABLE CACHE DIRECTORY NAME PROGRAM: VARIABLE as the path of the program that a Go module makes, built once into a directory
# of this name, if it is not set
need_module() {
    local hash target go
    [[ -z ${!1:-} ]] || return 0
    hash=$({ uname -sm && cat "$3"/go.mod "$3"/go.sum "$3"/*.go; } | sha256sum | cut -c 1-12)
    target=$2/$4-$hash/$5
    if [[ ! -x $target ]]; then
        go=$(command -v -- "${GO:-go}") || unavailable "no Go here, which builds $4: put Go on PATH"
        say "building $4"
        mkdir -p "${target%/*}"
        env -u GOOS -u GOARCH CGO_ENABLED=0 GOWORK=off "$go" -C "$3" build -trimpath -buildvcs=false -mod=readonly \
            -ldflags="-s -w" -o "$target.$$" . >&2 || die $EX_SOFTWARE "$4: no build; Go's reason is above"
        mv -T -- "$target.$$" "$target"
    fi
    printf -v "$1" %s "$target"
}

# in_namespaces SECONDS COMMAND…: on a node of its own: network, mounts and processes end with it, and it ends after SECONDS
in_namespaces() {
    local seconds=$1
    shift
    # unshare ignores SIGTERM, and each is to end with the one that started it.
    # shellcheck disable=SC2016
    setpriv --pdeathsig KILL timeout --signal=KILL "$seconds" setpriv --pdeathsig KILL unshare --net --mount --pid --fork --kill-child=KILL --mount-proc -- \
        bash -euc 'ip link set lo up && ip addr add "$0/32" dev lo && exec "$@"' "$NODE_IP" "$@"
}

# begin_work: ends with --check if what the script needs is there; else all programs, and the directory $work, which stays if $keep is true
# when the script ends
begin_work() {
    if $check; then
        "$root/scripts/kube-apiserver.sh" --check >/dev/null || exit
        [[ -n ${OLD_ETCD:-} && -n ${HISTORY:-} ]] || need_tools "${GO:-go}"
        exit
    fi
    need_etcds release
    work=$(mktemp -d)
    trap 'if [[ $keep == true ]]; then say "data and logs are in $work"; else rm -rf -- "$work"; fi' EXIT
}

# etcd_options VERSION...: options of the program for these versions of etcd, a word a line
etcd_options() {
    local version
    for version; do
        echo -etcd
        if [[ $version == 3.5 ]]; then echo "$OLD_ETCD"; else echo "$ETCD"; fi
    done
}
