//! Options of `berth ready`, `berth live` and `berth drain`, which a pod's probes and hooks run.

use crate::place::{ADDRESSES_HEADING, RunDirArgs};
use crate::probe::{PROBE_HEADING, ProbeArgs};
use clap::Args;
use std::time::Duration;

/// Options that say which instance's shim is asked.
#[derive(Debug, Clone, Args)]
pub struct AskArgs {
    /// Name of the instance [default: the only instance]
    #[arg(long, env = "BERTH_INSTANCE", value_name = "ID", help_heading = ADDRESSES_HEADING)]
    pub instance: Option<String>,
    /// The run directory.
    #[command(flatten)]
    pub run_dir: RunDirArgs,
}

/// Time limit of a probe.
#[derive(Debug, Clone, Args)]
pub struct TimeoutArgs {
    /// Time limit for the answer: the kubelet's timeoutSeconds less one second for the start of
    /// this process
    #[arg(long, env = "BERTH_TIMEOUT", value_name = "DURATION", value_parser = parse_duration, help_heading = PROBE_HEADING)]
    pub timeout: Option<Duration>,
}

/// Options of `berth ready`.
#[derive(Debug, Clone, Args)]
pub struct ReadyArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// Time limit for the shim's answer.
    #[command(flatten)]
    pub timeout: TimeoutArgs,
}

/// Options of `berth drain`.
#[derive(Debug, Clone, Args)]
pub struct DrainArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// Do nothing if no sibling is joined: the shim then serves clients until kube-apiserver itself
    /// stops (for a preStop hook)
    #[arg(long, env = "BERTH_DRAIN_IF_SIBLING")]
    pub if_sibling: bool,
    /// Return only when the siblings have taken over and waiting clients have received the
    /// kube-apiserver's first byte (5s at most)
    #[arg(long, env = "BERTH_DRAIN_WAIT")]
    pub wait: bool,
    /// Return only when the connections have ended too. After this time exit with status 1 and
    /// print the number of open connections; implies --wait
    #[arg(long, env = "BERTH_DRAIN_WAIT_STREAMS", value_name = "DURATION", value_parser = parse_duration)]
    pub wait_streams: Option<Duration>,
}

/// Options of `berth live`.
#[derive(Debug, Clone, Args)]
#[command(mut_args = |arg| if arg.get_help_heading() == Some(PROBE_HEADING) && arg.get_id() != "timeout" { arg.hide(true) } else { arg })]
pub struct LiveArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// Path of the request; with `?exclude=etcd` an outage of etcd does not restart kube-apiserver
    #[arg(long, env = "BERTH_LIVE_PATH", default_value = "/livez", value_name = "PATH", value_parser = parse_path)]
    pub path: String,
    /// Options of the shim's probe. In a pod, both containers have the same environment variables,
    /// so `berth live` accepts the probe options of `berth serve`.
    #[command(flatten)]
    pub probe: ProbeArgs,
    /// Time limit of the probe, which replaces --probe-timeout.
    #[command(flatten)]
    pub timeout: TimeoutArgs,
}

/// Parses a path for an HTTP request.
///
/// # Errors
/// `text` is not a path.
pub fn parse_path(text: &str) -> Result<String, String> {
    // RFC 3986 allows no other characters in a path and its query.
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/?%".contains(&byte);
    let fits = text.starts_with('/') && text.bytes().all(fits);
    if fits {
        Ok(text.to_owned())
    } else {
        Err("give a path such as /livez?exclude=etcd".to_owned())
    }
}

/// Longest duration that an option accepts. A longer one could exceed the range of the clock, and
/// so have no effect.
const MAX_DURATION: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Parses a duration such as `8s`.
///
/// # Errors
/// `text` is not a duration, or the duration is too long.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if time <= MAX_DURATION => Ok(time),
        Ok(_) => Err("at most 365days".to_owned()),
        Err(_) => Err("give a number with a unit, such as 8s, 500ms or 1m30s".to_owned()),
    }
}
