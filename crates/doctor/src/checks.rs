//! Lists all checks. The table in `docs/doctor.md` is made from this list.

use super::Check;
use super::Severity::{Error, Info, Warning};

/// Defines a constant for each check. Also defines a list of all constants, so that no check can be
/// missing from the list.
macro_rules! checks {
    ($($scope:literal { $($name:ident, $severity:ident, $id:literal, $rule:literal;)+ })+) => {
        $($(pub(super) const $name: Check = Check {
            id: $id,
            severity: $severity,
            scope: $scope,
            rule: $rule,
        };)+)+

        /// Every check, in the order of `docs/doctor.md`.
        pub const CHECKS: &[Check] = &[$($($name),+),+];
    };
}

checks! {
    "manifest" {
        NOT_BEHIND_BERTH, Info, "not-behind-berth", "kube-apiserver is started by `berth exec` or `berth run`, where berth is to stay; a bridge needs neither";
        INJECT_REFUSES, Warning, "inject-refuses", "`berth inject` accepts the manifest, if it is not behind berth yet";
        HOST_NETWORK, Error, "host-network", "the pod uses the node's network (`hostNetwork: true`)";
        SHIM_MISSING, Warning, "shim-missing", "a container of the pod runs `berth serve`. With a shim for the whole node, ignore the warning";
        SHIM_BLOCKS_START, Error, "shim-blocks-start", "a shim among the init containers has `restartPolicy: Always`";
        BERTH_OPTIONS, Error, "berth-options", "berth accepts its options and variables in both containers, as far as they can be seen. Variables unknown to berth have no effect, and are not reported";
        BERTH_DIFFERS, Error, "berth-differs", "kube-apiserver's container and the shim name the same berth, instance and run directory";
        PASS_DIFFERS, Warning, "pass-differs", "kube-apiserver's container and the shim both relay, or both pass clients' sockets (`--pass`)";
        UID_MISMATCH, Error, "uid-mismatch", "the shim runs with kube-apiserver's uid";
        INSTANCE_NOT_UNIQUE, Error, "instance-not-unique", "`BERTH_INSTANCE` is the pod's UID or name, from the downward API, in both containers";
        RUN_DIR_VOLUME, Error, "run-dir-volume", "the run directory is a hostPath that both containers mount, writable";
        PROBE_ON_SHARED_PORT, Error, "probe-on-shared-port", "no probe of kube-apiserver asks the shared port, directly or through a program that names the port or localhost";
        PROBE_ELSEWHERE, Warning, "probe-elsewhere", "no probe of kube-apiserver asks another process, such as a sidecar, which asks the shared port or localhost";
        READINESS_MISSING, Warning, "readiness-missing", "kube-apiserver's container has a readiness probe";
        PROBE_PACE, Warning, "probe-pace", "exec probes of berth have a period and a timeout of 5 s or more, and wait for an answer as long as the kubelet does";
        DECLARED_PORTS, Error, "declared-ports", "no container of the pod, native sidecars among them, declares `ports:`: with hostNetwork each is a port of the node, and the kubelet refuses the second pod";
        OTHER_CONTAINER, Warning, "other-container", "no container runs beside kube-apiserver and berth (a KMS plugin, konnectivity): it runs twice during an upgrade, and two copies cannot share a fixed port or a socket in a hostPath";
        SHARED_FILE, Error, "shared-file", "`--audit-log-path`, `--cert-dir` and `--debug-socket-path` have `{instance}` in them";
        PRE_STOP, Warning, "pre-stop", "the preStop hook runs `berth drain --wait --if-sibling`";
        SHUTDOWN_DELAY, Warning, "shutdown-delay", "`--shutdown-delay-duration` is not 0";
        PEER_PROXY, Warning, "peer-proxy", "`--peer-ca-file` is not set: the mixed version proxy takes the two kube-apiservers of a node for one";
        GRACE_PERIOD, Warning, "grace-period", "`terminationGracePeriodSeconds` is longer than what a preStop hook sleeps, the shutdown delay, the drain and a margin";
        UPDATE_STRATEGY, Warning, "update-strategy", "an update of a Deployment or DaemonSet starts the new pod before it stops the old one";
        ANONYMOUS_AUTH, Error, "anonymous-auth", "anonymous requests to /readyz and /livez are allowed, or the probe has credentials";
        AUTHENTICATION_CONFIG, Warning, "authentication-config", "`--authentication-config` allows anonymous requests to these paths (checked with `--node`), or the probe has credentials";
        HOST_IP_UNKNOWN, Warning, "host-ip", "a static pod names its address literally: status.hostIP may be empty at first, or differ from the address that clients use";
        LOOPBACK_ADDRESS, Warning, "loopback-address", "other nodes can reach the advertised address and the berth: neither is loopback (127.0.0.1) or link-local (169.254.0.0/16, fe80::/10)";
        ADVERTISED, Warning, "advertise-address", "the shim listens on the address of `--advertise-address`, where that is given";
        CLUSTER_ACCOUNT, Error, "cluster-account", "with `--cluster in-cluster` the shim's container has the token of a service account, which a static pod cannot have";
        CLUSTER_MOUNT, Error, "cluster-mount", "the directory of a kubeconfig for `--cluster` is mounted from the node as a whole, and writable: its files are renewed by a rename";
        NODE_NAME, Warning, "node-name", "with `--cluster`, `BERTH_NODE_NAME` is `spec.nodeName`, by the downward API";
    }
    "running manifest" {
        VERSION_SKEW, Error, "version-skew", "the versions of the two images are at most one minor version apart";
        LISTEN_LOST, Error, "listen-lost", "the shim listens on every address on which the running one listens";
        ETCD_DIFFERS, Error, "etcd-differs", "both have one store: an etcd server in common, one prefix, one `--etcd-servers-overrides`";
        KEYS_DIFFER, Warning, "keys-differ", "each instance has the other's encryption and signing keys, and accepts the other's issuer, as far as flags and the age of the files show";
    }
    "directory" {
        SAME_POD_NAME, Error, "same-pod-name", "no two files of the directory define the same pod (kube-apiserver, etcd or any other)";
        STRAY_FILE, Warning, "stray-file", "every other file that the kubelet reads there is a manifest, by name and content";
    }
    "node" {
        RUN_DIR_OWNER, Error, "run-dir-owner", "the run directory belongs to kube-apiserver's uid, and no other user may write there";
        ADDRESS_MISSING, Error, "address-missing", "the node has the addresses that the shim listens on, or they are marked `,freebind`";
        PORT_HELD, Error, "port-held", "no other program holds the port, and no berth of another uid";
        CLIENT_ADDRESS, Error, "client-address", "the shim listens on every address of the node by which a kubeconfig in /etc/kubernetes or an open connection reaches kube-apiserver";
        FILE_MISSING, Warning, "file-missing", "every file of the node that a flag of kube-apiserver names is there";
        FIRST_SWITCH, Warning, "first-switch", "kube-apiserver no longer holds the port itself";
        MEMORY, Error, "memory", "the node has memory for a second instance: as much as the running one takes";
        SERVING_CERTIFICATE, Error, "serving-certificate", "the shim's probe trusts the certificate that kube-apiserver serves, and its files fit: with `--probe-ca` and `--probe-server-name`, now";
        CLUSTER_KUBECONFIG, Error, "cluster-kubeconfig", "the kubeconfig of `--cluster` and its token are there, for the shim's uid alone (0600, in a directory of 0700), and hold no client certificate";
        MIGRATE_REQ, Warning, "tcp-migrate-req", "`net.ipv4.tcp_migrate_req` is 0: berth hands queued connections over itself, and with 1, kernels with CVE-2026-46015 do not wake the process that has to accept them";
        PASS_OBSTACLE, Error, "pass-obstacle", "with `--pass inject` or `auto`, the self-test of `berth exec` passes in doctor's own process, and `kernel.yama.ptrace_scope` is 0 or 1. With `auto` it is a warning. What a container's seccomp profile, AppArmor or SELinux refuse is seen when `berth exec` starts";
        BERTH_VERSION, Warning, "berth-version", "running shims are at most one minor version away";
        SHIMS_UNCONNECTED, Error, "shims-unconnected", "running shims have a connection to each of their siblings";
        UPGRADE_INTERRUPTED, Warning, "upgrade-interrupted", "no `berth upgrade` was interrupted";
    }
    "cluster" {
        SECURE_PORTS, Error, "secure-ports", "all control-plane nodes have one secure port, as the Service `kubernetes` shows them";
        BRIDGE_SLICE, Warning, "bridge-slice", "no bridge or upgrade that has ended has left its EndpointSlice in the Service `kubernetes`";
        NOT_CHECKED, Info, "not-checked", "everything was checked";
    }
}
