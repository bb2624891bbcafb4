//! `berth ready`, `berth live` and `berth drain`, for a pod's probes and hooks.

use crate::place::{ADDRESSES, RunDirArgs};
use crate::probe::{PROBE, ProbeArgs};
use clap::Args;
use std::time::Duration;

/// Which instance is meant.
#[derive(Debug, Clone, Args)]
pub struct AskArgs {
    /// Which instance [default: the only one there]
    #[arg(long, env = "BERTH_INSTANCE", value_name = "ID", help_heading = ADDRESSES)]
    pub instance: Option<String>,
    /// Where the shims of this node meet.
    #[command(flatten)]
    pub run_dir: RunDirArgs,
}

/// How long a probe's answer may take.
#[derive(Debug, Clone, Args)]
pub struct TimeoutArgs {
    /// How long the answer may take: the kubelet's timeoutSeconds less one, which is for the start of this process
    #[arg(long, env = "BERTH_TIMEOUT", value_name = "DURATION", value_parser = duration, help_heading = PROBE)]
    pub timeout: Option<Duration>,
}

/// Options of `berth ready`.
#[derive(Debug, Clone, Args)]
pub struct ReadyArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// How long the shim may take.
    #[command(flatten)]
    pub timeout: TimeoutArgs,
}

/// Options of `berth drain`.
#[derive(Debug, Clone, Args)]
pub struct DrainArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// Do nothing if no sibling is joined: without a shim to hand over to, clients are served until
    /// the apiserver itself stops (for a preStop hook)
    #[arg(long, env = "BERTH_DRAIN_IF_SIBLING")]
    pub if_sibling: bool,
    /// Return when the siblings have taken over and clients that wait for the apiserver's first byte have
    /// it (for 5s at most), not at once
    #[arg(long, env = "BERTH_DRAIN_WAIT")]
    pub wait: bool,
    /// Return when the connections have ended too, or with exit status 1 after this time and how
    /// many are left; implies --wait
    #[arg(long, env = "BERTH_DRAIN_WAIT_STREAMS", value_name = "DURATION", value_parser = duration)]
    pub wait_streams: Option<Duration>,
}

/// Options of `berth live`.
#[derive(Debug, Clone, Args)]
#[command(mut_args = |arg| if arg.get_help_heading() == Some(PROBE) && arg.get_id() != "timeout" { arg.hide(true) } else { arg })]
pub struct LiveArgs {
    #[command(flatten)]
    pub ask: AskArgs,
    /// Path of the request; with `?exclude=etcd` an outage of etcd does not have kube-apiserver restarted
    #[arg(long, env = "BERTH_LIVE_PATH", default_value = "/livez", value_name = "PATH", value_parser = path)]
    pub path: String,
    /// As the shim probes: in a pod, both have the same variables.
    #[command(flatten)]
    pub probe: ProbeArgs,
    /// How long it may take, if not --probe-timeout.
    #[command(flatten)]
    pub timeout: TimeoutArgs,
}

/// A path that can be requested.
///
/// # Errors
/// It is none.
pub fn path(text: &str) -> Result<String, String> {
    // Other signs go into no request (RFC 3986).
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/?%".contains(&byte);
    let fits = text.starts_with('/') && text.bytes().all(fits);
    if fits {
        Ok(text.to_owned())
    } else {
        Err("give a path such as /livez?exclude=etcd".to_owned())
    }
}

/// Longest time that an option can have: a moment that is later than clocks go would be none.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A duration such as `8s`.
///
/// # Errors
/// It is none, or too long.
pub fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if time <= LONGEST => Ok(time),
        Ok(_) => Err("at most 365days".to_owned()),
        Err(_) => Err("give a number with a unit, such as 8s, 500ms or 1m30s".to_owned()),
    }
}
