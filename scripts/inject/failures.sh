# shellcheck shell=bash disable=SC2086
# Part of scripts/inject.sh: processes that are killed, stopped or told to end, under load. Two instances of two versions, `old` and `new`,
# share the berth, and the processes are those of `old`.

# Kept connections of the clients of all kinds, and their new connections a second.
readonly KEPT=50 KEPT_RATE=5
# How often a process is stopped and continued, and for how long each time, in seconds.
readonly STOPS=20 STOP=0.05

# Failures that may cut no connection, and those in which kube-apiserver ends.
readonly HARMLESS=(shim_killed supervisor_stopped server_stopped supervisor_hangs) DEADLY=(supervisor_killed server_killed server_ends)
declare -A FAILURE_WORDS=(
    [shim_killed]="SIGKILL of the shim" [supervisor_stopped]="SIGSTOP of the supervisor, short" [server_stopped]="SIGSTOP of the server, short"
    [supervisor_hangs]="SIGSTOP of the supervisor" [supervisor_killed]="SIGKILL of the supervisor"
    [server_killed]="SIGSTOP, SIGKILL of the server" [server_ends]="SIGTERM of the server"
)

part_failures() {
    local failure time
    need_observer
    say "starting old, kube-apiserver $OLD, and new, kube-apiserver $NEW"
    KUBE_APISERVER=$OLD_KUBE_APISERVER start_pod old
    start_pod new
    await_both
    load_to load $HOST_IP:$PORT
    rate=$((rate / 2)) load_to control $OBSERVER_IP:$PORT
    load_of_all_kinds kinds $HOST_IP
    for ((time = 1; time <= times; time++)); do
        for failure in "${HARMLESS[@]}"; do cause $failure; done
    done
    stop kinds 60
    for ((time = 1; time <= times; time++)); do
        for failure in "${DEADLY[@]}"; do cause $failure; done
    done
    stop load 20
    stop control 20
    judge_failures
    relay_is_killed
    stop_instance old
    stop_instance new
}

# load_of_all_kinds NAME IP: new and kept connections, watches and informers
load_of_all_kinds() {
    start_needed "$1" "$client" "$TLS_LOAD" --server "$2:$PORT" --ca "$work/ca.crt" --client-certificate "$work/admin.crt" \
        --client-key "$work/admin.key" --clients $KEPT --rate $KEPT_RATE
    await 30 "kept connections to $2" has_kept "$2"
}
has_kept() { (($(ip netns exec "$client" ss -Htn state established dst "$1:$PORT" | wc -l) >= KEPT)); }

# await_more NUMBER: until so many new connections more have ended
await_more() { await 30 "$1 connections more" answers_are $(($(answers) + $1)); }

# cause FAILURE: and writes when it began, when the server had ended, or 0, and when its effect was over
cause() {
    local from gone=0 to
    say "${FAILURE_WORDS[$1]}"
    now from
    $1
    await_both
    await_more 50
    now to
    echo "[$from, $gone, $to]" >>"$work/$1"
}

# A client that the shim has accepted and has not passed yet ends with the shim, so that the shim gets SIGKILL when it has no client that waits for
# a first byte: clients stand still meanwhile.
shim_killed() {
    await 60 "old's shim to have no client in hand" stop_clients_between_two
    kill_now old
    kill -CONT ${pid[load]} ${pid[kinds]}
    await_more 50
    start_shim old
}

stop_clients_between_two() {
    kill -STOP ${pid[load]} ${pid[kinds]}
    pause $STOP
    [[ $(in_hand old) == 0 ]] || { kill -CONT ${pid[load]} ${pid[kinds]} && false; }
}
in_hand() { ip netns exec "$node" curl --silent --fail http://$ADMIN/metrics | awk -v shim="shim=\"$1\"" '/^berth_connections_open/ && index($0, shim) { open += $NF } END { print open }'; }

supervisor_stopped() { stop_and_continue ${pid[old-api]}; }
server_stopped() { stop_and_continue "$(pgrep -P ${pid[old-api]})"; }

stop_and_continue() {
    local count
    for ((count = 0; count < STOPS; count++)); do
        kill -STOP "$1"
        pause $STOP
        kill -CONT "$1"
        pause $STOP
    done
}

# Then nobody is accepted, not even at the server's own address, until both shims have noticed.
supervisor_hangs() {
    local address
    address=$(own_address old):$PORT
    dial "$node" "$address" >/dev/null
    kill -STOP ${pid[old-api]}
    ! dial "$node" "$address" --max-time 2 >/dev/null 2>&1 || fail "a client of the server's own address is served while the supervisor hangs"
    await 30 "old not to be ready" of_shims 'all(.instances[]; .instance != "old" or .health != "ready")'
    await_more 50
    kill -CONT ${pid[old-api]}
}

supervisor_killed() {
    local server
    server=$(pgrep -P ${pid[old-api]})
    kill_now old-api
    await 5 "the server to end with its supervisor" test ! -e "/proc/$server"
    now gone
    start_again
}

# Stopped before, so that clients wait for it; the instance without berth, too.
server_killed() {
    local server
    server=$(pgrep -P ${pid[old-api]})
    kill -STOP "$server" ${pid[observer]}
    await_more 20
    kill -KILL "$server"
    ends_with 137
    kill_now observer
    run_observer
    start_again
    await 60 "the instance without berth to be ready again" kubectl get --raw /readyz
}

# With --shutdown-delay-duration=0: it closes its listener at once.
server_ends() {
    kill -TERM ${pid[old-api]}
    ends_with 0
    start_again
}

# ends_with STATUS: the supervisor, after its server
ends_with() {
    unset 'needed[old-api]'
    await $GRACE "the supervisor to end with its server" has_ended old-api
    now gone
    take_exit old-api
    expect "exit status of the supervisor" ${exits[old-api]} -eq "$1" old-api.log
}

# old's kube-apiserver, as a kubelet starts it
start_again() {
    local KUBE_APISERVER=$OLD_KUBE_APISERVER place shim command
    apiserver_of old
    start_needed old-api "$node" "$BERTH" exec "${place[@]}" -- "${command[@]}"
}

# of_shims FILTER: whether it holds, by jq, of the status of each shim
of_shims() {
    "$BERTH" status --run-dir "$work/run" --json | jq -e "[.instances[].shim | $1] | length == 2 and all"
}

await_both() {
    await 60 "both instances to get clients' sockets from both shims" of_shims \
        '.state == "joined" and ([.instances[] | select(.injected and .health == "ready")] | length == 2)'
}

# A row for each failure. A server that is killed, or ends without a delay, takes along clients that it has answered.
judge_failures() {
    local failure words spans new opening later rest told longest
    heading "failures, with --pass inject, each × $times, under new connections"
    for failure in "${HARMLESS[@]}" "${DEADLY[@]}"; do
        words=${FAILURE_WORDS[$failure]} spans=$(jq -cs . "$work/$failure")
        read -r new opening later rest told longest <<<"$(by_jq "openings($spans)" "$work/load.out")"
        row "$words" "$new, $((opening + later + rest)) lost, longest $((longest / 1000)) ms$( ((!told)) || echo "; the server answered $told with 503")"
        expect "$words: lost in the handshake" "$opening" -eq 0 load.log
        expect "$words: lost of those that began after the end of the server" "$later" -eq 0 load.log
        [[ " ${DEADLY[*]} " == *" $failure "* ]] || expect "$words: lost" "$rest" -eq 0 load.log
        [[ $failure == server_killed ]] || continue
        read -r new opening later rest told longest <<<"$(by_jq "openings($spans)" "$work/control.out")"
        row "  the same without berth" "$new, $((later + rest)) lost, and $opening in the handshake"
        expect "$words: lost in the handshake without berth" "$opening" -gt 0 control.log
    done
}

# The control: SIGKILL of the only shim before the instance without berth, which relays.
relay_is_killed() {
    local requests broken
    ip -n "$node" addr add $RELAYED_IP/24 dev host
    start_relay
    load_of_all_kinds relayed $RELAYED_IP
    kill_now relay
    start_relay
    stop relayed 60
    stop relay 30
    heading "clients of all kinds, with $KEPT kept connections"
    read -r requests broken <<<"$(by_jq kept "$work/kinds.out")"
    row "under the first ${#HARMLESS[@]} of these" "$requests requests, lost or cut $broken"
    grep -Ev '"outcome":"(ok|whole)"' "$work/kinds.out" >"$work/kinds.lost" || :
    expect "lost or cut" "$broken" -eq 0 kinds.lost
    read -r requests broken <<<"$(by_jq kept "$work/relayed.out")"
    row "SIGKILL of a shim that relays" "$requests requests, lost or cut $broken"
    expect "lost or cut by a shim that relays" "$broken" -gt 0 relayed.log
}

start_relay() {
    start_needed relay "$node" "$BERTH" serve --pass relay --listen $RELAYED_IP:$PORT --instance relay --run-dir "$work/run" \
        --backend $OBSERVER_IP:$PORT --probe-ca "$work/ca.crt"
    await 20 "the relay to serve" dial "$client" $RELAYED_IP:$PORT
}
