//! Faults before the upgrade, while one instance serves: what is on the direct path, if there is one, is on it then.

use super::harm::LONGEST_HANG;
use super::{POLL, Play};
use crate::direct;
use crate::event::FaultStep;
use crate::fault::{Fault, Standby};
use crate::instance::InstanceSpec;
use crate::plan::{Topology, Via};
use crate::stage::Error;
use crate::topology::BESIDE;
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep};

impl Play<'_> {
    pub(super) async fn harm_in_calm(&mut self, old: &InstanceSpec, fault: Fault) -> Result<(), Error> {
        let (name, layout) = (&old.name, self.stage.layout);
        let skipped = match layout.relays() {
            None if fault.needs_a_shim() => "nothing that relays",
            _ if fault.needs_a_second_shim() && layout.via != Via::Berth => "no second shim",
            _ => "",
        };
        if !skipped.is_empty() {
            self.print(&format!("fault {fault}: {} has {skipped}, skipped", layout.via));
            return Ok(());
        }
        if fault.needs_a_second_shim() {
            self.harm_beside(old, fault).await?;
        } else {
            let Some(target) = self.target(fault, name) else {
                self.context.trouble(format!("{name} had ended before {fault} could happen"));
                return Ok(());
            };
            // A unit ends with either of its processes.
            let apart = layout.via == Via::Berth && layout.topology != Topology::Run;
            let standby = match fault {
                Fault::CalmKillShim | Fault::CalmCrash if self.stage.setting.direct && apart => Standby::Direct,
                Fault::CalmHangShim if self.stage.setting.direct => Standby::Direct,
                Fault::CalmCrash if apart => Standby::Shim,
                _ => Standby::Nothing,
            };
            self.print(&format!("fault {fault} at {name}"));
            let place = self.inject(fault, name, standby);
            match fault {
                Fault::CalmHang => self.hang(name, target, place).await,
                Fault::CalmHangShim => self.hang_beyond_lease(target).await,
                _ => {
                    self.stage.kill(name, target).await;
                    self.context.step(place, FaultStep::Noticed);
                    if fault == Fault::CalmCrash {
                        self.missed(name).await;
                    }
                    self.stage.open()?;
                    self.stage.start(old, true).await?;
                }
            }
            self.joined(old).await?;
            self.log_fault_end(place);
        }
        self.calm().await;
        self.steered_again(None, &fault.to_string()).await;
        Ok(())
    }

    /// What is done to a second shim, which steers if there is a direct path.
    async fn harm_beside(&mut self, old: &InstanceSpec, fault: Fault) -> Result<(), Error> {
        self.print(&format!("start {BESIDE}, a second shim"));
        self.stage.start_beside(&old.name, self.context.plan.timing.ready_within).await?;
        self.settle().await;
        // Of two, the one that started last steers. What it accepted before that would end with it.
        self.steered_again(Some(BESIDE), "a second shim came").await;
        let Some(target) = self.stage.beside() else {
            self.context.trouble(format!("{BESIDE} had ended before {fault} could happen"));
            return Ok(());
        };
        self.print(&format!("fault {fault} at {BESIDE}"));
        let standby = if self.stage.setting.direct { Standby::Direct } else { Standby::Sibling };
        let place = self.inject(fault, &old.name, standby);
        match fault {
            Fault::BesideHangShim => self.hang_beyond_lease(target).await,
            Fault::BesideDrain => self.stop_beside().await,
            _ => {
                self.stage.signal_beside(Signal::SIGKILL);
                self.stage.beside_gone(self.context.plan.timing.grace).await;
            }
        }
        self.log_fault_end(place);
        if fault == Fault::BesideHangShim {
            self.calm().await;
            self.stop_beside().await;
        }
        Ok(())
    }

    /// Ends it, as what it runs under does.
    async fn stop_beside(&self) {
        self.stage.signal_beside(Signal::SIGTERM);
        if !self.stage.beside_gone(self.context.plan.timing.grace).await {
            let trouble = format!("{BESIDE} was still there {:?} after SIGTERM", self.context.plan.timing.grace);
            self.context.trouble(trouble);
            self.stage.signal_beside(Signal::SIGKILL);
        }
    }

    /// Waits until new connections do not come to an instance any more: a shim that knew it before needs a moment.
    async fn missed(&self, name: &str) {
        let deadline = Instant::now() + LONGEST_HANG;
        // A unit ends with it.
        while Instant::now() < deadline && self.stage.ended(name).is_none() && !self.stage.is_missed(name).await {
            sleep(POLL).await;
        }
    }

    /// Waits until a shim steers, or this one and nothing goes through it, if there is a direct path.
    async fn steered_again(&self, by: Option<&str>, after: &str) {
        if self.stage.setting.direct && !direct::calm(&self.stage.setting, by).await {
            let trouble = format!("{} was to steer again after this, and did not: {after}", by.unwrap_or("a shim"));
            self.context.trouble(trouble);
        }
    }
}
