# shellcheck shell=bash
# Part of scripts/direct.sh: processes that are killed or hang, under new connections and open watches: relayed, then steered.

# Watches through the berth.
readonly WATCHES=3
# A shim hangs for so long, in seconds: longer than its lease, and shorter than a client waits.
readonly HANGS=6
# Results, by mode and name.
declare -A seen=()

part_killed() {
    local mode what
    need_observer
    [[ -z ${pid[a]:-} ]] || stop_instance a
    besides=()
    for mode in off on; do
        direct=(--direct $mode)
        say "starting a, kube-apiserver $NEW, with --direct $mode"
        start_pod a
        await 60 "a to serve" serves_as $mode
        load_to load $HOST_IP:$PORT
        await 10 "the first 100 connections" answers_are 100
        shim_hangs
        shim_is_killed
        instance_is_killed
        [[ $mode == off ]] || await 10 "a to steer 100 connections" opened_are a 100
        stop load 20
        mv "$work/load.out" "$work/load-$mode.out"
        stop_instance a
    done
    heading "$(printf '  %-34s %-36s %s' "what ends or hangs" "--direct on" "--direct off")"
    for what in "shim hangs for $HANGS s: connections" "  watches with events meanwhile" "  and after it" "shim killed: connections" \
        "  watches with events after it" "instance killed: connections" "  how they were lost"; do
        row "$what" "$(printf '%-36s %s' "${seen[on-$what]}" "${seen[off-$what]}")"
    done
}

# serves_as MODE
serves_as() { shims_are joined 1 && { [[ $1 == off ]] || steers a; }; }

# watch_all NAME: starts watches through the berth, and waits until they get events
watch_all() {
    local number
    watches=()
    for ((number = 1; number <= WATCHES; number++)); do
        watches+=("watch-$mode-$1-$number")
        start "${watches[-1]}" "$client" "$KUBECTL" "${kubectl_options[@]}" --server https://$HOST_IP:$PORT --request-timeout 0 \
            get configmaps --watch --output name
    done
    write "begin-$mode-$1"
    await 20 "the watches to get an event" got_event "begin-$mode-$1" $WATCHES
}

# write NAME: a ConfigMap, past the berth
write() { kubectl create configmap "$1" >/dev/null; }

# The number of watches that got the event.
with_event() {
    local watch count=0
    for watch in "${watches[@]}"; do ! grep -qxF "configmap/$1" "$work/$watch.out" || count=$((count + 1)); done
    echo $count
}
# got_event NAME LEAST
got_event() { (($(with_event "$1") >= $2)); }

end_watches() {
    local watch
    for watch in "${watches[@]}"; do
        stop "$watch" 5
    done
}

shim_hangs() {
    local from to
    watch_all hangs
    now from
    kill -STOP "${pid[a]}"
    write "hangs-$mode"
    pause $HANGS
    seen[$mode-  watches with events meanwhile]="$(with_event "hangs-$mode") of $WATCHES"
    now to
    kill -CONT "${pid[a]}"
    await 10 "the watches to get an event" got_event "hangs-$mode" $WATCHES
    seen[$mode-  and after it]="$(with_event "hangs-$mode") of $WATCHES"
    await 20 "a to serve as before" serves_as "$mode"
    # Its status has not changed, but what it renewed before in the kernel has expired.
    [[ $mode == off ]] || await 10 "a to steer again" opened_are a $(($(opened a) + 10))
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    seen[$mode-shim hangs for $HANGS s: connections]=$(words "$(window "$from" "$to")")
    expect "watches with events while the shim hung, --direct $mode" "${seen[$mode-  watches with events meanwhile]%% *}" \
        -eq "$([[ $mode == on ]] && echo $WATCHES || echo 0)" a.log
    expect "connections lost while the shim hung, --direct $mode" "$(lost "$(window "$from" "$to")")" -eq 0 load.log a.log
    end_watches
}

shim_is_killed() {
    local from to
    watch_all shim
    now from
    kill_now a
    start_shim a
    await 20 "a to serve as before" serves_as "$mode"
    now to
    write "shim-$mode"
    [[ $mode == off ]] || await 10 "the watches to get an event" got_event "shim-$mode" $WATCHES
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    seen[$mode-shim killed: connections]=$(words "$(window "$from" "$to")")
    seen[$mode-  watches with events after it]="$(with_event "shim-$mode") of $WATCHES"
    expect "watches with events after the shim was killed, --direct $mode" "$(with_event "shim-$mode")" \
        -eq "$([[ $mode == on ]] && echo $WATCHES || echo 0)" a.log
    end_watches
}

# Its container is started again at once.
instance_is_killed() {
    local from to command
    now from
    kill_now a-api
    apiserver_of a
    GODEBUG=$PLAIN start_needed a-api "$node" "$BERTH" exec "${place[@]}" -- "${command[@]}"
    await 30 "the instance to be ready again" kubectl get --raw /readyz --server https://$HOST_IP:$PORT
    await 20 "a to serve as before" serves_as "$mode"
    now to
    await 10 "100 connections more" answers_are $(($(answers) + 100))
    seen[$mode-instance killed: connections]=$(words "$(window $((from - 1000000)) "$to")")
    seen[$mode-  how they were lost]=$(by_jq "map(select(.began >= $from - 1e6 and lost)) | kinds | join(\", \")" "$work/load.out")
    expect "connections lost after a was ready again" "$(lost "$(window "$to" 9e18)")" -eq 0 load.log a.log
}
