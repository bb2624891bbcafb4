//! Faults of an upgrade. The script injects each fault, waits for its effect, ends it, and logs all
//! of this.

use super::{POLL_INTERVAL, Play, SETTLE};
use crate::config::{
    ANSWER_TIMEOUT, LEASE_DURATION, Topology, Via,
    fault::{Fault, Standby},
};
use crate::record::{
    event::{Attempt, ConnectionKind, FaultStep},
    log::attempts_at_tested_address,
    stamp::Stamp,
};
use crate::run::processes::{Error, has_faketime, instance_spec::InstanceSpec};
use crate::testbed::simulated::HANDSHAKE_TIMEOUT;
use nix::unistd::Pid;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};

/// Longest time for which an apiserver hangs. After it, accepted requests can still be answered
/// before they count as lost, and no TLS handshake has timed out.
pub(super) const LONGEST_HANG: Duration = Duration::from_secs(11);
const _: () = assert!(LONGEST_HANG.as_secs() < HANDSHAKE_TIMEOUT.as_secs());

/// Longest wait that counts as calm: no wait is longer in a rehearsal without faults.
const USUAL_WAIT: Duration = Duration::from_secs(1);

/// Time for which a shim has no free descriptor, or a wrong clock.
const FAULT_DURATION: Duration = Duration::from_secs(3);

/// Largest jump of the clock, in seconds.
const CLOCK_JUMP_SECONDS: i64 = 24 * 60 * 60;

/// Time that a shim hangs after its lease has expired.
const BEYOND_LEASE: Duration = Duration::from_secs(3);

impl Play<'_> {
    /// Starts a version that cannot serve, and stops this version after a while: a failed upgrade.
    pub(super) async fn failing_upgrade(
        &mut self,
        old: &InstanceSpec,
        fault: Fault,
    ) -> Result<(), Error> {
        if self.processes.layout.is_bridged() {
            return self.failing_bridged_upgrade(old, fault).await;
        }
        let new = super::failing_instance(self.session.plan, fault);
        let alone = self.session.via == Via::None;
        if alone {
            self.print_progress(&format!("stop {}", old.name));
            self.stop_instance(old).await;
        }
        let standby = if alone {
            Standby::Nothing
        } else {
            Standby::Sibling
        };
        let place = self.log_fault_begin(fault, &new.name, standby);
        self.print_progress(&format!("fault {fault}: start {}", new.name));
        let timing = &self.session.plan.timing;
        let patience = Instant::now()
            + match fault {
                // The flag makes the instance exit at once. The script waits for that exit.
                Fault::BadFlag => timing.ready_within,
                _ => timing.speedup.shorten(timing.failing),
            };
        // `start` may never return, because a proxy waits for the port of the faulty instance. So
        // the wait has a limit, and a failed start is ignored.
        let started = timeout_at(patience, self.processes.start_instance(&new, false)).await;
        if let Ok(Err(error @ Error::Unavailable(_))) = started {
            return Err(error);
        }
        while Instant::now() < patience
            && (fault != Fault::BadFlag || self.processes.exit_status(&new.name).is_none())
        {
            sleep(POLL_INTERVAL).await;
        }
        let why = match self.describe_end(&new.name).await {
            Some(end) => end,
            None => match self.processes.check_joined(&new.name).await {
                Ok(_) => "the instance reports that it is ready".into(),
                Err(why) => why,
            },
        };
        self.print_progress(&format!("{} does not serve: {why}", new.name));
        self.session.record_fault_step(place, FaultStep::Seen(why));
        self.wait_to_settle().await;
        // A version that cannot serve may exit with any status.
        self.processes
            .stop_instance(&new.name, self.session.plan.timing.grace)
            .await;
        if alone {
            self.start_instance(old).await?;
            self.wait_until_joined(old).await?;
        }
        self.log_fault_end(place);
        Ok(())
    }

    /// Returns an instance's exit status and last log lines, in words. `None` if the instance runs.
    pub(super) async fn describe_end(&mut self, name: &str) -> Option<String> {
        let status = self.processes.exit_status(name)?;
        Some(format!(
            "the instance ended with {status}; the last line of its log:\n{}",
            self.processes.last_log_lines(name).await
        ))
    }

    /// Injects a fault while both instances serve, and waits for its end.
    pub(super) async fn inject_fault(
        &mut self,
        old: &InstanceSpec,
        new: &InstanceSpec,
        fault: Fault,
    ) -> Result<(), Error> {
        // The shim of the old instance is harmed, since most streams are on the old instance.
        let hit = if matches!(fault, Fault::KillShim | Fault::HangShim) {
            old
        } else {
            new
        };
        let name = &hit.name;
        let via = self.session.via;
        let lacks = match fault {
            _ if fault.needs_a_bridge() => Some("bridge"),
            _ if fault.harms_shims() && via != Via::Berth => Some("shim"),
            _ if fault.needs_a_shim() && self.processes.layout.relay_role().is_none() => {
                Some("relay")
            }
            _ => None,
        };
        if let Some(what) = lacks {
            self.print_progress(&format!("fault {fault}: {via} has no {what}, skipped"));
            return Ok(());
        }
        let target = match fault {
            Fault::CrashAfterReady | Fault::Hang => self.processes.apiserver_pid(name),
            _ => self.processes.relay_pid(name),
        };
        let Some(target) = target else {
            self.session
                .record_trouble(format!("{name} had ended before {fault} could happen"));
            return Ok(());
        };
        if fault == Fault::ClockJump && !has_faketime(target) {
            self.print_progress(&format!(
                "fault {fault}: libfaketime is not installed, or berth is a static binary: skipped"
            ));
            return Ok(());
        }
        let alone = match via {
            Via::None => true,
            Via::Berth if self.processes.layout.topology == Topology::Node => fault.needs_a_shim(),
            _ => false,
        };
        let standby = if alone {
            Standby::Nothing
        } else {
            Standby::Sibling
        };
        self.print_progress(&format!("fault {fault} at {name}"));
        let has = match fault {
            // The apiserver of a unit ends with the shim, so all of its connections end.
            Fault::KillShim if self.processes.layout.topology == Topology::Run => None,
            Fault::KillShim | Fault::HangShim => self
                .processes
                .status(name)
                .await
                .ok()
                .map(|status| status.connections_open),
            _ => None,
        };
        let place = self.log_fault_begin(fault, name, standby);
        has.into_iter()
            .for_each(|has| self.session.record_fault_step(place, FaultStep::Has(has)));
        match fault {
            Fault::Hang => self.hang_apiserver(name, target, place).await,
            Fault::HangShim => self.hang_beyond_lease(target).await,
            Fault::NoDescriptors => {
                let limit = async |starved| {
                    let limited = self.processes.limit_files(target, starved).await;
                    limited.map_err(Error::unavailable_error(
                        "cannot limit a shim's descriptors",
                    ))
                };
                limit(true).await?;
                sleep(FAULT_DURATION).await;
                limit(false).await?;
            }
            Fault::ClockJump => {
                let jump = |seconds| {
                    self.processes
                        .set_clock(seconds)
                        .map_err(Error::unavailable_error("cannot set the shims' clock"))
                };
                jump(
                    fastrand::Rng::with_seed(
                        self.session.plan.load.seed.wrapping_add(place as u64),
                    )
                    .i64(-CLOCK_JUMP_SECONDS..=CLOCK_JUMP_SECONDS),
                )?;
                sleep(FAULT_DURATION).await;
                jump(0)?;
            }
            _ => {
                self.processes.kill_process(name, target).await;
                self.processes.start_node_shim()?;
                self.processes.start_instance(hit, true).await?;
            }
        }
        self.wait_until_joined(hit).await?;
        self.log_fault_end(place);
        self.wait_until_clients_are_served().await;
        Ok(())
    }

    /// Waits until clients are served as before, so that a loss is attributed to the right fault.
    pub(super) async fn wait_until_clients_are_served(&self) {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        self.wait_to_settle().await;
        while Instant::now() < deadline {
            let since = Stamp::now();
            sleep(self.session.plan.timing.speedup.shorten(POLL_INTERVAL * 10)).await;
            let (served, slow) = self.session.recorder.read(|log| {
                let lately = || {
                    attempts_at_tested_address(log)
                        .rev()
                        .take_while(|a| a.done >= since)
                };
                (
                    lately().count(),
                    lately().any(|a| a.done.since(a.due) > USUAL_WAIT),
                )
            });
            if served > 0 && !slow {
                return;
            }
        }
    }

    /// Stops an apiserver with SIGSTOP until its shim has noticed, and a little longer. Without a
    /// shim, the apiserver is stopped for the longest time, [`LONGEST_HANG`].
    pub(super) async fn hang_apiserver(&mut self, name: &str, apiserver: Pid, place: usize) {
        self.processes.freeze(apiserver);
        let deadline = Instant::now() + LONGEST_HANG;
        while Instant::now() < deadline {
            if self.processes.is_unreachable(name).await {
                let noticed = Stamp::now();
                self.session.record_fault_step(place, FaultStep::Noticed);
                sleep(SETTLE).await;
                // Wait until the other instance has answered a new connection.
                let since = |a: &Attempt| a.kind == ConnectionKind::New && a.due > noticed;
                let seen = || {
                    self.session
                        .recorder
                        .read(|log| attempts_at_tested_address(log).rev().any(since))
                };
                while Instant::now() < deadline && !seen() {
                    sleep(POLL_INTERVAL).await;
                }
                break;
            }
            sleep(POLL_INTERVAL).await;
        }
        self.processes.thaw();
    }

    /// Stops a shim with SIGSTOP for longer than its lease.
    pub(super) async fn hang_beyond_lease(&mut self, shim: Pid) {
        self.processes.freeze(shim);
        sleep(LEASE_DURATION + BEYOND_LEASE).await;
        self.processes.thaw();
    }

    /// Logs a fault and returns its number.
    pub(super) fn log_fault_begin(&self, fault: Fault, instance: &str, standby: Standby) -> usize {
        self.session.recorder.add_fault(instance, fault, standby)
    }

    pub(super) fn log_fault_end(&self, place: usize) {
        self.session.record_fault_step(place, FaultStep::Over);
    }
}
