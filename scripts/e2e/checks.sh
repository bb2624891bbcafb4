# shellcheck shell=bash
# Part of scripts/e2e.sh: what must hold, and the table of what was measured.

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

check_all() {
    flatten_audit a
    flatten_audit b
    check_load
    check_broken
    check_ready_before_joined
    check_listeners
    check_tls
    check_watches
    check_writer
    check_sources
    check_service
    expect "kube-apiserver's exit status becomes that of berth run a" "$a_exit" == 0 a.log
}

# flatten_audit INSTANCE: its audit log as a table, times in microseconds:
# received, stage, time of the stage, status, user, source addresses, user agent, URI
flatten_audit() {
    jq -r 'def us: (.[0:19] + "Z" | fromdateiso8601) * 1000000 + (.[20:26] | tonumber);
        [(.requestReceivedTimestamp | us), .stage, (.stageTimestamp | us), (.responseStatus.code // 0),
         .user.username, ((.sourceIPs // []) | join(",")), (.userAgent // "-"), .requestURI] | @tsv' \
        "$work/audit-$1.json" >"$work/audit-$1.tsv"
}

# audit INSTANCE PROGRAM [VARIABLE=VALUE…]: awk over the flattened audit log
audit() {
    local instance=$1 program=$2 assignments=() assignment
    shift 2
    for assignment in "$@"; do assignments+=(-v "$assignment"); done
    awk -F '\t' "${assignments[@]}" '
        { received = $1; stage = $2; time = $3; status = $4; user = $5; source = $6; agent = $7; uri = $8
          is_probe = agent ~ /^berth-probe\// && uri ~ /^\/(readyz|version)/
          # Its loopback client dials its own 127.x address from 127.0.0.1.
          is_itself = user == "system:apiserver" && agent ~ /^kube-apiserver\// && source == "127.0.0.1" }
        '"$program" "$work/audit-$instance.tsv"
}

check_load() {
    local all paced least
    all=$(window "$load_start" "$load_end")
    paced=$(awk 'NR == 1 || $1 < first { first = $1 } $1 > last { last = $1 }
        END { printf "%.0f", (NR - 1) * 1e6 / (last - first) }' "$work/load.out")
    # The first and the last second are no whole ones.
    least=$(awk '{ n[int($1 / 1e6)]++ } END { for (s in n) print s, n[s] }' "$work/load.out" |
        sort -n | sed '1d;$d' | awk 'NR == 1 || $2 < least { least = $2 } END { print least + 0 }')
    row "new TLS connections" "$(words "$all"); $paced a second, at least $least"
    expect "new connections a second" "$paced" -ge $LEAST_RATE load.log
    part "with a broken b" "$broken_start" "$broken_over"
    part "while b joins" "$join_start" "$leave_start"
    part "while a leaves" "$leave_start" "$left"
    expect "connections lost" "$(lost "$all")" -eq 0 load.log
}

# part LABEL FROM TO: a stretch of the load. A second before is part of it: those may be on their way.
part() {
    local figures
    figures=$(window $(($2 - 1000000)) "$3")
    row "  $1" "$(words "$figures")"
    expect "connections $1" "${figures%% *}" -ge $LEAST_RATE load.log
    (($(lost "$figures") == 0)) || {
        failures+=("connections lost $1")
        say "FAILED: connections lost $1: $(lost "$figures")"
        awk -v from=$(($2 - 1000000)) -v to="$3" '$1 >= from && $1 < to && $3 != "ok"' "$work/load.out" | head -n 10 >&2
    }
}

# window FROM TO: of the connections that began in it: number, lost, longest in microseconds
window() {
    awk -v from="$1" -v to="$2" '$1 >= from && $1 < to { n++; lost += $3 != "ok"; if ($4 > longest) longest = $4 }
        END { print n + 0, lost + 0, longest + 0 }' "$work/load.out"
}
lost() { cut -d' ' -f2 <<<"$1"; }
words() { awk '{ printf "%d, %d lost, longest %.0f ms", $1, $2, $3 / 1000 }' <<<"$1"; }

check_broken() {
    local status own
    row "b with a wrong flag" "exit status $broken_exit after $(((broken_end - broken_start) / 1000)) ms"
    expect "the broken kube-apiserver's exit status becomes that of berth run" "$broken_exit" == 1 broken.log
    expect "kube-apiserver's own words pass through" \
        "$(grep -c 'unknown flag: --no-such-flag' "$work/broken.log" "$work/broken.out" | awk -F: '{ n += $NF } END { print n }')" -ge 1 broken.log
    status=$(grep -E "^$HOST_IP:$PORT +b " "$work/broken.status" || :)
    [[ $status == *ended*"exit status: 1"* ]] && status=said
    expect "berth status says that b ended, and how" "$status" == said broken.status
    own=$(jq -r '.instances[] | select(.instance == "b") | [.running, .record.ended] | @tsv' "$work/broken.status.json")
    expect "berth status --json says that b ended, and how" "$own" == $'false\texit status: 1' broken.status.json
}

# b's audit log holds nothing but probes and itself before the first probe was answered with 200.
check_ready_before_joined() {
    local early first served instance
    b_ready=$(audit b 'is_probe && uri ~ /^\/readyz/ && stage == "ResponseComplete" && status == 200 { print time; exit }')
    expect "b's audit log has a probe that was answered with 200" "${b_ready:-none}" != none b.log
    early=$(audit b 'received < ready && !is_probe && !is_itself' ready="${b_ready:-0}" | tee "$work/early.log" | wc -l)
    expect "requests in b before it was ready, but for probes and its own" "$early" -eq 0 early.log
    first=$(audit b 'agent ~ /^(tls-load|kubectl)\// { print received; exit }')
    served=$(audit b 'received < ready { n++ } END { print n + 0 }' ready="${b_ready:-0}")
    row "b ready after" "$(((b_ready - join_start) / 1000)) ms; first client $(((first - b_ready) / 1000)) ms later"
    row "before that, in b" "$served audit lines of probes and its own, $early of others"
    for instance in a b; do
        served=$(audit $instance 'stage == "ResponseComplete" && agent ~ /^tls-load/ && received > from && received < to { n++ } END { print n + 0 }' \
            from="$joined" to="$leave_start")
        row "  served by $instance together" "$served"
    done
}

# One listener, a's, until b joined; then two; then b's alone. By inode in /proc/net/tcp.
check_listeners() {
    local a_inode b_inode seen
    a_inode=$(listener_sets "$load_start" "$broken_start")
    b_inode=$(listener_sets "$((left + 100000))" "$service_back")
    expect "one listener while a is alone" "$a_inode" != "" a.log
    seen=$(listener_sets "$broken_start" "$broken_over")
    expect "listeners while b is broken: a's alone, at every look" "$seen" == "$a_inode" broken.log
    row "looks at the listeners" "$(awk -v from="$broken_start" -v to="$broken_end" '$1 >= from && $1 <= to' "$work/listeners" | wc -l) while the broken b ran, $(wc -l <"$work/listeners") in all"
    expect "listeners after a has gone: one" "$(wc -w <<<"$b_inode")" -eq 1 b.log
    expect "the listener that is left is not a's" "$b_inode" != "$a_inode" b.log
    expect "that listener is b's shim's" "$b_inode" == "$(own_inodes b | grep -x "$b_inode" || :)" b.log
    seen=$(listener_sets "$join_start" "${b_ready:-$joined}")
    expect "listeners until b is ready: a's alone, at every look" "$seen" == "$a_inode" b.log
    seen=$(awk 'NF > most { most = NF } END { print most - 1 }' "$work/listeners")
    expect "most listeners at a time" "$seen" -eq 2 a.log b.log
}

# listener_sets FROM TO: the different sets of inodes that were seen
listener_sets() {
    awk -v from="$1" -v to="$2" '$1 >= from && $1 <= to { $1 = ""; sub(/^ /, ""); print }' "$work/listeners" | sort -u
}

own_inodes() { find "/proc/${pid[$1]}/fd" -lname 'socket:*' -printf '%l\n' | tr -dc '0-9\n'; }

check_tls() {
    local log found sum=0
    for log in a.log b.log; do
        found=$(grep -E 'x509|bad certificate|unknown (certificate|authority)' "$work/$log" | tee "$work/x509-$log" | wc -l) || :
        expect "x509 errors in $log" "$found" -eq 0 "x509-$log"
        sum=$((sum + found))
    done
    row "x509 errors in both logs" "$sum (TLS handshakes that failed: $(cat "$work/a.log" "$work/b.log" | grep -c 'TLS handshake error' || :))"
}

# The watches through the berth go on until a's apiserver ends them: not before its delay is over, cleanly, and
# at the client after it is so in a's audit log (a stream that was cut would end there first).
check_watches() {
    local name end status complete earliest= latest=0 direct
    for name in $(watch_names) watch-direct; do
        read -r end status <"$work/$name.ended" || end=0 status=none
        complete=$(audit a 'stage == "ResponseComplete" && uri ~ ("%3D" name "&") && uri ~ /watch=true/ { print time; exit }' name="$name")
        expect "$name ends at the client after it ended in a" "$end" -ge "${complete:-$end}" "$name.log" a.log
        expect "$name ends cleanly" "$status$(cat "$work/$name.log")" == 0 "$name.log" a.log
        complete=$(((${complete:-0} - leave_start) / 1000))
        expect "$name ends only after a's delay, in ms" "$complete" -ge $((DELAY * 1000)) "$name.log" a.log
        if [[ $name == watch-direct ]]; then
            direct=$complete
            continue
        fi
        earliest=$((complete < ${earliest:-complete + 1} ? complete : earliest))
        latest=$((complete > latest ? complete : latest))
        [[ ! -e $work/$name-2.early ]] || status=early
        expect "$name goes on in b until the test ends it" "$status" == 0 "$name-2.log" b.log
    done
    row "watches ended by a" "$WATCHES of $WATCHES, $earliest to $latest ms after SIGTERM; past the berth: $direct ms"
    row "a ended" "$(((left - leave_start) / 1000)) ms after SIGTERM, exit status $a_exit"
}

watch_names() { local n && for ((n = 1; n <= WATCHES; n++)); do echo "watch-$n"; done; }

# Every ConfigMap that was written came to every watch, once and in order.
check_writer() {
    local name written
    written=$(wc -l <"$work/written")
    for name in $(watch_names); do
        seen_by "$name" | grep '^c[0-9]' >"$work/$name.seen" || :
        diff "$work/written" "$work/$name.seen" >"$work/$name.diff" || :
        expect "ConfigMaps that $name missed, or saw twice or out of order" \
            "$(grep -c '^[<>]' "$work/$name.diff" || :)" -eq 0 "$name.diff"
    done
    touch "$work/writer.log"
    expect "what kubectl could not write or read" "$(wc -l <"$work/writer.log")" -eq 0 writer.log
    row "ConfigMaps written" "$written, seen by every watch; kubectl asked for the version $(wc -l <"$work/versions") times"
    expect "ConfigMaps written" "$written" -ge 10 writer.log
}

# The instance sees a client a.b.c.d as 127.b.c.d.
check_sources() {
    local instance address as wrong right
    for address in $CLIENT_IP $FAR_CLIENT_IP; do
        as=127.${address#*.}
        wrong=0 right=0
        for instance in a b; do
            wrong=$((wrong + $(audit $instance "$of_client"' && source != as' address="$address" as="$as" | wc -l)))
            right=$((right + $(audit $instance "$of_client"' && source == as' address="$address" as="$as" | wc -l)))
        done
        expect "audit lines of $address with another source than $as" "$wrong" -eq 0
        expect "audit lines of $address" "$right" -ge 100
        row "$address is in the audit logs" "as $as: $right lines, otherwise $wrong"
    done
}
# shellcheck disable=SC2016
readonly of_client='(agent == "tls-load/" address ||
    (user == "admin" && address == "'$CLIENT_IP'"))'

check_service() {
    local wanted="$HOST_IP|$PORT"
    expect "the Service kubernetes has the berth's address with a alone" "$a_endpoints" == "$wanted" a.log
    expect "the Service kubernetes has the berth's address with both" "$both_endpoints" == "$wanted" b.log
    expect "the Service kubernetes has the berth's address with b alone" "$b_endpoints" == "$wanted" b.log
    row "Service kubernetes" "$HOST_IP:$PORT; whole $(((service_back - left) / 1000)) ms after a had gone (kube-apiserver's own gap)"
}

report() {
    local i
    printf '\nkube-apiserver %s, %s, after %d s\n' "$version" "$("$BERTH" --version)" $SECONDS
    for ((i = 0; i < ${#rows[@]}; i += 2)); do
        printf '  %-34s %s\n' "${rows[i]}" "${rows[i + 1]}"
    done
    if ((${#failures[@]})); then
        printf 'FAILED: %d\n' ${#failures[@]}
        printf '  %s\n' "${failures[@]}"
        exit 1
    fi
    echo "all held"
}
