# shellcheck shell=bash
# Part of scripts/service.sh and scripts/inject.sh: the node's other processes, and its shims' rights.

# Where the Service is.
readonly SERVICE_IP=10.96.0.1 SERVICE_PORT=443
# An address of the node that is not the berth's. A kube-apiserver stays there all the time and writes no address: kube-proxy and
# what looks on watch through it, for through one that stops they would be blind to what it does. For inject.sh it is what has no berth.
readonly OBSERVER_IP=192.0.2.3 NODE=cp-1
last_instance=0 instance='' admin=''
usual_logs=(observer.log kube-proxy.log)

# Another instance: a name for the next one.
next_instance() {
    last_instance=$((last_instance + 1))
    instance=i$last_instance
    usual_logs=("$instance.log" "$instance-api.log" observer.log kube-proxy.log)
}

# A kube-apiserver that is no instance of the berth, and does not write its address.
start_observer() {
    ip -n "$node" addr add $OBSERVER_IP/24 dev host
    openssl genrsa -out "$work/sa.key" 2048 2>/dev/null
    openssl pkey -in "$work/sa.key" -pubout -out "$work/sa.pub"
    run_observer
    kubectl_options[1]=https://$OBSERVER_IP:$PORT
    admin=$work/admin.conf
    kubeconfig admin "https://$OBSERVER_IP:$PORT" >"$admin"
    await 60 "the observer to be ready" kubectl get --raw /readyz
    await 30 "the namespace default" kubectl get --raw /api/v1/namespaces/default
}

run_observer() {
    local command
    apiserver_of observer
    start_needed observer "$node" "${command[@]}" --bind-address=$OBSERVER_IP --advertise-address=$HOST_IP --secure-port=$PORT \
        --endpoint-reconciler-type=none --audit-log-path="$work/audit-observer.json"
}

# The Node, what its shims may do, kube-proxy, and those that look on.
start_node() {
    make_node
    grant $NODE
    cluster=(--cluster "$work/grants/$NODE/kubeconfig" --node-name "$NODE")
    watch_kernel
    start_proxy
    record slices "$SLICES"
    record leases "/apis/coordination.k8s.io/v1/namespaces/berth-system/leases?"
}

# The Node, which kube-proxy waits for.
make_node() {
    printf '{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "%s"}}' $NODE | kubectl create -f - >/dev/null
    kubectl patch node $NODE --subresource=status --type=merge >/dev/null \
        -p '{"status": {"addresses": [{"type": "InternalIP", "address": "'$HOST_IP'"}]}}'
}

# kube-proxy, and the client's way to the Service.
start_proxy() {
    ip -n "$client" route add 10.96.0.0/24 via $HOST_IP
    # As on any node: packets to an unused address are to be forwarded, and so pass kube-proxy's rule that rejects them.
    # Each client gets the ICMP error: by default the kernel sends one a second, and other clients wait for an answer.
    ip -n "$node" route add default via $CLIENT_IP
    ip netns exec "$node" bash -c 'cd /proc/sys/net/ipv4 && echo 1 >ip_forward && echo 0 >icmp_ratelimit'
    (cd "$work" && certificate proxy /CN=system:kube-proxy clientAuth DNS:proxy) 2>>"$work/openssl.log"
    kubeconfig proxy "https://$OBSERVER_IP:$PORT" >"$work/proxy.conf"
    # The machine's own limits of conntrack are not this one's to set.
    start_needed kube-proxy "$node" "$KUBE_PROXY" --proxy-mode=nftables --kubeconfig="$work/proxy.conf" --hostname-override=$NODE \
        --healthz-bind-address=127.0.0.1:10256 --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0s \
        --conntrack-tcp-timeout-close-wait=0s
}

# grant NODE: its kubeconfig, which dials the berth. `berth grant` tries it, at the observer: there is no other yet.
grant() {
    local file=$work/grants/$1/kubeconfig
    "$BERTH" --version >/dev/null
    ip netns exec "$node" "$BERTH" grant --kubeconfig "$admin" --node "$1" --listen "$OBSERVER_IP:$PORT" --uid 0 --out "$file" \
        >"$work/grant-$1.out" 2>"$work/grant-$1.log" || fail "berth grant --node $1" "grant-$1.log"
    sed -i "s/$OBSERVER_IP:/$HOST_IP:/" "$file"
}

# start_other_node NAME [ARGUMENT…]: a shim with the name of another node, which relays to the same apiserver from an address of
# its own
start_other_node() {
    local name=$1
    shift
    [[ -e $work/grants/$name ]] || grant "$name"
    give_address "$name"
    start_needed "$name" "$node" "$BERTH" serve --listen "${addresses[$name]}:$PORT" --instance "$name" --run-dir "$work/run" \
        --backend "$(own_address "$instance"):$PORT" --probe-ca "$work/ca.crt" \
        --cluster "$work/grants/$name/kubeconfig" --node-name "$name" "$@"
}

declare -gA addresses=()
# give_address NAME: one of its own on the node, if it has none
give_address() {
    [[ -z ${addresses[$1]:-} ]] || return 0
    addresses[$1]=192.0.2.$((100 + ${#addresses[@]}))
    ip -n "$node" addr add "${addresses[$1]}/24" dev host
}

# shims_are STATE NUMBER: of the berth; one that joined has an instance that is ready
shims_are() {
    local seen
    seen=$("$BERTH" status --run-dir "$work/run" --json | jq --arg state "$1" --arg berth "$HOST_IP:$PORT" \
        '[.instances[] | select(.berth == $berth and .shim.state == $state)] | length')
    ((seen == $2))
}
