//! The table of all checks.

use super::Check;
use super::Severity::{Error, Info, Warning};

/// Makes a constant of each check and a list of them all, so that none can be missing there.
macro_rules! checks {
    ($($name:ident, $severity:ident, $id:literal, $rule:literal;)+) => {
        $(pub(super) const $name: Check = Check { id: $id, severity: $severity, rule: $rule };)+

        /// Every check, in the order of the documentation.
        pub const CHECKS: &[Check] = &[$($name),+];
    };
}

checks! {
    // The manifest.
    NOT_BEHIND_BERTH, Error, "not-behind-berth", "kube-apiserver is started by `berth exec` or `berth run`";
    INJECT_REFUSES, Error, "inject-refuses", "nothing is in the way of `berth inject`, where the manifest is not behind berth yet";
    HOST_NETWORK, Error, "host-network", "the pod is in the node's network";
    SHIM_MISSING, Warning, "shim-missing", "a container of the pod runs `berth serve`; with a shim for the whole node none does, and this can be passed over";
    BERTH_OPTIONS, Error, "berth-options", "berth takes its options and variables in both containers, as far as they can be seen";
    WILDCARD_CLASH, Error, "wildcard-clash", "the shim does not listen on all addresses at the port of the apiserver's own 127.x address";
    BERTH_DIFFERS, Error, "berth-differs", "kube-apiserver's container and the shim name the same berth, instance and run directory";
    UID_MISMATCH, Error, "uid-mismatch", "the shim runs with kube-apiserver's uid";
    PRIVILEGED_PORT, Error, "privileged-port", "a shim without capabilities has `NET_BIND_SERVICE` for a port below 1024";
    DIRECT_CAPABILITIES, Error, "direct-capabilities", "a shim with `--direct` has the capabilities `BPF` and `NET_ADMIN`, and is root's: those that a pod adds count for no other uid; with `auto`, which relays then, a warning";
    DIRECT_ADDRESS, Error, "direct-address", "a shim with `--direct` listens on an address of IPv4 outside of 127.0.0.0/8; with `auto` a warning";
    INSTANCE_NOT_UNIQUE, Error, "instance-not-unique", "`BERTH_INSTANCE` is the pod's own, in both containers: its UID or name, by the downward API";
    RUN_DIR_VOLUME, Error, "run-dir-volume", "the run directory is a hostPath that both containers mount, writable";
    RUN_DIR_OWNER, Error, "run-dir-owner", "the run directory belongs to kube-apiserver's uid, and no other user may write there";
    BINARY_MISSING, Error, "binary-missing", "an init container copies berth to where kube-apiserver's container takes it from";
    SHIM_BLOCKS_START, Error, "shim-blocks-start", "a shim among the init containers has `restartPolicy: Always`, in Kubernetes 1.29 or newer, and no startup probe that waits for kube-apiserver";
    PROBE_ON_SHARED_PORT, Error, "probe-on-shared-port", "no probe of kube-apiserver asks the shared port, by itself or by a program that names it or localhost";
    PROBE_ELSEWHERE, Warning, "probe-elsewhere", "no probe of kube-apiserver asks another process, such as a sidecar, which asks the shared port or localhost";
    READINESS_MISSING, Warning, "readiness-missing", "kube-apiserver's container has a readiness probe";
    PROBE_PACE, Warning, "probe-pace", "exec probes of berth have a period and a timeout of 5 s or more, and wait for all of the timeout";
    DECLARED_PORTS, Error, "declared-ports", "kube-apiserver's container declares no `ports:`";
    SHARED_FILE, Error, "shared-file", "`--audit-log-path`, `--cert-dir` and `--debug-socket-path` have `{instance}` in them";
    PRE_STOP, Warning, "pre-stop", "the preStop hook runs `berth drain --wait --if-sibling`";
    SHUTDOWN_DELAY, Warning, "shutdown-delay", "`--shutdown-delay-duration` is not 0";
    PEER_PROXY, Warning, "peer-proxy", "`--peer-ca-file` is not set: the mixed version proxy takes the two kube-apiservers of a node for one";
    GRACE_PERIOD, Warning, "grace-period", "`terminationGracePeriodSeconds` is longer than the shutdown delay, the drain and a margin";
    UPDATE_STRATEGY, Warning, "update-strategy", "an update of a Deployment or DaemonSet starts the new pod before it stops the old one";
    PROBE_FILES, Error, "probe-files", "the shim's container mounts the files that its probe needs";
    ANONYMOUS_AUTH, Error, "anonymous-auth", "anonymous requests may ask /readyz and /livez, or the probe has credentials";
    AUTHENTICATION_CONFIG, Warning, "authentication-config", "it can be seen that `--authentication-config` lets anonymous requests ask those (`--node`, on its node), or the probe has credentials";
    HOST_IP_UNKNOWN, Warning, "host-ip", "a static pod names its address: status.hostIP may be empty at first, or another one";
    CLUSTER_ACCOUNT, Error, "cluster-account", "with `--cluster in-cluster` the shim's container has the token of a service account, which a static pod cannot have";
    CLUSTER_MOUNT, Error, "cluster-mount", "the directory of a kubeconfig for `--cluster` is mounted from the node as a whole, and writable: its files are renewed by a rename";
    NODE_NAME, Warning, "node-name", "with `--cluster`, `BERTH_NODE_NAME` is `spec.nodeName`, by the downward API";
    // The manifest that runs.
    VERSION_SKEW, Error, "version-skew", "its image's version and this one's are at most one minor version apart";
    LISTEN_LOST, Error, "listen-lost", "the shim listens on every address on which the running one listens";
    ETCD_DIFFERS, Error, "etcd-differs", "both have one store: an etcd server in common, one prefix, one `--etcd-servers-overrides`";
    KEYS_DIFFER, Warning, "keys-differ", "each has the keys with which the other encrypts and signs, and accepts its issuer, as far as the flags and the age of the files show it";
    // The other files of its directory.
    SAME_POD_NAME, Error, "same-pod-name", "no other file of the manifest directory has the same pod name";
    STRAY_FILE, Warning, "stray-file", "every other file there that the kubelet reads is a manifest by its name and by what is in it";
    // The node.
    HOST_PATH, Error, "host-path", "what a hostPath of type Directory, File or Socket wants is there";
    ADDRESS_MISSING, Error, "address-missing", "the node has the addresses that the shim listens on, or they are marked `,freebind`";
    PORT_HELD, Error, "port-held", "no other program holds the port, and no berth of another uid";
    CLIENT_ADDRESS, Error, "client-address", "the shim listens on every address of the node by which a kubeconfig in /etc/kubernetes or an open connection reaches kube-apiserver";
    FIRST_SWITCH, Warning, "first-switch", "kube-apiserver does not hold the port itself any more";
    MEMORY, Error, "memory", "the node has memory for a second instance: as much as the running one takes, and as it requests";
    CLUSTER_KUBECONFIG, Error, "cluster-kubeconfig", "the kubeconfig of `--cluster` and its token are there, for the shim's uid alone (0600, in a directory of 0700), and hold no client certificate";
    KERNEL, Error, "kernel", "the kernel has SO_REUSEPORT (Linux 3.9)";
    DIRECT_KERNEL, Error, "direct-kernel", "with `--direct` the kernel is Linux 5.10 or newer; with `auto` a warning";
    MIGRATE_REQ, Warning, "tcp-migrate-req", "`net.ipv4.tcp_migrate_req` is 0: berth hands over what is queued, and some kernels do not wake the process that waits for it";
    EPHEMERAL_PORTS, Warning, "ephemeral-ports", "no outgoing connection can take the secure port, and there are enough others";
    LEFTOVERS, Info, "leftovers", "the run directory holds nothing of the dead";
    BERTH_VERSION, Warning, "berth-version", "running shims are at most one minor version away";
    SHIMS_UNCONNECTED, Error, "shims-unconnected", "running shims have a connection to each of their siblings";
    UPGRADE_INTERRUPTED, Warning, "upgrade-interrupted", "no `berth upgrade` was interrupted";
    // The cluster.
    SECURE_PORTS, Error, "secure-ports", "all control-plane nodes have one secure port, as the Service `kubernetes` shows them";
    BRIDGE_SLICE, Warning, "bridge-slice", "no bridge or upgrade that has ended has left its EndpointSlice in the Service `kubernetes`";
    NOT_CHECKED, Info, "not-checked", "all was looked at";
}
