# shellcheck shell=bash
# Part of scripts/e2e.sh: what must hold, and the table of what was measured.

check_all() {
    local instance number
    for instance in "${INSTANCES[@]}"; do flatten_audit "$instance"; done
    check_load
    check_broken
    for ((number = 1; number < ${#INSTANCES[@]}; number++)); do
        check_upgrade "${INSTANCES[number - 1]}" "${INSTANCES[number]}"
    done
    heading "all of it"
    check_listeners
    check_tls
    check_writer
    check_sources
}

# check_upgrade OLD NEW
check_upgrade() {
    local old=$1 new=$2
    heading "$old to $new, $old with --shutdown-delay-duration=${DELAY[$old]}s"
    part "connections while $new joins" "${at[$new]}" "${at[$old-stop]}"
    part "connections while $old leaves" "${at[$old-stop]}" "${at[$old-left]}"
    check_ready_before_joined "$old" "$new"
    check_watches "$old" "$new"
    check_end "$old"
    check_service "$old" "$new"
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
          is_watch = uri ~ /[?&]watch=/
          is_probe = agent ~ /^berth-probe\// && uri ~ /^\/(readyz|version)/
          # Its loopback client dials its own 127.x address from 127.0.0.1.
          is_itself = user == "system:apiserver" && agent ~ /^kube-apiserver\// && source == "127.0.0.1" }
        '"$program" "$work/audit-$instance.tsv"
}

check_load() {
    local all paced least
    all=$(window "${at[load]}" "${at[load-end]}")
    read -r paced least <<<"$(pace)"
    row "new TLS connections" "$(words "$all"); $paced a second, at least $least"
    expect "new connections a second that this machine kept up" "$paced" -ge "$rate" load.log
    # They begin by the clock, and those that were late all at once: a machine with a pause of half a second
    # is no place for this test.
    expect "new connections in every second" "$least" -ge $((rate / 2)) load.log
    part "  with a broken b" "${at[broken]}" "${at[broken-over]}"
    expect "connections lost" "$(lost "$all")" -eq 0 load.log
}

check_broken() {
    local own
    row "b with a wrong flag" "exit status ${exits[broken]} after $(((at[broken-ended] - at[broken]) / 1000)) ms"
    expect "the broken kube-apiserver's exit status becomes that of berth run" "${exits[broken]}" == 1 broken.log
    expect "kube-apiserver's own words pass through" \
        "$(grep -c 'unknown flag: --no-such-flag' "$work/broken.log" "$work/broken.out" | awk -F: '{ n += $NF } END { print n }')" -ge 1 broken.log
    own=$(jq -r '.instances[] | select(.instance == "b") | [.running, .record.ended] | @tsv' "$work/broken.status.json")
    expect "berth status --json says that b ended, and how" "$own" == $'false\texit status: 1' broken.status.json
}

# The new one's audit log holds nothing but probes and itself before the first probe was answered with 200.
check_ready_before_joined() {
    local old=$1 new=$2 ready early first served instance
    ready=$(audit "$new" 'is_probe && uri ~ /^\/readyz/ && stage == "ResponseComplete" && status == 200 { print time; exit }')
    expect "$new's audit log has a probe that was answered with 200" "${ready:-none}" != none "$new.log"
    at[$new-ready]=${ready:-${at[$new-joined]}}
    early=$(audit "$new" 'received < ready && !is_probe && !is_itself' ready="${ready:-0}" | tee "$work/early-$new.log" | wc -l)
    expect "requests in $new before it was ready, but for probes and its own" "$early" -eq 0 "early-$new.log"
    first=$(audit "$new" 'agent ~ /^tls-load\// { print received; exit }')
    served=$(audit "$new" 'received < ready { n++ } END { print n + 0 }' ready="${ready:-0}")
    row "$new ready after" "$(((ready - at[$new]) / 1000)) ms; first client $(((first - ready) / 1000)) ms later"
    row "before that, in $new" "$served audit lines of probes and its own, $early of others"
    for instance in "$old" "$new"; do
        served+=" $(audit "$instance" 'stage == "ResponseComplete" && agent ~ /^tls-load/ && received > from && received < to { n++ } END { print n + 0 }' \
            from="${at[$new-joined]}" to="${at[$old-stop]}")"
    done
    read -r _ first served <<<"$served"
    row "connections served together" "$first by $old, $served by $new"
}

# One listener, a's, until b joined; then never more than two; and each that is left when an instance has
# gone is held by the shim that took over, whose own it need not be. By inode in /proc/net/tcp.
check_listeners() {
    local first seen inode number instance last
    first=$(listener_sets "${at[load]}" "${at[broken]}")
    expect "one listener while a is alone" "$(wc -w <<<"$first")" -eq 1 a.log
    seen=$(listener_sets "${at[broken]}" "${at[broken-over]}")
    expect "listeners while b is broken: a's alone, at every look" "$seen" == "$first" broken.log
    seen=$(listener_sets "${at[b]}" "${at[b-ready]}")
    expect "listeners until b is ready: a's alone, at every look" "$seen" == "$first" b.log
    seen=$(awk 'NF > most { most = NF } END { print most - 1 }' "$work/listeners")
    expect "most listeners at a time: as many as shims" "$seen" -eq 2 {a,b,c,d}.log
    for ((number = 1; number < ${#INSTANCES[@]}; number++)); do
        instance=${INSTANCES[number]} last=${INSTANCES[number - 1]}
        seen=$(listener_sets "$((at[$last-left] + 100000))" "${at[$last-service]}")
        expect "listeners when $last has gone: some" "$(wc -w <<<"$seen")" -ge 1 "$instance.log"
        expect "listeners when $last has gone: the same at every look" "$(wc -l <<<"$seen")" -eq 1 "$instance.log"
        for inode in $seen; do
            expect "a listener that is left when $last has gone is held by $instance" \
                "$(grep -cx "$inode" <<<"${held[$instance]}")" -eq 1 "$instance.log"
        done
    done
    row "listeners" "$(awk 'NF > 1 { $1 = ""; sub(/^ /, ""); print }' "$work/listeners" | tr ' ' '\n' | sort -u | wc -l) in all, at most $(awk 'NF > most { most = NF } END { print most - 1 }' "$work/listeners") at a time"
    row "looks at them" "$(awk -v from="${at[broken]}" -v to="${at[broken-ended]}" '$1 >= from && $1 <= to' "$work/listeners" | wc -l) while the broken b ran, $(wc -l <"$work/listeners") in all"
}

# listener_sets FROM TO: the different sets of inodes that were seen
listener_sets() {
    awk -v from="$1" -v to="$2" '$1 >= from && $1 <= to { $1 = ""; sub(/^ /, ""); print }' "$work/listeners" | sort -u
}

# Descriptors come and go while find looks.
own_inodes() { { find "/proc/${pid[$1]}/fd" -lname 'socket:*' -printf '%l\n' 2>/dev/null || :; } | tr -dc '0-9\n' | sort -u; }

check_tls() {
    local log found sum=0 handshakes=0
    for log in {a,b,c,d}{,-api}.log; do
        [[ -e $work/$log ]] || continue
        found=$(grep -E 'x509|bad certificate|unknown (certificate|authority)' "$work/$log" | tee "$work/x509-$log" | wc -l) || :
        expect "x509 errors in $log" "$found" -eq 0 "x509-$log"
        sum=$((sum + found))
        handshakes=$((handshakes + $(grep -c 'TLS handshake error' "$work/$log" || :)))
    done
    row "x509 errors in all logs" "$sum (TLS handshakes that failed: $handshakes)"
}

# The watches through the berth go on until the old one's apiserver ends them: not before its delay is over,
# cleanly, and at the client after it is so in its audit log (a stream that was cut would end there
# first). Then each goes on in the new one.
check_watches() {
    local old=$1 new=$2 name end status complete earliest='' latest=0 direct log=$1.log
    [[ ! -e $work/$old-api.log ]] || log=$old-api.log
    for name in $(watch_names "-$old") "watch-direct-$old"; do
        read -r end status <"$work/$name.ended" || end=0 status=none
        complete=$(audit "$old" 'stage == "ResponseComplete" && is_watch && uri ~ ("%3D" name "(&|$)") { print time; exit }' name="$name")
        expect "$name ends at the client after it ended in $old" "$end" -ge "${complete:-$((end + 1))}" "$name.log" "$log"
        expect "$name ends cleanly" "$status$(cat "$work/$name.log")" == 0 "$name.log" "$log"
        complete=$(((${complete:-0} - at[$old-stop]) / 1000))
        expect "$name ends only after $old's delay, in ms" "$complete" -ge $((DELAY[$old] * 1000)) "$name.log" "$log"
        if [[ $name == watch-direct-* ]]; then
            direct=$complete
            continue
        fi
        earliest=$((complete < ${earliest:-complete + 1} ? complete : earliest))
        latest=$((complete > latest ? complete : latest))
    done
    row "watches ended by $old" "$WATCHES of $WATCHES, $earliest to $latest ms after SIGTERM; past the berth: $direct ms"
    for name in $(watch_names ""); do
        expect "$name goes on in $new" "$(audit "$new" 'stage == "ResponseStarted" && is_watch && uri ~ ("%3D" name "(&|$)")' name="$name-$new" | wc -l)" -eq 1 \
            "$name-$new.log" "$new.log"
        [[ $new == "${INSTANCES[-1]}" ]] || continue
        [[ -e $work/$name-$new.early ]] && status=early || status=0
        expect "$name goes on in $new until the test ends it" "$status" == 0 "$name-$new.log" "$new.log"
    done
}

# check_end INSTANCE: all its processes end by themselves within the grace period, and well
check_end() {
    local instance=$1 part words=()
    for part in "$instance-api" "$instance"; do
        [[ -n ${exits[$part]:-} ]] || continue
        expect "$part's exit status" "${exits[$part]}" == 0 "$part.log"
        words+=("$((((at[$part-ended] - at[$instance-stop])) / 1000)) ms (exit status ${exits[$part]})")
    done
    if ((${#words[@]} == 1)); then
        row "$instance ended" "${words[0]} after SIGTERM to berth run"
    else
        row "$instance ended" "apiserver ${words[0]}, shim ${words[1]} after SIGTERM to both at once"
    fi
}

# watch_names SUFFIX
watch_names() { local n && for ((n = 1; n <= WATCHES; n++)); do echo "watch-$n$1"; done; }

# Every ConfigMap that was written came to every watch, once and in order.
check_writer() {
    local name written
    written=$(wc -l <"$work/written")
    for name in $(watch_names ""); do
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
        for instance in "${INSTANCES[@]}"; do
            wrong=$((wrong + $(audit "$instance" "$of_client"' && source != as' address="$address" as="$as" | wc -l)))
            right=$((right + $(audit "$instance" "$of_client"' && source == as' address="$address" as="$as" | wc -l)))
        done
        expect "audit lines of $address with another source than $as" "$wrong" -eq 0
        expect "audit lines of $address" "$right" -ge 100
        row "$address is in the audit logs" "as $as: $right lines, otherwise $wrong"
    done
}
# shellcheck disable=SC2016
readonly of_client='(agent == "tls-load/" address ||
    (user == "admin" && address == "'$CLIENT_IP'"))'

# check_service OLD NEW
check_service() {
    local old=$1 new=$2 wanted="$HOST_IP|$PORT"
    expect "the Service kubernetes has the berth's address with $old alone" "${endpoints[$old]}" == "$wanted" "$old.log"
    expect "the Service kubernetes has the berth's address with both" "${endpoints[$old$new]}" == "$wanted" "$new.log"
    expect "the Service kubernetes has the berth's address with $new alone" "${endpoints[$new]}" == "$wanted" "$new.log"
    row "Service kubernetes" "$HOST_IP:$PORT; whole $(((at[$old-service] - at[$old-left]) / 1000)) ms after $old had gone (kube-apiserver's own gap)"
}

