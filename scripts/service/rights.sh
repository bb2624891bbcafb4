# shellcheck shell=bash
# Part of scripts/service.sh: credentials that are none, and shims each of which lacks one right. All of them serve on.

# What fails without a right, as berth calls it, by what `kubectl auth can-i` calls the right. One that is missing here is a right
# that is not needed.
readonly -A REQUESTS=(
    [get services]=read_service [list endpointslices]=watch_slice [watch endpointslices]=watch_slice
    [create endpointslices]=apply_slice [patch endpointslices]=apply_slice [delete endpointslices]=delete_slice
    [list leases]=list_leases [create leases]=apply_lease [patch leases]=apply_lease [delete leases]=delete_lease
    [create serviceaccounts/token]=renew_token
)

# Where each answers for its metrics.
declare -gA admins=()

# What is wrong with them, by the name of the shim that has them: it serves without, and tries again.
readonly -A BAD=([missing]="a kubeconfig that is not there" [empty]="a kubeconfig without a context" [operators]="an administrator's kubeconfig")

credentials_that_are_none() {
    local name
    say "kubeconfigs that are none"
    heading "credentials that are none"
    backend=$(own_address "$instance")
    mkdir -p "$work/grants/missing" "$work/grants/empty" "$work/grants/operators"
    echo "apiVersion: v1" >"$work/grants/empty/kubeconfig"
    cp "$admin" "$work/grants/operators/kubeconfig"
    for name in "${!BAD[@]}"; do start_limited "$name"; done
    for name in "${!BAD[@]}"; do
        await 30 "$name to serve" has_joined "$name"
        await 15 "$name to log what is wrong" said "$name" ""
        check_limited "${BAD[$name]}" "$name" list_leases credentials
        stop "$name" 20
    done
}

# Shims that have all but one of the rights that `berth grant` gave.
rights_that_are_missing() {
    local right name missing=() left figures
    say "each right is missing once"
    heading "one right is missing"
    readarray -t rights < <(granted | jq -r '.[].rules[] as $rule | $rule.verbs[] | "\(.) \($rule.resources[0])"')
    expect "the rights that are granted" "$(printf '%s\n' "${rights[@]}" | sort)" == "$(printf '%s\n' "${!REQUESTS[@]}" | sort)"
    now 'at[rights]'
    make_accounts
    backend=$(own_address "$instance")
    for right in "${rights[@]}"; do
        name=$(name_of "$right")
        missing+=("$name")
        # Only where the Service names no other address there is a slice to make.
        [[ $right != @(create|patch)\ endpointslices ]] || addresses[$name]=$HOST_IP
        start_limited "$name"
    done
    for name in expired due; do start_limited "$name"; done
    for right in "${rights[@]}"; do
        name=$(name_of "$right")
        await 30 "$name to serve" has_joined "$name"
        # These are asked for when a shim leaves.
        if [[ $right == delete\ * ]]; then
            await 15 "$name to renew its Lease" renewed_once "$name"
            "$BERTH" drain --run-dir "$work/run" --instance "$name" >/dev/null 2>"$work/drain.log" || fail "berth drain" drain.log
        fi
    done
    for right in "${rights[@]}"; do
        name=$(name_of "$right")
        await 15 "$name to log which right it lacks" said "$name" "${REQUESTS[$right]}"
        check_limited "$right" "$name" "${REQUESTS[$right]}" forbidden
    done
    await 15 "the one with the expired token to log that" said expired ""
    check_limited "a token that has expired" expired list_leases unauthorized
    await 15 "the token that was due to be renewed" grep -q 'renewed the service account' "$work/due.log"
    expect "the token that was due is another one" "$(cmp -s "$work/due.token" "$work/grants/due/token" || echo new)" == new due.log

    say "a right is given back"
    limited_role no-patch-leases berth-system - | kubectl replace -f - >/dev/null
    await 20 "it to be noticed" grep -q 'takes this request again.*apply_lease' "$work/no-patch-leases.log"
    row "a right that is given back" "$(grep -c 'takes this request again' "$work/no-patch-leases.log") line"
    for name in "${missing[@]}" expired due; do
        unset "needed[$name]"
        kill -TERM "${pid[$name]}"
    done
    for name in "${missing[@]}" expired due; do
        await 20 "$name to end" has_ended "$name"
        take_exit "$name"
        expect "exit status of $name" "${exits[$name]}" == 0 "$name.log"
    done
    # A shim that may not remove its Lease leaves it: only an administrator can end it before it expires.
    left=$(kubectl get leases --namespace berth-system --output name | grep -v "/$NODE\." | xargs)
    kubectl delete --namespace berth-system $left >/dev/null
    now 'at[rights-over]'
    figures=$(window "${at[rights]}" "${at[rights-over]}")
    row "connections to $SERVICE_IP meanwhile" "$(words "$figures")"
    expect "connections lost while rights were missing" "$(lost "$figures")" -eq 0 load.log
}

name_of() {
    local name=no-${1/ /-}
    echo "${name/serviceaccounts\//}"
}

# granted: the Roles of the node as a list
granted() {
    {
        kubectl get role berth --namespace default --output json
        kubectl get role berth-$NODE --namespace berth-system --output json
    } | jq -s 'map({metadata: {name: .metadata.name, namespace: .metadata.namespace}, rules})'
}

# make_accounts: service accounts that have what the node's has, but for one verb each, and a token for each
make_accounts() {
    local right name uids uid now=${EPOCHSECONDS:-0} from to
    {
        for right in "${rights[@]}"; do objects_of "$(name_of "$right")" "${right% *}" "${right#* }"; done
        for name in expired due; do objects_of $name - -; done
    } | kubectl create -f - >"$work/accounts.log"
    uids=$(kubectl get serviceaccounts --namespace berth-system --output json | jq '.items | map({key: .metadata.name, value: .metadata.uid}) | from_entries')
    for name in $(for right in "${rights[@]}"; do name_of "$right"; done) expired due; do
        # A token is to be renewed after a third of its life.
        from=$((now - 60)) to=$((now + 86400))
        case $name in
            expired) from=$((now - 7200)) to=$((now - 3600)) ;;
            due | no-create-token) from=$((now - 7200)) to=$((now + 7200)) ;;
        esac
        uid=$(jq -r --arg name "berth-$name" '.[$name]' <<<"$uids")
        mkdir -p "$work/grants/$name"
        cp "$work/grants/$NODE/kubeconfig" "$work/grants/$name/kubeconfig"
        token "berth-$name" "$uid" "$from" "$to" >"$work/grants/$name/token"
    done
    cp "$work/grants/due/token" "$work/due.token"
}

# objects_of NAME VERB RESOURCE
objects_of() {
    granted_roles=${granted_roles:-$(granted)}
    jq --arg name "$1" --arg verb "$2" --arg resource "$3" --arg node $NODE '
        def subject: [{kind: "ServiceAccount", name: "berth-\($name)", namespace: "berth-system"}];
        {apiVersion: "v1", kind: "ServiceAccount", metadata: {name: "berth-\($name)", namespace: "berth-system"}},
        (.[] | .metadata.namespace as $namespace
            | {apiVersion: "rbac.authorization.k8s.io/v1", kind: "Role", metadata: {name: "limited-\($name)", $namespace},
               rules: [.rules[]
                   | if .resources == [$resource] then .verbs -= [$verb] else . end | select(.verbs != [])
                   | if .resourceNames then .resourceNames |= map(gsub("berth-\($node)"; "berth-\($name)")) else . end]},
              {apiVersion: "rbac.authorization.k8s.io/v1", kind: "RoleBinding", metadata: {name: "limited-\($name)", $namespace},
               roleRef: {apiGroup: "rbac.authorization.k8s.io", kind: "Role", name: "limited-\($name)"}, subjects: subject})
    ' <<<"$granted_roles"
}

# limited_role NAME NAMESPACE VERB: its Role without this verb
limited_role() {
    objects_of "$1" "$3" - | jq --arg namespace "$2" 'select(.kind == "Role" and .metadata.namespace == $namespace)'
}

# token ACCOUNT UID FROM TO: what kube-apiserver would have given at FROM, in seconds since 1970
token() {
    local said
    said=$(jq -cn '{alg: "RS256"}' | base64url).$(jq -cn --arg account "$1" --arg uid "$2" --argjson from "$3" --argjson to "$4" '
        "https://kubernetes.default.svc" as $issuer | {iss: $issuer, aud: [$issuer], iat: $from, nbf: $from, exp: $to,
            sub: "system:serviceaccount:berth-system:\($account)",
            "kubernetes.io": {namespace: "berth-system", serviceaccount: {name: $account, $uid}}}' | base64url)
    printf '%s.%s' "$said" "$(printf %s "$said" | openssl dgst -sha256 -sign "$work/sa.key" | base64url)"
}

base64url() { base64 -w 0 | tr '+/' '-_' | tr -d '='; }

# start_limited NAME
start_limited() {
    local name=$1
    give_address "$name"
    admins[$name]=127.0.0.1:$((9100 + ${#admins[@]}))
    start_needed "$name" "$node" "$BERTH" serve --listen "${addresses[$name]}:$PORT" --instance "$name" --run-dir "$work/run" \
        --admin "${admins[$name]}" \
        --backend "$backend:$PORT" --probe-ca "$work/ca.crt" --cluster "$work/grants/$name/kubeconfig" --node-name "$name"
}

shim_status() {
    "$BERTH" status --run-dir "$work/run" --json | jq --arg name "$1" '.instances[] | select(.instance == $name) | .shim'
}
has_joined() { [[ $(shim_status "$1" | jq -r .state) == joined ]]; }
renewed_once() { [[ $(shim_status "$1" | jq -r .cluster.lease_renewed) == 2* ]]; }
said() { grep -q "WARN.*help: .*request=\"$2" "$work/$1.log"; }

# check_limited RIGHT NAME REQUEST RESULT: one line in the log, the metric, the status, and it serves
check_limited() {
    local right=$1 name=$2 request=$3 result=$4 status lines counted answer
    status=$(shim_status "$name")
    lines=$(grep -c 'WARN.*help: ' "$work/$name.log" || :)
    counted=$(ip netns exec "$node" "$KUBECTL" --server "http://${admins[$name]}" get --raw /metrics |
        sed -n "s/^berth_cluster_requests_total{.*shim=\"$name\",request=\"$request\",result=\"$result\"} //p")
    row "$right" "$request: $result, $lines line in the log, $counted in the metric"
    expect "lines in the log, $right" "$lines" == 1 "$name.log"
    expect "berth_cluster_requests_total, $right" "${counted:-0}" -ge 1 "$name.log"
    expect "problems in the status that are $request, $right" \
        "$(jq -r '.cluster.problems[]?' <<<"$status" | grep -c "^$request .*: .*help: ")" == 1 "$name.log"
    # Who was drained has left.
    if [[ $right != delete\ * ]]; then
        answer=$(kubectl get --raw /readyz --server "https://$(jq -r .berth <<<"$status")" 2>&1) || :
        expect "it serves, $right" "$answer" == ok "$name.log"
    fi
}
