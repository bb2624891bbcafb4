#!/usr/bin/env bash
# usage: scripts/cluster.sh [--check] [--keep] [--nodes N] [--rate N] [--together] [--bridge BERTH] [SCENARIO...] [-- COMMAND...]
#
# Runs `kubeadm init` of the version before the newest in namespaces of its own, with all that a node has, and clients: a pod
# that dials the Service, another host, the node itself. Does to it what each SCENARIO says and counts what was lost. This is the control:
# it fails if nothing was lost. Needs root, ip, nft, jq, openssl, unshare, setpriv, containerd, runc, Debian's
# containernetworking-plugins, a C compiler, cargo, and what scripts/kube-apiserver.sh builds; with --nodes 3 haproxy and nsenter.
#
#   upgrade           kubeadm upgrade apply, to the newest version
#   etcd              the same with etcd, which is restarted: no kube-apiserver can do without
#   conformance       the same with etcd, while Kubernetes' own conformance tests run again and again
#   bad-flag          upgrade with a patch that gives kube-apiserver a flag that it does not know
#   kubelet           the newest kubelet put in place and restarted
#   certs             kubeadm certs renew all, kube-apiserver stopped by its name, and each static pod started again
#   renew, renew-new  kubeadm certs renew all alone, of the older and of the newest version, and nothing restarted until the old certificates
#                     have expired, after 12 minutes; the control may lose nothing, either
#   flag              a flag of kube-apiserver changed in its manifest
#   wedged            the same with a typo, the kubelet restarted, the typo corrected; the control shows that kube-apiserver does not come
#                     back within 180 s, and restarts the kubelet again
#   cluster-api       Cluster API's requests for an update in place to the handler of examples/cluster-api
#   inject, eject     kube-apiserver put behind berth, and back, by berth, which begins a bridge itself
#   behind            the upgrade of a node that is behind berth, as docs/upgrade.md has it; the control leaves out berth upgrade
#   judged            a node that is behind berth, by berth upgrade --judge: to a version that lacks an API and is sent back, and to
#                     a good one; the control writes the manifest
#   interrupted       a node that is behind berth, by berth upgrade, which gets SIGKILL in each of its steps and is run again: back from a
#                     flag that no kube-apiserver knows, then to the newest version; the control writes the manifest
#   killed            a flag changed again and again, and each time a process of the bridge gets SIGKILL, at another step
#   all of them if none is given. With --nodes 3:
#   guide             Kubernetes' guide to upgrades with kubeadm, node after node: kubeadm, drain, kubelet, uncordon
#   behind            berth upgrade and kubeadm, node after node, all behind berth; one upgrade fails, two are begun at once
#   dead              one of three nodes dies in the middle of its upgrade, and another is upgraded
#
#   --check           build and start nothing: exit with 69 if something is missing
#   --keep            keep the directories with the logs, and print where they are; failures keep them too
#   --nodes N         3: three control-plane nodes with an etcd member each, a worker, and HAProxy in front of them (1)
#   --rate N          new TLS connections a second, each way (50; 10 with --nodes 3)
#   --together        both halves of a scenario at the same time
#   --bridge BERTH    each scenario once more, in a new cluster, under `BERTH bridge`: nothing may be lost but
#                     while etcd or the kubelet is away, which no kube-apiserver can do without
#   COMMAND...        run this on the node, or with --nodes 3 outside of them, when the cluster is ready, and no scenario. Its exit status is
#                     the script's. $OLD and $NEW are the two versions, $PROGRAMS has a directory of programs for each.
#
# Variables, built if not given: TLS_LOAD, the clients; BERTH, where there is no --bridge; IMAGE and ARCHIVE, which are put before
# kube-apiserver, as scripts/image.sh prints them.

export TZ=UTC

. "$(dirname "${BASH_SOURCE[0]}")/stage.sh"
# All the time that half a scenario may take, in seconds, for each node.
readonly LIMIT=1800

# The node, and another host of its network (RFC 5737, RFC 3849).
readonly HOST_IP6=2001:db8::2 VIP=192.0.2.9 FAR_IP=192.0.2.1 FAR_IP6=2001:db8::1 NODE=${BERTH_NODE:-cp-1}
# The pods that the kubelet starts, a pod's namespace that only has clients, and where the Service is.
readonly POD_SUBNET=10.244.0.0/24 POD_GATEWAY=10.244.1.1 POD_IP=10.244.1.2 SERVICE_IP=10.96.0.1
# Several nodes and their balancer.
declare -rA ADDRESSES=([cp-1]=192.0.2.2 [cp-2]=192.0.2.3 [cp-3]=192.0.2.4 [w-1]=192.0.2.5)
readonly LB_IP=192.0.2.10
CONTROLS=()
readonly SCENARIOS=(upgrade etcd conformance bad-flag kubelet certs renew renew-new flag wedged cluster-api inject eject behind judged interrupted killed) SCENARIOS_OF_THREE=(guide behind dead)

main() {
    local all
    check=false keep=false together=false nodes=1 rate='' bridge=''
    parse_options check keep together 'nodes=^[13]$' 'rate=^[1-9][0-9]{0,3}$' bridge=. \
        "ARGUMENT=$(one_of "${SCENARIOS[@]}" "${SCENARIOS_OF_THREE[@]}")" -- "$@"
    if ((nodes == 1)); then all=("${SCENARIOS[@]}") rate=${rate:-50}; else all=("${SCENARIOS_OF_THREE[@]}") rate=${rate:-10}; fi
    if [[ $bridge ]]; then
        [[ -x $bridge ]] || wrong_usage "--bridge $bridge cannot be run"
        bridge=$(realpath -- "$bridge")
        # For the report.
        export BERTH=$bridge
    fi
    scenarios=("${arguments[@]:-${all[@]}}")
    for scenario in "${scenarios[@]}"; do
        [[ " ${all[*]} " == *" $scenario "* ]] || wrong_usage "$scenario is not one of those with --nodes $nodes: ${all[*]}"
    done
    . "$root/scripts/cluster/images.sh"
    . "$root/scripts/cluster/outside.sh"
    . "$root/scripts/cluster/node.sh"
    . "$root/scripts/cluster/clients.sh"
    . "$root/scripts/cluster/judge.sh"
    . "$root/scripts/cluster/scenarios.sh"
    . "$root/scripts/cluster/killed.sh"
    . "$root/scripts/cluster/conformance.sh"
    # What runs on one of several nodes is what runs on the only one.
    if ((nodes > 1)) && [[ ! ${BERTH_NODE:-} ]]; then
        . "$root/scripts/cluster/nodes.sh"
        . "$root/scripts/cluster/guide.sh"
    fi

    if $check; then
        need_all
        check_node
    elif [[ -z ${BERTH_NODE_FOLDER:-} ]]; then
        need_all
        prepare
        if ((${#command[@]})); then
            begin_half command -- "${command[@]}"
            end_half command
        else
            each_scenario
        fi
    elif [[ $BERTH_NODE_CGROUP ]]; then
        # Runs this again.
        enter_cgroup "$@"
    elif [[ ${BERTH_NODE:-} ]]; then
        work=$BERTH_NODE_FOLDER
        if ((${#command[@]})); then call "${command[@]}"; else be_node; fi
    elif ((${#command[@]})); then
        work=$BERTH_NODE_FOLDER
        watch_over 86400
        start_cluster
        # Outside of the nodes there is no kubectl.
        ((nodes == 1)) || PATH=$PROGRAMS/$OLD:$PATH
        on_the_node "${command[@]}"
    else
        work=$BERTH_NODE_FOLDER
        # The control has none.
        [[ $bridge ]] || needs_berth || unset BERTH
        watch_over $((LIMIT * nodes))
        half "${scenarios[0]}"
    fi
}

main "$@"
