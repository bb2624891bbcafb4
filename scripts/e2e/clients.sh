# shellcheck shell=bash
# Part of scripts/e2e.sh: the clients, and the one that watches the listeners.

# New TLS connections, by turns from both addresses.
start_load() {
    start load "$client" "$TLS_LOAD" --server $HOST_IP:$PORT --ca "$work/ca.crt" --rate "$rate" \
        --source $CLIENT_IP --source $FAR_CLIENT_IP
    needed[load]=
}

# How many connections have had their end.
answers() { wc -l <"$work/load.out"; }
answers_are() { (($(answers) >= $1)); }

# both_served NUMBER: the load's requests that each instance has answered
both_served() {
    local instance
    for instance in a b; do
        (($(grep -c 'ResponseComplete.*"tls-load/' "$work/audit-$instance.json") >= $1)) || return
    done
}

# Watches through the berth, and one on the node that dials a's own address, past it: what that one
# meets is the instance's doing.
start_watches() {
    local number own_address
    own_address=$(own_addresses)
    for ((number = 1; number <= WATCHES; number++)); do
        follow "watch-$number" "$client" &
        pid[watch-$number]=$!
    done
    follow watch-direct "$node" --server "https://$own_address:$PORT" \
        --client-certificate "$work/direct.crt" --client-key "$work/direct.key" &
    pid[watch-direct]=$!
    await 10 "the watches to begin" watches_are $((WATCHES + 1))
}

watches_are() { (($(grep -c '"ResponseStarted".*metadata.name%21%3Dwatch-.*watch=true' "$work/audit-a.json") >= $1)); }

# follow NAME NAMESPACE OPTIONS…: a watch until its end, then, if it was through the berth, another one
# from where it ended. Each has a selector that names it in an audit log and leaves nothing out.
follow() {
    local name=$1 namespace=$2 child status=0 time version
    shift 2
    trap 'kill "$child"; exit' TERM
    ip netns exec "$namespace" "$KUBECTL" "${kubectl_options[@]}" "$@" --request-timeout 0 \
        get configmaps --watch --field-selector "metadata.name!=$name" \
        -o 'jsonpath={.metadata.name} {.metadata.resourceVersion}{"\n"}' >"$work/$name.out" 2>"$work/$name.log" &
    child=$!
    wait "$child" || status=$?
    now time
    echo "$time $status" >"$work/$name.ended"
    [[ $namespace == "$client" ]] || return 0

    version=$(tail -n 1 "$work/$name.out")
    version=${version#* }
    ip netns exec "$namespace" "$KUBECTL" "${kubectl_options[@]}" --request-timeout 0 get --raw \
        "/api/v1/namespaces/default/configmaps?watch=1&resourceVersion=$version&fieldSelector=metadata.name%21%3D$name" \
        >"$work/$name-2.out" 2>"$work/$name-2.log" &
    child=$!
    wait "$child" || status=$?
    echo "$status" >"$work/$name-2.ended"
}

# What a watch saw, in its order.
seen_by() {
    cut -d' ' -f1 "$work/$1.out"
    [[ ! -e $work/$1-2.out ]] || jq -r '.object.metadata.name' "$work/$1-2.out"
}

# Makes ConfigMaps, and asks for the version each time.
start_writer() {
    write_configmaps &
    pid[writer]=$!
    needed[writer]=
}

write_configmaps() {
    local number answer name
    : >"$work/written"
    for ((number = 1; ; number++)); do
        [[ ! -e $work/over ]] || return 0
        name=c$number
        if answer=$(kubectl create --raw /api/v1/namespaces/default/configmaps -f - \
            <<<"{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"$name\"}}" 2>&1); then
            echo "$name" >>"$work/written"
        else
            echo "$name: $answer" >>"$work/writer.log"
        fi
        answer=$(kubectl get --raw /version 2>&1) || :
        if [[ $answer == *"\"gitVersion\": \"$version\""* ]]; then
            echo "$name" >>"$work/versions"
        else
            echo "version: $answer" >>"$work/writer.log"
        fi
        pause 0.2
    done
}

all_saw() {
    local number
    for ((number = 1; number <= WATCHES; number++)); do
        # Of a line that is being written, jq complains.
        [[ $'\n'$(seen_by "watch-$number" 2>/dev/null)$'\n' == *$'\n'"$1"$'\n'* ]] || return
    done
}

end_clients() {
    say "ending the clients"
    stop load 20
    now load_end
    touch "$work/over"
    unset 'needed[writer]'
    await 40 "the writer to end" has_ended writer
    await 10 "the watches to see the last ConfigMap" all_saw "$(tail -n 1 "$work/written")"
    local number
    for ((number = 1; number <= WATCHES; number++)); do
        [[ ! -e $work/watch-$number-2.ended ]] || touch "$work/watch-$number-2.early"
        stop "watch-$number" 5
    done
    stop sampler 5
}

service_addresses() {
    kubectl get --raw /apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes |
        jq -r '[.endpoints[]?.addresses[]] as $a | [.ports[]?.port] as $p | "\($a | join(","))|\($p | join(","))"'
}
service_has_addresses() { [[ $(service_addresses) == [0-9]* ]]; }

# PORT as /proc/net/tcp writes it.
printf -v port_hex %04X "$PORT"

# Sockets that listen on PORT in the node's namespace, as lines "ADDRESS INODE". They stand before all
# others in the table, so that a few lines of it are enough, and one read(2) gives them as of one moment.
listeners() {
    local lines line address state inode
    mapfile -t -n 20 lines <"/proc/${pid[etcd]}/net/tcp"
    for line in "${lines[@]:1}"; do
        read -r _ address _ state _ _ _ _ _ inode _ <<<"$line"
        [[ $state == 0A && $address == *:$port_hex ]] || continue
        printf '%d.%d.%d.%d %s\n' "0x${address:6:2}" "0x${address:4:2}" "0x${address:2:2}" "0x${address:0:2}" "$inode"
    done
}
listeners_are() { (($(listeners | grep -c "^$HOST_IP ") == $1)); }
own_addresses() { listeners | sed -nE 's/^(127\..*) .*/\1/p'; }

# Looks again and again, and writes a line a look: the time and the inodes of the berth's listeners.
sample_listeners() {
    local octets host_hex lines line inodes
    IFS=. read -ra octets <<<$HOST_IP
    printf -v host_hex %02X "${octets[3]}" "${octets[2]}" "${octets[1]}" "${octets[0]}"
    while :; do
        inodes=
        mapfile -t -n 20 lines <"/proc/${pid[etcd]}/net/tcp"
        for line in "${lines[@]}"; do
            [[ $line == *": $host_hex:$port_hex "*" 0A "* ]] || continue
            # shellcheck disable=SC2086
            set -- $line
            inodes+=" ${10}"
        done
        echo "${EPOCHREALTIME/./}$inodes"
        pause 0.002
    done >"$work/listeners"
}
