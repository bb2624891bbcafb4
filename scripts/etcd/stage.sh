# shellcheck shell=bash
# Part of scripts/etcd-history.sh and scripts/etcd-power.sh: what they build, and the namespaces that they run in.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly MODULE=$root/tests/etcd-history
# An address of the node that is not of loopback.
readonly NODE_IP=10.77.0.1

# in_namespaces NAME SECONDS COMMAND…: on a node of its own: network, mounts and processes end with it, and it ends after SECONDS. COMMAND
# ends with $HISTORY and its options, and gets those that all runs have.
in_namespaces() {
    local status=0
    # unshare ignores SIGTERM, and each is to end with the one that started it.
    # shellcheck disable=SC2016
    setpriv --pdeathsig KILL timeout --signal=KILL "$2" setpriv --pdeathsig KILL unshare --net --mount --pid --fork --kill-child=KILL --mount-proc -- \
        bash -euc 'ip link set lo up && ip addr add "$0/32" dev lo && exec "$@"' "$NODE_IP" "${@:3}" -within $(($2 - 3))s -berth "$BERTH" -seed "$seed" || status=$?
    ((status != 137)) || say "FAILED: $1 was not done within $2 s"
    return $status
}

# begin_work: ends with --check if what the script needs is there; else sets ETCD and OLD_ETCD of the version before, HISTORY, which makes
# histories and judges them, BERTH, `options` for the versions in `etcd`, a seed if none is given, and the directory $work, which stays if
# $keep is true when the script ends
begin_work() {
    local version
    need_root "namespaces"
    need_tools ip unshare setpriv timeout mount
    if $check; then
        "$root/scripts/kube-apiserver.sh" --check >/dev/null || exit
        need_tools "${GO:-go}"
        exit
    fi
    need_kubernetes
    need_module "$MODULE/v3.5" etcd-v3.5 etcd
    OLD_ETCD=$built/etcd
    need_module "$MODULE" etcd-history etcd-history
    HISTORY=$built/etcd-history
    need_cargo
    need_program BERTH berth
    # Only now: the builds may need a proxy.
    clean_environment
    ((${#etcd[@]})) || etcd=(3.6 3.5)
    for version in "${etcd[@]}"; do
        if [[ $version == 3.5 ]]; then options+=(-etcd "$OLD_ETCD"); else options+=(-etcd "$ETCD"); fi
    done
    [[ $seed ]] || seed=$((RANDOM * 32768 + RANDOM))
    say "seed $seed"
    work=$(mktemp -d)
    trap 'if [[ $keep == true ]]; then say "data and logs are in $work"; else rm -rf -- "$work"; fi' EXIT
}
