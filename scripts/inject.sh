#!/usr/bin/env bash
# usage: scripts/inject.sh [--times N] [--rounds N] [--keep] [--check] [PART...]
#
# Real kube-apiservers under `berth exec --pass inject` behind `berth serve --pass inject`, in network namespaces; what is asserted is seen
# from outside, by clients, in audit logs and in metrics. Needs root, ip, openssl, jq, curl, pgrep, cargo and the binaries of
# scripts/kube-apiserver.sh for the two newest versions, which it builds if they are not there.
#
#   sources     the client address in audit logs; compared with the relay
#   upgrade     to the newest version and back, under new connections; compared with an instance without berth
#   failures    the shim, the supervisor and the server killed, stopped, told to end, under new connections, kept ones and watches; compared
#               with an instance without berth, and with the relay
#   speed       requests a second and CPU time; compared with no berth, the relay, and HAProxy if it is there
#   the first two if none is given
#
#   --times N   of upgrade there and back, and of each failure (1)
#   --rounds N  of speed, each with all ways by turns (8)
#   --keep      keep the directory with the logs, and print where it is; failures keep it too
#   --check     only check that all is there, without building
#
# Variables: BERTH, the berth to test; built with cargo if not given, for speed by scripts/static.sh

export TZ=UTC

. "$(dirname "${BASH_SOURCE[0]}")/stage.sh"
# Berths of their own on the node, for what is measured.
readonly RELAYED_IP=192.0.2.5 HAPROXY_IP=192.0.2.7
# Each instance's --shutdown-delay-duration, in seconds.
readonly -A DELAY=([old]=0 [new]=5)
# Where the shims of the berth have their metrics, on the node.
readonly ADMIN=127.0.0.1:9443
readonly SHORT=(sources upgrade) PARTS=(sources upgrade failures speed)

main() {
    local part
    keep=false check=false times=1 rounds=8 rate=$LEAST_RATE
    parse_options keep check 'times=^[1-9][0-9]?$' 'rounds=^[1-9][0-9]?$' "ARGUMENT=$(one_of "${PARTS[@]}")" -- "$@"
    ((${#arguments[@]})) || arguments=("${SHORT[@]}")
    # All the time that it may take, in seconds.
    LIMIT=$((120 + 120 * times * ${#arguments[@]}))
    [[ " ${arguments[*]} " != *\ speed\ * ]] || LIMIT=$((LIMIT + 60 * rounds))
    . "$root/scripts/service/stage.sh"
    # The other addresses that kube-apiserver's certificate names.
    readonly OTHER_IPS="$OBSERVER_IP $RELAYED_IP $HAPROXY_IP $CLIENT_IP"
    usual_logs=({relay,inject,old,new}{,-api}.log observer.log)
    . "$root/scripts/inject/sources.sh"
    . "$root/scripts/inject/upgrade.sh"
    . "$root/scripts/inject/failures.sh"
    . "$root/scripts/inject/speed.sh"

    need_root "network namespaces"
    need_tools ip openssl jq curl pgrep "${CARGO:=cargo}"
    if $check; then
        for part in "$(previous_version)" "$(pinned_versions | tail -n 1)"; do "$root/scripts/kube-apiserver.sh" --check "$part" >/dev/null || exit; done
        [[ ! ${BERTH:-} ]] || need_injection
        exit
    fi
    need_versions
    NEW_KUBE_APISERVER=$KUBE_APISERVER
    [[ " ${arguments[*]} " != *\ speed\ * ]] || need_shipped
    need_program BERTH berth debug
    need_clients
    need_injection
    # A supervisor puts a listener of TCP in place of that of MPTCP. So that both sides are alike, no server has one of MPTCP.
    export BERTH_PASS=inject BERTH_ADMIN=$ADMIN GODEBUG=multipathtcp=0
    set_stage
    for part in "${arguments[@]}"; do "part_$part"; done
    report "kube-apiserver $OLD and $NEW"
}

# Whether this machine lets a parent answer accept(2) for its child.
need_injection() {
    local why directory
    directory=$(mktemp -d)
    why=$("$BERTH" exec --pass inject --listen "$HOST_IP:$PORT" --run-dir "$directory" -- true 2>&1) || unavailable "${why##*$'\n'}"
    rm -rf -- "$directory"
}

# The instance without berth is there once, for whichever part comes first.
need_observer() {
    [[ -z ${pid[observer]:-} ]] || return 0
    say "starting kube-apiserver $NEW without berth"
    start_observer
}

# takes_sockets INSTANCE: its shim passes clients' sockets to it
takes_sockets() {
    "$BERTH" status --run-dir "$work/run" --json |
        jq -e --arg id "$1" '.instances[] | select(.instance == $id) | .shim.instances[] | select(.own).injected'
}

# connections INSTANCE: those that its shim passed to an instance, and those that it relayed or that ended otherwise
connections() {
    ip netns exec "$node" curl --silent --show-error --fail http://$ADMIN/metrics | awk -v shim="shim=\"$1\"" '
        /^berth_connections_total/ && index($0, shim) { if (/"injected"/) passed += $NF; else other += $NF }
        /^berth_connections_open/ && index($0, shim) { other += $NF }
        END { print passed + 0, other + 0 }'
}
# passed_are INSTANCE LEAST
passed_are() { (($(connections "$1" | cut -d' ' -f1) >= $2)); }

# dial NAMESPACE SERVER CURL-OPTION…: a new connection
dial() {
    ip netns exec "$1" curl --silent --show-error --fail --max-time 10 --cacert "$work/ca.crt" \
        --connect-to "kubernetes:443:$2" "${@:3}" https://kubernetes/version
}

main "$@"
