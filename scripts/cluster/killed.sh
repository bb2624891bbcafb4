# shellcheck shell=bash
# Part of scripts/cluster.sh: a flag is changed under the bridge again and again, and each time another of its processes is killed, at
# another step. The control is a flag that is changed without a bridge.

# The command line; the bridge itself, which serves, too; its kube-apiserver.
readonly VICTIMS=(caller daemon instance)
# The steps in their order, and how `berth bridge --json` reports them: it is watched before clients depend on it; COMMAND runs; the node's
# own is away; that is back, and watched; the bridge's connections end.
readonly WHENS=(settles runs away returns drains)
readonly -A TOLD=(
    [settles]='.step == "settle"' [runs]='.step == "hold" and .command' [away]='.step == "await-own" and .own.listener == null'
    [returns]='.step == "await-own" and .own.ready' [drains]='.step == "drain"'
)
readonly -A SAID=(
    [settles]="it settles" [runs]="COMMAND runs" [away]="the node's own is away" [returns]="that is back and settles" [drains]="it drains"
)
# Exit status of `berth bridge`: of a killed child of a shell, of a bridge that does not start, of COMMAND, or as in docs/bridge.md.
readonly -A EXITS=([caller]=137 [daemon]=75 [daemon-settles]=69 [daemon-runs]=1 [instance]=0 [instance-settles]=69)
# How long a new connection may wait where there is a listener: a SYN is sent again after 1 s and 3 s.
readonly LONGEST_WAIT=5000000

# A line each: VICTIM WHEN, times of kill, victim's end, node's own ready again, end of all; exit status; what is left.
declare -ga kills=()

killed_begins() {
    [[ $bridge ]] || { flag_begins; return; }
    # Else each kube-apiserver waits for its watches, the node's own for 30 s, the other for 60 s.
    sed -i 's/^    - --allow-privileged=true$/&\n    - --event-ttl=2h0m0s\n    - --shutdown-watch-termination-grace-period=2s/' $manifests/kube-apiserver.yaml
    await 120 "kube-apiserver with its new flags" has_flag
    await_pods
    bridges_itself=true
    # A bridge that is not killed.
    operator=("$BERTH" bridge --settle 5s -- true)
}
killed_ends() {
    local when victim
    [[ $bridge ]] || { flag_ends; return; }
    mkfifo "$work/gate"
    for when in "${WHENS[@]}"; do
        for victim in "${VICTIMS[@]}"; do kill_one "$victim" "$when"; done
    done
    expect "nothing left of any bridge" "$(left cgroups)" == ""
}

# kill_one VICTIM WHEN
kill_one() {
    local victim=$1 when=$2 caller daemon instance end step
    local name="$1-$2"
    say "killed: $name"
    sed "s/--event-ttl=.*/--event-ttl=2h0m$((${#kills[@]} + 1))s/" $manifests/kube-apiserver.yaml >/etc/kubernetes/new.yaml
    # COMMAND waits for a line.
    # shellcheck disable=SC2016
    on_the_node "$BERTH" bridge --json --settle 5s -- sh -c \
        'read -r word <"$0" && test "$word" = go && mv /etc/kubernetes/new.yaml "$1/kube-apiserver.yaml"' \
        "$work/gate" $manifests >"$work/$name.log" 2>&1 &
    pid[bridge]=$!
    usual_logs=("$name.log" kubelet.log)
    for step in "${WHENS[@]}"; do
        await 120 "a bridge that $step" told "$name" "${TOLD[$step]}"
        [[ $step != "$when" ]] || break
        [[ $step != runs ]] || echo go >"$work/gate"
    done
    daemon=$(last_told "$name" | jq .pid)
    caller=$(awk '$1 == "PPid:" { print $2 }' "/proc/$daemon/status")
    # shellcheck disable=SC2034
    instance=$(instance)
    now 'at[killed]'
    kill -KILL "${!victim}"
    await 5 "the $victim to be gone" is_gone "${!victim}"
    now 'at[gone]'
    case $name in
        # COMMAND has no parent then.
        caller-runs)
            await 20 "the bridge to report that COMMAND was abandoned" bridge_is '.step == "hold" and (.trouble | test("went away"))'
            echo stop >"$work/gate"
            "$BERTH" bridge end >>"$work/$name.log" 2>&1 || fail "berth bridge end" "$name.log"
            ;;
        instance-runs)
            await 60 "another temporary kube-apiserver" bridge_is '.temporary.ends == 1 and .temporary.ready and .steering'
            echo go >"$work/gate"
            ;;
        # Or it has ended by itself.
        caller-*) expect "the bridge, without its command line" "$(bridge_is ".pid == $daemon" || is_gone "$daemon" && echo on)" == on ;;
        daemon-*)
            expect "exit status of berth bridge status, without a bridge" \
                "$("$BERTH" bridge status >>"$work/$name.log" 2>&1 || echo $?)" == $EX_UNAVAILABLE
            [[ $when != runs ]] || echo stop >"$work/gate"
            ;;
        instance-away | instance-returns) await 20 "the bridge to report that its kube-apiserver ended" bridge_is '.temporary.ends == 1' ;;
    esac
    await 240 "berth bridge to end" has_ended bridge
    take_exit bridge
    await 240 "the bridge to end" is_ended "$daemon"
    await 120 "the node's kube-apiserver" serves "$OLD"
    now 'at[back]'
    # Removes the slice of a killed daemon, if there is one.
    "$BERTH" bridge end >>"$work/$name.log" 2>&1 || :
    expect "exit status of berth bridge: $name" "${exits[bridge]}" -eq "${EXITS[$name]:-${EXITS[$victim]}}" "$name.log"
    await 10 "nothing to be left" nothing_left
    await 20 "more connections" answers_are $(($(answers address) + 2 * rate)) address
    now end
    kills+=("$victim $when ${at[killed]} ${at[gone]} ${at[back]} $end ${exits[bridge]}")
}

instance() { pgrep -x berth-temporary; }
last_told() { grep '^{' "$work/$1.log" | tail -n 1; }
told() { last_told "$1" | jq -e "$2"; }
bridge_is() { "$BERTH" bridge status --json 2>/dev/null | jq -e "$1" >/dev/null; }
# is_gone PROCESS: or it waits to be collected. Until its last thread has ended, its sockets are open.
is_gone() { [[ ! -e /proc/$1 ]] || [[ $(awk '$1 == "State:" || $1 == "Threads:" { print $2 }' "/proc/$1/status" 2>/dev/null | xargs) == @(|"Z 1") ]]; }
# is_ended DAEMON: a bridge relays open connections for a while after its end, which is cut short here
is_ended() {
    "$BERTH" bridge status >/dev/null 2>&1 || "$BERTH" bridge end --now >/dev/null 2>&1 || :
    is_gone "$1"
}
nothing_left() { [[ ! $(left) ]]; }

# left [cgroups]: of any bridge: a second kube-apiserver, processes, mounts, slices; and cgroups, which may wait for the next bridge
left() {
    (($(pgrep -c 'kube-apiserver|berth-temporary') == 1)) || echo "$(pgrep -c 'kube-apiserver|berth-temporary') kube-apiservers"
    pgrep -a -f "^$BERTH bridge" || :
    cat /proc/[0-9]*/mountinfo 2>/dev/null | grep -m 1 bridge-memory || :
    kubectl get endpointslices --namespace default -o name | grep berth-bridge || :
    ((!$#)) || cgroup_hierarchies | xargs -I{} find {} -maxdepth 1 -name 'berth-bridge*'
}

killed_judges() {
    local each victim when killed gone back end status lost later swallowed again longest cut how
    heading "$(printf '  %-34s %6s %6s %7s %7s %5s  %s' "killed, and while what" "lost" "later" "again" "longest" "cut" "lost how")"
    for each in "${kills[@]}"; do
        read -r victim when killed gone back end status <<<"$each"
        read -r lost later swallowed again longest how < <(kill_figures "$killed" "$gone" "$back" "$end")
        cut=$(by_jq "during($killed; $gone + 1e6) | map(select(.outcome == \"ended\")) | length" "$work/kinds.out")
        row "$victim: ${SAID[$when]}" "$(printf '%6d %6d %6.1fs %6.1fs %5d  %s' "$lost" "$later" "$again" "$longest" "$cut" "$how")"
        expect "swallowed after the kill: $victim, $when" "$swallowed" -eq 0
        # Nothing listens then.
        [[ $when == away && $victim != caller ]] || expect "lost that began after the kill: $victim, $when" "$later" -eq 0
        [[ $victim != caller && $when != settles ]] || expect "lost by a kill that clients do not depend on: $victim, $when" "$lost" -eq 0
    done
}

# kill_figures KILLED GONE BACK END: of new connections in all ways, from the kill on: lost; of these begun after the
# victim's end; never answered or refused in time since the node's own is ready; seconds until each way is answered again;
# the longest wait in seconds; lost how
kill_figures() {
    jq -nRr -L "$root/scripts" "include \"judge\"; files | killed($1; $2; $3; $4; $LONGEST_WAIT)" \
        "$work"/{service,address,vip,ipv6,node,localhost}.out
}
