# shellcheck shell=bash
# Part of scripts/direct.sh: instances that cannot be steered to, and shims that cannot steer.

part_fallback() {
    local status=0 elsewhere=$CLIENT_IP:$PORT caps=(setpriv --bounding-set "-bpf,-net_admin,-sys_admin")
    need_instance
    start_elsewhere
    heading "the shims relay, and log why"
    falls_back "a listener of MPTCP" on $OBSERVER_IP:$PORT "no direct path, the shims relay: .*MPTCP \(Go: GODEBUG=multipathtcp=0\)"
    falls_back "the same" auto $OBSERVER_IP:$PORT "no direct path, the shims relay: .*MPTCP"
    await 60 "the instance elsewhere to be ready" dial "$client" "$elsewhere"
    falls_back "in another network namespace" on "$elsewhere" "no direct path, the shims relay: .*in this network namespace"
    falls_back "a shim without capabilities" auto "$(own_address a):$PORT" \
        "--direct auto: no direct path, every connection is relayed: .*CAP_BPF" "${caps[@]}"
    # With `on` it must not serve, and give the reason.
    start_lame on "$(own_address a):$PORT" "${caps[@]}"
    unset 'needed[lame]'
    await 20 "it to end" has_ended lame
    take_exit lame
    row "the same, on" "exit status ${exits[lame]}: $(grep -o -- '--direct on: .*' "$work/lame.log" | cut -c 1-80)…"
    expect "exit status of a shim that is to steer and cannot" "${exits[lame]}" == 69 lame.log
    expect "its error" "$(grep -cE -- '--direct on: .*CAP_BPF' "$work/lame.log")" -ge 1 lame.log
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

# start_lame MODE BACKEND [PREFIX…]: a berth of its own
start_lame() {
    start_needed lame "$node" "${@:3}" "$BERTH" serve --listen $LAME_IP:$PORT --instance lame --run-dir "$work/run" --backend "$2" \
        --probe-ca "$work/ca.crt" --direct "$1"
}

# falls_back WORDS MODE BACKEND LINE [PREFIX…]: such a line is in the log, and clients are served
falls_back() {
    local words=$1 mode=$2 times
    ip -n "$node" addr replace $LAME_IP/24 dev host
    start_lame "$mode" "$3" "${@:5}"
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
