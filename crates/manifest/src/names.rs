//! Names of the parts that `berth inject` adds to a pod. `berth eject` finds the parts by these
//! names.

/// Path of berth's binary in the apiserver's container.
pub const BINARY: &str = "/opt/berth/berth";

/// Names of the added containers.
pub const INSTALL: &str = "berth-install";
pub const SHIM: &str = "berth";
/// Volumes of the binary, of the run directory, and of the shim's credentials for the cluster.
pub const VOLUMES: [&str; 3] = ["berth-bin", "berth-run", "berth-cluster"];
/// Variables that are added to the apiserver's container.
pub const VARIABLES: [&str; 13] = [
    "BERTH_HOST_IP",
    "BERTH_INSTANCE",
    "BERTH_LISTEN",
    "BERTH_RUN_DIR",
    PASS,
    "BERTH_PROBE",
    "BERTH_PROBE_CA",
    "BERTH_PROBE_CERT",
    "BERTH_PROBE_KEY",
    "BERTH_PROBE_TOKEN_FILE",
    "BERTH_PROBE_SERVER_NAME",
    "BERTH_PROBE_INSECURE",
    "BERTH_PROBE_TIMEOUT",
];

/// How the apiserver gets its clients, for `berth exec` and the shim.
pub const PASS: &str = "BERTH_PASS";

/// The three probes of a container.
pub const PROBES: [&str; 3] = ["startupProbe", "livenessProbe", "readinessProbe"];

/// Minimum period and timeout of an exec probe, in seconds. Each probe costs the runtime the start
/// of a process.
pub const LEAST: u64 = 5;
