# shellcheck shell=bash
# Part of scripts/cluster.sh: what operators do to one of three nodes after the other.

# https://kubernetes.io/docs/tasks/administer-cluster/kubeadm/kubeadm-upgrade/
guide_begins() {
    excuses=(kubelet)
    [[ $bridge ]] || excuses+=(etcd)
}
guide_operates() {
    local node
    for node in "${CONTROLS[@]}"; do
        on "$node" put_program kubeadm "$NEW"
        [[ $node != cp-1 ]] || bridge='' step "$node" "kubeadm upgrade plan" kubeadm upgrade plan "$NEW" --ignore-preflight-errors "$(ignored)"
        # The guide has this for upgrades of etcd. The temporary kube-apiserver has another name.
        step "$node" "killall kube-apiserver" sh -c 'killall -s SIGTERM kube-apiserver; sleep 20'
        # shellcheck disable=SC2046
        step "$node" "kubeadm upgrade" $(upgrade_of "$node")
        bridge='' step "$node" "kubectl drain" kubectl drain "$node" --ignore-daemonsets
        kubelet_of "$node"
        bridge='' step "$node" "kubectl uncordon" kubectl uncordon "$node"
        await 120 "kube-apiserver $NEW on $node" on "$node" serves "$NEW"
    done
}
guide_ends() {
    local node
    for node in "${CONTROLS[@]}"; do
        await 60 "kubelet $NEW on $node" on "$node" has_kubelet "$NEW"
        expect "etcd's image on $node" "$(sed -n 's/^ *image: //p' "$work/$node/node/etc/kubernetes/manifests/etcd.yaml")" == "$(image_of etcd "$NEW")"
    done
}

# Where kubeadm has upgraded everything else.
kubelet_begins() {
    local node
    excuses=(kubelet)
    [[ $bridge ]] || excuses+=(etcd)
    for node in "${CONTROLS[@]}"; do
        on "$node" put_program kubeadm "$NEW"
        # shellcheck disable=SC2046
        bridge='' step "$node" "kubeadm upgrade, before" $(upgrade_of "$node")
    done
    await 60 "all pods to be ready" pods_are_ready
}
kubelet_operates() {
    local node
    for node in "${CONTROLS[@]}"; do kubelet_of "$node"; done
}
kubelet_ends() {
    local node
    for node in "${CONTROLS[@]}"; do await 60 "kubelet $NEW on $node" on "$node" has_kubelet "$NEW"; done
}

# upgrade_of NODE [OPTION…]: kubeadm's command for its static pods
upgrade_of() {
    local what=(node)
    [[ $1 != cp-1 ]] || what=(apply "$NEW" --yes)
    echo kubeadm upgrade "${what[@]}" --ignore-preflight-errors "$(ignored)" "${@:2}"
}

kubelet_of() {
    # shellcheck disable=SC2016
    step "$1" "kubelet $NEW" sh -euc 'install -t /usr/bin "$0/kubelet" "$0/kubectl"
        systemctl daemon-reload
        systemctl restart kubelet' "$PROGRAMS/$NEW"
    await 60 "$1 to be ready" on "$1" node_is_ready
}

# connections: that are open to each node's kube-apiserver
connections() {
    local node
    for node in "${CONTROLS[@]}"; do ip netns exec "$node" ss -Htn state established "sport = :$PORT" | wc -l; done | xargs
}

# step NODE WHAT COMMAND…: an operator's, there, with a row for it
step() {
    local began ended status=0
    now began
    say "$1: ${*:3}"
    on "$1" on_the_node "${@:3}" >>"$work/operator.log" 2>&1 || status=$?
    now ended
    row "$1: $2" "exit status $status, after $(seconds "$began" "$ended")"
    row "  open connections to each node" "$(connections)"
    ((status == 0)) || fail "$2 on $1" operator.log
}
