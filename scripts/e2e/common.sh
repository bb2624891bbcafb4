# shellcheck shell=bash
# Part of the scripts that start kube-apiservers: addresses, processes, waiting, the load, and the report.

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# The node's end and the client's end of a veth (RFC 5737), and a client from farther away, because only 127.b.c.d with a b that is not 0
# shows that every octet is kept.
readonly HOST_IP=${BERTH_NODE_IP:-192.0.2.2} CLIENT_IP=192.0.2.1 FAR_CLIENT_IP=10.23.45.67 PORT=6443
# Fewest new TLS connections a second that are a test.
readonly LEAST_RATE=100

# Process IDs by name; of those in `needed` the end is the end of the test.
declare -A pid=() needed=()
# When something happened, and exit statuses: each by its name.
declare -A at=() exits=()
failures=() rows=()
# Logs to show where no others are named.
usual_logs=()
work='' node='' client=''

# The clients, built for release: they are not to take the CPUs from the node.
need_clients() {
    need_program TLS_LOAD tls-load
    # Only now: the builds may need a proxy.
    clean_environment
}

# watch_over LIMIT: an unexpected error must not end the script without a message, and the script ends after LIMIT seconds.
watch_over() {
    # A trap may find standard error redirected.
    exec {stderr}>&2
    # A subshell's end is its caller's to judge.
    trap '((BASH_SUBSHELL)) || {
        failures+=("$BASH_COMMAND")
        say "FAILED: $BASH_COMMAND (${FUNCNAME[0]:-main}, line $LINENO)"
    }' ERR
    trap 'exit 130' INT
    trap 'keep=true; exit 143' TERM
    # Read from, it gives nothing for as long as one likes: a sleep without a process.
    mkfifo "$work/never"
    exec {never}<>"$work/never"
    {
        pause "$1"
        say "FAILED: not done within $1 s"
        kill -TERM $$
    } &
    pid[watchdog]=$!
}

# start NAME NAMESPACE COMMAND…: in the background, with NAME.out and NAME.log; NAMESPACE - is this one. `ip netns exec` becomes
# the command, so the process ID is the command's own.
start() {
    local name=$1 namespace=$2
    shift 2
    [[ $namespace == - ]] || set -- ip netns exec "$namespace" "$@"
    "$@" >"$work/$name.out" 2>"$work/$name.log" &
    pid[$name]=$!
}

# start_needed NAME NAMESPACE COMMAND…: as start; its end would be the end of the test
start_needed() {
    start "$@"
    needed[$1]=
}

# link_client: the namespace $client, a veth to it from $node (this namespace if it has no name), and both ends' addresses
link_client() {
    local at=(${node:+-n "$node"})
    ip netns add "$client"
    ip "${at[@]}" link add name host type veth peer name client netns "$client"
    ip "${at[@]}" link set lo up
    ip -n "$client" link set lo up
    ip "${at[@]}" addr add $HOST_IP/24 dev host
    ip -n "$client" addr add $CLIENT_IP/24 dev client
    ip -n "$client" addr add $FAR_CLIENT_IP/32 dev client
    ip "${at[@]}" link set host up
    ip -n "$client" link set client up
    ip "${at[@]}" route add $FAR_CLIENT_IP/32 dev host
}

# now VARIABLE: Unix time in microseconds
now() { printf -v "$1" %s "${EPOCHREALTIME/./}"; }

# seconds FROM TO: the time between two such times
seconds() { awk -v from="$1" -v to="$2" 'BEGIN { printf "%.1f s", (to - from) / 1e6 }'; }

# pause SECONDS, without starting a process
pause() { read -rt "$1" -u "$never" || :; }

# await SECONDS WHAT COMMAND…: until the command succeeds
await() {
    local deadline=$((SECONDS + $1)) what=$2 name
    shift 2
    until "$@" >/dev/null 2>"$work/await.log"; do
        for name in "${!needed[@]}"; do
            kill -0 "${pid[$name]}" 2>/dev/null || fail "$name ended while waiting for $what" "$name.log"
        done
        ((SECONDS < deadline)) || fail "waited in vain for $what"
        pause 0.02
    done
}

has_ended() { ! kill -0 "${pid[$1]}" 2>/dev/null; }

# stop NAME SECONDS: ends it, and waits for that and its exit status
stop() {
    unset "needed[$1]"
    kill -TERM "${pid[$1]}" 2>/dev/null || :
    await "$2" "$1 to end" has_ended "$1"
    take_exit "$1"
}

# kill_now NAME: the same by SIGKILL
kill_now() {
    unset "needed[$1]"
    kill -KILL "${pid[$1]}"
    await 5 "$1 to end" has_ended "$1"
    take_exit "$1"
}

# take_exit NAME: the exit status of what has ended
take_exit() {
    local status=0
    # The shell would report a signal.
    wait "${pid[$1]}" 2>/dev/null || status=$?
    unset "pid[$1]"
    exits[$1]=$status
}

# fail WHAT LOG…: ends the test
fail() {
    failures+=("$1")
    say "FAILED: $1"
    shift
    (($#)) || set -- await.log "${usual_logs[@]}"
    show_logs "$@"
    exit 1
}

show_logs() {
    local log
    for log in "$@"; do
        [[ -s $work/$log ]] || continue
        say "the last lines of $log:"
        # Each connection's line would fill it.
        grep -v 'connection ended' "$work/$log" | tail -n 15 | cut -c 1-300 >&"$stderr"
    done
}

start_load() { load_to load "${SERVICE_IP:-$HOST_IP}:${SERVICE_PORT:-$PORT}"; }

# load_to NAME SERVER: new TLS connections, by turns from both addresses
load_to() {
    start_needed "$1" "$client" "$TLS_LOAD" --server "$2" --ca "$work/ca.crt" --rate "$rate" \
        --source $CLIENT_IP --source $FAR_CLIENT_IP
}

# answers [NAME]: the number of lines that it wrote; of the load, connections that have ended
answers() { wc -l <"$work/${1:-load}.out"; }

# answers_are NUMBER [LOAD]
answers_are() { (($(answers "${@:2}") >= $1)); }

# expect WHAT LEFT OPERATOR RIGHT [LOG…]: as test(1) compares
expect() {
    local what=$1 left=$2 operator=$3 right=$4
    shift 4
    test "$left" "$operator" "$right" && return
    failures+=("$what")
    say "FAILED: $what: '$left', wanted $operator '$right'"
    show_logs "$@"
}

row() { rows+=("$1" "$2"); }

heading() { rows+=("" "$1"); }

# part LABEL FROM TO: a stretch of the load. A second before is part of it: those may be on their way.
part() {
    local figures
    figures=$(window $(($2 - 1000000)) "$3")
    row "$1" "$(words "$figures")"
    expect "connections enough: $1" "${figures%% *}" -ge $LEAST_RATE load.log
    (($(lost "$figures") == 0)) || {
        failures+=("connections lost: $1")
        say "FAILED: connections lost: $1: $(lost "$figures")"
        awk -v from=$(($2 - 1000000)) -v to="$3" '$1 >= from && $1 < to && $3 != "ok" && n++ < 10' "$work/load.out" >&2
    }
}

# window FROM TO [LOAD]: of the connections that began in it: number, lost, longest in microseconds
window() { "$TLS_LOAD" judge window "$work/${3:-load}.out" "$1" "$2"; }

# pace: new connections a second, and in the second in which the fewest began, but for the first and the last one
pace() { "$TLS_LOAD" judge pace "$work/load.out"; }

lost() { cut -d' ' -f2 <<<"$1"; }

words() { awk '{ printf "%d, %d lost, longest %.0f ms", $1, $2, $3 / 1000 }' <<<"$1"; }

# report WHAT: the table; fails if something did
report() {
    local i
    printf '\n%s%s, after %d s\n' "$1" "${BERTH:+, $("$BERTH" --version)}" $SECONDS
    for ((i = 0; i < ${#rows[@]}; i += 2)); do
        if [[ ${rows[i]} ]]; then
            printf '  %-34s %s\n' "${rows[i]}" "${rows[i + 1]}"
        else
            printf '%s\n' "${rows[i + 1]}"
        fi
    done
    if ((${#failures[@]})); then
        printf 'FAILED: %d\n' ${#failures[@]}
        printf '  %s\n' "${failures[@]}"
        exit 1
    fi
    echo "all held"
}
