//! Names of what `berth inject` adds to a pod, by which `berth eject` finds it.

/// Where the apiserver's container finds berth.
pub const BINARY: &str = "/opt/berth/berth";

/// Names of what is added to a pod.
pub const INSTALL: &str = "berth-install";
pub const SHIM: &str = "berth";
/// Volume with the binary, the one that is the run directory, and that of the shim's credentials in the cluster.
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

/// Least period and timeout of an exec probe, in seconds: each costs a start of a process by the runtime.
pub const LEAST: u64 = 5;
