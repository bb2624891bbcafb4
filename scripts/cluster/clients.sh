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
# That do something again and again, and that stay open: as fields 1, 3 and 4 of a way's lines, and as lines of streams.
readonly LOOPS=(kubectl election) STREAMS=(logs exec port-forward)
# Of the one that is known by a certificate, through the Service; its streams' names begin with them.
readonly KINDS=(new kept watch informer quiet)

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
        ("$@") >"$work/$name.last" 2>&1 || { status=lost detail=$(tail -n 1 "$work/$name.last" | cut -c 1-200); }
        now to
        echo "$from - ${status/#0/ok} $((to - from)) $detail"
        left=$((seconds * 1000000 - to + from))
        ((left <= 0)) || pause "$((left / 1000000)).$(printf %06d $((left % 1000000)))"
    done >"$work/$name.out" 2>"$work/$name.log" &
    pid[$name]=$!
    needed[$name]=
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
    pid[$name]=$!
    needed[$name]=
}
flows() { [[ -e $work/$1.flows ]]; }

end_clients() {
    local way name
    for name in "${STREAMS[@]}"; do await 30 "kubectl $name once more" flows "$name"; done
    now 'at[end]'
    for name in "${LOOPS[@]}" "${STREAMS[@]}"; do unset "needed[$name]"; done
    touch "$work/over"
    for name in "${CONTROLS[@]}"; do touch "$work/$name/over"; done
    stop kinds 60
    for way in "${WAYS[@]}"; do stop "${way%% *}" 30; done
    for name in "${LOOPS[@]}"; do await 30 "$name to end" has_ended "$name"; done
}

# count_lost: a row for each way, of what began since at[begin]; sets lost[WAY], of which WAY.lost has a line each: when it began and
# ended
count_lost() {
    local name
    declare -gA lost=()
    for name in "${KINDS[@]}"; do grep " $name-" "$work/kinds.out" >"$work/$name.out" || :; done
    judged told kept
    # At a rate of new connections that is too much for the machine, kube-apiserver itself ends some: no proxy has a part in it.
    judged slow new "$work"/{,cp-*/}node/{var/log/pods/*_kube-apiserver-*/kube-apiserver/*,run/berth-bridge/kube-apiserver}.log
    heading "$(printf '  %-34s %8s %6s %8s %9s  %s' "way" "answered" "lost" "lost for" "longest" "lost how")"
    for name in "${WAYS[@]%% *}" "${LOOPS[@]}" "${KINDS[@]}"; do
        awk -v from="${at[begin]}" '$1 >= from && $3 == "lost" { printf "%.0f %.0f\n", $1, $1 + $4 }' "$work/$name.out" >"$work/$name.lost"
        row "${WORDS[$name]}" "$(figures "$name")"
        [[ $name != @(new|kept) ]] || {
            grep '/write ' "$work/$name.out" >"$work/$name-writes.out" || :
            row "  writes among them" "$(figures "$name-writes")"
        }
    done
    heading "$(printf '  %-34s %8s %6s %9s' "stream" "ended" "failed" "away for")"
    for name in "${STREAMS[@]}"; do
        began_in_vain "$name" | cut -d' ' -f1,3 >"$work/$name.lost"
        row "${WORDS[$name]}" "$(away "$name")"
    done
    for name in kept watch informer quiet; do
        row "${WORDS[$name]}" "$(awk -v from="${at[begin]}" '
            $1 >= from && $3 == "ended" { n[$5]++ }
            $1 >= from && $3 == "told" { answers++ }
            END {
                printf "%8d ended: %d told by the apiserver, %d cut", n["told,"] + n["cut,"], n["told,"], n["cut,"]
                if (answers) printf "; told by an answer 503 or 429: %d", answers
            }' "$work/$name.out")"
    done
    row "slow, ended by kube-apiserver" "$(grep -c ' slow ' "$work/new.out")"
    # They are read back at the end.
    row "acknowledged writes of clients" "$(grep -c '/write ok ' "$work/kinds.out" || :)"
    expect "acknowledged writes that are gone" "$(grep -E 'objects (are not there|could not be listed)' "$work/kinds.log" || :)" == ""
    # What a watch missed is lost by whoever lost it, at no time that could be known.
    awk '$3 == "flawed" { for (n = $5 + $7; n; n--) print 0, 0 }' "$work/kinds.out" >"$work/events.lost"
    row "${WORDS[events]}" "$(awk '$3 == "whole" || $3 == "flawed" { n++; whole += $3 == "whole"; lists += $9 }
        END { printf "%8d of %d whole, %d lists again", whole, n, lists }' "$work/kinds.out")"
    for name in "${!WORDS[@]}"; do lost[$name]=$(wc -l <"$work/$name.lost"); done
}

# judged HOW NAME [LOG...]: its lines are replaced by those of the judge
judged() {
    local how=$1 name=$2 log logs=()
    shift 2
    for log; do [[ ! -e $log ]] || logs+=("$log"); done
    "$TLS_LOAD" judge "$how" "$work/$name.out" "${logs[@]}" >"$work/$name.judged"
    mv "$work/$name.judged" "$work/$name.out"
}

# figures WAY: as the heading says
figures() { "$TLS_LOAD" judge kinds "$work/$1.out" "${at[begin]}"; }

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
