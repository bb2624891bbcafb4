# shellcheck shell=bash
# Part of scripts/service.sh: what looks on, what was seen, and the EndpointSlices of the Service `kubernetes`: how long they had no address.

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
    done < <(by_jq "during($1; $2)[] | select(.detail == \"request: closed\") | \"\(.began) \(.client) \(.took)\"" "$work/load.out")
    echo "$number $((lost - ended)) $longest $ended"
}

# words_of FIGURES: of at_service
words_of() { echo "$(words "$1")$(awk '$4 { printf ", %d more ended by the instance itself", $4 }' <<<"$1")"; }

# What kube-proxy changes in the kernel, as it changes it: lines with the time, in microseconds.
watch_kernel() {
    local line
    mkfifo "$work/kernel.out"
    while IFS= read -r line; do printf '%s %s\n' "${EPOCHREALTIME/./}" "$line"; done <"$work/kernel.out" >"$work/kernel.seen" &
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

# lease_events FROM TO: lines "TIME TYPE NAME NODE"
lease_events() {
    jq -r --argjson from "$1" --argjson to "$2" 'select(.time >= $from and .time < $to and .type != "LIST")
        | "\(.time) \(.type) \(.object.metadata.name) \(.object.metadata.annotations["berth/node"])"' "$work/leases.seen"
}

# renewed NODE TIMES: since etcd is back
renewed() { (($(lease_events "${at[back]}" 9e18 | awk -v node="$1" '$2 == "MODIFIED" && $4 == node' | wc -l) >= $2)); }
first_renewal() { lease_events "${at[back]}" 9e18 | awk '$2 == "MODIFIED" { print $1; exit }'; }

# removed FROM TO: slices and Leases that were removed, or that a new list lacks
removed() {
    local name
    for name in slices leases; do
        jq -rn --argjson from "$1" --argjson to "$2" '
            foreach inputs as $event ({names: []};
                .gone = [] | if $event.type == "LIST" then
                    [$event.object.items[].metadata.name] as $now | .gone = .names - $now | .names = $now
                  elif $event.type == "DELETED" then
                    .gone = [$event.object.metadata.name] | .names -= .gone
                  elif $event.type == "ADDED" then .names += [$event.object.metadata.name]
                  else . end
                | if $event.time < $from or $event.time >= $to then .gone = [] else . end;
                .gone[])' "$work/$name.seen"
    done
}

readonly SLICES="/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name%3Dkubernetes"

# record NAME PATH: a list and all that changes in it, in NAME.seen
record() {
    follow_list "$@" >>"$work/$1.seen" 2>>"$work/$1.log" &
    pid[record-$1]=$!
    await 20 "the list of $1" test -s "$work/$1.seen"
}

# Events with the time when they came, in microseconds.
dated() { jq -c --unbuffered '.time = (now * 1e6 | floor)'; }

follow_list() {
    local list version
    while :; do
        if list=$(kubectl get --raw "$2"); then
            version=$(jq -r .metadata.resourceVersion <<<"$list")
            {
                jq -c '{type: "LIST", object: .}' <<<"$list"
                kubectl --request-timeout 0 get --raw "$2&watch=1&timeoutSeconds=7200&resourceVersion=$version" || :
            } | dated || :
        fi
        pause 0.2
    done
}

# changes OF: lines "TIME ADDRESSES NAMES", each time how many addresses are ready from then on: in all slices of the
# Service (union), or for the Service in the kernel, 0 or 1
changes() {
    if [[ $1 == kernel ]]; then
        # kube-proxy has a set of the Services that reject.
        awk -v ip=$SERVICE_IP -v port=$SERVICE_PORT '
            index($0, "no-endpoint-services") && index($0, ip " . 6 . " port) {
                if ($2 == "add") print $1, 0
                if ($2 == "delete") print $1, 1
            }' "$work/kernel.seen"
        return
    fi
    jq -nr '
        def ready: [.endpoints[]? | select(.conditions.ready != false) | .addresses[]];
        foreach inputs as $event ({slices: {}};
            $event.object as $o | .time = $event.time
            | if $event.type == "LIST" then .slices = ($o.items | map({key: .metadata.name, value: ready}) | from_entries)
              elif $event.type == "DELETED" then del(.slices[$o.metadata.name])
              elif $event.type == "BOOKMARK" or $event.type == "ERROR" then .
              else .slices[$o.metadata.name] = ($o | ready) end;
            "\(.time) \([.slices[][]] | unique | length) \([.slices | to_entries[] | select(.value != []) | .key] | sort | join(","))")
    ' "$work/slices.seen"
}

# spells OF FROM TO: how often nobody was there
spells() { spells_of "$@" | wc -l; }

# spells_of OF FROM TO: a line each, how long in microseconds. What is at FROM counts.
spells_of() {
    changes "$1" | awk -v from="$2" -v to="$3" '
        function ends(at) { if (began != "") { print at - began; began = "" } }
        $1 >= to { exit }
        { if ($1 < from) { empty = $2 == 0; next } }
        !started { started = 1; if (empty) began = from }
        $2 == 0 && began == "" { began = $1 }
        $2 > 0 { ends($1) }
        END { if (!started && empty) began = from; ends(to) }'
}

longest_spell() { spells_of union "$1" "$2" | sort -n | tail -n 1 | awk '{ printf ", the longest %.1f s", $1 / 1e6 }'; }

# The slices that name somebody now.
slices_in_service() { changes union | tail -n 1 | cut -d' ' -f3; }
