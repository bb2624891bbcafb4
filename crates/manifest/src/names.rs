//! Names of the parts that `berth inject` adds to a pod. `berth eject` finds the parts by these
//! names.

/// Path of berth's binary in the apiserver's container.
pub const BINARY: &str = "/opt/berth/berth";

/// Names of the containers that `inject` adds: one copies berth's binary, the other is the shim.
pub const INSTALL_CONTAINER: &str = "berth-install";
pub const SHIM_CONTAINER: &str = "berth";
/// Names of the volumes for the binary, the run directory, and the shim's credentials for the
/// cluster.
pub const VOLUMES: [&str; 3] = ["berth-bin", "berth-run", "berth-cluster"];
/// Variables that are added to the apiserver's container.
pub const VARIABLES: [&str; 13] = [
    "BERTH_HOST_IP",
    "BERTH_INSTANCE",
    "BERTH_LISTEN",
    "BERTH_RUN_DIR",
    PASS_VARIABLE,
    "BERTH_PROBE",
    "BERTH_PROBE_CA",
    "BERTH_PROBE_CERT",
    "BERTH_PROBE_KEY",
    "BERTH_PROBE_TOKEN_FILE",
    "BERTH_PROBE_SERVER_NAME",
    "BERTH_PROBE_INSECURE",
    "BERTH_PROBE_TIMEOUT",
];

/// The variable of `--pass`, for `berth exec` and the shim: whether the shim relays clients' bytes,
/// or passes their sockets to kube-apiserver.
pub const PASS_VARIABLE: &str = "BERTH_PASS";

/// The three probes of a container.
pub const PROBES: [&str; 3] = ["startupProbe", "livenessProbe", "readinessProbe"];

/// Minimum period and timeout of an exec probe, in seconds. Each probe costs the runtime the start
/// of a process.
pub const MIN_PROBE_SECONDS: u64 = 5;
