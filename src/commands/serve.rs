//! Runs `berth serve`, the shim in a sidecar of an apiserver's pod.

use super::{CommandError, Exit, block_on, unavailable_error, usage_error};
use berth_options::check::{self, Mistakes};
use berth_options::shim::ServeArgs;
use berth_os::signals;
use berth_shim::app::{self, Bound, BuildError};
use berth_shim::config::Config;
use berth_shim::state::Stop;
use nix::sys::signal::Signal;
use tokio::sync::watch;

pub(super) fn run(args: &ServeArgs) -> anyhow::Result<Exit> {
    let config = check::check_serve(args).map_err(usage_error)?;
    args.shim.speedup.speed_up_process();
    block_on(async {
        let mut signals = Signals::new()?;
        let bound = build_shim(config, &mut signals).await?;
        let (stop, stopped) = watch::channel(Stop::No);
        let serving = bound.run(stopped);
        tokio::pin!(serving);
        loop {
            tokio::select! {
                _ = &mut serving => return Ok(Exit::Ok),
                () = signals.next() => { stop.send_modify(Signals::escalate_stop); }
            }
        }
    })?
}

/// Builds a shim. If a signal comes while the shim waits for a port, this process ends, because
/// nothing is served yet.
pub(super) async fn build_shim(config: Config, signals: &mut Signals) -> anyhow::Result<Bound> {
    let built = tokio::select! {
        built = app::build_shim(config) => built,
        () = signals.next() => return Err(CommandError { exit: Exit::Ok, why: Vec::new() }.into()),
    };
    built.map_err(|error| match error {
        BuildError::Probe(mistake) => usage_error(Mistakes(vec![mistake])),
        error => unavailable_error(error),
    })
}

/// Receives SIGTERM and SIGINT. Create this value before any wait: if this process is the first one
/// of a PID namespace, the kernel drops signals that have no handler.
pub(super) struct Signals(signals::Signals);

impl Signals {
    pub(super) fn new() -> anyhow::Result<Self> {
        Ok(Self(signals::Signals::new(&[
            Signal::SIGTERM,
            Signal::SIGINT,
        ])?))
    }

    /// Waits for the next of the two signals, and logs it.
    pub(super) async fn next(&mut self) {
        let signal = self.0.next().await;
        tracing::info!("{signal}");
    }

    /// Raises the stop level at a signal: the first signal makes the shim drain, the second one
    /// ends it.
    pub(super) fn escalate_stop(stop: &mut Stop) {
        *stop = if *stop < Stop::Drain {
            Stop::Drain
        } else {
            Stop::Now
        };
    }
}
