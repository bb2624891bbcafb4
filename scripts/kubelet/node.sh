# shellcheck shell=bash
# Part of scripts/kubelet.sh: a node with containerd, a standalone kubelet, and what kubeadm writes.
#
# What differs from a node in a cluster, and why: the kubelet has no kubeconfig, since static pods need none,
# so there are no mirror pods. There is no CNI plugin: each pod uses the host's network. The images are
# packed here from built binaries. OOM scores and sysctls stay as they are: they are the machine's.

readonly manifests=/etc/kubernetes/manifests pause_image=registry.k8s.io/pause:test

start_node() {
    client=client
    kubectl_options=(--kubeconfig /etc/kubernetes/super-admin.conf --cache-dir "$work/node/cache" --request-timeout 15s)
    mkdir "$work/node"
    make_mounts etc
    link_client
    ip route add default via $CLIENT_IP
    write_configurations
    start_containerd
    # Begins and ends of all containers.
    start_needed events - ctr --namespace k8s.io events
    pack_images
    write_manifests
    start_kubelet
    await 60 "kube-apiserver $OLD to be ready" serves "$OLD"
    # As kubeadm does when it writes admin.conf.
    kubectl create clusterrolebinding kubeadm:cluster-admins --clusterrole cluster-admin --group kubeadm:cluster-admins \
        >"$work/kubectl.log"
}

start_containerd() {
    start_needed containerd - containerd --config "$work/node/containerd.toml"
    await 10 "containerd to answer" ctr version
}

start_kubelet() {
    start_needed kubelet - "$KUBELET" --config "$work/node/kubelet.yaml" --hostname-override node --node-ip $HOST_IP \
        --root-dir /var/lib/kubelet
}

pack_images() {
    cc -static -x c -o "$work/node/pause" - <<'TEXT'
#include <signal.h>
#include <unistd.h>
int main(void) {
    signal(SIGTERM, _exit);
    for (;;) pause();
}
TEXT
    pack $pause_image "$work/node/pause"
    pack "registry.k8s.io/kube-apiserver:$OLD" "$OLD_KUBE_APISERVER"
    pack "registry.k8s.io/kube-apiserver:$NEW" "$KUBE_APISERVER"
    pack "$("$KUBEADM" config images list --kubernetes-version "$OLD" 2>>"$work/images.log" | grep /etcd:)" "$ETCD"
    ctr --namespace k8s.io images import "$ARCHIVE" >>"$work/images.log" 2>&1
}

# pack NAME BINARY: an image that holds one program, imported
pack() { image "$@" | ctr --namespace k8s.io images import - >>"$work/images.log" 2>&1; }

# What kubeadm init writes up to the static pods.
write_manifests() {
    local phase
    cat >"$work/node/kubeadm.yaml" <<TEXT
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: $OLD
networking: {serviceSubnet: 10.96.0.0/16}
encryptionAlgorithm: ECDSA-P256
etcd: {local: {extraArgs: [{name: unsafe-no-fsync, value: "true"}]}}
# berth inject leaves them as they are. Without the second an apiserver that has watches ends after a minute.
apiServer:
  extraArgs:
    - {name: shutdown-delay-duration, value: 2s}
    - {name: shutdown-watch-termination-grace-period, value: 5s}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
nodeRegistration: {name: node}
localAPIEndpoint: {advertiseAddress: $HOST_IP, bindPort: $PORT}
TEXT
    for phase in "certs all" "kubeconfig admin" "kubeconfig super-admin" "etcd local" "control-plane apiserver"; do
        # shellcheck disable=SC2086
        "$KUBEADM" init phase $phase --config "$work/node/kubeadm.yaml" >>"$work/kubeadm.log" 2>&1 ||
            fail "kubeadm init phase $phase" kubeadm.log
    done
    cp $manifests/kube-apiserver.yaml "$work/kubeadm.yaml"
    # For the load.
    cp /etc/kubernetes/pki/ca.crt "$work/ca.crt"
}

write_configurations() {
    cat >"$work/node/containerd.toml" <<TEXT
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$pause_image"
  restrict_oom_score_adj = true
TEXT
    cat >"$work/node/kubelet.yaml" <<TEXT
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
staticPodPath: $manifests
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
# For GET /pods.
readOnlyPort: 10255
cgroupRoot: /$BERTH_NODE_CGROUP
$(kubelet_settings)
fileCheckFrequency: 1s
TEXT
}
