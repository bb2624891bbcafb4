# shellcheck shell=bash
# Part of scripts/cluster.sh, outside of the nodes of one cluster: their network, the balancer, how kubeadm makes one cluster of them, and,
# under the same names, what is asked of one node where there is only one.

CONTROLS=(cp-1 cp-2 cp-3) WORKER=w-1
# Ways to the apiservers, as in clients.sh.
WAYS=("service pod $SERVICE_IP:443 $POD_IP" "balancer far $LB_IP:$PORT $FAR_IP")
WORDS[service]="a pod, to the Service" WORDS[balancer]="another host, to the balancer"
for name in "${CONTROLS[@]}"; do
    WAYS+=("to-$name far ${ADDRESSES[$name]}:$PORT $FAR_IP" "localhost-$name $name 127.0.0.1:$PORT 127.0.0.1")
    WORDS[to-$name]="another host, to $name's address" WORDS[localhost-$name]="$name, to localhost"
done
unset 'WORDS[address]' 'WORDS[vip]' 'WORDS[ipv6]' 'WORDS[node]' 'WORDS[localhost]'

start_cluster() {
    local node
    client=far
    mkdir "$work/node"
    mount_cgroups
    join_cgroup test
    # For the names of network namespaces.
    make_mounts etc
    make_networks
    usual_logs=(haproxy.out cp-1/kubelet.log)
    for node in "${CONTROLS[@]}" $WORKER; do start_node "$node"; done
    for node in "${CONTROLS[@]}" $WORKER; do await 300 "$node to have its images" test -e "$work/$node/started"; done
    balancer_configuration >"$work/haproxy.cfg"
    start_needed haproxy balancer haproxy -db -f "$work/haproxy.cfg"
    on cp-1 by_kubeadm init --upload-certs || fail "kubeadm init"
    cp "$work/cp-1/node/etc/kubernetes/admin.conf" /etc/kubernetes/admin.conf
    cp "$work/cp-1/node/etc/kubernetes/pki/ca.crt" "$work/ca.crt"
    for node in cp-2 cp-3 $WORKER; do on "$node" by_kubeadm join || fail "kubeadm join: $node" "$node.log"; done
    await 120 "the nodes to be ready" node_is_ready
    await_pods 120
}

# A switch, and on it the nodes, the balancer and another host; and a pod's namespace on the worker, which has its way through what
# kube-proxy wrote.
make_networks() {
    local name
    declare -A hosts=([far]=$FAR_IP [balancer]=$LB_IP)
    for name in "${!ADDRESSES[@]}"; do hosts[$name]=${ADDRESSES[$name]}; done
    ip link set lo up
    ip link add name switch type bridge
    # For kubectl of the test.
    ip addr add 192.0.2.8/24 dev switch
    ip link set switch up
    for name in pod "${!hosts[@]}"; do
        ip netns add "$name"
        ip -n "$name" link set lo up
    done
    for name in "${!hosts[@]}"; do
        ip link add name "$name" type veth peer name eth0 netns "$name"
        ip link set "$name" master switch up
        ip -n "$name" link set eth0 up
        ip -n "$name" addr add "${hosts[$name]}/24" dev eth0
        # The Service's address needs a route, and so do answers to the pod.
        [[ $name != *-[0-9] ]] || ip -n "$name" route add default via $FAR_IP
        [[ $name != cp-* ]] || ip -n "$name" route add $POD_IP/32 via "${ADDRESSES[$WORKER]}"
    done
    ip -n $WORKER link add name pod type veth peer name node netns pod
    ip -n $WORKER link set pod up
    ip -n pod link set node up
    ip -n $WORKER addr add $POD_GATEWAY/30 dev pod
    ip -n pod addr add $POD_IP/30 dev node
    ip -n pod route add default via $POD_GATEWAY
}

# start_node NAME: this script, in namespaces of its own, with a cgroup in this cluster's
start_node() {
    local cgroup=$1
    mkdir "$work/$1"
    make_cgroups
    # No function: the process is to be this very command.
    env BERTH_NODE="$1" BERTH_NODE_IP="${ADDRESSES[$1]}" BERTH_NODE_FOLDER="$work/$1" BERTH_NODE_CGROUP="$1" \
        setpriv --pdeathsig KILL nsenter "--net=/run/netns/$1" unshare --mount --pid --uts --fork --kill-child --mount-proc \
        "$root/scripts/$program.sh" --nodes 3 >"$work/$1.log" 2>&1 &
    pid[$1]=$! needed[$1]=
}

# on NODE COMMAND…: a function or program, there; under the bridge if there is one
on() {
    BERTH_NODE=$1 BERTH_NODE_IP=${ADDRESSES[$1]} BERTH_NODE_FOLDER=$work/$1 \
        nsenter --mount --pid --net --uts --cgroup --target "$(pgrep -P "${pid[$1]}")" \
        "$root/scripts/$program.sh" --nodes 3 ${bridge:+--bridge "$bridge"} -- "${@:2}"
}

# As kubeadm's docs/ha-considerations.md has it (check every 2 s, 3 to fall and 2 to rise are HAProxy's defaults), but for /readyz instead of
# /healthz, which also says whether etcd answers, and for the log.
balancer_configuration() {
    local node
    cat <<TEXT
global
    log stdout format raw local0
defaults
    mode tcp
    log global
    option dontlognull
    option redispatch
    retries 1
    timeout queue 20s
    timeout connect 5s
    timeout client 35s
    timeout server 35s
    timeout check 10s
frontend apiserver
    bind *:$PORT
    default_backend apiserverbackend
backend apiserverbackend
    option httpchk
    http-check connect ssl
    http-check send meth GET uri /readyz
    http-check expect status 200
    balance roundrobin
TEXT
    for node in "${CONTROLS[@]}"; do echo "    server $node ${ADDRESSES[$node]}:$PORT check verify none"; done
}

kubectl() { "$PROGRAMS/$OLD/kubectl" --kubeconfig /etc/kubernetes/admin.conf --cache-dir "$work/cache" --request-timeout 15s "$@"; }

node_is_ready() {
    kubectl get nodes -o json |
        jq -e --argjson nodes $((${#CONTROLS[@]} + 1)) '.items | length == $nodes and all(any(.status.conditions[]; .type == "Ready" and .status == "True"))'
}

node_condition() { kubectl get nodes -o json | jq -r '.items[].status.conditions[] | select(.type == "Ready") | .lastTransitionTime' | xargs; }

certificates() {
    local node
    for node in "${CONTROLS[@]}"; do on "$node" certificates | sed "s/^/$node:/"; done | sort
}

# On all nodes at the same time.
watch_away() {
    local node
    for node in "${CONTROLS[@]}"; do on "$node" watch_away "$1" & done
    wait
    cat "$work"/cp-?/"$1.away" >"$work/$1.away"
}
