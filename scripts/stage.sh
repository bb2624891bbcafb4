# shellcheck shell=bash disable=SC2034,SC2086,SC2154
# Part of the scripts that start kube-apiservers: addresses, processes, waiting, the load, and the report; then one node in network
# namespaces, with certificates, etcd, and kube-apiservers behind berth as pods have them.

. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

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

# stop NAME SECONDS [SIGNAL]: ends it, and waits for that and its exit status
stop() {
    unset "needed[$1]"
    kill -"${3:-TERM}" "${pid[$1]}" 2>/dev/null || :
    await "$2" "$1 to end" has_ended "$1"
    take_exit "$1"
}

kill_now() { stop "$1" 5 KILL; ((exits[$1] == 137)) || fail "$1 had ended before it was killed" "$1.log"; }

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

# by_jq FILTER FILE…: by scripts/judge.jq, of lines of tls-load, or of spans
by_jq() { jq -nRrc -L "$root/scripts" "include \"judge\"; lines | $1" "${@:2}"; }

# window FROM TO [LOAD]: of the connections that began in it: number, lost, longest in microseconds
window() { by_jq "window($1; $2)" "$work/${3:-load}.out"; }

# pace: new connections a second
pace() { by_jq pace "$work/load.out"; }

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

# What shims are given for the cluster's API.
declare -ga cluster=()
# terminationGracePeriodSeconds: from SIGTERM to all of a pod's containers to SIGKILL for what is left, which no test expects.
readonly GRACE=30

set_stage() {
    work=$(mktemp -d -t berth-e2e.XXXXXX)
    trap clear_stage EXIT
    watch_over $LIMIT

    make_namespaces
    make_certificates
    start_etcd etcd "$node" "$work/etcd"
}

# start_etcd NAME NAMESPACE DIRECTORY
start_etcd() {
    start_needed "$1" "$2" "$ETCD" --name e2e --data-dir "$3" --unsafe-no-fsync --log-level warn --listen-peer-urls http://127.0.0.1:0 \
        --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379
}

# The node, a client, and a veth between them.
make_namespaces() {
    local id=berth-e2e-$$
    node=$id-node client=$id-client
    ip netns add "$node"
    ip netns add "$client"
    ip -n "$node" link add name host type veth peer name client netns "$client"
    ip -n "$node" link set lo up
    ip -n "$client" link set lo up
    ip -n "$node" addr add $HOST_IP/24 dev host
    ip -n "$client" addr add $CLIENT_IP/24 dev client
    ip -n "$client" addr add $FAR_CLIENT_IP/32 dev client
    ip -n "$node" link set host up
    ip -n "$client" link set client up
    ip -n "$node" route add $FAR_CLIENT_IP/32 dev host
}

make_certificates() {
    (
        cd "$work"
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2 -subj /CN=e2e-ca \
            -keyout ca.key -out ca.crt
        certificate server /CN=kube-apiserver serverAuth "DNS:kubernetes,IP:$HOST_IP${SERVICE_IP:+,IP:$SERVICE_IP}${OTHER_IPS:+,IP:${OTHER_IPS// /,IP:}}"
        certificate admin /O=system:masters/CN=admin clientAuth DNS:admin
        openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out sa.key
        openssl pkey -in sa.key -pubout -out sa.pub
    ) 2>"$work/openssl.log" || {
        cat "$work/openssl.log" >&2
        exit 1
    }
    kubectl_options=(
        --server "https://$HOST_IP:$PORT" --tls-server-name kubernetes --cache-dir "$work/cache"
        --certificate-authority "$work/ca.crt" --client-certificate "$work/admin.crt" --client-key "$work/admin.key"
        --request-timeout 15s
    )
    export KUBERC=off
}

# certificate NAME SUBJECT USAGE NAMES
certificate() {
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj "$2" -keyout "$1.key" -out "$1.csr"
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out "$1.crt" \
        -extfile <(printf 'extendedKeyUsage=%s\nsubjectAltName=%s\n' "$3" "$4")
}

# start_pod INSTANCE: `berth serve`, which has the instance's name here, and `berth exec`, as INSTANCE-api
start_pod() {
    local instance=$1 command
    start_shim "$instance"
    start_needed "$instance-api" "$node" "$BERTH" exec "${place[@]}" -- "${command[@]}"
}

# start_shim INSTANCE: `berth serve`
start_shim() {
    apiserver_of "$1"
    start_needed "$1" "$node" "$BERTH" serve "${place[@]}" "${shim[@]}"
}

# apiserver_of INSTANCE: sets what is common to all ways to start it
apiserver_of() {
    place=(--listen "$HOST_IP:$PORT" --instance "$1" --run-dir "$work/run")
    shim=(--probe-ca "$work/ca.crt" --log-connections "${cluster[@]}")
    command=(
        "$KUBE_APISERVER" --etcd-servers=http://127.0.0.1:2379 --service-cluster-ip-range=10.96.0.0/24
        --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$work/sa.pub"
        --service-account-signing-key-file="$work/sa.key" --authorization-mode=RBAC
        --client-ca-file="$work/ca.crt" --tls-cert-file="$work/server.crt" --tls-private-key-file="$work/server.key"
        --audit-policy-file="$root/scripts/audit.yaml" --audit-log-path="$work/audit-{instance}.json"
        --shutdown-delay-duration="${DELAY[${1%%[0-9]*}]:-0}s" --shutdown-watch-termination-grace-period=10s
    )
}

kubectl() { ip netns exec "$client" "$KUBECTL" "${kubectl_options[@]}" "$@"; }

# kubeconfig USER SERVER: with the certificate of that name
kubeconfig() {
    jq -n --arg ca "$work/ca.crt" --arg server "$2" --arg certificate "$work/$1.crt" --arg key "$work/$1.key" '{
        apiVersion: "v1", kind: "Config", "current-context": "c", contexts: [{name: "c", context: {cluster: "c", user: "u"}}],
        clusters: [{name: "c", cluster: {server: $server, "certificate-authority": $ca, "tls-server-name": "kubernetes"}}],
        users: [{name: "u", user: {"client-certificate": $certificate, "client-key": $key}}]}'
}

# stop_instance INSTANCE: as a kubelet ends a pod: SIGTERM to all its processes, first to the apiserver, the worse order for its shim
stop_instance() {
    local name parts=("$1" ${pid[$1-api]:+"$1-api"})
    for name in "${parts[@]}"; do unset "needed[$name]"; done
    kill -TERM ${pid[$1-api]:-} "${pid[$1]}" 2>/dev/null || :
    for name in "${parts[@]}"; do
        await $GRACE "$name to end" has_ended "$name"
        now "at[$name-ended]"
        take_exit "$name"
    done
}

# Ends what was started, by its process ID.
clear_stage() {
    local status=$?
    trap - EXIT ERR
    trap '' INT TERM
    ((!${#failures[@]})) || keep=true
    kill -KILL "${pid[@]}" 2>/dev/null || :
    wait "${pid[@]}" 2>/dev/null || :
    ip netns del "$node" 2>/dev/null || :
    ip netns del "$client" 2>/dev/null || :
    rm -rf -- "$work/etcd" "$work/never"
    if $keep; then say "logs: $work"; else rm -rf -- "$work"; fi
    exit "$status"
}

# served_by INSTANCE: the load's requests that it has answered
served_by() { grep -c 'ResponseComplete.*"tls-load/' "$work/audit-$1.json" || :; }
# both_served INSTANCE NUMBER INSTANCE NUMBER
both_served() { (($(served_by "$1") >= $2 && $(served_by "$3") >= $4)); }

service_has_addresses() {
    kubectl get --raw /apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes | jq -e '[.endpoints[]?.addresses[]] != []'
}

# own_address INSTANCE: the one in its record
own_address() {
    "$BERTH" status --run-dir "$work/run" --json |
        jq -r --arg id "$1" '.instances[] | select(.instance == $id) | .record.address | split(":")[0]'
}
