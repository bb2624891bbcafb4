#!/usr/bin/env bash
# Part of scripts/direct.sh, run by scripts/cluster.sh on the node of a whole cluster: kube-apiserver, a static pod of a real kubelet, goes
# behind a shim, and kubectl logs -f, exec and port-forward go to a container through it. Then the shim gets SIGKILL: what it relays
# ends, what it steered goes on. Writes one line a stream into DIRECTORY/streams: MODE NAME LINES-BEFORE LINES-AFTER.

export TZ=UTC

# shellcheck source=scripts/e2e/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../e2e/common.sh"
# shellcheck source=scripts/cluster/streams.sh
. "$root/scripts/cluster/streams.sh"
# The instance's own.
readonly OWN_IP=127.0.0.77
readonly manifest=/etc/kubernetes/manifests/kube-apiserver.yaml
# What kubectl speaks: by default, and before.
readonly -A PROTOCOLS=([websocket]=true [spdy]=false)

main() {
    local mode stream
    work=$1
    usual_logs=(shim.log kubectl.log)
    watch_over 400
    make_tool
    put_behind
    for mode in on off; do
        start_shim $mode
        start_streams $mode
        for stream in "${streams[@]}"; do await 30 "$stream" answers_are 30 "$stream"; done
        [[ $mode == off ]] || open_of_direct >"$work/open"
        kill_now shim
        for stream in "${streams[@]}"; do before[$stream]=$(answers "$stream"); done
        # The kubelet dials the API through it, too.
        start_shim $mode
        if [[ $mode == on ]]; then
            for stream in "${streams[@]}"; do await 10 "$stream to go on" answers_are $((before[$stream] + 50)) "$stream"; done
        else
            for stream in "${streams[@]}"; do await 20 "$stream to end" has_ended "$stream"; done
        fi
        for stream in "${streams[@]}"; do
            echo "$mode ${stream#*-} ${before[$stream]} $(($(answers "$stream") - before[$stream]))"
            kill "${pid[$stream]}" 2>/dev/null || :
        done >>"$work/streams"
        # It would wait for what is open.
        kill_now shim
    done
}
declare -A before=()

kubectl() { /usr/bin/kubectl --kubeconfig /etc/kubernetes/admin.conf --request-timeout 15s "$@"; }

# kube-apiserver on an address of its own, with a listener that can be steered to.
put_behind() {
    sed -e "/- --advertise-address=/a\\    - --bind-address=$OWN_IP" \
        -e '/^    image:/i\    env: [{name: GODEBUG, value: multipathtcp=0}]' $manifest >"$work/kube-apiserver.yaml"
    cp "$work/kube-apiserver.yaml" $manifest
    await 120 "kube-apiserver on $OWN_IP" kubectl --server https://$OWN_IP:$PORT --tls-server-name kubernetes get --raw /readyz
}

# start_shim MODE
start_shim() {
    start_needed shim - "$BERTH" serve --listen $HOST_IP:$PORT --backend $OWN_IP:$PORT --instance node --run-dir "$work/run" \
        --bind-wait 60s --probe-ca /etc/kubernetes/pki/ca.crt --direct "$1"
    await 60 "the shim to serve" serves_as "$1"
}
serves_as() {
    kubectl get --raw /readyz && { [[ $1 == off ]] || "$BERTH" status --run-dir "$work/run" --json | jq -e '.instances[].shim.direct.on'; }
}
open_of_direct() { "$BERTH" status --run-dir "$work/run" --json | jq '.instances[].shim.direct.open'; }

# start_streams MODE: each by both protocols, but logs, which is plain HTTP; from another host
start_streams() {
    local protocol port=8080
    streams=("$1-logs")
    stream "$1-logs" logs --follow --tail 1 tool
    for protocol in "${!PROTOCOLS[@]}"; do
        export KUBECTL_REMOTE_COMMAND_WEBSOCKETS=${PROTOCOLS[$protocol]} KUBECTL_PORT_FORWARD_WEBSOCKETS=${PROTOCOLS[$protocol]}
        port=$((port + 1))
        streams+=("$1-exec-$protocol" "$1-port-forward-$protocol")
        stream "$1-exec-$protocol" exec tool -- /usr/local/bin/pause tick
        forward $port /usr/bin/kubectl --kubeconfig /etc/kubernetes/admin.conf \
            >"$work/$1-port-forward-$protocol.out" 2>"$work/$1-port-forward-$protocol.log" &
        pid[$1-port-forward-$protocol]=$!
    done
}

# stream NAME ARGUMENTS…: of kubectl
stream() {
    ip netns exec far /usr/bin/kubectl --kubeconfig /etc/kubernetes/admin.conf "${@:2}" >"$work/$1.out" 2>"$work/$1.log" &
    pid[$1]=$!
}

main "$@"
