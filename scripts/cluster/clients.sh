# shellcheck shell=bash
# Part of scripts/cluster.sh: the clients, each of which dials again at once, and what they lost.

# Ways to the apiserver: name, namespace, server, address that it is dialled from.
WAYS=(
    "service pod $SERVICE_IP:443 $POD_IP"
    "address far $HOST_IP:$PORT $FAR_IP"
    "vip far $VIP:$PORT $FAR_IP"
    "ipv6 far [$HOST_IP6]:$PORT $FAR_IP6"
    "node - $HOST_IP:$PORT $HOST_IP"
    "localhost - 127.0.0.1:$PORT 127.0.0.1"
)
declare -A WORDS=(
    [service]="a pod, to the Service" [address]="another host, to the node's address" [vip]="another host, to a VIP"
    [ipv6]="another host, IPv6" [node]="the node, to its address" [localhost]="the node, to localhost"
    [kubectl]="kubectl, once a second" [election]="renewals of a leader"
    [new]="new connections, as admin" [kept]="kept connections" [watch]="watches" [informer]="informers" [quiet]="quiet informers"
    [events]="events of watches and informers" [logs]="kubectl logs -f" [exec]="kubectl exec" [port-forward]="kubectl port-forward"
)
# That do something again and again, and that stay open.
readonly LOOPS=(kubectl election) STREAMS=(logs exec port-forward)
# Of the one that is known by a certificate, through the Service; its streams' names begin with them.
readonly KINDS=(new kept watch informer quiet)
# Its watches, informers and quiet informers.
readonly FOLLOWERS=10

start_clients() {
    local way name namespace server source
    # A copy, for COMMAND may change the other.
    cp /etc/kubernetes/admin.conf "$work/admin.conf"
    make_tool
    make_lease
    for way in "${WAYS[@]}"; do
        read -r name namespace server source <<<"$way"
        start_needed "$name" "$namespace" "$TLS_LOAD" --server "$server" --ca "$work/ca.crt" --rate "$rate" --source "$source"
        # One of several nodes steers what is in its cgroup.
        [[ $namespace != cp-* ]] || join_cgroup "$namespace/test" "${pid[$name]}"
    done
    start_kinds
    run_again kubectl 1 client_kubectl far get nodes
    run_again election 2 renew
    stream logs client_kubectl far logs --follow --tail 1 tool
    stream exec client_kubectl far exec tool -- /usr/local/bin/pause tick
    stream port-forward forward 8080 "$PROGRAMS/$OLD/kubectl" --kubeconfig "$work/admin.conf" --cache-dir "$work/node/cache-far"
    for name in "${STREAMS[@]}"; do await 20 "kubectl $name" flows "$name"; done
    for way in "${WAYS[@]}"; do await 20 "connections: ${way%% *}" answers_are $((3 * rate)) "${way%% *}"; done
}

# What the pods of the test run.
readonly TOOL_IMAGE=localhost/tool:test

# A pod whose container prints a line each 100 ms, and echoes on port 8080.
make_tool() {
    kubectl create -f - >>"$work/kubectl.log" 2>&1 <<TEXT
apiVersion: v1
kind: Pod
metadata: {name: tool}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - {name: tool, image: $TOOL_IMAGE, imagePullPolicy: Never, command: [/usr/local/bin/pause, serve]}
TEXT
    # After a gap the scheduler's informers come back with client-go's delays, of up to a minute.
    await 180 "the tool's pod to be ready" tool_is_ready
}
tool_is_ready() { [[ $(kubectl get pod tool -o 'jsonpath={.status.containerStatuses[0].ready}') == true ]]; }

# forward PORT KUBECTL…: becomes a process on another host that sends lines through a forwarded port, and prints what comes back. It ends
# with kubectl, or with what it forwards.
forward() {
    # shellcheck disable=SC2016
    exec ip netns exec far bash -c '
        "$@" port-forward pod/tool "$0:8080" >/dev/null &
        trap "kill $! 2>/dev/null" EXIT
        trap "exit" TERM
        until exec 3<>"/dev/tcp/127.0.0.1/$0"; do kill -0 $! || exit; sleep 0.1; done 2>/dev/null
        while echo line >&3 && read -rt 15 -u 3 line; do echo "$line"; sleep 0.1; done' "$@"
}

# With a leader of the test's own.
make_lease() {
    kubectl create -f - >>"$work/kubectl.log" 2>&1 <<TEXT
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: test}
spec: {holderIdentity: test, leaseDurationSeconds: 15}
TEXT
}

# Clients of all kinds, known by admin.conf's certificate, through the Service.
start_kinds() {
    local field
    for field in certificate key; do
        kubectl config view --raw -o jsonpath="{.users[0].user.client-$field-data}" | base64 -d >"$work/admin.$field"
    done
    openssl pkcs8 -topk8 -nocrypt -in "$work/admin.key" -out "$work/admin.pkcs8"
    start_needed kinds pod "$TLS_LOAD" --server $SERVICE_IP:443 --ca "$work/ca.crt" --rate $((rate < 20 ? rate : 20)) \
        --client-certificate "$work/admin.certificate" --client-key "$work/admin.pkcs8"
}

# client_kubectl NAMESPACE ARGUMENTS…: of the old version, from there
client_kubectl() {
    local namespace=$1
    shift
    exec ip netns exec "$namespace" "$PROGRAMS/$OLD/kubectl" --kubeconfig "$work/admin.conf" --cache-dir "$work/node/cache-$namespace" "$@"
}

# As client-go's: a leader that has not renewed for 10 s gives up, and after 15 s somebody else may be it.
renew() {
    client_kubectl pod --server "https://$SERVICE_IP" --request-timeout 5s patch lease test --type merge \
        --patch "{\"spec\": {\"renewTime\": \"$(date -u +%FT%T.%6NZ)\"}}"
}

# run_again NAME SECONDS COMMAND…: with the time between two beginnings; lines as those of tls-load
run_again() {
    local name=$1 seconds=$2
    shift 2
    while [[ ! -e $work/over ]]; do
        local from to left status=0 detail=-
        now from
        # Without what JSON would have to escape.
        ("$@") >"$work/$name.last" 2>&1 || { status=lost detail=$(tail -n 1 "$work/$name.last" | tr -cd ' !#-[]-~' | cut -c 1-200); }
        now to
        echo "{\"began\":$from,\"client\":\"-\",\"outcome\":\"${status/#0/ok}\",\"took\":$((to - from)),\"detail\":\"$detail\"}"
        left=$((seconds * 1000000 - to + from))
        ((left <= 0)) || pause "$((left / 1000000)).$(printf %06d $((left % 1000000)))"
    done >"$work/$name.out" 2>"$work/$name.log" &
    pid[$name]=$! needed[$name]=
}

# stream NAME COMMAND…: again when it has ended; a line each, of when it began, gave its first line and ended, 0 if it never did
stream() {
    local name=$1
    shift
    while [[ ! -e $work/over ]]; do
        local from first=0 to line
        now from
        while read -r line; do
            ((first)) || {
                now first
                : >"$work/$name.flows"
            }
        done < <("$@" 2>>"$work/$name.log")
        now to
        rm -f "$work/$name.flows"
        echo "$from $first $to"
        pause 0.2
    done >"$work/$name.out" &
    pid[$name]=$! needed[$name]=
}
flows() { [[ -e $work/$1.flows ]]; }

end_clients() {
    local name
    for name in "${STREAMS[@]}"; do await 30 "kubectl $name once more" flows "$name"; done
    now 'at[end]'
    for name in "${LOOPS[@]}" "${STREAMS[@]}"; do unset "needed[$name]"; done
    touch "$work/over"
    for name in "${CONTROLS[@]}"; do touch "$work/$name/over"; done
    # One that ended with an error has lost nothing that could be counted.
    for name in kinds "${WAYS[@]%% *}"; do
        stop "$name" 60
        expect "exit status of the clients: $name" "${exits[$name]}" -eq 0 "$name.log"
    done
    for name in "${LOOPS[@]}"; do await 30 "$name to end" has_ended "$name"; done
}

# count_lost: a row for each way, of what began since at[begin]; sets lost[WAY], of which WAY.lost has the spans
count_lost() {
    local name slow log from=${at[begin]}
    declare -gA lost=()
    # At a rate of new connections that is too much for the machine, kube-apiserver itself ends some: no proxy has a part in it.
    slow=$(for log in "$work"/{,cp-*/}node/{var/log/pods/*_kube-apiserver-*/kube-apiserver/*,run/berth-bridge/kube-apiserver}.log; do
        [[ ! -e $log ]] || cat "$log"
    done | grep -c 'timeout waiting for SETTINGS frames from' || :)
    of_kind new "slow($slow)"
    of_kind kept told
    for name in watch informer quiet; do of_kind $name .; done
    heading "$(printf '  %-34s %8s %6s %8s %9s  %s' "way" "answered" "lost" "lost for" "longest" "lost how")"
    for name in "${WAYS[@]%% *}" "${LOOPS[@]}" "${KINDS[@]}"; do
        by_jq "losses($from)[]" "$work/$name.out" >"$work/$name.lost"
        row "${WORDS[$name]}" "$(by_jq "figures($from)" "$work/$name.out")"
        [[ $name != @(new|kept) ]] || row "  writes among them" "$(by_jq "map(select(.write)) | figures($from)" "$work/$name.out")"
    done
    heading "$(printf '  %-34s %8s %6s %9s' "stream" "ended" "failed" "away for")"
    for name in "${STREAMS[@]}"; do
        began_in_vain "$name" | awk '{ print "[" $1 ", " $3 "]" }' >"$work/$name.lost"
        row "${WORDS[$name]}" "$(away "$name")"
    done
    for name in new kept; do
        expect "answers to ${WORDS[$name]}" "$(by_jq "during($from; ${at[end]}) | map(select(good)) | length" "$work/$name.out")" -ge 100 kinds.log
    done
    for name in kept watch informer quiet; do row "${WORDS[$name]}" "$(by_jq "ends($from)" "$work/$name.out")"; done
    row "slow, ended by kube-apiserver" "$(by_jq 'map(select(.outcome == "slow")) | length' "$work/new.out")"
    # They are read back at the end.
    row "acknowledged writes of clients" "$(by_jq 'map(select(.write and good)) | length' "$work/kinds.out")"
    expect "acknowledged writes that are gone" "$(grep -E 'objects (are not there|could not be listed)' "$work/kinds.log" || :)" == ""
    # What a watch missed is lost by whoever lost it, at no time that could be known.
    by_jq '.[] | range((.missed // 0) + (.twice // 0)) | [0, 0]' "$work/kinds.out" >"$work/events.lost"
    by_jq 'map(select(.lists))[]' "$work/kinds.out" >"$work/followers.out"
    expect "watches and informers that were there at the end" "$(answers followers)" -eq $FOLLOWERS kinds.log
    row "${WORDS[events]}" "$(by_jq '"\(map(select(.outcome == "whole")) | length | pad(8)) of \(length) whole, \(map(.lists) | add) lists again"' "$work/followers.out")"
    for name in "${!WORDS[@]}"; do lost[$name]=$(wc -l <"$work/$name.lost"); done
}

# of_kind KIND FILTER: the lines of its clients
of_kind() { by_jq "map(select(.client | startswith(\"$1-\"))) | $2 | .[]" "$work/kinds.out" >"$work/$1.out"; }

# began_in_vain STREAM: those that gave nothing
began_in_vain() { awk -v from="${at[begin]}" -v to="${at[end]}" '$1 >= from && $3 <= to && !$2' "$work/$1.out"; }

# away STREAM: how many that gave something ended, how many began in vain, and the longest time without one that gives something
away() {
    local open
    open=$(stat -c %.6Y "$work/$1.flows")
    { cat "$work/$1.out" && echo "0 ${open/./} 0"; } |
        awk -v from="${at[begin]}" -v failed="$(began_in_vain "$1" | wc -l)" '
            !$2 || ($3 && $3 < from) { next }
            { if (gone && $2 - gone > away) away = $2 - gone }
            $3 { ended++; gone = $3 }
            END { printf "%8d %6d %8.1fs", ended, failed, away / 1e6 }'
}
