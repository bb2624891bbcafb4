# shellcheck shell=bash
# Part of scripts/service.sh and scripts/kubelet.sh: the EndpointSlices of the Service `kubernetes` as they change, and how long they had no
# address.

readonly SLICES="/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io/service-name%3Dkubernetes"

# Each line with the time when it came, in microseconds.
stamp() {
    local line
    while IFS= read -r line; do printf '%s %s\n' "${EPOCHREALTIME/./}" "$line"; done
}

# record NAME PATH: a list and all that changes in it, in NAME.seen
record() {
    follow_list "$@" >>"$work/$1.seen" 2>>"$work/$1.log" &
    pid[record-$1]=$!
    await 20 "the list of $1" test -s "$work/$1.seen"
}

follow_list() {
    local list version child
    trap 'kill "$child"; exit' TERM
    while :; do
        if list=$(kubectl get --raw "$2"); then
            version=$(jq -r .metadata.resourceVersion <<<"$list")
            jq -c '{type: "LIST", object: .}' <<<"$list" | stamp
            ip netns exec "$client" "$KUBECTL" "${kubectl_options[@]}" --request-timeout 0 \
                get --raw "$2&watch=1&timeoutSeconds=7200&resourceVersion=$version" > >(stamp) &
            child=$!
            wait "$child" || :
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
    jq -Rnr '
        def ready: [.endpoints[]? | select(.conditions.ready != false) | .addresses[]];
        foreach inputs as $line ({slices: {}};
            ($line | index(" ")) as $i | .time = $line[:$i] | ($line[$i + 1:] | fromjson) as $event | $event.object as $o
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
