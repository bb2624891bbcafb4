//! Replaces an instance without berth in place, under `berth bridge`.
//!
//! The script takes the part of COMMAND: it stops the old instance and starts the new one, as
//! systemd does for `systemctl restart`. Faults are injected while COMMAND runs, so that neither
//! the script nor the bridge can be too late.

use super::faults::LONGEST_HANG;
use super::{Play, SETTLE};
use crate::config::fault::{Fault, Standby};
use crate::record::event::FaultStep;
use crate::run::processes::{Error, Stage, Status, instance_spec::InstanceSpec, layout::Limits};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Exit status of a bridge if the node's kube-apiserver did not come back.
const AGAIN: i32 = 75;

/// Time that a bridge takes in addition to twice its --settle and --ready-timeout: for the
/// preflight checks, and for handshakes and connections to end.
const BESIDES: Duration = Duration::from_secs(90);

impl Play<'_> {
    pub(super) async fn bridged_upgrade(
        &mut self,
        old: &InstanceSpec,
        new: &InstanceSpec,
        faults: &[Fault],
    ) -> Result<(), Error> {
        let ready = self.context.plan.timing.ready_within;
        self.bridge(old, ready).await?;
        // Faults of the old instance and of the bridge come first.
        for fault in faults {
            match fault {
                Fault::KillShim => self.kill_bridge(old).await?,
                Fault::HangShim => self.hang_bridge(old).await?,
                Fault::KillTemporary => self.kill_temporary(old).await?,
                Fault::KillOld => self.kill_own(old, *fault).await?,
                _ => {}
            }
        }
        let before = self.stage.bridge_status().own.listener;
        self.print(&format!("stop {}", old.name));
        self.stop(old).await;
        // The storm comes while the bridge serves, because no berth is left afterwards.
        self.storm().await?;
        self.start_own(new).await?;
        self.own_ready(new, before, ready).await?;
        for fault in faults {
            match fault {
                Fault::CrashAfterReady => self.kill_own(new, *fault).await?,
                Fault::Hang => self.hang_own(new).await?,
                _ => {}
            }
        }
        self.stage.command_ends(0)?;
        self.bridge_ends(old, 0).await?;
        self.stage.bridge_gone(ready).await?;
        self.stage.publish_joined(&new.name);
        self.check_version(new).await;
        Ok(())
    }

    /// Upgrades in place to a version that cannot serve. Clients stay on the bridge until the
    /// operator brings the old instance back.
    pub(super) async fn failing_bridged_upgrade(
        &mut self,
        old: &InstanceSpec,
        fault: Fault,
    ) -> Result<(), Error> {
        let new = super::failing(self.context.plan, fault);
        // Long enough for the temporary instance to get ready, but no longer, because clients wait
        // for the timeout.
        let ready = self
            .context
            .plan
            .timing
            .failing
            .max(self.context.plan.timing.ready_within / 2);
        self.bridge(old, ready).await?;
        self.print(&format!("stop {}", old.name));
        self.stop(old).await;
        let place = self.inject(fault, &new.name, Standby::Bridge);
        self.print(&format!("fault {fault}: start {}", new.name));
        self.stage.start(&new, false).await?;
        self.stage.replaced_by(&new.name);
        self.stage.command_ends(0)?;
        self.bridge_ends(old, AGAIN).await?;
        let status = self.stage.bridge_status();
        let ended = self.end_of(&new.name).await.unwrap_or(status.own.probe);
        let why = match status.trouble {
            Some(trouble) => vec![trouble, ended],
            None => Vec::new(),
        };
        self.print(&format!("{} does not serve: {}", new.name, why.join("; ")));
        for why in why {
            self.context.step(place, FaultStep::Seen(why));
        }
        self.settle().await;
        // The exit status does not matter.
        self.stage
            .stop(&new.name, self.context.plan.timing.grace)
            .await;
        self.start_own(old).await?;
        self.stage.end_bridge()?;
        self.bridge_ends(old, 0).await?;
        self.stage.bridge_gone(ready).await?;
        self.stage.publish_joined(&old.name);
        self.log_fault_end(place);
        Ok(())
    }

    /// Builds a bridge over an instance. Waits until the bridge serves and the instance may be
    /// replaced.
    async fn bridge(&mut self, running: &InstanceSpec, ready: Duration) -> Result<(), Error> {
        let temporary = running.temporary();
        self.print(&format!("berth bridge over {}", running.name));
        let (limits, began) = (
            Limits {
                ready,
                settle: self.context.plan.timing.settle,
            },
            Instant::now(),
        );
        self.stage.bridge(running, limits, self.patience()).await?;
        self.check_version(&temporary).await;
        self.print(&format!(
            "{} serves, and {} may be replaced after {:.1?}",
            temporary.name,
            running.name,
            began.elapsed()
        ));
        Ok(())
    }

    /// Waits until `berth bridge` or `berth bridge end` has exited. Fails if the exit status is not
    /// `wanted`.
    async fn bridge_ends(&mut self, running: &InstanceSpec, wanted: i32) -> Result<(), Error> {
        let (name, began) = (running.temporary().name, Instant::now());
        let code = self.stage.bridge_ended(self.patience()).await?;
        if code != Some(wanted) {
            let code = code.map_or_else(|| "a signal".into(), |code| format!("exit status {code}"));
            return Err(self
                .stage
                .failed(&name, format!("ended with {code} instead of {wanted}"))
                .await);
        }
        self.print(&format!(
            "berth bridge ended with {wanted} after {:.1?}",
            began.elapsed()
        ));
        Ok(())
    }

    fn patience(&self) -> Duration {
        2 * (self.context.plan.timing.ready_within + self.context.plan.timing.settle) + BESIDES
    }

    /// Starts the node's kube-apiserver, which has the port alone, in the part of COMMAND.
    async fn start_own(&mut self, own: &InstanceSpec) -> Result<(), Error> {
        self.print(&format!("start {} in its place", own.name));
        self.stage.start(own, true).await?;
        self.stage.replaced_by(&own.name);
        Ok(())
    }

    /// Waits until the bridge reports that the node's kube-apiserver is ready and has another
    /// listener than `before`.
    async fn own_ready(
        &mut self,
        own: &InstanceSpec,
        before: Option<u64>,
        within: Duration,
    ) -> Result<(), Error> {
        let ready = async |stage: &Stage| {
            let now = stage.bridge_status().own;
            if now.ready && now.listener != before {
                Ok(())
            } else {
                Err(now.probe)
            }
        };
        let ((), took) = self.stage.until(&own.name, "ready", within, ready).await?;
        self.print(&format!("{} is ready after {took:.1?}", own.name));
        Ok(())
    }

    /// Kills the bridge while the old instance still runs, and builds another bridge.
    async fn kill_bridge(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        let place = self.harms(Fault::KillShim, &old.temporary().name);
        self.stage.kill_bridge().await;
        self.context.step(place, FaultStep::Noticed);
        // COMMAND does nothing without a bridge.
        self.stage.command_ends(1)?;
        self.bridge_ends(old, 1).await?;
        self.bridge(old, self.context.plan.timing.ready_within)
            .await?;
        self.end_fault(place).await;
        Ok(())
    }

    async fn hang_bridge(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        let place = self.harms(Fault::HangShim, &old.temporary().name);
        let pid = i32::try_from(self.stage.bridge_status().pid).unwrap_or_default();
        self.hang_beyond_lease(Pid::from_raw(pid)).await;
        self.end_fault(place).await;
        Ok(())
    }

    async fn kill_temporary(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        let place = self.harms(Fault::KillTemporary, &old.temporary().name);
        let killed = self.stage.bridge_status().temporary.pid;
        if let Some(pid) = killed.and_then(|pid| i32::try_from(pid).ok()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let ready = self.context.plan.timing.ready_within;
        self.stage
            .bridge_is("it saw the end", ready, |status| {
                status.temporary.pid != killed
            })
            .await?;
        self.context.step(place, FaultStep::Noticed);
        let serves = |status: &Status| {
            status.steering && status.temporary.ready && status.temporary.pid != killed
        };
        self.stage
            .bridge_is("another was ready", ready, serves)
            .await?;
        self.stage.temporary_joined();
        self.end_fault(place).await;
        Ok(())
    }

    /// Kills the node's kube-apiserver while the bridge serves, and starts it again like systemd.
    async fn kill_own(&mut self, own: &InstanceSpec, fault: Fault) -> Result<(), Error> {
        let name = &own.name;
        let place = self.harms(fault, name);
        let before = self.stage.bridge_status().own.listener;
        if let Some(pid) = self.stage.apiserver(name) {
            self.stage.kill(name, pid).await;
        }
        self.context.step(place, FaultStep::Noticed);
        self.start_own(own).await?;
        self.own_ready(own, before, self.context.plan.timing.ready_within)
            .await?;
        self.end_fault(place).await;
        Ok(())
    }

    /// Stops the new instance with SIGSTOP until the bridge has noticed.
    async fn hang_own(&mut self, new: &InstanceSpec) -> Result<(), Error> {
        let place = self.harms(Fault::Hang, &new.name);
        if let Some(pid) = self.stage.apiserver(&new.name) {
            self.stage.freeze(pid);
        }
        let noticed = self
            .stage
            .bridge_is("it saw it hang", LONGEST_HANG, |status| !status.own.ready)
            .await;
        if noticed.is_ok() {
            self.context.step(place, FaultStep::Noticed);
            sleep(SETTLE).await;
        }
        self.stage.thaw();
        self.own_ready(new, None, self.context.plan.timing.ready_within)
            .await?;
        self.end_fault(place).await;
        Ok(())
    }

    fn harms(&self, fault: Fault, name: &str) -> usize {
        self.print(&format!("fault {fault} at {name}"));
        self.inject(fault, name, Standby::Bridge)
    }

    async fn end_fault(&self, place: usize) {
        self.log_fault_end(place);
        self.calm().await;
    }
}
