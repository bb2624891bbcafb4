#!/usr/bin/env bash
# usage: scripts/direct.sh [--keep] [PART...]
#
# Real kube-apiservers behind `berth serve --direct on`, in network namespaces; what is asserted is seen from outside, by clients, in audit
# logs and in answers. Needs root that may load BPF programs, ip, nft, openssl, jq, curl, cargo and the binaries of
# scripts/kube-apiserver.sh for the two newest versions, which it builds if they are not there.
#
#   sources    the client address in audit logs, by every way to the node; compared with the relay
#   upgrade    to the newest version and back, under new connections; compared with an instance without berth
#   killed     SIGKILL of the instance, SIGKILL and SIGSTOP of the shim; each compared with the relay
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
readonly SHORT=(sources upgrade) PARTS=(sources upgrade killed speed)

main() {
    local part
    keep=false rate=$LEAST_RATE
    parse_options keep "ARGUMENT=$(one_of "${PARTS[@]}")" -- "$@"
    ((${#arguments[@]})) || arguments=("${SHORT[@]}")
    # All the time that it may take, in seconds.
    LIMIT=$((120 + 120 * ${#arguments[@]}))
    [[ " ${arguments[*]} " != *\ speed\ * ]] || LIMIT=$((LIMIT + 600))
    . "$root/scripts/service/stage.sh"
    . "$root/scripts/direct/stage.sh"
    . "$root/scripts/direct/sources.sh"
    . "$root/scripts/direct/upgrade.sh"
    . "$root/scripts/direct/killed.sh"
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

main "$@"
