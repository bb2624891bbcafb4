# shellcheck shell=bash
# Part of scripts/cluster.sh: what an operator does, and what must hold.

# What the operator calls, whether that is berth and begins a bridge itself, whether it has to succeed, its exit status, and how much the
# control loses, compared with 0 as by test(1).
operator=() bridges_itself=${bridges_itself:-false} succeeds=true status=0 loses=gt
# The halves' names.
with="under berth bridge" without="without berth bridge"

# half SCENARIO: one new cluster, under berth bridge if there is one
half() {
    local scenario=$1
    start_cluster
    say "$scenario: the cluster is there after $SECONDS s"
    "${scenario//-/_}_begins"
    start_clients
    before
    now 'at[begin]'
    $bridges_itself || [[ -z $bridge ]] || say "$scenario: under berth bridge"
    usual_logs=(operator.log kubelet.log)
    if declare -F "${scenario}_operates" >/dev/null; then
        "${scenario}_operates"
    else
        say "$scenario: ${operator[*]}"
        on_the_node "${operator[@]}" >"$work/operator.log" 2>&1 || status=$?
    fi
    now 'at[back]'
    row "exit status of the operator's command" "$status, after $(seconds "${at[begin]}" "${at[back]}")"
    ! $succeeds || ((status == 0)) || fail "exit status of the operator's command" operator.log
    "${scenario//-/_}_ends"
    await 60 "the node to be ready" node_is_ready
    await_pods "${bridge:+60}"
    # What is left of the change comes to an end.
    pause 10
    end_clients
    count_lost
    after
    judge
    report "$scenario, $([[ $bridge ]] && echo "$with" || echo "$without"), $OLD and $NEW"
}

# on_the_node COMMAND…: as an operator would
on_the_node() (
    join_cgroup operator
    # berth has options of such names.
    unset "${!BERTH_@}"
    export KUBECONFIG=/etc/kubernetes/admin.conf
    # Short times: no watch needs the settled one's bookmarks, those that list again are counted.
    export BERTH_SETTLE=10s BERTH_READY_TIMEOUT=2m
    if [[ $bridge ]] && ! $bridges_itself; then "$bridge" bridge -- "$@"; else "$@"; fi
)

# by_script FUNCTION: the operator calls a script that is this function
by_script() { operator=(bash -euo pipefail -c "$(declare -f "$1") && $1"); }

# To the next minor version, as Kubernetes' documents have it.
upgrade_begins() {
    put_program kubeadm "$NEW"
    operator=(kubeadm upgrade apply "$NEW" --etcd-upgrade="${1:-false}" --yes --ignore-preflight-errors "$(ignored)")
}
upgrade_ends() {
    await 120 "kube-apiserver $NEW" serves "$NEW"
    expect_new_for_new
    expect "new certificates" "$(renewed)" == "apiserver-etcd-client.crt apiserver-kubelet-client.crt apiserver.crt ${1:+$1 }front-proxy-client.crt"
}

# No controller may be newer than the kube-apiserver that answers it.
expect_new_for_new() {
    local name
    for name in kube-controller-manager kube-scheduler; do
        await 60 "$name $NEW to be answered by kube-apiserver $NEW" answered "$name/$NEW" $AUDIT/audit.log
        [[ $bridge ]] || continue
        row "requests of $name $OLD to the temporary kube-apiserver" "$(cat $AUDIT/audit-bridge*.log | requests_of "$name/$OLD")"
        expect "requests of $name $NEW to the temporary kube-apiserver $OLD" "$(cat $AUDIT/audit-bridge*.log | requests_of "$name/$NEW")" -eq 0
    done
}
answered() { (($(requests_of "$1" <"$2"))); }
requests_of() { jq -c --arg of "$1 " 'select(.userAgent // "" | startswith($of))' | wc -l; }

# How long clients waited for etcd, each time that neither it nor the temporary one served.
etcd_pauses() { grep -o 'waited [0-9]* ms' "$work/${1:-operator.log}" | cut -d' ' -f2 | paste -sd, | sed 's/,/, /g; s/$/ ms/'; }

# The same with etcd: its image has another name in the newest version.
etcd_begins() {
    [[ $bridge ]] || excuses=(etcd)
    upgrade_begins true
}
etcd_ends() {
    [[ ! $bridge ]] || row "what needs etcd waited" "$(etcd_pauses)"
    upgrade_ends "etcd/healthcheck-client.crt etcd/peer.crt etcd/server.crt"
    expect "etcd's image" "$(sed -n 's/^ *image: //p' $manifests/etcd.yaml)" == "$(image_of etcd "$NEW")"
    await 60 "etcd to answer" is_there etcd
}

# The same with a patch that keeps kube-apiserver from starting. kubeadm waits, and puts back what was there.
bad_flag_begins() {
    succeeds=false
    put_program kubeadm "$NEW"
    mkdir "$work/node/patches"
    echo '[{"op": "add", "path": "/spec/containers/0/command/-", "value": "--no-such-flag"}]' >"$work/node/patches/kube-apiserver+json.json"
    # Its own 5 minutes are long.
    cat >"$work/node/upgrade.yaml" <<TEXT
apiVersion: kubeadm.k8s.io/v1beta4
kind: UpgradeConfiguration
apply:
  kubernetesVersion: $NEW
  etcdUpgrade: false
  forceUpgrade: true
  ignorePreflightErrors: [$(ignored)]
  patches: {directory: $work/node/patches}
timeouts: {upgradeManifests: 90s}
TEXT
    operator=(kubeadm upgrade apply --config "$work/node/upgrade.yaml")
}
bad_flag_ends() {
    if [[ $bridge ]]; then
        # kubeadm may have ended well, for the bridge answers it.
        expect "exit status when the node's own did not come back" "$status" -eq 75
        "$bridge" bridge restore >>"$work/operator.log" 2>&1 || fail "berth bridge restore" operator.log
    else
        expect "exit status of kubeadm upgrade apply" "$status" -ne 0
    fi
    await 120 "kube-apiserver $OLD again" serves "$OLD"
}

# The newest kubelet, put in place and restarted: kubeadm's next step after the control plane. Of another minor version it restarts
# each static pod. Meanwhile containerd is killed, too.
kubelet_begins() {
    excuses=(kubelet)
    [[ $bridge ]] || excuses+=(etcd)
    upgrade_before
    by_script new_kubelet
}
# Before the clients start.
upgrade_before() {
    upgrade_begins
    "${operator[@]}" >"$work/upgrade.log" 2>&1 || fail "kubeadm upgrade apply" upgrade.log
    await 120 "kube-apiserver $NEW" serves "$NEW"
    await_pods
}
# shellcheck disable=SC2317
new_kubelet() {
    systemctl stop kubelet
    killall -s SIGKILL containerd
    until ctr version >/dev/null 2>&1; do sleep 0.1; done
    install "$PROGRAMS/$NEW/kubelet" /usr/bin/kubelet
    systemctl daemon-reload
    systemctl start kubelet
}
kubelet_ends() {
    [[ ! $bridge ]] || row "what needs etcd waited" "$(etcd_pauses)"
    await 60 "kubelet $NEW" has_kubelet "$NEW"
}
has_kubelet() { [[ $(kubectl get node $NODE -o jsonpath='{.status.nodeInfo.kubeletVersion}') == "$1" ]]; }

# All certificates, and restarts of the programs that read theirs only at the start. etcd reads its own at each handshake.
certs_begins() { by_script new_certificates; }
# shellcheck disable=SC2317
new_certificates() {
    local name
    kubeadm certs renew all
    # By its name, as Kubernetes' guide for etcd has it (killall): the temporary one has another.
    pkill -SIGTERM kube-apiserver
    sleep 20
    mkdir /etc/kubernetes/away
    for name in kube-apiserver kube-controller-manager kube-scheduler; do
        mv "/etc/kubernetes/manifests/$name.yaml" /etc/kubernetes/away
        # The kubelet looks at its directory every 20 s.
        sleep 20
        mv "/etc/kubernetes/away/$name.yaml" /etc/kubernetes/manifests
    done
}
certs_ends() { await 120 "kube-apiserver with its new certificate" has_certificate; }
# has_certificate [VERSION]: that it serves with
has_certificate() { serves "${1:-$OLD}" && shows_certificate 127.0.0.1:$PORT apiserver.crt; }
# shows_certificate ADDRESS FILE: the one of this file, in a new handshake
shows_certificate() {
    [[ $(openssl s_client -connect "$1" </dev/null 2>/dev/null | openssl x509 -noout -serial) == "$(openssl x509 -in "/etc/kubernetes/pki/$2" -noout -serial)" ]]
}

# All certificates are valid for 12 minutes, and kubeadm renews them. Nothing is restarted, until those from before have expired: what still
# uses one of these then fails.
renew_begins() {
    loses=eq
    # The administrator's does not expire.
    cp /etc/kubernetes/admin.conf "$work/node/admin.conf"
    sed 's/^kubernetesVersion: .*/&\ncertificateValidityPeriod: 12m0s/' "$work/node/kubeadm.yaml" >"$work/node/short.yaml"
    kubeadm certs renew all --config "$work/node/short.yaml" >"$work/short.log" 2>&1 || fail "kubeadm certs renew all" short.log
    expiry=$(date -d "$(openssl x509 -in /etc/kubernetes/pki/apiserver.crt -noout -enddate | cut -d= -f2)" +%s)
    expect "seconds until the certificates expire" $((expiry - EPOCHSECONDS)) -le 720 short.log
    mv "$work/node/admin.conf" /etc/kubernetes/admin.conf
    # All three start with these, and kube-apiserver logs what it reads.
    sed -i -E 's/^    - --(allow-privileged|leader-elect)=true$/&\n    - --v=2/' $manifests/kube-*.yaml
    await 180 "the control plane with certificates that soon expire" are_restarted "${1:-$OLD}"
    await_pods
    instances=$(pgrep -x 'etcd|kube-apiserver')
    operator=(kubeadm certs renew all)
}
are_restarted() { (($(grep -lasE '^kube-(apiserver|controller-manager|scheduler).*--v=2' /proc/[0-9]*/cmdline | wc -l) == 3)) && serves "$1"; }
renew_ends() {
    local name connections
    await 90 "kube-apiserver with its new certificate" has_certificate "${1:-$OLD}"
    await 10 "etcd with its new certificate" shows_certificate "$HOST_IP:2379" etcd/server.crt
    await 10 "etcd with its new certificate for peers" shows_certificate "$HOST_IP:2380" etcd/peer.crt
    await 90 "kube-apiserver to read front-proxy-client.crt again" reads_again front-proxy-client.crt
    for name in controller-manager scheduler; do
        expect "kube-$name with its new certificate, not restarted" "$(is_known_by $name && echo yes)" == ""
    done
    expect "seconds until the certificates expire" $((expiry - EPOCHSECONDS)) -gt 0
    pause $((expiry > EPOCHSECONDS ? expiry - EPOCHSECONDS : 1))
    for name in controller-manager scheduler; do
        await 180 "kube-$name with its new certificate" is_known_by $name
        row "kube-$name had its new one" "$((EPOCHSECONDS - expiry)) s after the old one had expired"
    done
    expect "etcd and kube-apiserver" "$(pgrep -x 'etcd|kube-apiserver')" == "$instances"
    # Each resource has a connection to etcd of its own.
    connections=$(etcd_connections)
    kubectl create -f - >>"$work/kubectl.log" 2>&1 <<TEXT
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: probes.berth.example}
spec: {group: berth.example, scope: Cluster, names: {kind: Probe, plural: probes}, versions: [
  {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]}
TEXT
    await 60 "kube-apiserver with a new connection to etcd" kubectl get probes
    expect "connections to etcd" "$(etcd_connections)" -gt "$connections"
    expect "lines of kubectl logs" "$(kubectl logs --tail 1 tool | wc -l)" -eq 1
}
# reads_again FILE: in the log of this kube-apiserver, the first time is at its start
reads_again() { (($(cat /var/log/pods/kube-system_kube-apiserver-*/*/*.log | grep -c "Loaded a new cert/key pair.*$1") > 1)); }
etcd_connections() { ss -Htn state established 'dport = :2379' | wc -l; }
# is_known_by COMPONENT: its last audit event names the certificate that its kubeconfig has
is_known_by() {
    local file
    file=$(sed -n 's/^ *client-certificate-data: //p' "/etc/kubernetes/$1.conf" | base64 -d | openssl x509 -outform DER | sha256sum)
    [[ $(tail -n 5000 $AUDIT/audit.log | jq -r --arg user "system:kube-$1" 'select(.user.username == $user) |
        .user.extra["authentication.kubernetes.io/credential-id"][0]' | tail -n 1) == "X509SHA256=${file%% *}" ]]
}
# With the newest version.
renew_new_begins() {
    upgrade_before
    renew_begins "$NEW"
}
renew_new_ends() { renew_ends "$NEW"; }

# Another flag, written into the manifest. The command is back long before the kubelet sees it.
flag_begins() { by_script new_flag; }
# shellcheck disable=SC2317
new_flag() {
    sed 's/^    - --allow-privileged=true$/&\n    - --event-ttl=2h0m0s/' /etc/kubernetes/manifests/kube-apiserver.yaml >/etc/kubernetes/new.yaml
    mv /etc/kubernetes/new.yaml /etc/kubernetes/manifests/kube-apiserver.yaml
}
flag_ends() { await 120 "kube-apiserver with its new flag" has_flag; }
has_flag() { grep -qas '^kube-apiserver.*--event-ttl=2h0m0s' /proc/[0-9]*/cmdline && serves "$OLD"; }

# The same with a typo, for which the kubelet is restarted before the typo is corrected. A kubelet that has not read the API since its start
# removes no pod, and the corrected kube-apiserver has to wait for the removal of the other one (kubernetes#140257).
wedged_begins() {
    excuses=(kubelet)
    # So that the kubelet's log says what it refuses.
    sed -i 's/"$/ --v=2"/' /var/lib/kubelet/kubeadm-flags.env
    by_script corrected_typo
    operator+=("$work/kubelet.log")
}
# corrected_typo, with the kubelet's log as $0
# shellcheck disable=SC2317
corrected_typo() {
    local lines manifest=/etc/kubernetes/manifests/kube-apiserver.yaml new=/etc/kubernetes/new.yaml
    await_crashes() {
        lines=$(wc -l <"$0")
        until sed "1,${lines}d" "$0" | grep 'StartContainer.*kube-apiserver' >/dev/null; do sleep 0.5; done
    }
    sed 's/^    - --allow-privileged=true$/&\n    - --event-tll=2h0m0s/' $manifest >$new
    mv $new $manifest
    await_crashes
    systemctl restart kubelet
    await_crashes
    sed 's/event-tll/event-ttl/' $manifest >$new
    mv $new $manifest
}
wedged_ends() {
    local refusals
    [[ $bridge ]] || pause 180
    refusals=$(grep -c "skipping delete because sources aren't ready yet" "$work/kubelet.log" || :)
    row "the kubelet refused to remove a pod" "$refusals times"
    [[ $bridge ]] || {
        expect "refusals of the kubelet to remove a pod" "$refusals" -gt 0 kubelet.log
        expect "kube-apiservers, 180 s after the typo was corrected" "$(pgrep -c -x kube-apiserver)" -eq 0 kubelet.log
        # A kubelet that only knows the corrected one.
        systemctl restart kubelet
    }
    flag_ends
}

# Cluster API's own requests to the handler of examples/cluster-api, which runs berth-upgrade here: control plane, etcd and kubelet. As its
# controller does, it has the new version in kubeadm's configuration before anything is upgraded. In the control no bridge is behind `berth`.
cluster_api_begins() {
    local example=$root/examples/cluster-api sbin=/usr/local/sbin
    # kubeadm replaces the controllers, and the new kubelet restarts them.
    excuses=(kubelet) replacements=2
    [[ $bridge ]] || excuses+=(etcd)
    mkdir -p $sbin /usr/local/bin
    sed "s/ apply .* --yes/& --ignore-preflight-errors $(ignored)/" "$example/berth-upgrade.sh" >$sbin/berth-upgrade
    { declare -p PROGRAMS && declare -f put_program && echo "put_program \"\$@\""; } | sed '1i #!/bin/bash -e' >$sbin/install-kubernetes
    cat >/usr/local/bin/berth <<TEXT
#!/bin/bash -e
export BERTH_SETTLE=10s BERTH_READY_TIMEOUT=2m
[[ -z "$bridge" ]] || exec "$bridge" "\$@"
[[ \$* != "bridge status" ]] || { echo "no bridge is on: the control" && exit 69; }
[[ \$2 != --dry-run ]] || exit 0
shift 2
exec "\$@"
TEXT
    chmod 755 $sbin/{berth-upgrade,install-kubernetes} /usr/local/bin/berth
    kubectl --namespace kube-system get configmap kubeadm-config -o json | sed "s/kubernetesVersion: $OLD/kubernetesVersion: $NEW/" |
        kubectl replace -f - >>"$work/kubectl.log"
    bridges_itself=true
    with="by Cluster API's hooks" without="by Cluster API's hooks, without berth"
    operator=(env CAPI_RUN=$sbin/berth-upgrade CAPI_FROM="$OLD" CAPI_TO="$NEW" "$CAPI_TEST" -test.run '^TestNode$' -test.v -test.timeout 25m)
}
cluster_api_ends() {
    local log=/var/lib/berth-upgrade/log
    cp $log "$work/berth-upgrade.log"
    [[ ! $bridge ]] || row "what needs etcd waited" "$(etcd_pauses berth-upgrade.log)"
    expect "upgrades that began" "$(grep -c '^install kubeadm' $log)" -eq 1 berth-upgrade.log
    await 60 "kube-apiserver $NEW" serves "$NEW"
    await 60 "kubelet $NEW" has_kubelet "$NEW"
    expect "etcd's image" "$(sed -n 's/^ *image: //p' $manifests/etcd.yaml)" == "$(image_of etcd "$NEW")"
}

# Behind berth, by berth itself.
inject_begins() {
    bridges_itself=true
    operator=("$BERTH" inject --write ${bridge:+--bridge} --image "$IMAGE" "${LISTEN[@]}")
}
inject_ends() {
    await 120 "kube-apiserver behind berth" is_behind_berth
    await 60 "kube-apiserver $OLD" serves "$OLD"
}
# Every address that clients dial; a shim listens only on given ones.
LISTEN=(--listen "$HOST_IP:$PORT" --listen "127.0.0.1:$PORT")
((nodes > 1)) || LISTEN+=(--listen "$VIP:$PORT" --listen "[$HOST_IP6]:$PORT")
is_behind_berth() { ss -Hltnp "sport = :$PORT" | grep -F "$HOST_IP:$PORT" | grep -qF '"berth"'; }

# put_behind OPTION…: the node's kube-apiserver, by a gap. In a copy first, so that its shim has its credentials when it starts.
put_behind() {
    local manifest=/etc/kubernetes/kube-apiserver.yaml
    cp $manifests/kube-apiserver.yaml $manifest
    "$BERTH" inject $manifest --write --image "$IMAGE" "${LISTEN[@]}" "$@" >"$work/inject.log" 2>&1 || fail "berth inject" inject.log
    [[ $* != *--service* ]] ||
        "$BERTH" grant --manifest $manifest --out /etc/kubernetes/berth-cluster/kubeconfig >>"$work/inject.log" 2>&1 ||
        fail "berth grant" inject.log
    mv $manifest $manifests
    await 120 "kube-apiserver behind berth" is_behind_berth
    await 60 "kube-apiserver $OLD" serves "$OLD"
    await_pods
}

# A node that is behind berth: first to a version without an API that clients use, which the judge sends back, then to one that is good.
# The control writes the manifest itself.
judged_begins() {
    local manifest=$work/node/next.yaml
    put_behind --service
    sed "s/\(kube-apiserver:\)$OLD/\1$NEW/" $manifests/kube-apiserver.yaml >"$manifest"
    sed 's/^\( *- \)--allow-privileged=true$/&\n\1--runtime-config=autoscaling\/v2=false/' "$manifest" >"$work/node/lacks-api.yaml"
    grep -q autoscaling "$work/node/lacks-api.yaml" || fail "a manifest without an API"
    instance=$(pgrep -x kube-apiserver)
    bridges_itself=true
    with="berth upgrade --judge" without="the manifest replaced"
}
judged_operates() {
    local judge=(--judge --canary-time 15s)
    [[ $bridge ]] || { cp "$work/node/next.yaml" $manifests/kube-apiserver.yaml; return; }
    say "judged: berth upgrade --judge, to a version that lacks an API, then to a good one"
    on_the_node "$BERTH" upgrade "$work/node/lacks-api.yaml" "${judge[@]}" >"$work/lacks-api.log" 2>&1 || status=$?
    expect "exit status of the upgrade to a version that lacks an API" "$status" -eq 75 lacks-api.log
    expect "what the verdict names" "$(grep -o '^ *missing-api .*autoscaling' "$work/lacks-api.log" | wc -l)" -ge 1 lacks-api.log
    expect "kube-apiserver after the way back" "$(pgrep -x kube-apiserver)" == "$instance" lacks-api.log
    status=0
    on_the_node "$BERTH" upgrade "$work/node/next.yaml" "${judge[@]}" >"$work/operator.log" 2>&1 || status=$?
}
judged_ends() {
    await 120 "kube-apiserver $NEW" serves "$NEW"
    expect "kube-apiserver behind berth" "$(is_behind_berth && echo yes)" == yes
    [[ -z $bridge ]] || expect "verdicts" "$(grep -c 'good: [0-9]* requests' "$work/operator.log")" -eq 2 operator.log
}

# A node that is behind berth, by a command that gets SIGKILL in each step, when that has just begun and when it is under way, and is run
# again each time: back from a flag that no kube-apiserver knows, then to the new version.
interrupted_begins() {
    judged_begins
    with="berth upgrade, killed again and again"
}
interrupted_operates() {
    local step delay before=$work/node/before.yaml upgrades=/etc/kubernetes/berth/upgrade.json kills=0
    [[ $bridge ]] || { cp "$work/node/next.yaml" $manifests/kube-apiserver.yaml; return; }
    cp $manifests/kube-apiserver.yaml "$before"
    sed 's/^\( *- \)--allow-privileged=true$/&\n\1--no-such-flag/' "$before" >"$work/node/unknown-flag.yaml"
    upgrade_killed_at withdraw 0 "$work/node/unknown-flag.yaml"
    on_the_node "$BERTH" upgrade >>"$work/operator.log" 2>&1 || status=$?
    expect "exit status of what was rolled back" "$status" -eq 1 operator.log
    expect "lines with kube-apiserver's own reason" "$(grep -c 'unknown flag: --no-such-flag' "$work/operator.log")" -ge 1 operator.log
    expect "kube-apiserver after the way back" "$(pgrep -x kube-apiserver)" == "$instance" operator.log
    expect "what differs in the manifest after the way back" "$(cmp "$before" $manifests/kube-apiserver.yaml)" == ""
    for step in start-temporary settle-temporary stop-old start-canonical settle-canonical stop-temporary; do
        for delay in 0 0.5; do
            upgrade_killed_at $step $delay "$work/node/next.yaml"
            kills=$((kills + 1))
        done
    done
    status=0
    on_the_node "$BERTH" upgrade "$work/node/next.yaml" >>"$work/operator.log" 2>&1 || status=$?
    row "berth upgrade got SIGKILL" "$kills times on its way to $NEW"
    expect "a state that is left" "$([[ ! -e $upgrades ]] || echo yes)" == "" operator.log
}
# upgrade_killed_at STEP DELAY OPTION…: as its state names the step
upgrade_killed_at() {
    (join_cgroup operator && unset "${!BERTH_@}" && exec "$BERTH" upgrade --settle 5s "${@:3}") >>"$work/operator.log" 2>&1 &
    pid[upgrade]=$!
    await 120 "berth upgrade to begin $1" grep "\"$1\"" $upgrades
    pause "$2"
    kill_now upgrade
}
interrupted_ends() {
    await 120 "kube-apiserver $NEW" serves "$NEW"
    expect "kube-apiserver behind berth" "$(is_behind_berth && echo yes)" == yes
    expect "what differs from what was upgraded to" "$(cmp "$work/node/next.yaml" $manifests/kube-apiserver.yaml)" == ""
    expect "kube-apiservers" "$(pgrep -c -x kube-apiserver)" -eq 1
}

# A node that is behind berth, upgraded by the very commands of docs/upgrade.md. The control leaves out `berth upgrade`.
behind_begins() {
    local patches=/etc/kubernetes/patches
    put_behind --service
    "$BERTH" inject --image "$IMAGE" "${LISTEN[@]}" --service --kubeadm-patch $patches >>"$work/inject.log" 2>&1 ||
        fail "berth inject --kubeadm-patch" inject.log
    put_program kubeadm "$NEW"
    install "$BERTH" /usr/bin/berth
    bridges_itself=true
    with="berth upgrade, then kubeadm" without="kubeadm alone"
    operator=(documented_upgrade)
}
documented_upgrade() { bash -euxo pipefail -c "$(documented)"; }
# Its commands, for this node, without questions and without a registry.
documented() {
    awk '/^## / { part = $0 == "## With kubeadm" }
        part && /^```/ && code++ { exit }
        part && code && !/^```/' "$root/docs/upgrade.md" |
        sed "s/v1\.[0-9]*\.[0-9]*/$NEW/; s/10\.0\.0\.5/$HOST_IP/; s|/root/|$work/node/|g; /images pull/d
            s/^kubeadm upgrade apply .*/& --yes --ignore-preflight-errors $(ignored)/
            $([[ $NODE == cp-1 ]] || echo 's/^kubeadm upgrade apply [^ ]* \(.*\) --yes/kubeadm upgrade node \1/')
            $([[ $bridge ]] || echo '/^berth upgrade /d')"
}
behind_ends() {
    local name
    await 120 "kube-apiserver $NEW with its new certificate" has_certificate "$NEW"
    expect "kube-apiserver behind berth" "$(is_behind_berth && echo yes)" == yes
    expect "what differs from what was upgraded to" "$(cmp "$work/node/next/kube-apiserver.yaml" $manifests/kube-apiserver.yaml)" == ""
    [[ -z $bridge ]] || expect "kubeadm left kube-apiserver alone" \
        "$(grep -c 'manifests of kube-apiserver are equal, skipping' "$work/operator.log")" -eq 1 operator.log
    expect "new certificates" "$(renewed)" == "apiserver-etcd-client.crt apiserver-kubelet-client.crt apiserver.crt etcd/healthcheck-client.crt etcd/peer.crt etcd/server.crt front-proxy-client.crt"
    row "its own are in use by" "$(for name in kube-apiserver kube-controller-manager kube-scheduler; do uses_new "$name" && printf '%s ' "$name"; done)"
    for name in kube-apiserver kube-controller-manager kube-scheduler; do
        expect "certificates newer than $name" "$(uses_new "$name" || echo some)" == ""
    done
}
# uses_new COMPONENT: it began after its certificates were written, and these since the operator began
uses_new() {
    local files=("/etc/kubernetes/${1#kube-}.conf") began file
    [[ $1 != kube-apiserver ]] || files=(/etc/kubernetes/pki/{apiserver,apiserver-kubelet-client,apiserver-etcd-client,front-proxy-client}.crt)
    began=$(($(date +%s) - $(ps -o etimes= -C "$1" | sort -n | tail -n 1)))
    for file in "${files[@]}"; do
        (($(stat -c %Y "$file") <= began && $(stat -c %Y "$file") >= at[begin] / 1000000)) || return
    done
}

# And as it was again.
eject_begins() {
    put_behind
    bridges_itself=true
    operator=("$BERTH" eject --write ${bridge:+--bridge})
}
eject_ends() {
    expect "a manifest with berth in it" "$(grep -c berth "$manifests/kube-apiserver.yaml" || :)" -eq 0
    await 120 "kube-apiserver without berth" is_alone
    await 60 "kube-apiserver $OLD" serves "$OLD"
}
is_alone() { ss -Hltnp "sport = :$PORT" | grep -F "*:$PORT" | grep -qF '"kube-apiserver"'; }
