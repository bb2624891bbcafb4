# shellcheck shell=bash
# Part of scripts/direct.sh: instances that cannot be steered to.

part_fallback() {
    local elsewhere=$CLIENT_IP:$PORT
    need_instance
    start_elsewhere
    heading "the shims relay, and log why"
    falls_back "a listener of MPTCP" on $OBSERVER_IP:$PORT "no direct path, the shims relay: .*MPTCP \(Go: GODEBUG=multipathtcp=0\)"
    falls_back "the same" auto $OBSERVER_IP:$PORT "no direct path, the shims relay: .*MPTCP"
    await 60 "the instance elsewhere to be ready" dial "$client" "$elsewhere"
    falls_back "in another network namespace" on "$elsewhere" "no direct path, the shims relay: .*in this network namespace"
    expect "a steers meanwhile" "$(of_direct a .on)" == true a.log
    stop elsewhere 20
    stop etcd-elsewhere 10
}

# A kube-apiserver in the client's network namespace, with an etcd of its own.
start_elsewhere() {
    local command
    start_etcd etcd-elsewhere "$client" "$work/etcd/elsewhere"
    apiserver_of elsewhere
    GODEBUG=$PLAIN start_needed elsewhere "$client" "${command[@]}" --bind-address=$CLIENT_IP --advertise-address=$CLIENT_IP --secure-port=$PORT \
        --endpoint-reconciler-type=none --audit-log-path="$work/audit-elsewhere.json"
}

# falls_back WORDS MODE BACKEND LINE: such a line is in the log of a berth of its own, and clients are served
falls_back() {
    local words=$1 mode=$2 times
    ip -n "$node" addr replace $LAME_IP/24 dev host
    start_needed lame "$node" "$BERTH" serve --listen $LAME_IP:$PORT --instance lame --run-dir "$work/run" --backend "$3" \
        --probe-ca "$work/ca.crt" --direct "$mode"
    await 20 "the shim to log why it relays: $words" grep -qE -- "$4" "$work/lame.log"
    await 20 "it to serve: $words" dial "$client" $LAME_IP:$PORT
    for ((times = 0; times < 10; times++)); do
        dial "$client" $LAME_IP:$PORT >/dev/null 2>"$work/ask.log" || fail "a client is served: $words" ask.log lame.log
    done
    expect "connections steered: $words" "$(of_direct lame '.opened // 0')" -eq 0 lame.log
    row "$words, $mode" "$(grep -oE -- "$4" "$work/lame.log" | head -n 1 | cut -c 1-110)"
    stop lame 20
    expect "exit status: $words" "${exits[lame]}" == 0 lame.log
}
