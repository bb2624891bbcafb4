//! Lists all checks. `docs/doctor.md` says for each what must hold.

use super::Check;
use super::Severity::{Error, Info, Warning};

/// Defines a constant for each check. Also defines a list of all constants, so that no check can be
/// missing from the list.
macro_rules! checks {
    ($($name:ident, $severity:ident, $id:literal;)+) => {
        $(pub(super) const $name: Check = Check { id: $id, severity: $severity };)+

        /// Every check, in the order of `docs/doctor.md`.
        pub const CHECKS: &[Check] = &[$($name),+];
    };
}

checks! {
    // Checks of the manifest itself.
    NOT_BEHIND_BERTH, Info, "not-behind-berth";
    INJECT_REFUSES, Warning, "inject-refuses";
    HOST_NETWORK, Error, "host-network";
    SHIM_MISSING, Warning, "shim-missing";
    SHIM_BLOCKS_START, Error, "shim-blocks-start";
    BERTH_OPTIONS, Error, "berth-options";
    BERTH_DIFFERS, Error, "berth-differs";
    PASS_DIFFERS, Warning, "pass-differs";
    UID_MISMATCH, Error, "uid-mismatch";
    INSTANCE_NOT_UNIQUE, Error, "instance-not-unique";
    RUN_DIR_VOLUME, Error, "run-dir-volume";
    PROBE_ON_SHARED_PORT, Error, "probe-on-shared-port";
    PROBE_ELSEWHERE, Warning, "probe-elsewhere";
    READINESS_MISSING, Warning, "readiness-missing";
    PROBE_PACE, Warning, "probe-pace";
    DECLARED_PORTS, Error, "declared-ports";
    OTHER_CONTAINER, Warning, "other-container";
    SHARED_FILE, Error, "shared-file";
    PRE_STOP, Warning, "pre-stop";
    SHUTDOWN_DELAY, Warning, "shutdown-delay";
    PEER_PROXY, Warning, "peer-proxy";
    GRACE_PERIOD, Warning, "grace-period";
    UPDATE_STRATEGY, Warning, "update-strategy";
    ANONYMOUS_AUTH, Error, "anonymous-auth";
    AUTHENTICATION_CONFIG, Warning, "authentication-config";
    HOST_IP_UNKNOWN, Warning, "host-ip";
    LOOPBACK_ADDRESS, Warning, "loopback-address";
    ADVERTISED, Warning, "advertise-address";
    CLUSTER_ACCOUNT, Error, "cluster-account";
    CLUSTER_MOUNT, Error, "cluster-mount";
    NODE_NAME, Warning, "node-name";
    // Checks that compare the manifest with the one that runs now.
    VERSION_SKEW, Error, "version-skew";
    LISTEN_LOST, Error, "listen-lost";
    ETCD_DIFFERS, Error, "etcd-differs";
    KEYS_DIFFER, Warning, "keys-differ";
    // Checks of the other files in the manifest's directory.
    SAME_POD_NAME, Error, "same-pod-name";
    STRAY_FILE, Warning, "stray-file";
    // Checks of the node and its processes.
    RUN_DIR_OWNER, Error, "run-dir-owner";
    ADDRESS_MISSING, Error, "address-missing";
    PORT_HELD, Error, "port-held";
    CLIENT_ADDRESS, Error, "client-address";
    FILE_MISSING, Warning, "file-missing";
    FIRST_SWITCH, Warning, "first-switch";
    MEMORY, Error, "memory";
    SERVING_CERTIFICATE, Error, "serving-certificate";
    CLUSTER_KUBECONFIG, Error, "cluster-kubeconfig";
    MIGRATE_REQ, Warning, "tcp-migrate-req";
    PASS_OBSTACLE, Error, "pass-obstacle";
    BERTH_VERSION, Warning, "berth-version";
    SHIMS_UNCONNECTED, Error, "shims-unconnected";
    UPGRADE_INTERRUPTED, Warning, "upgrade-interrupted";
    // Checks of the cluster and its Service.
    SECURE_PORTS, Error, "secure-ports";
    BRIDGE_SLICE, Warning, "bridge-slice";
    NOT_CHECKED, Info, "not-checked";
}
