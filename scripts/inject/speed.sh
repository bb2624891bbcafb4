# shellcheck shell=bash
# Part of scripts/inject.sh: how fast a kube-apiserver is by every way, and what processor time that takes on the node. The clients run on
# the same machine. The relay and HAProxy have the instance without berth behind them; --pass inject has one of its own, under the filter.

# Seconds of each measurement, and clients at a time.
readonly MEASURED=2 CLIENTS=8
# What is asked: words, and how.
readonly REQUESTS=(
    "kept connections; goals of inject: at least 0.99 of none, at most 1 µs of berth|"
    "a new connection with a client certificate each; goals: no less than relayed, at most 100 µs of berth|--fresh"
)
declare -A WAY_IP=([none]=$OBSERVER_IP [relayed]=$RELAYED_IP [inject]=$HOST_IP [haproxy]=$HAPROXY_IP)
# Processes of the server and of what is before it.
declare -A SERVER=() BEFORE=([none]='')

# The berth that ships, and clients of the same profile: their own cost must not be what is measured.
need_shipped() {
    [[ ${BERTH:-} ]] || BERTH=$("$root/scripts/static.sh")/berth
    [[ ${TLS_LOAD:-} ]] || TLS_LOAD=$("$root/scripts/static.sh" -- --package berth-bench --bin tls-load)/tls-load
}

part_speed() {
    local ways=(none relayed inject) way round turn request command place shim
    need_observer
    for way in relayed haproxy; do ip -n "$node" addr add "${WAY_IP[$way]}/24" dev host; done
    start_needed relayed "$node" env -u BERTH_ADMIN BERTH_PASS=relay "$BERTH" serve --listen "$RELAYED_IP:$PORT" --instance relayed \
        --run-dir "$work/run" --backend $OBSERVER_IP:$PORT --probe-ca "$work/ca.crt"
    apiserver_of inject
    start_needed inject "$node" "$BERTH" serve "${place[@]}" --probe-ca "$work/ca.crt"
    start_needed inject-api "$node" "$BERTH" exec "${place[@]}" -- "${command[@]}"
    await 60 "the shim to pass sockets" takes_sockets inject
    await 10 "the shim to join" shims_are joined 1
    if type -P haproxy >/dev/null; then
        ways+=(haproxy)
        start_haproxy
    else
        say "haproxy is not here: it is left out"
    fi
    for way in "${ways[@]}"; do
        await 10 "$way to serve" dial "$client" "${WAY_IP[$way]}:$PORT"
        SERVER[$way]=${pid[observer]} BEFORE[$way]=${pid[$way]:-}
    done
    SERVER[inject]=$(pgrep -P "${pid[inject-api]}") BEFORE[inject]+=" ${pid[inject-api]}"
    for ((round = 1; round <= rounds; round++)); do
        say "round $round of $rounds"
        measure_idle $round
        for request in "${!REQUESTS[@]}"; do
            # Who is first comes after a pause: each is, by turns.
            for ((turn = 0; turn < ${#ways[@]}; turn++)); do
                measure $round "$request" "${ways[(turn + round) % ${#ways[@]}]}"
            done
        done
    done
    for request in "${!REQUESTS[@]}"; do
        heading "$(printf 'GET of a namespace, %s\n  %-34s %10s %8s %10s %16s %16s' "${REQUESTS[request]%|*}" "medians of $rounds rounds, ratios within" \
            requests/s "÷ none" "÷ relayed" "CPU µs: server" "shim or proxy")"
        for way in "${ways[@]}"; do row "$way" "$(medians "$request" "$way")"; done
    done
    for way in "${ways[@]:1}"; do row "$way without requests" "$(medians idle "$way")"; done
    read -r turn round < <(connections inject)
    row "sockets passed, and clients not" "$turn, $round"
    expect "sockets passed" "$turn" -ge $((100 * rounds)) inject.log
    expect "clients whose sockets were not passed" "$round" -eq 0 inject.log
}

# As crates/bench has it.
start_haproxy() {
    cat >"$work/haproxy.cfg" <<TEXT
global
    nbthread $(nproc)
defaults
    mode tcp
    timeout connect 5s
    timeout client 24h
    timeout server 24h
listen bench
    bind $HAPROXY_IP:$PORT backlog 65535
    server backend $OBSERVER_IP:$PORT
TEXT
    start_needed haproxy "$node" haproxy -db -f "$work/haproxy.cfg"
}

# measure ROUND REQUEST WAY: a line with these, the answers, seconds, and microseconds of processor time of the server and before it
measure() {
    local before
    before="$(cpu_of ${SERVER[$3]}) $(cpu_of ${BEFORE[$3]})"
    # shellcheck disable=SC2086
    start_needed closed "$client" "$TLS_LOAD" --server "${WAY_IP[$3]}:$PORT" --ca "$work/ca.crt" --client-certificate "$work/admin.crt" \
        --client-key "$work/admin.key" --clients $CLIENTS --closed /api/v1/namespaces/default ${REQUESTS[$2]#*|}
    pause $MEASURED
    stop closed 20
    ((exits[closed] == 0)) || fail "$3: ${REQUESTS[$2]%|*}" closed.log
    echo "$* $(<"$work/closed.out") $before $(cpu_of ${SERVER[$3]}) $(cpu_of ${BEFORE[$3]})" |
        awk '{ print $1, $2, $3, $4, $5, $8 - $6, $9 - $7 }' >>"$work/measured"
}

# measure_idle ROUND: a line for each way, with the microseconds of processor time that it takes without requests, and seconds
measure_idle() {
    local way before=() began=$EPOCHREALTIME
    for way in "${ways[@]}"; do before+=("$(cpu_of ${BEFORE[$way]})"); done
    pause $MEASURED
    for way in "${!ways[@]}"; do
        echo "$1 idle ${ways[way]} $(($(cpu_of ${BEFORE[${ways[way]}]}) - before[way])) $(((${EPOCHREALTIME/./} - ${began/./}) / 1000))e-3"
    done >>"$work/measured"
}

# cpu_of PID…: processor time of all threads so far
cpu_of() {
    local process
    for process; do cat "/proc/$process"/task/*/schedstat; done 2>/dev/null | awk '{ sum += $1 } END { printf "%.0f", sum / 1000 }'
}

# medians REQUEST WAY: requests a second, ratios to none and to the relay, processor microseconds a request of the server and before it, less
# what that takes without requests
medians() {
    awk -v request="$1" -v way="$2" '
        function median(of, n,    i, j, x) {
            for (i = 2; i <= n; i++) { x = of[i]; for (j = i - 1; j && of[j] > x; j--) of[j + 1] = of[j]; of[j + 1] = x }
            return n % 2 ? of[(n + 1) / 2] : (of[n / 2] + of[n / 2 + 1]) / 2
        }
        $2 == "idle" && $3 == way { idle[++idles] = $4 / $5 }
        $2 == request { rates[$1, $3] = $4 / $5 }
        $2 == request && $3 == way { round[++n] = $1; answers[n] = $4; seconds[n] = $5; server[n] = $6 / $4; before[n] = $7 }
        END {
            alone = median(idle, idles)
            if (request == "idle") { printf "%.1f ms of CPU time a second", alone / 1000; exit }
            for (i = 1; i <= n; i++) {
                rate[i] = answers[i] / seconds[i]
                before[i] = (before[i] - alone * seconds[i]) / answers[i]
                none[i] = rate[i] / rates[round[i], "none"]
                relayed[i] = rate[i] / rates[round[i], "relayed"]
            }
            printf "%10.0f %8.3f %10.3f %16.0f %16.1f", median(rate, n), median(none, n), median(relayed, n), median(server, n), median(before, n)
        }' "$work/measured"
}
