# shellcheck shell=bash
# Part of scripts/direct.sh: how fast one and the same kube-apiserver is by every way, and what processor time that takes on the node.
# The clients run on the same machine.

# Rounds, each of all ways by turns; seconds of each; and clients at a time.
readonly ROUNDS=8 MEASURED=2 CLIENTS=8
# What is asked: words, path, and how.
readonly REQUESTS=(
    "GET of a namespace, kept connections|/api/v1/namespaces/default|"
    "GET of a namespace, new connections|/api/v1/namespaces/default|--fresh"
    "list of 5 MB, kept connections|/api/v1/namespaces/large/configmaps|"
    "list of 5 MB, new connections|/api/v1/namespaces/large/configmaps|--fresh"
)
declare -A WAY_IP=([none]=$OBSERVER_IP [relayed]=$RELAYED_IP [direct]=$STEERED_IP [haproxy]=$HAPROXY_IP)

# The berth that ships, and clients of the same profile: their own cost must not be what is measured.
need_shipped() {
    [[ ${BERTH:-} ]] || BERTH=$("$root/scripts/static.sh")/berth
    TLS_LOAD=$("$root/scripts/static.sh" -- --package berth-bench --bin tls-load)/tls-load
}

part_speed() {
    local ways=(none relayed direct) way round turn request
    # The instance has no address of 127.0.0.0/8: so that it can be dialled without berth, too.
    need_observer
    stop observer 30
    GODEBUG=$PLAIN run_observer
    await 60 "the instance to be ready" kubectl get --raw /readyz
    for way in relayed direct haproxy; do ip -n "$node" addr add "${WAY_IP[$way]}/24" dev host; done
    start_way relayed off
    start_way direct on
    await 20 "the shim to steer" steers direct
    if type -P haproxy >/dev/null; then
        ways+=(haproxy)
        start_haproxy
    else
        say "haproxy is not here: it is left out"
    fi
    make_large
    for way in "${ways[@]}"; do await 10 "$way to serve" dial "$client" "${WAY_IP[$way]}:$PORT"; done
    for ((round = 1; round <= ROUNDS; round++)); do
        say "round $round of $ROUNDS"
        for request in "${!REQUESTS[@]}"; do
            # Who is first comes after a pause: each is, by turns.
            for ((turn = 0; turn < ${#ways[@]}; turn++)); do
                measure "${ways[(turn + round) % ${#ways[@]}]}" "$request"
            done
        done
    done
    for request in "${!REQUESTS[@]}"; do
        heading "$(printf '%s\n  %-34s %10s %8s %16s %16s' "${REQUESTS[request]%%|*}, medians of $ROUNDS rounds" "" "requests/s" "÷ none" "CPU ms: instance" "shim or proxy")"
        for way in "${ways[@]}"; do row "$way" "$(medians "$way" "$request")"; done
    done
    expect "connections steered" "$(opened direct)" -ge 100 direct.log
    expect "connections steered by the one that relays" "$(of_direct relayed '.opened // 0')" -eq 0 relayed.log
}

# start_way NAME MODE: where there is a gate, a load as here is a crowd, which does not go directly
start_way() {
    local gate=auto
    [[ $2 == off ]] || gate=off
    start_needed "$1" "$node" "$BERTH" serve --listen "${WAY_IP[$1]}:$PORT" --instance "$1" --run-dir "$work/run" \
        --backend $OBSERVER_IP:$PORT --probe-ca "$work/ca.crt" --direct "$2" --max-openings $gate
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

# Five objects of a megabyte.
make_large() {
    local number
    kubectl create namespace large >/dev/null
    head -c 1000000 /dev/zero | tr '\0' x >"$work/large"
    for number in 1 2 3 4 5; do
        kubectl create configmap "large-$number" --namespace large --from-file="data=$work/large" >/dev/null
    done
}

# measure WAY REQUEST: a line REQUEST WAY ANSWERS SECONDS INSTANCE-TICKS RELAY-TICKS
measure() {
    local way=$1 words path options before
    IFS='|' read -r words path options <<<"${REQUESTS[$2]}"
    before=$(ticks_of observer)\ $(ticks_of "$way")
    # shellcheck disable=SC2086
    start_needed closed "$client" "$TLS_LOAD" --server "${WAY_IP[$way]}:$PORT" --ca "$work/ca.crt" --client-certificate "$work/admin.crt" \
        --client-key "$work/admin.key" --clients $CLIENTS --closed "$path" $options
    pause $MEASURED
    stop closed 20
    ((exits[closed] == 0)) || fail "$words, $way" closed.log
    echo "$2 $way $(<"$work/closed.out") $before $(ticks_of observer) $(ticks_of "$way")" |
        awk '{ print $1, $2, $3, $4, $7 - $5, $8 - $6 }' >>"$work/measured"
}

# ticks_of NAME: processor time of a process so far; none has none
ticks_of() {
    local stat
    [[ $1 != none ]] || { echo 0 && return; }
    stat=$(<"/proc/${pid[$1]}/stat")
    awk '{ print $12 + $13 }' <<<"${stat##*) }"
}

# medians WAY REQUEST: requests a second, ratio to none, processor milliseconds a request of the instance and of what is before it
medians() {
    awk -v way="$1" -v request="$2" -v hz="$(getconf CLK_TCK)" '
        function median(of, n,    i, j, x) {
            for (i = 2; i <= n; i++) { x = of[i]; for (j = i - 1; j && of[j] > x; j--) of[j + 1] = of[j]; of[j + 1] = x }
            return n % 2 ? of[(n + 1) / 2] : (of[n / 2] + of[n / 2 + 1]) / 2
        }
        $1 == request && $2 == "none" { none[++nones] = $3 / $4 }
        $1 == request && $2 == way { n++; rate[n] = $3 / $4; instance[n] = $5 * 1000 / hz / $3; relay[n] = $6 * 1000 / hz / $3 }
        END { printf "%10.0f %8.3f %16.3f %16.3f", median(rate, n), median(rate, n) / median(none, nones), median(instance, n), median(relay, n) }
    ' "$work/measured"
}
