# shellcheck shell=bash
# Part of scripts/etcd-history.sh and scripts/etcd-power.sh: what they build, and the namespaces that they run in.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly MODULE=$root/tests/etcd-history
# An address of the node that is not of loopback.
readonly NODE_IP=10.77.0.1

# need_etcds: ETCD and OLD_ETCD of the version before, HISTORY, which makes histories and judges them, and BERTH
need_etcds() {
    need_kubernetes
    need_module v3.5 etcd-v3.5 etcd
    OLD_ETCD=$built/etcd
    need_module . etcd-history etcd-history
    HISTORY=$built/etcd-history
    need_cargo
    need_program BERTH berth "$1"
    # Only now: the builds may need a proxy.
    clean_environment
}

# need_module DIRECTORY NAME PROGRAM: of tests/etcd-history
need_module() {
    local hash
    hash=$(cd "$MODULE/$1" && { uname -sm && cat go.mod go.sum ./*.go; } | sha256sum | cut -c 1-12)
    go_build "$2-$hash" "$MODULE/$1" "$3" -trimpath -buildvcs=false -mod=readonly -ldflags="-s -w" .
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
        need_tools "${GO:-go}"
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
