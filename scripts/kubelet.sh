#!/usr/bin/env bash
# usage: scripts/kubelet.sh [--check] [--short] [--keep] [--help] [-- COMMAND...]
#
# Runs a standalone kubelet with containerd and runc in network, mount and PID namespaces of its own, and in
# them etcd and kube-apiserver as static pods that kubeadm wrote. Tests with them what berth does to static
# pods. Needs root, ip, jq, unshare, setpriv, containerd, runc, a C compiler, cargo, what
# scripts/image.sh needs, and the binaries of scripts/kube-apiserver.sh for the two newest versions.
#
#   --check     build and start nothing: exit with 69 if something is missing
#   --short     without the plain sidecar and without berth bridge
#   --keep      keep the directory with the logs, and print where it is; failures keep it too
#   COMMAND...  run this on the node when its kube-apiserver is ready, and no test: bash, for example.
#               $OLD and $NEW are the two versions, $IMAGE is berth's image, $BERTH its binary.
#   --help      this text
#
# Variables:
#   BERTH            the berth that is called on the node; built with cargo if not given
#   IMAGE, ARCHIVE   the berth in the pods, as scripts/image.sh prints them, which is run if they are
#                    not given
#   CARGO            the cargo command, if not the one on PATH
#   and those of scripts/kube-apiserver.sh for the newest version
#
# Exit status: 0 all held; 1 something did not; 64 a wrong argument; 69 something is missing; 70 a build failed; otherwise
# the COMMAND's own.

# shellcheck source=scripts/e2e/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/e2e/common.sh"
# All the time that it may take, in seconds; 190 to 240 are needed, 130 with --short.
readonly LIMIT=360
# New connections a second.
# shellcheck disable=SC2034
readonly rate=$LEAST_RATE

main() {
    check=false short=false keep=false
    parse_options check short keep -- "$@"
    # shellcheck source=scripts/node/outside.sh
    . "$root/scripts/node/outside.sh"
    # shellcheck source=scripts/node/inside.sh
    . "$root/scripts/node/inside.sh"
    # shellcheck source=scripts/kubelet/node.sh
    . "$root/scripts/kubelet/node.sh"
    # shellcheck source=scripts/service/slices.sh
    . "$root/scripts/service/slices.sh"
    # shellcheck source=scripts/kubelet/pods.sh
    . "$root/scripts/kubelet/pods.sh"
    # shellcheck source=scripts/kubelet/scenarios.sh
    . "$root/scripts/kubelet/scenarios.sh"

    if $check; then
        need_node cc
        [[ -n ${ARCHIVE:-} ]] || "$root/scripts/image.sh" --check >/dev/null || exit
        check_node
        return
    fi
    if [[ -z ${BERTH_NODE_FOLDER:-} ]]; then
        need_node cc
        need_binaries
        # Runs this again, inside, and exits.
        enter_node "$@"
    fi
    work=$BERTH_NODE_FOLDER
    if ((${#command[@]})); then
        watch_over 86400
        start_node
        "${command[@]}"
    else
        watch_over $LIMIT
        start_node
        start_load
        record slices "$SLICES"
        keep_logs &
        await 10 "the first connections" answers_are 100
        first_switch
        upgrade
        upgrade_that_must_not_be
        interrupted_upgrade
        $short || lone_restart
        back_again
        $short || bridge
        end_clients
        report "kubelet $("$KUBELET" --version | cut -d" " -f2), containerd $(containerd --version | cut -d" " -f3), kube-apiserver $OLD and $NEW"
    fi
}

# Everything that the node is made of, exported.
need_binaries() {
    need_versions
    need_image
    need_program BERTH berth debug
    need_clients
    export BERTH IMAGE ARCHIVE TLS_LOAD OLD NEW OLD_KUBE_APISERVER KUBE_APISERVER KUBECTL KUBEADM KUBELET ETCD
    export KUBERC=off
}

main "$@"
