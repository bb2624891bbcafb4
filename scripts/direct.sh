#!/usr/bin/env bash
# usage: scripts/direct.sh [--keep] [PART...]
#
# Real kube-apiservers behind `berth serve --direct on`, in network namespaces; what is asserted is seen from outside, by clients, in audit
# logs and in answers. Needs root that may load BPF programs, ip, nft, openssl, jq, curl, cargo and the binaries of
# scripts/kube-apiserver.sh for the two newest versions, which it builds if they are not there.
#
#   sources    the client address in audit logs, by every way to the node; compared with the relay
#   upgrade    to the newest version and back, under new connections; compared with an instance without berth
#   speed      requests a second and CPU time; compared with no berth, the relay, and HAProxy if it is there
#   the first two if none is given
#
#   --keep     keep the directory with the logs, and print where it is; failures keep it too
#
# Variables: BERTH, the berth to test; built with cargo if not given, for speed by scripts/static.sh

export TZ=UTC

. "$(dirname "${BASH_SOURCE[0]}")/stage.sh"
# An address that the node has later than its shim.
readonly VIP=192.0.2.9
# Berths of their own on the node, for what is measured.
readonly RELAYED_IP=192.0.2.5 STEERED_IP=192.0.2.6 HAPROXY_IP=192.0.2.7
# Each instance's --shutdown-delay-duration, in seconds.
readonly -A DELAY=([old]=0 [new]=5)
readonly SHORT=(sources upgrade) PARTS=(sources upgrade speed)
# What makes listeners of Go's as the kernel can steer to them, and as Go makes them by default where the kernel has MPTCP.
readonly PLAIN=multipathtcp=0 MULTIPATH=multipathtcp=2

main() {
    local part
    keep=false rate=$LEAST_RATE
    parse_options keep "ARGUMENT=$(one_of "${PARTS[@]}")" -- "$@"
    ((${#arguments[@]})) || arguments=("${SHORT[@]}")
    # All the time that it may take, in seconds.
    LIMIT=$((120 + 120 * ${#arguments[@]}))
    [[ " ${arguments[*]} " != *\ speed\ * ]] || LIMIT=$((LIMIT + 600))
    . "$root/scripts/service/stage.sh"
    # The other addresses that kube-apiserver's certificate names.
    readonly OTHER_IPS="$VIP $OBSERVER_IP $RELAYED_IP $STEERED_IP $HAPROXY_IP $CLIENT_IP"
    usual_logs=({a,old,new,last}{,-api}.log observer.log kube-proxy.log)
    . "$root/scripts/direct/sources.sh"
    . "$root/scripts/direct/upgrade.sh"
    . "$root/scripts/direct/speed.sh"

    need_root "network namespaces"
    need_tools ip nft openssl jq curl "${CARGO:=cargo}"
    need_versions
    NEW_KUBE_APISERVER=$KUBE_APISERVER
    [[ " ${arguments[*]} " != *\ speed\ * ]] || need_shipped
    need_program BERTH berth debug
    need_clients
    set_stage
    for part in "${arguments[@]}"; do "part_$part"; done
    report "kube-apiserver $OLD and $NEW"
}

# The instance without berth is there once, for whichever part comes first.
need_observer() {
    [[ -z ${pid[observer]:-} ]] || return 0
    say "starting kube-apiserver $NEW without berth"
    GODEBUG=$MULTIPATH start_observer
}

# of_direct INSTANCE FILTER: by jq, of the direct path in its shim's status
of_direct() {
    "$BERTH" status --run-dir "$work/run" --json |
        jq -r --arg id "$1" ".instances[] | select(.instance == \$id) | .shim.direct | $2"
}
steers() { [[ $(of_direct "$1" .on) == true ]]; }
opened() { of_direct "$1" .opened; }
# opened_are INSTANCE LEAST
opened_are() { (($(opened "$1") >= $2)); }

# dial NAMESPACE SERVER CURL-OPTION…: a new connection
dial() {
    ip netns exec "$1" curl --silent --show-error --fail --max-time 10 --cacert "$work/ca.crt" \
        --connect-to "kubernetes:443:$2" "${@:3}" https://kubernetes/version
}

main "$@"
