# shellcheck shell=bash
# Part of scripts/cluster.sh: what an operator does, and what must hold.

# What the operator calls, whether that is berth and begins a bridge itself, and its exit status.
operator=() bridges_itself=false status=0

# half SCENARIO: one new cluster, under berth bridge if there is one
half() {
    local scenario=$1
    start_cluster
    say "$scenario: the cluster is there after $SECONDS s"
    "${scenario//-/_}_begins"
    start_clients
    before
    now 'at[begin]'
    $bridges_itself || [[ -z $bridge ]] || say "$scenario: under berth bridge"
    say "$scenario: ${operator[*]}"
    usual_logs=(operator.log kubelet.log)
    on_the_node "${operator[@]}" >"$work/operator.log" 2>&1 || status=$?
    now 'at[back]'
    row "exit status of the operator's command" "$status, after $(seconds "${at[begin]}" "${at[back]}")"
    "${scenario//-/_}_ends"
    await 60 "the node to be ready" node_is_ready
    await 60 "all pods to be ready" pods_are_ready
    # What is left of the change comes to an end.
    pause 10
    end_clients
    count_lost
    after
    judge
    report "$scenario, ${bridge:+under berth bridge}${bridge:-without berth}, $OLD and $NEW"
}

# on_the_node COMMAND…: as an operator would
on_the_node() (
    join_cgroup operator
    # berth has options of such names.
    unset "${!BERTH_@}"
    export KUBECONFIG=/etc/kubernetes/admin.conf
    # Short times: no watch needs the settled one's bookmarks, those that list again are counted.
    export BERTH_SETTLE=20s BERTH_READY_TIMEOUT=2m
    if [[ $bridge ]] && ! $bridges_itself; then "$bridge" bridge -- "$@"; else "$@"; fi
)

# by_script FUNCTION: the operator calls a script that is this function
by_script() { operator=(bash -euo pipefail -c "$(declare -f "$1") && $1"); }

# To the next minor version, as Kubernetes' documents have it.
upgrade_begins() {
    put_program kubeadm "$NEW"
    operator=(kubeadm upgrade apply "$NEW" --etcd-upgrade=false --yes --ignore-preflight-errors "$(ignored)")
}
upgrade_ends() {
    ((status == 0)) || fail "kubeadm upgrade apply" operator.log
    await 120 "kube-apiserver $NEW" serves "$NEW"
    expect "new certificates" "$(renewed)" == "apiserver-etcd-client.crt apiserver-kubelet-client.crt apiserver.crt front-proxy-client.crt"
}

# The same with a patch that keeps kube-apiserver from starting. kubeadm waits, and puts back what was there.
bad_flag_begins() {
    put_program kubeadm "$NEW"
    mkdir "$work/node/patches"
    echo '[{"op": "add", "path": "/spec/containers/0/command/-", "value": "--no-such-flag"}]' >"$work/node/patches/kube-apiserver+json.json"
    # Its own 5 minutes are long.
    cat >"$work/node/upgrade.yaml" <<TEXT
apiVersion: kubeadm.k8s.io/v1beta4
kind: UpgradeConfiguration
apply:
  kubernetesVersion: $NEW
  etcdUpgrade: false
  forceUpgrade: true
  ignorePreflightErrors: [$(ignored)]
  patches: {directory: $work/node/patches}
timeouts: {upgradeManifests: 90s}
TEXT
    operator=(kubeadm upgrade apply --config "$work/node/upgrade.yaml")
}
bad_flag_ends() {
    if [[ $bridge ]]; then
        # kubeadm may have ended well, for the bridge answers it.
        expect "exit status when the node's own did not come back" "$status" -eq 75
        "$bridge" bridge restore >>"$work/operator.log" 2>&1 || fail "berth bridge restore" operator.log
    else
        expect "exit status of kubeadm upgrade apply" "$status" -ne 0
    fi
    await 120 "kube-apiserver $OLD again" serves "$OLD"
}

# The newest kubelet, put in place and restarted: kubeadm's next step after the control plane.
kubelet_begins() {
    upgrade_begins
    "${operator[@]}" >"$work/upgrade.log" 2>&1 || fail "kubeadm upgrade apply" upgrade.log
    await 120 "kube-apiserver $NEW" serves "$NEW"
    await 60 "all pods to be ready" pods_are_ready
    by_script new_kubelet
}
# shellcheck disable=SC2317
new_kubelet() {
    systemctl stop kubelet
    install "$PROGRAMS/$NEW/kubelet" /usr/bin/kubelet
    systemctl daemon-reload
    systemctl start kubelet
}
kubelet_ends() {
    ((status == 0)) || fail "a new kubelet" operator.log
    await 60 "kubelet $NEW" has_kubelet "$NEW"
}
has_kubelet() { [[ $(kubectl get node $NODE -o jsonpath='{.status.nodeInfo.kubeletVersion}') == "$1" ]]; }

# All certificates, and those who read theirs only as they start. etcd reads its own at each handshake: it stays.
certs_begins() { by_script new_certificates; }
# shellcheck disable=SC2317
new_certificates() {
    local name
    kubeadm certs renew all
    mkdir /etc/kubernetes/away
    for name in kube-apiserver kube-controller-manager kube-scheduler; do
        mv "/etc/kubernetes/manifests/$name.yaml" /etc/kubernetes/away
        # The kubelet looks at its directory every 20 s.
        sleep 20
        mv "/etc/kubernetes/away/$name.yaml" /etc/kubernetes/manifests
    done
}
certs_ends() {
    ((status == 0)) || fail "new certificates" operator.log
    await 120 "kube-apiserver with its new certificate" has_certificate
}
has_certificate() {
    local server
    serves "$OLD"
    server=$(openssl s_client -connect 127.0.0.1:$PORT </dev/null 2>/dev/null | openssl x509 -noout -serial)
    [[ $server == "$(openssl x509 -in /etc/kubernetes/pki/apiserver.crt -noout -serial)" ]]
}

# Another flag, written into the manifest. The command is back long before the kubelet sees it.
flag_begins() { by_script new_flag; }
# shellcheck disable=SC2317
new_flag() {
    sed 's/^    - --allow-privileged=true$/&\n    - --event-ttl=2h0m0s/' /etc/kubernetes/manifests/kube-apiserver.yaml >/etc/kubernetes/new.yaml
    mv /etc/kubernetes/new.yaml /etc/kubernetes/manifests/kube-apiserver.yaml
}
flag_ends() {
    ((status == 0)) || fail "a new flag" operator.log
    await 120 "kube-apiserver with its new flag" has_flag
}
has_flag() { grep -qas '^kube-apiserver.*--event-ttl=2h0m0s' /proc/[0-9]*/cmdline && serves "$OLD"; }

# Behind berth, by berth itself.
inject_begins() {
    bridges_itself=true
    operator=("$BERTH" inject --write ${bridge:+--bridge} --image "$IMAGE" "${LISTEN[@]}")
}
inject_ends() {
    ((status == 0)) || fail "berth inject" operator.log
    await 120 "kube-apiserver behind berth" is_behind_berth
    await 60 "kube-apiserver $OLD" serves "$OLD"
}
# Every address that clients dial; a shim listens on those that it is told.
readonly LISTEN=(--listen "$HOST_IP:$PORT" --listen "$VIP:$PORT" --listen "[$HOST_IP6]:$PORT" --listen "127.0.0.1:$PORT")
is_behind_berth() { ss -Hltnp "sport = :$PORT" | grep -F "$HOST_IP:$PORT" | grep -qF '"berth"'; }

# And as it was again.
eject_begins() {
    "$BERTH" inject --write --image "$IMAGE" "${LISTEN[@]}" >"$work/inject.log" 2>&1 || fail "berth inject" inject.log
    await 120 "kube-apiserver behind berth" is_behind_berth
    await 60 "kube-apiserver $OLD" serves "$OLD"
    await 60 "all pods to be ready" pods_are_ready
    bridges_itself=true
    operator=("$BERTH" eject --write ${bridge:+--bridge})
}
eject_ends() {
    ((status == 0)) || fail "berth eject" operator.log
    expect "a manifest with berth in it" "$(grep -c berth "$manifests/kube-apiserver.yaml" || :)" -eq 0
    await 120 "kube-apiserver without berth" is_alone
    await 60 "kube-apiserver $OLD" serves "$OLD"
}
is_alone() { ss -Hltnp "sport = :$PORT" | grep -F "*:$PORT" | grep -qF '"kube-apiserver"'; }

# What must stay as it is, or not: leaders, the node's condition, certificates; and what was used.
before() {
    leaders >"$work/leaders.before"
    node_condition >"$work/node.before"
    certificates >"$work/certificates.before"
    cpu_used >"$work/cpu.before"
    watch_memory &
    pid[memory]=$!
}
after() {
    local name transitions
    leaders >"$work/leaders.after"
    node_condition >"$work/node.after"
    cpu_used >"$work/cpu.after"
    heading "the cluster"
    while read -r name transitions; do
        elections[$name]=$((transitions - $(awk -v name="$name" '$1 == name { print $2 }' "$work/leaders.before")))
        row "elections of $name" "${elections[$name]}"
    done <"$work/leaders.after"
    row "a leader's longest time to renew" "$(longest_between election)"
    row "the node was not ready" "$(cmp -s "$work/node.before" "$work/node.after" && echo never || echo "until $(<"$work/node.after")")"
    row "new certificates" "$(renewed)"
    row "processors in use, mean" "$(awk -v used=$(($(<"$work/cpu.after") - $(<"$work/cpu.before"))) -v time=$((at[end] - at[begin])) \
        'BEGIN { printf "%.2f", used / time }')"
    row "memory in use, most" "$(($(sort -n "$work/memory" | tail -n 1) / 1048576)) MiB"
}
declare -gA elections=()

judge() {
    local name sum=0
    for name in "${!lost[@]}"; do
        [[ $name == localhost ]] || sum=$((sum + lost[$name]))
        [[ -z $bridge || $name == localhost ]] || expect "lost: ${WORDS[$name]}" "${lost[$name]}" -eq 0
    done
    if [[ $bridge ]]; then
        ((!${#failures[@]})) || show_logs operator.log
        expect "the node was ready all the time" "$(<"$work/node.after")" == "$(<"$work/node.before")"
        # client-go's leader gives up after 10 s.
        expect "a leader's longest time to renew" "$(longest_between election | cut -d. -f1)" -lt 10
        for name in "${!elections[@]}"; do expect "elections of $name" "${elections[$name]}" -le 1; done
    else
        expect "what the control lost, without a bridge" "$sum" -gt 0
    fi
}

# How often each Lease got another holder.
leaders() {
    kubectl get leases --namespace kube-system -o json |
        jq -r '.items[] | select(.metadata.name | test("^kube-(controller-manager|scheduler)$")) | "\(.metadata.name) \(.spec.leaseTransitions)"'
}

# Since when it is ready: another time after it was not.
node_condition() { kubectl get node $NODE -o json | jq -r '.status.conditions[] | select(.type == "Ready") | .lastTransitionTime'; }

# Lines "FILE DATE SERIAL"
certificates() {
    local file
    find /etc/kubernetes/pki -name '*.crt' | sort | while read -r file; do
        echo "${file#/etc/kubernetes/pki/} $(openssl x509 -in "$file" -noout -startdate -serial | xargs)"
    done
}

# Those that are others than before.
renewed() { comm -13 "$work/certificates.before" <(certificates) | cut -d' ' -f1 | xargs | sed 's/^$/none/'; }

seconds() { awk -v from="$1" -v to="$2" 'BEGIN { printf "%.1f s", (to - from) / 1e6 }'; }

longest_between() {
    awk -v from="${at[begin]}" -v to="${at[end]}" '
        function until(now) { if (last && now - last > longest) longest = now - last }
        $3 == "ok" {
            if ($1 >= from) until($1 + $4)
            last = $1 + $4
        }
        END {
            until(to)
            printf "%.1f s", longest / 1e6
        }' "$work/$1.out"
}

# By the node, microseconds.
cpu_used() {
    local cgroup=/sys/fs/cgroup file
    for file in $cgroup/{cpuacct,cpu\,cpuacct}; do [[ ! -e $file/cpuacct.usage ]] || cgroup=$file; done
    if [[ -e $cgroup/cpuacct.usage ]]; then
        echo $((($(<"$cgroup/cpuacct.usage") - $(<"$cgroup/test/cpuacct.usage")) / 1000))
    else
        awk '$1 == "usage_usec" { used += (NR == FNR ? $2 : -$2) } END { printf "%.0f\n", used }' $cgroup/{,test/}cpu.stat
    fi
}

# By the node's processes, bytes, each second; without cached files.
watch_memory() {
    local cgroup=/sys/fs/cgroup
    [[ ! -e $cgroup/memory ]] || cgroup+=/memory
    while [[ ! -e $work/over ]]; do
        awk '$1 == "total_rss" || $1 == "anon" { used += (NR == FNR ? $2 : -$2) } END { printf "%.0f\n", used }' $cgroup/{,test/}memory.stat
        pause 1
    done >"$work/memory"
}
