#!/usr/bin/env bash
# usage: scripts/manifests.sh
#
# Tests berth inject, berth eject and the manifests in examples/ with a real kubeadm, kube-apiserver and kubectl, and the chart charts/berth
# with helm if it is there, in namespaces and a directory of its own. Needs root, ip, openssl, jq, cargo and the binaries of
# scripts/kube-apiserver.sh, which it builds if they are not there.
#
# Variables: BERTH, the berth to test; built with cargo if not given

. "$(dirname "${BASH_SOURCE[0]}")/stage.sh"
readonly IMAGE=registry.example/berth:v0.1.0
# All the time that it may take, in seconds.
readonly LIMIT=300
declare -A DELAY=()

main() {
    keep=false
    parse_options -- "$@"
    need_root "network namespaces"
    need_tools ip openssl jq "${CARGO:=cargo}"
    need_kubernetes
    need_program BERTH berth debug
    clean_environment
    set_stage

    version=$("$KUBEADM" version --output=short)
    manifests=$work/manifests
    mkdir "$manifests"
    kubeadm_is_matched plain
    # Another family, lists that kubeadm leaves out else, flags that need a file of their own.
    kubeadm_is_matched more --listen 10.0.0.5:$PORT --listen 127.0.0.1:$PORT --run-dir /run/other --pass auto \
        --probe-ca /etc/kubernetes/pki/ca.crt --probe-cert /etc/kubernetes/pki/probe.crt --probe-key /etc/kubernetes/pki/probe.key
    "$BERTH" inject "$root/tests/data/manifest/deployment.yaml" --image $IMAGE \
        --probe-ca /etc/kubernetes/secrets/ca.crt >"$manifests/deployment.yaml" 2>"$work/notes"
    "$BERTH" inject "$root/tests/data/manifest/deployment.yaml" --image $IMAGE --listen 10.0.0.5:6443 --listen 127.0.0.1:6443 \
        --probe-insecure >"$manifests/deployment-listen.yaml" 2>"$work/notes"
    examples
    apiserver_takes_all
    apiserver_takes_chart
    say "all held: kubeadm $version twice, $(find "$manifests" -type f | wc -l) files taken by $("$KUBE_APISERVER" --version)"
}

# kubeadm_is_matched NAME OPTIONS…: kubeadm with patches writes what inject writes, to the byte; eject
# undoes it, to the byte
kubeadm_is_matched() {
    local name=$1 dir=$work/$1 file=$work/$1/etc/kubernetes/manifests/kube-apiserver.yaml
    shift
    mkdir "$dir"
    kubeadm_config "$name" >"$dir/plain.yaml"
    { kubeadm_config "$name" && printf 'patches: {directory: /patches}\n'; } >"$dir/patched.yaml"
    kubeadm "$dir" plain.yaml
    cp "$file" "$dir/plain.out"
    "$BERTH" inject "$file" --image $IMAGE "$@" --kubeadm-patch "$dir/patches" 2>"$dir/notes"
    "$BERTH" inject "$file" --image $IMAGE "$@" >"$dir/injected.out" 2>"$dir/notes"
    kubeadm "$dir" patched.yaml
    diff -u "$dir/injected.out" "$file"
    "$BERTH" eject "$file" 2>"$dir/notes" | diff -u "$dir/plain.out" -
    # What it reads now is injected: the patches stay the same.
    cp -r "$dir/patches" "$dir/before"
    "$BERTH" inject "$file" --image $IMAGE "$@" --kubeadm-patch "$dir/patches" 2>"$dir/notes"
    diff -ru "$dir/before" "$dir/patches"
    cp "$file" "$manifests/kubeadm-$name.yaml"
}

# kubeadm FOLDER CONFIG: the manifest, with the directory as its root
kubeadm() {
    "$KUBEADM" init phase control-plane apiserver --rootfs "$1" --config "/$2" >"$work/kubeadm.log" 2>&1 ||
        { cat "$work/kubeadm.log" >&2 && return 1; }
}

kubeadm_config() {
    cat <<TEXT
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: $version
TEXT
    [[ $1 == plain ]] || cat <<'TEXT'
networking: {serviceSubnet: "fd01::/112"}
apiServer:
  extraArgs:
    - {name: audit-log-path, value: /var/log/kubernetes/audit.log}
    - {name: shutdown-delay-duration, value: 0s}
    - {name: anonymous-auth, value: "false"}
  extraEnvs:
    - {name: GOGC, value: "80"}
  extraVolumes:
    - {name: logs, hostPath: /var/log/kubernetes, mountPath: /var/log/kubernetes, pathType: DirectoryOrCreate}
TEXT
    cat <<TEXT
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
nodeRegistration: {name: node}
localAPIEndpoint: {advertiseAddress: "$([[ $1 == plain ]] && echo 10.0.0.5 || echo fd00::5)", bindPort: $PORT}
TEXT
}

# The manifests in examples/, and what kustomize makes of those that are its.
examples() {
    local file name kustomize=$work/kustomize
    for file in "$root"/examples/{static-pod,addresses,haproxy-migration,node-shim}/*.yaml; do
        name=${file#"$root"/examples/}
        cp "$file" "$manifests/example-${name//\//-}"
    done
    cp -r "$root/examples/kustomize" "$kustomize"
    mkdir "$kustomize"/with-{metrics,cluster,node-shim}
    printf '%s\n' 'resources: [../base]' 'components: [../metrics]' >"$kustomize/with-metrics/kustomization.yaml"
    printf '%s\n' 'resources: [../base]' 'components: [../cluster, ../pass, ../metrics]' >"$kustomize/with-cluster/kustomization.yaml"
    cp "$root/examples/node-shim/daemonset.yaml" "$kustomize/with-node-shim"
    printf '%s\n' 'resources: [daemonset.yaml]' 'components: [../cluster, ../pass]' >"$kustomize/with-node-shim/kustomization.yaml"
    kubectl kustomize "$kustomize/with-node-shim" >"$manifests/kustomize-with-node-shim.yaml"
    for name in base several-control-plane-nodes with-metrics with-cluster; do
        kubectl kustomize "$kustomize/$name" >"$manifests/kustomize-$name.yaml"
        "$BERTH" doctor "$manifests/kustomize-$name.yaml" | tee "$work/notes" >&2
        grep -q 'no error and no warning' "$work/notes"
    done
    grep -q 'replicas: 3$' "$manifests/kustomize-several-control-plane-nodes.yaml"
    grep -q 'value: 127.0.0.1:9443$' "$manifests/kustomize-with-metrics.yaml"
    [[ $(grep -c 'name: BERTH_PASS$' "$manifests/kustomize-with-cluster.yaml") == 2 ]]
    for name in with-cluster with-node-shim; do
        # The pod's account, one mount of its token, and the binding of each Role to it.
        [[ $(grep -c 'serviceAccountName: berth$' "$manifests/kustomize-$name.yaml") == 1 ]]
        [[ $(grep -c 'mountPath: /var/run/secrets/kubernetes.io/serviceaccount$' "$manifests/kustomize-$name.yaml") == 1 ]]
        [[ $(grep -c 'value: in-cluster$' "$manifests/kustomize-$name.yaml") == 1 ]]
    done
}

# A kube-apiserver with an etcd takes each file, strictly validated.
apiserver_takes_all() {
    local file command
    apiserver_of manifests
    # Without a controller manager there is no service account that a pod could be given.
    start_needed apiserver "$node" "${command[@]}" --bind-address="$HOST_IP" --advertise-address="$HOST_IP" --secure-port=$PORT \
        --audit-log-path="$work/audit.json" --disable-admission-plugins=ServiceAccount
    usual_logs=(apiserver.log)
    await 60 "the namespace kube-system" kubectl get namespace kube-system
    await 60 "the priority classes" kubectl get priorityclass system-node-critical
    # A dry run makes none for what comes after it in the file.
    kubectl create namespace berth-system >&2
    for file in "$manifests"/*; do
        kubectl apply --dry-run=server --validate=strict -f "$file" >&2
    done
    # The control: it rejects a wrong one.
    sed 's/restartPolicy: Always/restartPolicy: Alway/; s/exec:$/exce:/' "$manifests/deployment.yaml" >"$work/wrong.yaml"
    if kubectl apply --dry-run=server --validate=strict -f "$work/wrong.yaml" >"$work/wrong.log" 2>&1; then return 1; fi
    grep -q 'unknown field' "$work/wrong.log"
}

# The chart is installed, upgraded to the other layout, and uninstalled, which leaves what serves clients.
apiserver_takes_chart() {
    local kubernetes=registry.k8s.io/kube-apiserver:$version
    if ! type -P helm >/dev/null; then
        say "skipped: no helm, so nothing is installed by charts/berth"
        return
    fi
    kubeconfig admin "https://$HOST_IP:$PORT" >"$work/kubeconfig"
    # The namespace is there already.
    helm install berth "$root/charts/berth" --take-ownership --set "image=$IMAGE,kubeApiserver.image=$kubernetes" \
        --set 'cluster.nodes={cp-1},monitoring.port=9443' >&2
    [[ $(system get deployment kube-apiserver -o 'jsonpath={.spec.template.spec.containers[0].image}') == "$kubernetes" ]]
    helm upgrade berth "$root/charts/berth" --reuse-values --set kubeApiserver.replicas=3 >&2
    [[ $(system get deployment kube-apiserver -o 'jsonpath={.spec.replicas}') == 3 ]]
    helm upgrade berth "$root/charts/berth" --reuse-values --set layout=node-shim,pass=auto >&2
    helm uninstall berth >&2
    system get deployment/kube-apiserver poddisruptionbudget/kube-apiserver daemonset/berth serviceaccount/berth >&2
}

# What it caches is in $work, too.
helm() { ip netns exec "$client" env HOME="$work" helm --kubeconfig "$work/kubeconfig" --namespace kube-system "$@"; }

system() { kubectl --namespace kube-system "$@"; }

main "$@"
