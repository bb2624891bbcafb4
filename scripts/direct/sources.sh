# shellcheck shell=bash
# Part of scripts/direct.sh: the client addresses that an instance sees.

# Name, namespace, server, and the address that the instance is to see.
readonly WAYS=(
    "address client $HOST_IP:$PORT $CLIENT_IP"
    "far client $HOST_IP:$PORT $FAR_CLIENT_IP"
    "vip client $VIP:$PORT $FAR_CLIENT_IP"
    "service client $SERVICE_IP:$SERVICE_PORT $FAR_CLIENT_IP"
    "node node $HOST_IP:$PORT $HOST_IP"
    "node-service node $SERVICE_IP:$SERVICE_PORT $HOST_IP"
)
declare -A WAY_WORDS=(
    [address]="another host, to the node's address" [far]="one from farther away, the same" [vip]="the same, to a VIP"
    [service]="the same, to the Service" [node]="the node, to its own address" [node-service]="the node, to the Service"
)
# Times that each asks.
readonly ASKS=5
part_sources() {
    local way name namespace server source mode seen seen_direct seen_relayed
    need_observer
    make_node
    start_proxy
    besides=(--listen "$VIP:$PORT,freebind") direct=(--direct off)
    say "starting a, kube-apiserver $NEW, relayed"
    start_pod a
    await 60 "a to serve" shims_are joined 1
    ip -n "$node" addr add $VIP/32 dev host
    await 30 "the Service to have an address" service_has_addresses
    await 30 "kube-proxy to send clients there" ask service waiting --max-time 1
    ask_all relayed
    say "its shim again, with --direct on"
    stop a 20
    direct=(--direct on)
    start_shim a
    await 20 "a to steer" steers a
    ask_all direct
    await 5 "the shim to count them" opened_are a $((ASKS * ${#WAYS[@]}))

    heading "$(printf '  %-34s %-24s %s' "client address in the audit log" "--direct on" "--direct off")"
    for way in "${WAYS[@]}"; do
        read -r name namespace server source <<<"$way"
        for mode in direct relayed; do
            seen=$(jq -r --arg agent "$mode-$name" 'select(.userAgent == $agent and .stage == "ResponseComplete") | .sourceIPs | join(",")' \
                "$work/audit-a.json" | sort | uniq -c | awk '{ print $2 "*" $1 }' | xargs)
            printf -v "seen_$mode" %s "$seen"
        done
        row "${WAY_WORDS[$name]}" "$(printf '%-24s %s' "$seen_direct" "$seen_relayed")"
        expect "the audit log names ${WAY_WORDS[$name]}, steered" "$seen_direct" == "$source*$ASKS" a.log
        expect "the audit log names ${WAY_WORDS[$name]}, relayed" "$seen_relayed" == "127.${source#*.}*$ASKS" a.log
    done
    row "connections steered" "$(opened a)"
}

# ask WAY MODE [CURL-OPTION…]: a new connection
ask() {
    local way namespace server source
    for way in "${WAYS[@]}"; do
        [[ $way == "$1 "* ]] || continue
        read -r _ namespace server source <<<"$way"
        # What dials the Service from the node has the address that the kernel gives it.
        [[ $1 == node-service ]] || set -- "$@" --interface "$source"
        dial "${!namespace}" "$server" --user-agent "$2-$1" "${@:3}"
        return
    done
}

# ask_all MODE: by every way
ask_all() {
    local way name times
    for way in "${WAYS[@]}"; do
        name=${way%% *}
        for ((times = 0; times < ASKS; times++)); do
            ask "$name" "$1" >/dev/null 2>"$work/ask.log" || fail "$1: ${WAY_WORDS[$name]}" ask.log a.log
        done
    done
}
