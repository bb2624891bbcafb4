# shellcheck shell=bash
# Part of scripts/e2e.sh, scripts/service.sh, scripts/direct.sh and scripts/manifests.sh: binaries, namespaces, certificates, processes, and their removal.

# The Service's addresses and sockets of shims, each by its name. -g: this is read within a function.
declare -gA endpoints=() held=()
# What shims are given for the cluster's API.
declare -ga cluster=()
# More listen addresses, and more options of shims.
declare -ga besides=() direct=()
# terminationGracePeriodSeconds: from SIGTERM to all of a pod's containers to SIGKILL for what is left.
readonly GRACE=30
usual_logs=({a,b,c,d}{,-api}.log)

need_binaries() {
    need_kubernetes
    version=$(kubernetes_version "$KUBE_APISERVER")
    need_program BERTH berth debug
    need_clients
}

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

make_namespaces() {
    local id=berth-e2e-$$
    node=$id-node client=$id-client
    ip netns add "$node"
    link_client
}

make_certificates() {
    (
        cd "$work"
        openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2 -subj /CN=e2e-ca \
            -keyout ca.key -out ca.crt
        certificate server /CN=kube-apiserver serverAuth "DNS:kubernetes,IP:$HOST_IP${SERVICE_IP:+,IP:$SERVICE_IP}${OTHER_IPS:+,IP:${OTHER_IPS// /,IP:}}"
        certificate admin /O=system:masters/CN=admin clientAuth DNS:admin
        certificate direct /O=system:masters/CN=direct clientAuth DNS:direct
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

# start_run NAME INSTANCE FLAGS…: `berth run`
start_run() {
    local name=$1 instance=$2 command
    shift 2
    apiserver_of "$instance"
    start_needed "$name" "$node" "$BERTH" run "${place[@]}" "${shim[@]}" -- "${command[@]}" "$@"
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
    place=(--listen "$HOST_IP:$PORT" "${besides[@]}" --instance "$1" --run-dir "$work/run")
    shim=(--probe-ca "$work/ca.crt" --log-connections "${cluster[@]}" "${direct[@]}")
    command=(
        "$KUBE_APISERVER" --etcd-servers=http://127.0.0.1:2379 --service-cluster-ip-range=10.96.0.0/24
        --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$work/sa.pub"
        --service-account-signing-key-file="$work/sa.key" --authorization-mode=RBAC
        --client-ca-file="$work/ca.crt" --tls-cert-file="$work/server.crt" --tls-private-key-file="$work/server.key"
        --audit-policy-file="$root/scripts/e2e/audit.yaml" --audit-log-path="$work/audit-{instance}.json"
        --shutdown-delay-duration="${DELAY[$1]:-0}s" --shutdown-watch-termination-grace-period=10s
    )
}

kubectl() { ip netns exec "$client" "$KUBECTL" "${kubectl_options[@]}" "$@"; }

# stop_instance INSTANCE: as a kubelet ends a pod: SIGTERM to all its processes (first to the apiserver,
# the worse order for its shim), SIGKILL to those that are left after the grace period
stop_instance() {
    local name=$1 parts=("$1") part pids=() deadline=$((SECONDS + GRACE))
    [[ -z ${pid[$name-api]:-} ]] || parts=("$name-api" "$name")
    for part in "${parts[@]}"; do
        unset "needed[$part]"
        pids+=("${pid[$part]}")
    done
    kill -TERM "${pids[@]}" 2>/dev/null || :
    while ((${#parts[@]})); do
        pids=()
        for part in "${!parts[@]}"; do
            name=${parts[part]}
            if has_ended "$name"; then
                now "at[$name-ended]"
                take_exit "$name"
                unset "parts[part]"
            else
                pids+=("${pid[$name]}")
            fi
        done
        ((SECONDS < deadline || !${#pids[@]})) || kill -KILL "${pids[@]}" 2>/dev/null || :
        pause 0.02
    done
}

# Ends what was started, by its process ID: etcd last, for an apiserver does not end well without it.
clear_stage() {
    local status=$?
    trap - EXIT ERR
    trap '' INT TERM
    ((!${#failures[@]})) || keep=true
    touch "$work/over"
    signal_all TERM
    # A shim ends at once after a second signal, and its apiserver with it.
    all_end_within 1 || signal_all TERM
    all_end_within 5 || :
    if [[ -n ${pid[etcd]:-} ]]; then
        kill -TERM "${pid[etcd]}" 2>/dev/null || :
        all_end_within 3 etcd || :
    fi
    signal_all KILL
    ip netns del "$node" 2>/dev/null || :
    ip netns del "$client" 2>/dev/null || :
    rm -rf -- "$work/etcd" "$work/never"
    if $keep; then
        say "logs: $work"
    else
        rm -rf -- "$work"
    fi
    exit "$status"
}

# All but etcd.
signal_all() {
    local name
    for name in "${!pid[@]}"; do
        [[ $1 != KILL && $name == etcd ]] || kill "-$1" "${pid[$name]}" 2>/dev/null || :
    done
}

# all_end_within SECONDS [NAME…]: all but etcd if no name is given
all_end_within() {
    local deadline=$((SECONDS + $1)) name
    shift
    (($#)) || for name in "${!pid[@]}"; do
        [[ $name == etcd ]] || set -- "$@" "$name"
    done
    for name in "$@"; do
        until has_ended "$name"; do
            ((SECONDS <= deadline)) || return 1
            pause 0.02
        done
    done
}
