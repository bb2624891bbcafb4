# shellcheck shell=bash
# Part of scripts/kubelet.sh: what is done to the static pods, and what must hold.

declare -gA ids=()

# begin WHAT: a scenario
begin() {
    say "$1"
    heading "$1, from second $SECONDS"
    now 'at[begin]'
}

# From kubeadm's own manifest to one behind berth: the one time when there is a gap.
first_switch() {
    begin "berth inject, of kubeadm's manifest with kube-apiserver $OLD"
    change_in_place inject --image "$IMAGE"
}

# change_in_place COMMAND…: berth writes into the manifest, and the kubelet ends the pod before it starts it again
change_in_place() {
    "$BERTH" "$@" --write 2>"$work/$1.log" || fail "berth $1" "$1.log"
    await 60 "connections to fail" lost_since "${at[begin]}"
    await 90 "connections again" served_since "$EPOCHREALTIME"
    # So that none of those that were lost counts as a later scenario's.
    await 10 "more of them" answers_are $(($(answers) + 2 * LEAST_RATE))
    now 'at[end]'
    row "gap" "$(gap "${at[begin]}" "${at[end]}")"
}

# The steps of `berth upgrade` that take time, as its state names them.
readonly STEPS=(start-temporary settle-temporary stop-old start-canonical settle-canonical stop-temporary)
readonly upgrade_state=/etc/kubernetes/berth/upgrade.json canonical=$manifests/kube-apiserver.yaml

# To the new version by one command: a second pod next to the first, then only that one.
upgrade() {
    begin "berth upgrade, $OLD to $NEW"
    follow_pod kube-apiserver
    sed "s/:$OLD\$/:$NEW/" $canonical >"$work/new.yaml"
    berth_upgrade --manifest "$work/new.yaml" || fail "berth upgrade" upgrade.log
    row "took" "$(elapsed)"
    check_upgraded "$work/new.yaml"
    await 5 "kube-apiserver $NEW" serves "$NEW"
    check_end "$uid"
    row "Service kubernetes empty" "$(service_gap "${at[begin]}"), with --kubeconfig"
}

# With a flag that kube-apiserver does not know: it goes back and reports why, even if it is killed meanwhile.
upgrade_that_must_not_be() {
    local status=0
    begin "berth upgrade to a manifest with a wrong flag, killed on its way back"
    cp $canonical "$work/before.yaml"
    sed 's/^    - --allow-privileged=true$/&\n    - --no-such-flag/' $canonical >"$work/wrong.yaml"
    : >"$work/upgrade.log"
    start_upgrade --manifest "$work/wrong.yaml"
    await 60 "berth upgrade to go back" is_at withdraw
    kill_now upgrade
    berth_upgrade || status=$?
    row "rolled back after" "$(elapsed)"
    expect "exit status of what was rolled back" $status -eq 1 upgrade.log
    expect "lines with kube-apiserver's own reason" "$(grep -c 'unknown flag: --no-such-flag' "$work/upgrade.log")" -ge 1 upgrade.log
    check_upgraded "$work/before.yaml"
    await 30 "all probes of the pod that was there to pass" pod_is_ready kube-apiserver
    row "its probes" "startup, readiness and liveness pass, nothing was restarted"
}

# A rolling restart whose command is killed in each step, when that has just begun and when it is under way, and
# run again each time. Without a kubeconfig.
interrupted_upgrade() {
    local step delay kills=()
    begin "berth upgrade, without a manifest, killed in each step"
    mv /etc/kubernetes/admin.conf "$work/node/admin.conf"
    follow_pod kube-apiserver
    cp $canonical "$work/before.yaml"
    : >"$work/upgrade.log"
    for step in "${STEPS[@]}"; do
        for delay in 0 0.5; do
            start_upgrade
            await 60 "berth upgrade to begin $step" is_at "$step"
            pause $delay
            kill_now upgrade
            kills+=("$step")
        done
    done
    berth_upgrade || fail "berth upgrade, for the last time" upgrade.log
    row "took" "$(elapsed), killed ${#kills[@]} times in ${#STEPS[@]} steps"
    check_upgraded "$work/before.yaml"
    # Not the pod: the same file gives the same UID.
    expect "the container that was there before" \
        "$(pod kube-apiserver '.status.containerStatuses[].containerID' | grep -c "${ids[$uid-kube-apiserver]}" || :)" -eq 0
    await 20 "the Service kubernetes to have an address" service_has_addresses
    row "Service kubernetes empty" "$(service_gap "${at[begin]}"), without --kubeconfig"
    mv "$work/node/admin.conf" /etc/kubernetes/admin.conf
}

berth_upgrade() { "$BERTH" upgrade --settle 2s "$@" >>"$work/upgrade.log" 2>&1; }
start_upgrade() {
    "$BERTH" upgrade --settle 2s "$@" >>"$work/upgrade.log" 2>&1 &
    pid[upgrade]=$!
}

is_at() { grep "\"$1\"" $upgrade_state; }

# check_upgraded MANIFEST: nothing was lost since at[begin], this manifest is the only one, nothing is left over
check_upgraded() {
    await 10 "connections" answers_are $(($(answers) + 100))
    now 'at[end]'
    part "connections meanwhile" "${at[begin]}" "${at[end]}"
    diff -u "$1" $canonical >"$work/upgrade.diff" || :
    expect "lines of the manifest that are not as they should be" "$(wc -l <"$work/upgrade.diff")" -eq 0 upgrade.diff
    expect "files in the kubelet's directory" "$(find $manifests -type f -printf '%f\n' | sort | xargs)" == "etcd.yaml kube-apiserver.yaml"
    expect "a state that is left" "$([[ ! -e $upgrade_state ]] || echo yes)" == "" upgrade.log
    expect "instances" "$("$BERTH" status | grep -c ' joined ')" -eq 1
}

elapsed() { seconds "${at[begin]}" "${EPOCHREALTIME/./}"; }

# check_end UID: of a pod that the kubelet ended: the hook first, then kube-apiserver, its shim last
check_end() {
    local log apiserver shim words left
    log=$(log_of berth "$1")
    read -r -a apiserver <<<"$(exit_of "${ids[$1-kube-apiserver]}")"
    read -r -a shim <<<"$(exit_of "${ids[$1-berth]}")"
    expect "kube-apiserver's exit status" "${apiserver[1]}" -eq 0 "$(log_of kube-apiserver "$1")"
    expect "the shim's exit status" "${shim[1]}" -eq 0 "$log"
    # Told by berth upgrade, and by the hook once more.
    words=$(grep -oE 'INFO (drain requested|left|SIGTERM|drained)' "$work/$log" | cut -c 6- | uniq | paste -sd,)
    expect "what the shim is asked to do and does" "$words" == "drain requested,left,drain requested,SIGTERM,drained" "$log"
    expect "the shim is stopped after kube-apiserver has ended" "$(logged_at SIGTERM "$work/$log")" -ge "${apiserver[0]}" "$log"
    left=$(logged_at 'left .*' "$work/$log")
    row "the old pod" "kube-apiserver ended $(((apiserver[0] - left) / 1000)) ms after its shim had left, the shim $(((shim[0] - left) / 1000)) ms, exit status 0"
}

# Nothing takes over for a lone pod while the kubelet restarts it.
lone_restart() {
    begin "an instance alone, changed in place: inject --sidecar plain"
    change_in_place inject --image "$IMAGE" --sidecar plain
}

# The manifest is kubeadm's again, and berth is not there.
back_again() {
    local container status
    begin "berth eject"
    follow_pod kube-apiserver
    change_in_place eject
    for container in kube-apiserver berth; do
        read -r _ status <<<"$(exit_of "${ids[$uid-$container]}")"
        expect "exit status of $container" "$status" -eq 0 "$(log_of "$container")"
    done
    sed "s/:$OLD\$/:$NEW/" "$work/kubeadm.yaml" >"$work/wanted.yaml"
    diff -u "$work/wanted.yaml" $canonical >"$work/eject.diff" || :
    expect "lines that differ from what kubeadm wrote" "$(wc -l <"$work/eject.diff")" -eq 0 eject.diff
    await 30 "kube-apiserver $NEW to be ready without berth" serves "$NEW"
    expect "shims that run" "$("$BERTH" status | grep -c ' joined ' || :)" -eq 0
}

# A static pod that knows nothing of berth gets another flag, by a command that kills kubelet and containerd too.
bridge() {
    local daemons=(kubelet containerd) daemon
    begin "berth bridge, of kubeadm's manifest: another flag, with kubelet and containerd killed"
    sed 's/--shutdown-delay-duration=2s$/--shutdown-delay-duration=3s/' $canonical >"$work/flag.yaml"
    # It ends with containerd.
    stop events 5
    for daemon in "${daemons[@]}"; do unset "needed[$daemon]"; done
    "$BERTH" bridge --settle 2s -- sh -c "kill -KILL ${pid[kubelet]} ${pid[containerd]} && cp $work/flag.yaml $canonical" >"$work/bridge.log" 2>&1 &
    pid[bridge]=$!
    for daemon in "${daemons[@]}"; do
        await 60 "$daemon to be killed" has_ended "$daemon"
        take_exit "$daemon"
    done
    row "memory of the temporary one's files" "$(bridge_memory)"
    start_containerd
    start_kubelet
    await 90 "berth bridge to end" has_ended bridge
    take_exit bridge
    expect "its exit status" "${exits[bridge]}" -eq 0 bridge.log
    row "took" "$(elapsed)"
    await 10 "connections" answers_are $(($(answers) + 100))
    now 'at[end]'
    part "connections meanwhile" "${at[begin]}" "${at[end]}"
    expect "kube-apiservers with the new flag" "$(pgrep -f -c -- '^kube-apiserver .*--shutdown-delay-duration=3s')" -eq 1
    await 5 "nothing to be left of it" is_no_bridge
}

bridge_pid() { "$BERTH" bridge status --json | jq -e .pid; }
# stat asks the kernel where df looks for the name.
bridge_memory() {
    stat --file-system --format '%b %f %S' "/proc/$(bridge_pid)/root/run/berth-bridge/bridge-memory" |
        awk '{ printf "%.0f MiB", ($1 - $2) * $3 / 1024 / 1024 }'
}
is_alone() { (($(pgrep -c -x kube-apiserver) == 1)); }
is_no_bridge() {
    is_alone && ! cgroup_hierarchies | xargs -I{} find {} -maxdepth 1 -name 'berth-bridge*' | grep . &&
        ! cat /proc/[0-9]*/mountinfo 2>/dev/null | grep bridge-memory
}

# lost_since TIME, served_since TIME: a connection that began then failed, was answered
lost_since() { (($(lost "$(window "$1" 9e18)"))); }
served_since() {
    local figures
    figures=$(window "${1/./}" 9e18)
    ((${figures%% *} > $(lost "$figures")))
}

# gap FROM TO: from the first connection that was lost to the next that was answered after the last lost one
gap() { "$TLS_LOAD" judge gap "$work/load.out" "$1" "$2"; }

# service_gap FROM
service_gap() {
    spells_of union "$1" "${EPOCHREALTIME/./}" |
        awk '{ sum += $1 } END { if (sum) printf "%.1f s", sum / 1e6; else print "never" }'
}
service_has_addresses() { [[ $(slices_in_service) ]]; }

end_clients() {
    stop load 20
    expect "connections at all" "$(answers)" -ge 1000 load.log
}
