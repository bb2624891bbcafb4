# shellcheck shell=bash
# Part of scripts/cluster.sh: what must stay as it is, what may be lost, and what it took.

# What must stay as it is, or not: leaders, the node's condition, certificates; and what was used.
before() {
    local name
    leaders >"$work/leaders.before"
    node_condition >"$work/node.before"
    certificates >"$work/certificates.before"
    watch_memory &
    pid[memory]=$!
    for name in "${excuses[@]}"; do
        watch_away "$name" &
        pid[away-$name]=$!
    done
}
after() {
    local name transitions
    leaders >"$work/leaders.after"
    node_condition >"$work/node.after"
    heading "the cluster"
    while read -r name transitions; do
        elections[$name]=$((transitions - $(awk -v name="$name" '$1 == name { print $2 }' "$work/leaders.before")))
        row "elections of $name" "${elections[$name]}"
    done <"$work/leaders.after"
    row "a leader's longest time to renew" "$(longest_between election)"
    for name in "${excuses[@]}"; do row "$name was away" "$(away_for "$name")"; done
    row "the node was not ready" "$(cmp -s "$work/node.before" "$work/node.after" && echo never || echo "until $(<"$work/node.after")")"
    row "new certificates" "$(renewed)"
    row "memory in use, most" "$(($(sort -n "$work/memory" | tail -n 1) / 1048576)) MiB"
}
declare -gA elections=()

# What the operator stops that no kube-apiserver can do without: nothing that is lost while it is away is the bridge's.
excuses=() replacements=1
# Who says that it is there: port and path; and for how long it does so when it serves no more, in microseconds: etcd, told to stop, listens and
# is ready for as long as a request may take, 5 s and twice its election timeout.
readonly -A ASKED=([etcd]="2381 /readyz" [kubelet]="10248 /healthz") LATE=([etcd]=7000000 [kubelet]=0)

judge() {
    local name sum=0
    if [[ $bridge ]] && declare -F "${scenario//-/_}_judges" >/dev/null; then
        "${scenario//-/_}_judges"
        return
    fi
    for name in "${!lost[@]}"; do
        sum=$((sum + lost[$name]))
        [[ -z $bridge ]] || expect "lost: ${WORDS[$name]}" "$(unexcused "$name")" -eq 0
    done
    if [[ $bridge ]]; then
        ((!${#failures[@]})) || show_logs operator.log
        # One whose etcd member is away cannot renew its Lease: after 40 s the controllers of other nodes say so.
        ((nodes > 1)) || expect "the node was ready all the time" "$(<"$work/node.after")" == "$(<"$work/node.before")"
        [[ " ${excuses[*]} " != *" etcd "* ]] || return 0
        # client-go's leader gives up after 10 s.
        expect "a leader's longest time to renew" "$(longest_between election | cut -d. -f1)" -lt 10
        # The leader's node is one of those whose controllers are replaced, once or more.
        for name in "${!elections[@]}"; do expect "elections of $name" "${elections[$name]}" -le "$((nodes * replacements))"; done
    else
        expect "what the control lost, without a bridge" "$sum" "-$loses" 0
    fi
}

# watch_away NAME: a line for each time without an answer: the last one before, the first one after
watch_away() {
    local gone='' from to interval=0.05
    # Each look costs a process.
    ((nodes == 1)) || interval=0.2
    now from
    while [[ ! -e $work/over ]]; do
        now to
        if is_there "$1"; then
            [[ -z $gone ]] || {
                now to
                echo "[$((from - LATE[$1])), $to]"
            }
            gone='' from=$to
        else
            gone=yes
        fi
        pause $interval
    done >"$work/$1.away"
}

# is_there NAME
is_there() (
    read -r port path <<<"${ASKED[$1]}"
    exec 3<>"/dev/tcp/127.0.0.1/$port" && printf 'GET %s HTTP/1.0\r\n\r\n' "$path" >&3 && read -rt 2 -u 3 line && [[ $line == *' 200 '* ]]
) 2>/dev/null

# unexcused WAY: how many of its lost ones no absence of one of the excuses explains
unexcused() {
    for name in "${excuses[@]}"; do cat "$work/$name.away"; done >"$work/excused"
    by_jq 'unexcused($away)' "$work/$1.lost" --slurpfile away "$work/excused"
}

# away_for NAME: and what was lost meanwhile, and until when
away_for() {
    local name
    for name in "${!WORDS[@]}"; do cat "$work/$name.lost"; done >"$work/lost"
    by_jq 'away($lost)' "$work/$1.away" --slurpfile lost "$work/lost"
}

# How often each Lease got another holder.
leaders() {
    kubectl get leases --namespace kube-system -o json |
        jq -r '.items[] | select(.metadata.name | test("^kube-(controller-manager|scheduler)$")) | "\(.metadata.name) \(.spec.leaseTransitions)"'
}

# Since when it is ready: another time after it was not.
node_condition() { kubectl get node $NODE -o json | jq -r '.status.conditions[] | select(.type == "Ready") | .lastTransitionTime'; }

# Lines "FILE DATE SERIAL"
certificates() {
    local file
    find /etc/kubernetes/pki -name '*.crt' | sort | while read -r file; do
        echo "${file#/etc/kubernetes/pki/} $(openssl x509 -in "$file" -noout -startdate -serial | xargs)"
    done
}

# Those that are others than before.
renewed() { comm -13 "$work/certificates.before" <(certificates) | cut -d' ' -f1 | xargs | sed 's/^$/none/'; }

longest_between() { by_jq "silence(${at[begin]}; ${at[end]}) | \"\(seconds) s\"" "$work/$1.out"; }

# By the node's processes, bytes, each second; without cached files.
watch_memory() {
    local cgroup=/sys/fs/cgroup
    [[ ! -e $cgroup/memory ]] || cgroup+=/memory
    while [[ ! -e $work/over ]]; do
        awk '$1 == "total_rss" || $1 == "anon" { used += (NR == FNR ? $2 : -$2) } END { printf "%.0f\n", used }' $cgroup/{,test/}memory.stat
        pause 1
    done >"$work/memory"
}
