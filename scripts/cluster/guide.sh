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

# Each is behind berth, and is upgraded by the commands of docs/upgrade.md; the control leaves out `berth upgrade`. On the second one an
# upgrade fails, and then two operators upgrade two of them at once.
behind_begins() {
    local node
    export bridges_itself=true
    for node in "${CONTROLS[@]}"; do on "$node" behind_begins || fail "berth inject on $node" "$node/inject.log"; done
    with="berth upgrade, then kubeadm" without="kubeadm alone"
}
behind_operates() {
    local refused=cp-3
    step cp-1 upgrade.md documented_upgrade
    if [[ $bridge ]]; then
        fails_on cp-2
        begin_step cp-2 documented_upgrade
        begin_step cp-3 documented_upgrade
        end_step cp-2 "upgrade.md, beside cp-3" '@(0|69)'
        ((status == 0)) || refused=cp-2
        end_step cp-3 "upgrade.md, beside cp-2" '@(0|69)'
        expect "of two operators, who was refused" "$refused $status" == "$([[ $refused == cp-2 ]] && echo cp-2 0 || echo cp-3 69)" operator.log
    else
        step cp-2 upgrade.md documented_upgrade
    fi
    step $refused upgrade.md documented_upgrade
}
behind_ends() {
    local node
    for node in "${CONTROLS[@]}"; do
        await 120 "kube-apiserver $NEW with its new certificate on $node" on "$node" has_certificate "$NEW"
        expect "kube-apiserver behind berth on $node" "$(on "$node" is_behind_berth && echo yes)" == yes
        expect "what differs on $node from what was upgraded to" \
            "$(cmp "$work/$node"/node/{next,etc/kubernetes/manifests}/kube-apiserver.yaml)" == ""
    done
}

# fails_on NODE: its upgrade, to a manifest with a flag that no kube-apiserver knows. The next one is not touched.
fails_on() {
    local manifest=$work/$1/node/unknown-flag.yaml instance
    instance=$(on cp-3 pgrep -x kube-apiserver)
    sed 's/^\( *- \)--allow-privileged=true$/&\n\1--no-such-flag/' "$work/$1/node/etc/kubernetes/manifests/kube-apiserver.yaml" >"$manifest"
    begin_step "$1" "$BERTH" upgrade "$manifest"
    end_step "$1" "berth upgrade to an unknown flag" 1
    expect "kube-apiserver of cp-3" "$(on cp-3 pgrep -x kube-apiserver)" == "$instance" operator.log
}

# The third node, behind berth as the others, dies in the middle of its upgrade, and its link with it. Another one takes its lock.
dead_begins() {
    behind_begins
    with="berth upgrade" without="kubeadm alone"
}
dead_operates() {
    if [[ $bridge ]]; then
        begin_step cp-3 documented_upgrade
        await 240 "cp-3 to be changed" is_changed cp-3
    fi
    say "cp-3 dies"
    unset 'needed[cp-3]'
    ip link set cp-3 down
    kill -KILL "${pid[cp-3]}"
    CONTROLS=(cp-1 cp-2)
    if [[ $bridge ]]; then
        begin_step cp-1 documented_upgrade
        end_step cp-1 "upgrade.md while cp-3 has the lock" 69
        step cp-1 "berth upgrade --break-lock" "$BERTH" upgrade "$work/cp-1/node/next/kube-apiserver.yaml" --break-lock
    fi
    # As an operator does whose node is gone for good; no kubelet removes its pods.
    { kubectl delete node cp-3 && kubectl delete pods --namespace kube-system --field-selector spec.nodeName=cp-3 --force; } >>"$work/kubectl.log" 2>&1
    step cp-1 upgrade.md documented_upgrade
}
is_changed() {
    kubectl get lease upgrade --namespace berth-upgrade -o json |
        jq -e --arg node "$1" '.metadata.annotations | ."berth/node" == $node and ."berth/changed" == "true"'
}
dead_ends() { await 120 "kube-apiserver $NEW with its new certificate on cp-1" on cp-1 has_certificate "$NEW"; }
# What goes to the one that died, or is sent on to it, is lost for a while in any case.
dead_judges() {
    local name
    for name in {to,localhost}-{cp-1,cp-2}; do expect "lost: ${WORDS[$name]}" "${lost[$name]}" -eq 0; done
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
    begin_step "$1" "${@:3}"
    end_step "$1" "$2"
}
begin_step() {
    say "$1: ${*:2}"
    now "at[$1]"
    on "$1" on_the_node "${@:2}" >"$work/$1.operator.log" 2>&1 &
    pid[$1-step]=$!
}
# end_step NODE WHAT [STATUS]: of such a status
end_step() {
    local ended
    status=0
    wait "${pid[$1-step]}" || status=$?
    now ended
    unset "pid[$1-step]"
    cat "$work/$1.operator.log" >>"$work/operator.log"
    row "$1: $2" "exit status $status, after $(seconds "${at[$1]}" "$ended")"
    row "  open connections to each node" "$(connections)"
    # shellcheck disable=SC2053
    [[ $status == ${3:-0} ]] || fail "$2 on $1" "$1.operator.log"
}
