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
# Users that priority and fairness distinguishes.
declare -A SUBJECTS=(
    [admin]=/O=system:masters/CN=admin [user]=/CN=somebody [kubelet]=/O=system:nodes/CN=system:node:$NODE
    [leader]=/CN=system:kube-controller-manager
)

part_sources() {
    local way name namespace server source mode seen seen_direct seen_relayed opened
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
    make_users
    ask_all past
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
    opened=$(opened a)
    row "connections steered" "$opened"
    check_priority
}

make_users() {
    local user
    (
        cd "$work"
        for user in "${!SUBJECTS[@]}"; do certificate "u-$user" "${SUBJECTS[$user]}" clientAuth "DNS:$user"; done
    ) 2>>"$work/openssl.log"
    kubectl create serviceaccount somebody >/dev/null
    kubectl create token somebody >"$work/u-account.token"
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

# ask_all MODE: by every way, and as every user; past: at the instance's own address, on the node
ask_all() {
    local mode=$1 way name server=$HOST_IP:$PORT namespace=$client times user options
    if [[ $mode == past ]]; then
        server=$(own_address a):$PORT namespace=$node
    else
        for way in "${WAYS[@]}"; do
            name=${way%% *}
            for ((times = 0; times < ASKS; times++)); do
                ask "$name" "$mode" >/dev/null 2>"$work/ask.log" || fail "$mode: ${WAY_WORDS[$name]}" ask.log a.log
            done
        done
    fi
    for user in "${!SUBJECTS[@]}" account anonymous; do
        case $user in
            anonymous) options=() ;;
            account) options=(--header "Authorization: Bearer $(<"$work/u-account.token")") ;;
            *) options=(--cert "$work/u-$user.crt" --key "$work/u-$user.key") ;;
        esac
        # Which levels they get, whatever it answers.
        dial "$namespace" "$server" --user-agent "user-$mode" "${options[@]}" --output /dev/null --dump-header "$work/answer" 2>"$work/ask.log" ||
            fail "$mode, as $user" ask.log a.log
        echo "$user $(tr -d '\r' <"$work/answer" | sed -n 's/^X-Kubernetes-Pf-[A-Za-z]*-Uid: //ip' | xargs)"
    done | sort >"$work/priority-$mode"
}

# By every way the same user has the same flow schema and priority level as at the instance's own address.
check_priority() {
    local mode
    for mode in direct relayed; do
        expect "flow schemas and priority levels, $mode as past berth" "$(<"$work/priority-$mode")" == "$(<"$work/priority-past")" priority-past "priority-$mode"
    done
    row "flow schemas of ${#SUBJECTS[@]} users and 2 more" \
        "$(cut -d' ' -f2 "$work/priority-past" | sort -u | wc -l), as at the instance's own address, by the relay too"
    expect "different flow schemas" "$(cut -d' ' -f2 "$work/priority-past" | sort -u | wc -l)" -ge 4 priority-past
    expect "users with both headers" "$(awk 'NF == 3' "$work/priority-past" | wc -l)" -eq $((${#SUBJECTS[@]} + 2)) priority-past
}
