# shellcheck shell=bash
# Part of scripts/direct.sh: to the newest version and back, under new connections. Beside it the instance without berth, which is
# replaced in place.

part_upgrade() {
    local figures steered=0
    need_observer
    [[ -z ${pid[a]:-} ]] || stop_instance a
    direct=(--direct on) besides=()
    say "starting old, kube-apiserver $OLD"
    KUBE_APISERVER=$OLD_KUBE_APISERVER start_pod old
    await 60 "old to serve" shims_are joined 1
    await 10 "old to steer" steers old
    load_to load $HOST_IP:$PORT
    rate=$((rate / 2)) load_to control $OBSERVER_IP:$PORT
    await 10 "the first 100 connections" answers_are 100

    heading "to another version and back under new connections, with --direct on"
    replace_control
    replace old new "$NEW_KUBE_APISERVER"
    replace new last "$OLD_KUBE_APISERVER"
    stop load 20
    stop control 20
    figures=$(window 0 9e18)
    row "new connections" "$(words "$figures")"
    row "of them steered" "$steered"
    expect "connections lost" "$(lost "$figures")" -eq 0 load.log
    expect "connections steered" "$steered" -ge $LEAST_RATE old.log
    figures=$(window 0 9e18 control)
    row "without berth, replaced in place once" "$(words "$figures")"
    expect "connections lost without berth" "$(lost "$figures")" -gt 0 control.log
    stop_instance last
}

# replace OLD NEW PROGRAM: as a kubelet does it: the new pod, and when that is ready, the preStop hook and SIGTERM for the old one
replace() {
    local old=$1 new=$2 before after began hooked
    say "starting $new"
    now began
    KUBE_APISERVER=$3 start_pod "$new"
    await 60 "$new to serve" shims_are joined 2
    after=$(answers)
    await 20 "100 connections more" answers_are $((after + 100))
    # With two instances, no shim steers.
    before=$(opened "$old")
    await 20 "both to serve 20 connections" both_served "$old" $(($(served_by "$old") + 20)) "$new" 20
    expect "connections steered while two instances are there" "$(opened "$old")" -eq "$before" "$old.log"
    expect "connections that $new's shim steered" "$(opened "$new")" -eq 0 "$new.log"
    steered=$((steered + before))
    say "stopping $old"
    now hooked
    ip netns exec "$node" "$BERTH" drain --wait --if-sibling --run-dir "$work/run" --instance "$old" >"$work/$old-drain.log" 2>&1 ||
        fail "the preStop hook of $old" "$old-drain.log" "$old.log"
    now "at[$old-stop]"
    stop_instance "$old"
    expect "$old's exit statuses" "${exits[$old]} ${exits[$old-api]}" == "0 0" "$old.log" "$old-api.log"
    await 20 "$new to steer" steers "$new"
    await 20 "$new to steer 100 connections" opened_are "$new" 100
    row "$old to $new" "$before steered before; hook $(((at[$old-stop] - hooked) / 1000)) ms, shim ended $(((at[$old-ended] - at[$old-stop]) / 1000)) ms later"
    [[ $new != last ]] || steered=$((steered + $(opened "$new")))
}

# Stopped and started again, with no berth before it.
replace_control() {
    stop observer 30
    GODEBUG=$MULTIPATH run_observer
    await 60 "the instance without berth to be ready again" kubectl get --raw /readyz
}
