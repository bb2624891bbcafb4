# shellcheck shell=bash
# Part of scripts/inject.sh: the client addresses that an instance sees.

# Namespace, and the address of its own that a client dials from. In words.
readonly WAYS=("client $CLIENT_IP another host" "client $FAR_CLIENT_IP one from farther away" "node $HOST_IP the node itself")
# Times that each asks.
readonly ASKS=5

part_sources() {
    local mode way namespace source words asked seen
    for mode in relay inject; do
        say "starting $mode, kube-apiserver $NEW with --pass $mode"
        BERTH_PASS=$mode start_pod $mode
        await 60 "$mode to serve" shims_are joined 1
        [[ $mode == relay ]] || await 10 "its shim to pass sockets" takes_sockets $mode
        heading "$(printf '  %-34s client address in the audit log' "--pass $mode")"
        for way in "${WAYS[@]}"; do
            read -r namespace source words <<<"$way"
            for ((asked = 0; asked < ASKS; asked++)); do
                dial "${!namespace}" "$HOST_IP:$PORT" --interface "$source" --user-agent "from-$source" >/dev/null 2>"$work/ask.log" ||
                    fail "$mode: $words" ask.log $mode.log
            done
            seen=$(jq -r --arg agent "from-$source" 'select(.userAgent == $agent and .stage == "ResponseComplete") | .sourceIPs | join(",")' \
                "$work/audit-$mode.json" | sort | uniq -c | awk '{ print $2 "*" $1 }' | xargs)
            row "$words" "$seen"
            [[ $mode != relay ]] || source=127.${source#*.}
            expect "whom the audit log names for $words, --pass $mode" "$seen" == "$source*$ASKS" $mode.log
        done
        if [[ $mode == inject ]]; then
            await 5 "the shim to count them" passed_are inject $((ASKS * ${#WAYS[@]}))
            expect "clients passed and others" "$(connections inject)" == "$((ASKS * ${#WAYS[@]})) 0" inject.log
        fi
        stop_instance $mode
    done
}
