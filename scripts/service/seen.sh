# shellcheck shell=bash
# Part of scripts/service.sh: what looks on, and what was seen.

# at_service FROM TO: of the connections that began in it: number, lost, longest in microseconds, and apart from what is lost, how
# many the instance itself ended without an answer. With --shutdown-delay-duration=0 it does so with a few that it had already
# begun to serve, and only their shim's log tells them from what somebody else cut.
at_service() {
    local number lost longest ended=0 start client took second next
    read -r number lost longest <<<"$(window "$1" "$2")"
    while read -r start client took; do
        printf -v second '%(%FT%T)T' $(((start + took) / 1000000))
        # Its line is there within the second, or in the next one.
        printf -v next '%(%FT%T)T' $(((start + took) / 1000000 + 1))
        ! grep -qsE "^($second|$next)\..* connection ended client=$client .* down=[1-9][0-9]* .*outcome=\"closed\"" "$work"/i*.log ||
            ended=$((ended + 1))
    done < <(awk -v from="$1" -v to="$2" '$1 >= from && $1 < to && $3 != "ok" && $5 == "request:" && $6 == "closed" { print $1, $2, $4 }' \
        "$work/load.out")
    echo "$number $((lost - ended)) $longest $ended"
}

# words_of FIGURES: of at_service
words_of() { echo "$(words "$1")$(awk '$4 { printf ", %d more ended by the instance itself", $4 }' <<<"$1")"; }

# What kube-proxy changes in the kernel, as it changes it.
watch_kernel() {
    mkfifo "$work/kernel.out"
    stamp <"$work/kernel.out" >"$work/kernel.seen" &
    pid[stamp-kernel]=$!
    start_needed kernel "$node" nft -nn monitor
}

slice_is_there() { [[ ,$(slices_in_service), == *,berth-$NODE-ipv4,* ]]; }

# Does the kernel send the Service's clients to the node?
proxied() {
    local rules
    rules=$(ip netns exec "$node" nft -nn list table ip kube-proxy)
    [[ $rules == *" : $HOST_IP . $PORT }"* && $(changes kernel | tail -n 1) == *" 1" ]]
}

leases_now() { kubectl get leases --namespace berth-system --output name | sed 's@.*/@@'; }

# have_leases yes|no NAME…: are all of them there, or none?
have_leases() {
    local name want=$1 found
    shift
    found=$(leases_now)
    for name in "$@"; do
        [[ $(grep -cxF "$name" <<<"$found") == "$([[ $want == yes ]] && echo 1 || echo 0)" ]] || return
    done
}

# settled NODE…: another node's address was in the Service for long enough, so what could be of theirs there is removed
settled() {
    local name
    for name in "$@"; do grep -q 'is out of the Service kubernetes' "$work/$name.log" || return; done
}

# lease_events FROM TO: lines "TIME TYPE NAME NODE"
lease_events() {
    jq -Rr --argjson from "$1" --argjson to "$2" '
        index(" ") as $i | (.[:$i] | tonumber) as $time | (.[$i + 1:] | fromjson)
        | select($time >= $from and $time < $to and .type != "LIST")
        | "\($time) \(.type) \(.object.metadata.name) \(.object.metadata.annotations["berth/node"])"' "$work/leases.seen"
}

# renewed NODE TIMES: since etcd is back
renewed() { (($(lease_events "${at[back]}" 9e18 | awk -v node="$1" '$2 == "MODIFIED" && $4 == node' | wc -l) >= $2)); }
first_renewal() { lease_events "${at[back]}" 9e18 | awk '$2 == "MODIFIED" { print $1; exit }'; }

# removed FROM TO: slices and Leases that were removed, or that a new list lacks
removed() {
    local name
    for name in slices leases; do
        jq -Rrn --argjson from "$1" --argjson to "$2" '
            foreach inputs as $line ({names: []};
                ($line | index(" ")) as $i | ($line[:$i] | tonumber) as $time | ($line[$i + 1:] | fromjson) as $event
                | .gone = []
                | if $event.type == "LIST" then
                    [$event.object.items[].metadata.name] as $now | .gone = .names - $now | .names = $now
                  elif $event.type == "DELETED" then
                    .gone = [$event.object.metadata.name] | .names -= .gone
                  elif $event.type == "ADDED" then .names += [$event.object.metadata.name]
                  else . end
                | if $time < $from or $time >= $to then .gone = [] else . end;
                .gone[])' "$work/$name.seen"
    done
}

# answered METHOD PATH_END SINCE: when an instance had answered such a request with 200, in microseconds
answered() {
    jq -r --arg verb "${1,,}" --arg path "$2" --argjson since "$3" '
        def us: (.[0:19] + "Z" | fromdateiso8601) * 1000000 + (.[20:26] | tonumber);
        select(.verb == $verb and .stage == "ResponseComplete" and .responseStatus.code == 200 and (.requestURI | endswith($path)))
        | (.stageTimestamp | us) | select(. >= $since)' "$work/audit-$instance.json" | head -n 1
}

# written_in SECONDS: what etcd was given in that time, by its own count
written_in() {
    local before after
    before=$(etcd_counts)
    pause "$1"
    after=$(etcd_counts)
    awk -v seconds="$1" '{ split($0, n); if (NR == 1) split($0, b) }
        END { printf "%.2f writes/s, %.0f bytes/s", (n[1] - b[1]) / seconds, (n[2] - b[2]) / seconds }' <<<"$before"$'\n'"$after"
}

etcd_counts() {
    ip netns exec "$node" "$KUBECTL" --server http://127.0.0.1:2379 get --raw /metrics | awk '
        $1 == "etcd_mvcc_put_total" { puts = $2 }
        $1 == "etcd_debugging_mvcc_total_put_size_in_bytes" { bytes = $2 }
        END { printf "%d %d\n", puts, bytes }'
}
