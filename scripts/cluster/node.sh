# shellcheck shell=bash
# Part of scripts/cluster.sh, on the node: its network, its services, and the cluster as `kubeadm init` makes it.
#
# What differs from a real node, and why: there is no systemd, so a script with the name systemctl does what
# kubeadm and operators use it for. What containers see of the machine's kernel stays as it is: OOM scores and sysctls that
# are not of a namespace. etcd does not wait for the disk.

# Preflight errors that kubeadm is to ignore: nothing here asks for a name, so there is no CoreDNS, and hierarchies of cgroup version 1
# are accepted only by configuration.
IGNORED=(CoreDNSUnsupportedPlugins CoreDNSMigration)
[[ $(stat -fc %T /sys/fs/cgroup) == cgroup2fs ]] || IGNORED+=(SystemVerification)
readonly manifests=/etc/kubernetes/manifests

start_cluster() {
    client=far
    make_machine
    make_network
    start_services
    usual_logs=(kubeadm-init.log kubelet.log)
    by_kubeadm init
    # For the load.
    cp /etc/kubernetes/pki/ca.crt "$work/ca.crt"
    await 60 "the node to be ready" node_is_ready
    await_pods 60
}

# Its mounts, and a cgroup for what is not part of it: clients and the test.
make_machine() {
    mkdir "$work/node"
    mount_cgroups
    join_cgroup test
    # /usr as well: the node's own programs, and the directories in it that its containers mount.
    make_mounts etc usr
    echo "$NODE" >/proc/sys/kernel/hostname
}

# make_mounts DIRECTORY…: directories that are written to are the node's own, and only in this mount namespace. Of the
# given ones it sees what the machine has, and what it writes there is its own, too.
make_mounts() {
    local directory setting value
    for directory in "$@"; do
        mkdir "$work/node/upper-${directory//\//-}" "$work/node/overlay-${directory//\//-}"
        mount -t overlay overlay "/$directory" -o \
            "lowerdir=/$directory,upperdir=$work/node/upper-${directory//\//-},workdir=$work/node/overlay-${directory//\//-}"
    done
    mkdir -p /etc/kubernetes
    for directory in run var/log var/lib etc/kubernetes; do
        mkdir -p "$work/node/$directory"
        mount --bind "$work/node/$directory" "/$directory"
    done
    # The kubelet would set these for the whole machine; so it finds them set.
    while read -r setting value; do
        echo "$value" >"$work/node/${setting//\//.}"
        mount --bind "$work/node/${setting//\//.}" "/proc/sys/$setting"
    done <<'TEXT'
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
TEXT
}

start_services() {
    local name
    echo 1 >/proc/sys/net/ipv4/ip_forward
    # Each client gets the ICMP error when the Service has no address: by default the kernel sends one a second.
    echo 0 >/proc/sys/net/ipv4/icmp_ratelimit
    echo "$HOST_IP $NODE" >>/etc/hosts
    for name in kubeadm kubelet kubectl; do put_program "$name" "$OLD"; done
    install "$root/scripts/cluster/systemctl" /usr/bin/systemctl
    write_configurations
    service containerd /usr/bin/containerd
    service kubelet run_kubelet
    systemctl start containerd
    await 60 "containerd's CRI plugin to be loaded" has_cri
    import_images
}

has_cri() { ctr plugins ls | awk '$2 == "cri" && $NF == "ok" { found = 1 } END { exit !found }'; }

# by_kubeadm init|join [OPTION…]
by_kubeadm() {
    kubeadm "$1" --config "$work/node/kubeadm.yaml" --ignore-preflight-errors "$(ignored)" "${@:2}" >"$work/kubeadm-$1.log" 2>&1 ||
        fail "kubeadm $1 on $NODE" "kubeadm-$1.log" kubelet.log
}

# be_node: one of several, until it is killed; call COMMAND…: a function or program, there
be_node() {
    watch_over 86400
    make_machine
    start_services
    : >"$work/started"
    while :; do pause 3600; done
}
call() {
    exec {never}<>"$work/never"
    "$@"
}

ignored() { (IFS=, && echo "${IGNORED[*]}"); }

# The node, another host of its network, and a pod's namespace, which has its way through what kube-proxy wrote.
make_network() {
    local namespace
    ip link set lo up
    for namespace in far pod; do
        ip netns add $namespace
        ip -n $namespace link set lo up
        ip link add name $namespace type veth peer name node netns $namespace
        # So that an IPv6 address can be used at once.
        ip netns exec $namespace sh -c 'echo 0 >/proc/sys/net/ipv6/conf/node/accept_dad'
        echo 0 >/proc/sys/net/ipv6/conf/$namespace/accept_dad
        ip link set $namespace up
        ip -n $namespace link set node up
    done
    ip addr add $HOST_IP/24 dev far
    ip addr add $HOST_IP6/64 dev far
    ip addr add $VIP/32 dev far
    ip -n far addr add $FAR_IP/24 dev node
    ip -n far addr add $FAR_IP6/64 dev node
    ip route add default via $FAR_IP
    ip addr add $POD_GATEWAY/30 dev pod
    ip -n pod addr add $POD_IP/30 dev node
    ip -n pod route add default via $POD_GATEWAY
}

# put_program NAME VERSION: as a package does it, a new file, since the old one may run
put_program() {
    install "$PROGRAMS/$2/$1" "/usr/bin/.$1"
    mv "/usr/bin/.$1" "/usr/bin/$1"
}

# service NAME COMMAND…: what the systemctl of this node starts and stops; as systemd does, it starts what has ended
service() {
    local name=$1
    shift
    mkdir -p /run/services
    echo down >"/run/services/$name"
    while :; do
        if [[ $(<"/run/services/$name") == up ]]; then
            (echo "$BASHPID" >"/run/services/$name.pid" && join_cgroup system && exec 0</dev/null && "$@") >>"$work/$name.log" 2>&1 || :
            rm -f "/run/services/$name.pid"
        fi
        pause 0.1
    done &
    pid[$name]=$! needed[$name]=
}

# As in kubeadm's unit file
run_kubelet() {
    # shellcheck source=/dev/null
    . /var/lib/kubelet/kubeadm-flags.env
    # shellcheck disable=SC2086
    exec kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
        --config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS
}

# enter_cgroup ARGUMENTS…: this script once more, with the node's cgroup for the root of all: what the node makes there, it makes
# in that.
enter_cgroup() {
    local cgroup=$BERTH_NODE_CGROUP hierarchy
    join_cgroup "$cgroup"
    # What else runs on this machine is not to slow it down: 8 times the usual weight. Several nodes share that evenly.
    [[ ${BERTH_NODE:-} ]] || while read -r hierarchy; do
        [[ ! -e $hierarchy/$cgroup/cpu.shares ]] || echo 8192 >"$hierarchy/$cgroup/cpu.shares"
        [[ ! -e $hierarchy/$cgroup/cpu.weight ]] || echo 800 >"$hierarchy/$cgroup/cpu.weight"
    done < <(cgroup_hierarchies)
    BERTH_NODE_CGROUP='' exec unshare --cgroup "$root/scripts/$program.sh" "$@"
}

# The mounted ones have the machine's root.
mount_cgroups() {
    local hierarchy kind options mounted
    mounted=$(cgroup_mounts)
    while read -r hierarchy kind options; do
        umount "$hierarchy"
        mount -t "$kind" -o "$options" cgroup "$hierarchy"
    done <<<"$mounted"
}

cgroup_mounts() { awk '$3 == "cgroup" || $3 == "cgroup2" { print $2, $3, $4 }' /proc/self/mounts; }

# join_cgroup NAME [PID]: this process or that, with all that it starts
join_cgroup() {
    local hierarchy file
    while read -r hierarchy; do
        mkdir -p "$hierarchy/$1"
        # A cgroup of CPUs and memory has to be given some before a process can join.
        for file in cpuset.cpus cpuset.mems; do
            [[ ! -e $hierarchy/$1/$file ]] || cat "$hierarchy/$file" >"$hierarchy/$1/$file"
        done
        echo "${2:-$BASHPID}" >"$hierarchy/$1/cgroup.procs"
    done < <(cgroup_hierarchies)
}

# kube-apiserver's audit log, of controllers only, and the one of a bridge's kube-apiserver.
readonly AUDIT=/var/log/audit AUDIT_POLICY=/etc/kubernetes/audit-policy.yaml

write_configurations() {
    mkdir -p /etc/containerd /etc/cni/net.d $AUDIT
    cat >$AUDIT_POLICY <<TEXT
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, users: ["system:kube-controller-manager", "system:kube-scheduler"]}
- {level: None}
TEXT
    cat >/etc/containerd/config.toml <<TEXT
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$(image_of pause "$OLD")"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    # Debian's.
    bin_dir = "/usr/lib/cni"
TEXT
    cat >/etc/cni/net.d/10-ptp.conflist <<TEXT
{"cniVersion": "0.3.1", "name": "ptp", "plugins": [
  {"type": "ptp", "ipam": {"type": "host-local", "subnet": "$POD_SUBNET", "routes": [{"dst": "0.0.0.0/0"}]}}]}
TEXT
    cat >"$work/node/kubeadm.yaml" <<TEXT
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
$(registration)
localAPIEndpoint: {advertiseAddress: $HOST_IP, bindPort: $PORT}
# Nothing here asks for a name.
skipPhases: [addon/coredns]
$( ((nodes == 1)) || one_of_several)
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: $OLD
networking: {serviceSubnet: 10.96.0.0/16, podSubnet: 10.244.0.0/16}
encryptionAlgorithm: ECDSA-P256
apiServer:
  certSANs: ["$VIP", "$HOST_IP6", 127.0.0.1, "$LB_IP"]
  # Who was asked by the new controllers.
  extraArgs:
  - {name: audit-policy-file, value: $AUDIT_POLICY}
  - {name: audit-log-path, value: $AUDIT/audit.log}
  extraVolumes:
  - {name: audit, hostPath: $AUDIT, mountPath: $AUDIT}
  - {name: audit-policy, hostPath: $AUDIT_POLICY, mountPath: $AUDIT_POLICY, readOnly: true, pathType: File}
$( ((nodes == 1)) || echo "controlPlaneEndpoint: $LB_IP:$PORT")
etcd: {local: {extraArgs: [{name: unsafe-no-fsync, value: "true"}$( ((nodes == 1)) || echo "$MEMBER_TIMES")]}}
---
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
# Where the machine has it.
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
localStorageCapacityIsolation: false
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 1Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%}
volumePluginDir: /var/lib/kubelet/volume-plugins
---
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
# The machine's own limits of conntrack are not this one's to set.
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
TEXT
}

registration() {
    cat <<TEXT
nodeRegistration:
  name: $NODE
  criSocket: unix:///run/containerd/containerd.sock
  kubeletExtraArgs: [{name: node-ip, value: $HOST_IP}]
TEXT
    # The only node runs everything.
    ((nodes > 1)) || echo "  taints: []"
}

# What init and join have in common: a token, and a key for the certificates that init uploads.
readonly TOKEN=abcdef.0123456789abcdef CERTIFICATE_KEY=0000000000000000000000000000000000000000000000000000000000000000
# Several members on 2 processors: with the default of 1 s, one that waits for a processor would be an election.
readonly MEMBER_TIMES=', {name: heartbeat-interval, value: "300"}, {name: election-timeout, value: "3000"}'

# The end of init's configuration, and all of join's: kubeadm takes what it needs.
one_of_several() {
    cat <<TEXT
certificateKey: "$CERTIFICATE_KEY"
bootstrapTokens: [{token: $TOKEN}]
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: JoinConfiguration
$(registration)
discovery: {bootstrapToken: {apiServerEndpoint: "$LB_IP:$PORT", token: $TOKEN, unsafeSkipCAVerification: true}}
$([[ $NODE == w-* ]] || echo "controlPlane: {localAPIEndpoint: {advertiseAddress: $HOST_IP, bindPort: $PORT}, certificateKey: \"$CERTIFICATE_KEY\"}")
TEXT
}

kubectl() { /usr/bin/kubectl --kubeconfig /etc/kubernetes/admin.conf --cache-dir "$work/node/cache" --request-timeout 15s "$@"; }

node_is_ready() { kubectl get node $NODE -o json | jq -e 'any(.status.conditions[]; .type == "Ready" and .status == "True")'; }

# await_pods [SECONDS]
# By default after an outage: a kube-scheduler that started meanwhile lists again after up to 60 s, and is ready 30 s later.
await_pods() { await "${1:-180}" "all pods to be ready" pods_are_ready; }

pods_are_ready() {
    kubectl get pods --all-namespaces -o json | jq -e '[.items[] | select(.status.phase != "Succeeded")] | length >= 5 and
        all(any(.status.conditions[]?; .type == "Ready" and .status == "True"))'
}

# serves VERSION: the node's own is ready, and of this version
serves() {
    kubectl --server https://127.0.0.1:$PORT get --raw /readyz &&
        [[ $(kubectl --server https://127.0.0.1:$PORT get --raw /version) == *"\"gitVersion\": \"$1\""* ]]
}
