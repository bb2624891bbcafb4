# shellcheck shell=bash
# Part of scripts/inject.sh: to the newest version and back, under new connections. Beside it the instance without berth, which is
# replaced in place.

part_upgrade() {
    local figures time last=old passed=0
    need_observer
    say "starting old, kube-apiserver $OLD"
    KUBE_APISERVER=$OLD_KUBE_APISERVER start_pod old
    await 60 "old to serve" shims_are joined 1
    await 10 "old's shim to pass sockets" takes_sockets old
    load_to load $HOST_IP:$PORT
    rate=$((rate / 2)) load_to control $OBSERVER_IP:$PORT
    await 10 "the first 100 connections" answers_are 100

    heading "to another version and back under new connections, with --pass inject"
    replace_control
    for ((time = 1; time <= times; time++)); do
        replace $last "new$time" "$NEW_KUBE_APISERVER"
        replace "new$time" "old$time" "$OLD_KUBE_APISERVER"
        last=old$time
    done
    stop load 20
    stop control 20
    figures=$(window 0 9e18)
    row "new connections" "$(words "$figures")"
    row "passed to an instance by those before the last" "$passed"
    expect "connections lost" "$(lost "$figures")" -eq 0 load.log
    expect "connections passed" "$passed" -ge $((3 * LEAST_RATE)) old.log
    figures=$(window 0 9e18 control)
    row "without berth, replaced in place once" "$(words "$figures")"
    expect "connections lost without berth" "$(lost "$figures")" -gt 0 control.log
    stop_instance $last
}

# replace OLD NEW PROGRAM: as a kubelet does it: the new pod, and when that is ready, the preStop hook and SIGTERM for the old one
replace() {
    local old=$1 new=$2 by_old other after began hooked
    say "starting $new"
    now began
    KUBE_APISERVER=$3 start_pod "$new"
    await 60 "$new to serve" shims_are joined 2
    await 10 "$new's shim to pass sockets" takes_sockets "$new"
    after=$(answers)
    await 20 "100 connections more" answers_are $((after + 100))
    await 20 "both to serve 20 connections" both_served "$old" $(($(served_by "$old") + 20)) "$new" 20
    read -r by_old other < <(connections "$old")
    passed=$((passed + by_old))
    say "stopping $old"
    now hooked
    ip netns exec "$node" "$BERTH" drain --wait --if-sibling --run-dir "$work/run" --instance "$old" >"$work/$old-drain.log" 2>&1 ||
        fail "the preStop hook of $old" "$old-drain.log" "$old.log"
    now "at[$old-stop]"
    stop_instance "$old"
    expect "$old's exit statuses" "${exits[$old]} ${exits[$old-api]}" == "0 0" "$old.log" "$old-api.log"
    await 20 "$new to be passed 100 connections" passed_are "$new" 100
    row "$old to $new" "$by_old passed, $other relayed before; hook $(((at[$old-stop] - hooked) / 1000)) ms, shim ended $(((at[$old-ended] - at[$old-stop]) / 1000)) ms later"
}

# Stopped and started again, with no berth before it.
replace_control() {
    stop observer 30
    run_observer
    await 60 "the instance without berth to be ready again" kubectl get --raw /readyz
}
