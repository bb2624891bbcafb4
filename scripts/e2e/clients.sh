# shellcheck shell=bash
# Part of scripts/e2e.sh and scripts/service.sh: the clients, and the one that watches the listeners.

# shellcheck source=scripts/e2e/stage.sh
. "$root/scripts/e2e/stage.sh"

# served_by INSTANCE: the load's requests that it has answered
served_by() { grep -c 'ResponseComplete.*"tls-load/' "$work/audit-$1.json" || :; }
has_served() { (($(served_by "$1") >= $2)); }
both_served() { has_served "$1" "$2" && has_served "$3" "$4"; }

# Watches through the berth: each goes on with the next instance where one ended it.
start_watches() {
    local number
    for ((number = 1; number <= WATCHES; number++)); do
        follow "watch-$number" &
        pid[watch-$number]=$!
    done
    await 10 "the watches to begin" watches_are $WATCHES a 'watch-[0-9]'
}

# watch_past_the_berth INSTANCE: a watch on the node that dials the instance's own address; what that one
# meets is the instance's doing.
watch_past_the_berth() {
    local name=watch-direct-$1
    leg "$name" "$node" --server "https://$(own_address "$1"):$PORT" \
        --client-certificate "$work/direct.crt" --client-key "$work/direct.key" &
    pid[$name]=$!
    await 10 "the watch past the berth to begin" watches_are 1 "$1" "$name"
}

watches_are() { (($(grep -cE "\"ResponseStarted\".*metadata.name%21%3D$3" "$work/audit-$2.json") >= $1)); }

# follow NAME: watches one after another, one an instance, each from where the one before ended
follow() {
    local instance from='' version
    for instance in "${INSTANCES[@]}"; do
        leg "$1-$instance" "$client" --request-timeout 0
        version=$(versions_of "$1-$instance" | tail -n 1)
        from=${version:-$from}
    done
}

# leg NAME NAMESPACE OPTIONS…: a watch until its end. It has a selector that names it in an audit log and leaves
# nothing out.
leg() {
    local name=$1 namespace=$2 child status=0 time
    shift 2
    trap 'kill "$child"; exit' TERM
    if [[ -z ${from:-} ]]; then
        set -- "$@" --request-timeout 0 get configmaps --watch --field-selector "metadata.name!=$name" \
            -o 'jsonpath={.metadata.name} {.metadata.resourceVersion}{"\n"}'
    else
        set -- "$@" get --raw \
            "/api/v1/namespaces/default/configmaps?watch=1&resourceVersion=$from&fieldSelector=metadata.name%21%3D$name"
    fi
    ip netns exec "$namespace" "$KUBECTL" "${kubectl_options[@]}" "$@" >"$work/$name.out" 2>"$work/$name.log" &
    child=$!
    wait "$child" || status=$?
    now time
    echo "$time $status" >"$work/$name.ended"
}

# What a leg saw, in its order: lines "NAME VERSION" of the first, events of the others.
names_of() { fields_of "$1" 1 .object.metadata.name; }
versions_of() { fields_of "$1" 2 .object.metadata.resourceVersion; }
fields_of() {
    [[ -s $work/$1.out ]] || return 0
    # Of a line that is being written, jq complains.
    if [[ $(head -c 1 "$work/$1.out") == '{' ]]; then
        jq -r "$3" "$work/$1.out" 2>/dev/null || :
    else
        cut -d' ' -f"$2" "$work/$1.out"
    fi
}

# What a watch saw, all its legs together.
seen_by() {
    local instance
    for instance in "${INSTANCES[@]}"; do names_of "$1-$instance"; done
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
        [[ $'\n'$(seen_by "watch-$number")$'\n' == *$'\n'"$1"$'\n'* ]] || return
    done
}

end_clients() {
    say "ending the clients"
    stop load 20
    now 'at[load-end]'
    touch "$work/over"
    unset 'needed[writer]'
    await 40 "the writer to end" has_ended writer
    await 10 "the watches to see the last ConfigMap" all_saw "$(tail -n 1 "$work/written")"
    local number last=${INSTANCES[-1]}
    for ((number = 1; number <= WATCHES; number++)); do
        [[ ! -e $work/watch-$number-$last.ended ]] || touch "$work/watch-$number-$last.early"
        stop "watch-$number" 5
    done
    stop "watch-direct-$last" 5
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
# own_address INSTANCE: the address in its record, if something listens there
own_address() {
    local address
    address=$("$BERTH" status --run-dir "$work/run" --json |
        jq -r --arg id "$1" '.instances[] | select(.instance == $id) | .record.address | split(":")[0]')
    listeners | grep -oF "$address"
}

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
