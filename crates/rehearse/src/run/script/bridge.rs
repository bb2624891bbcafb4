//! Replaces an instance in place, under `berth bridge`. The instance has no shim.
//!
//! The script does the work of COMMAND: it stops the old instance and starts the new instance, as
//! systemd does for `systemctl restart`. Faults are injected while COMMAND runs. COMMAND waits for
//! the script, so the bridge cannot end before the fault.

use super::faults::LONGEST_HANG;
use super::{Play, SETTLE};
use crate::config::fault::{Fault, Standby};
use crate::record::event::FaultStep;
use crate::run::processes::{
    Error, Processes, Status, instance_spec::InstanceSpec, layout::Limits,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Exit status of a bridge if the node's kube-apiserver did not come back.
const NOT_BACK: i32 = 75;

/// Time that a bridge takes in addition to twice its --settle and --ready-timeout: for the
/// preflight checks, and for handshakes and connections to end.
const OVERHEAD: Duration = Duration::from_secs(90);

impl Play<'_> {
    pub(super) async fn bridged_upgrade(
        &mut self,
        old: &InstanceSpec,
        new: &InstanceSpec,
        faults: &[Fault],
    ) -> Result<(), Error> {
        let ready = self.session.plan.timing.ready_within;
        self.build_bridge(old, ready).await?;
        // Faults of the old instance and of the bridge come first.
        for fault in faults {
            match fault {
                Fault::KillShim => self.kill_bridge(old).await?,
                Fault::HangShim => self.hang_bridge(old).await?,
                Fault::KillTemporary => self.kill_temporary_instance(old).await?,
                Fault::KillOld => self.kill_own_instance(old, *fault).await?,
                _ => {}
            }
        }
        let before = self.processes.bridge_status().own.listener;
        self.print_progress(&format!("stop {}", old.name));
        self.stop_instance(old).await;
        // The storm comes while the bridge serves, because no berth is left afterwards.
        self.run_storm().await?;
        self.start_own_instance(new).await?;
        self.wait_until_own_instance_is_ready(new, before, ready)
            .await?;
        for fault in faults {
            match fault {
                Fault::CrashAfterReady => self.kill_own_instance(new, *fault).await?,
                Fault::Hang => self.hang_own_instance(new).await?,
                _ => {}
            }
        }
        self.processes.end_command(0)?;
        self.expect_bridge_exit(old, 0).await?;
        self.processes.wait_for_bridge_end(ready).await?;
        self.processes.publish_joined(&new.name);
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
        let new = super::failing_instance(self.session.plan, fault);
        // The limit lets the temporary instance get ready in time. A longer limit would only make
        // the rehearsal longer, since the new version never gets ready.
        let ready = self
            .session
            .plan
            .timing
            .failing
            .max(self.session.plan.timing.ready_within / 2);
        self.build_bridge(old, ready).await?;
        self.print_progress(&format!("stop {}", old.name));
        self.stop_instance(old).await;
        let place = self.log_fault_begin(fault, &new.name, Standby::Bridge);
        self.print_progress(&format!("fault {fault}: start {}", new.name));
        self.processes.start_instance(&new, false).await?;
        self.processes.set_own_instance(&new.name);
        self.processes.end_command(0)?;
        self.expect_bridge_exit(old, NOT_BACK).await?;
        let status = self.processes.bridge_status();
        let ended = self
            .describe_end(&new.name)
            .await
            .unwrap_or(status.own.probe);
        let why = match status.trouble {
            Some(trouble) => vec![trouble, ended],
            None => Vec::new(),
        };
        self.print_progress(&format!("{} does not serve: {}", new.name, why.join("; ")));
        for why in why {
            self.session.record_fault_step(place, FaultStep::Seen(why));
        }
        self.wait_to_settle().await;
        // A version that cannot serve may exit with any status.
        self.processes
            .stop_instance(&new.name, self.session.plan.timing.grace)
            .await;
        self.start_own_instance(old).await?;
        self.processes.end_bridge()?;
        self.expect_bridge_exit(old, 0).await?;
        self.processes.wait_for_bridge_end(ready).await?;
        self.processes.publish_joined(&old.name);
        self.log_fault_end(place);
        Ok(())
    }

    /// Builds a bridge over an instance. Waits until the bridge serves and the instance may be
    /// replaced.
    async fn build_bridge(&mut self, running: &InstanceSpec, ready: Duration) -> Result<(), Error> {
        let temporary = running.temporary_instance_spec();
        self.print_progress(&format!("berth bridge over {}", running.name));
        let (limits, began) = (
            Limits {
                ready,
                settle: self.session.plan.timing.settle,
            },
            Instant::now(),
        );
        self.processes
            .start_bridge(running, limits, self.bridge_patience())
            .await?;
        self.check_version(&temporary).await;
        self.print_progress(&format!(
            "{} serves, and {} may be replaced, {:.1?} after the start of berth bridge",
            temporary.name,
            running.name,
            began.elapsed()
        ));
        Ok(())
    }

    /// Waits until `berth bridge` or `berth bridge end` has exited. Fails if the exit status is not
    /// `wanted`.
    async fn expect_bridge_exit(
        &mut self,
        running: &InstanceSpec,
        wanted: i32,
    ) -> Result<(), Error> {
        let (name, began) = (running.temporary_instance_spec().name, Instant::now());
        let code = self
            .processes
            .wait_for_bridge_exit(self.bridge_patience())
            .await?;
        if code != Some(wanted) {
            let code = code.map_or_else(|| "a signal".into(), |code| format!("exit status {code}"));
            return Err(self
                .processes
                .instance_error(
                    &name,
                    format!("ended with {code} instead of exit status {wanted}"),
                )
                .await);
        }
        self.print_progress(&format!(
            "berth bridge ended with exit status {wanted} after {:.1?}",
            began.elapsed()
        ));
        Ok(())
    }

    fn bridge_patience(&self) -> Duration {
        2 * (self.session.plan.timing.ready_within + self.session.plan.timing.settle) + OVERHEAD
    }

    /// Starts the node's kube-apiserver, which has the port alone, on behalf of COMMAND.
    async fn start_own_instance(&mut self, own: &InstanceSpec) -> Result<(), Error> {
        self.print_progress(&format!(
            "start {} in place of the old kube-apiserver",
            own.name
        ));
        self.processes.start_instance(own, true).await?;
        self.processes.set_own_instance(&own.name);
        Ok(())
    }

    /// Waits until the bridge reports that the node's kube-apiserver is ready and has another
    /// listener than `before`.
    async fn wait_until_own_instance_is_ready(
        &mut self,
        own: &InstanceSpec,
        before: Option<u64>,
        within: Duration,
    ) -> Result<(), Error> {
        let ready = async |processes: &Processes| {
            let now = processes.bridge_status().own;
            if now.ready && now.listener != before {
                Ok(())
            } else {
                Err(now.probe)
            }
        };
        let ((), took) = self
            .processes
            .wait_until(&own.name, "ready", within, ready)
            .await?;
        self.print_progress(&format!("{} is ready after {took:.1?}", own.name));
        Ok(())
    }

    /// Kills the bridge while the old instance still runs, and then builds a second bridge.
    async fn kill_bridge(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        let place = self.begin_fault(Fault::KillShim, &old.temporary_instance_spec().name);
        self.processes.kill_bridge().await;
        self.session.record_fault_step(place, FaultStep::Noticed);
        // Without a bridge, COMMAND must fail before it replaces the instance.
        self.processes.end_command(1)?;
        self.expect_bridge_exit(old, 1).await?;
        self.build_bridge(old, self.session.plan.timing.ready_within)
            .await?;
        self.end_fault(place).await;
        Ok(())
    }

    async fn hang_bridge(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        let place = self.begin_fault(Fault::HangShim, &old.temporary_instance_spec().name);
        let pid = i32::try_from(self.processes.bridge_status().pid).unwrap_or_default();
        self.hang_beyond_lease(Pid::from_raw(pid)).await;
        self.end_fault(place).await;
        Ok(())
    }

    async fn kill_temporary_instance(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        let place = self.begin_fault(Fault::KillTemporary, &old.temporary_instance_spec().name);
        let killed = self.processes.bridge_status().temporary.pid;
        if let Some(pid) = killed.and_then(|pid| i32::try_from(pid).ok()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let ready = self.session.plan.timing.ready_within;
        self.processes
            .wait_for_bridge_status("the temporary kube-apiserver has ended", ready, |status| {
                status.temporary.pid != killed
            })
            .await?;
        self.session.record_fault_step(place, FaultStep::Noticed);
        let serves = |status: &Status| {
            status.steering && status.temporary.ready && status.temporary.pid != killed
        };
        self.processes
            .wait_for_bridge_status("another temporary kube-apiserver is ready", ready, serves)
            .await?;
        self.processes.publish_temporary_instance();
        self.end_fault(place).await;
        Ok(())
    }

    /// Kills the node's kube-apiserver while the bridge serves, and starts it again like systemd.
    async fn kill_own_instance(&mut self, own: &InstanceSpec, fault: Fault) -> Result<(), Error> {
        let name = &own.name;
        let place = self.begin_fault(fault, name);
        let before = self.processes.bridge_status().own.listener;
        if let Some(pid) = self.processes.apiserver_pid(name) {
            self.processes.kill_process(name, pid).await;
        }
        self.session.record_fault_step(place, FaultStep::Noticed);
        self.start_own_instance(own).await?;
        self.wait_until_own_instance_is_ready(own, before, self.session.plan.timing.ready_within)
            .await?;
        self.end_fault(place).await;
        Ok(())
    }

    /// Stops the new instance with SIGSTOP until the bridge has noticed.
    async fn hang_own_instance(&mut self, new: &InstanceSpec) -> Result<(), Error> {
        let place = self.begin_fault(Fault::Hang, &new.name);
        if let Some(pid) = self.processes.apiserver_pid(&new.name) {
            self.processes.freeze(pid);
        }
        let noticed = self
            .processes
            .wait_for_bridge_status("the node's kube-apiserver hangs", LONGEST_HANG, |status| {
                !status.own.ready
            })
            .await;
        if noticed.is_ok() {
            self.session.record_fault_step(place, FaultStep::Noticed);
            sleep(SETTLE).await;
        }
        self.processes.thaw();
        self.wait_until_own_instance_is_ready(new, None, self.session.plan.timing.ready_within)
            .await?;
        self.end_fault(place).await;
        Ok(())
    }

    fn begin_fault(&self, fault: Fault, name: &str) -> usize {
        self.print_progress(&format!("fault {fault} at {name}"));
        self.log_fault_begin(fault, name, Standby::Bridge)
    }

    async fn end_fault(&self, place: usize) {
        self.log_fault_end(place);
        self.wait_until_clients_are_served().await;
    }
}
