//! An upgrade that is judged as `berth upgrade --judge` does it, by the same judge and in the same steps, but faster: the
//! new version gets a larger part of new connections from step to step, and none any more once the judge finds that it is
//! bad.

use super::{POLL, Play};
use crate::context::Context;
use crate::data::MarkKind;
use crate::event::{Event, EventKind, FaultStep};
use crate::fault::{Fault, Standby};
use crate::instance::InstanceSpec;
use crate::monitor::Monitor;
use crate::setting::StageSetting;
use crate::stage::{Error, Stage};
use berth_judge::canary::{INTERVAL, percent};
use berth_judge::{Canary, Judge, Judgement, Outcome, Plan, Verdict, Wanted};
use berth_node::instance::InstanceId;
use berth_node::ipc::wire::Share;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

/// How many times faster it is.
const FASTER: u32 = 4;

/// From its first client to the hang of a new version, at the pace of `berth upgrade`.
const HANGS_AFTER: Duration = Duration::from_secs(20);

/// The store, while there is a storm.
const STANDS_STILL: Duration = Duration::from_secs(3);

/// How long a share lasts that is not renewed.
const LEASE: Duration = Duration::from_secs(10);

impl Play<'_> {
    /// An upgrade to a version with this fault. Whatever the judge finds, the old one serves on.
    pub(super) async fn faulty_upgrade(&mut self, old: &InstanceSpec, fault: Fault) -> Result<(), Error> {
        let new = super::failing(self.context.plan, fault);
        let place = self.inject(fault, &new.name, Standby::Judged);
        self.judge(old, &new).await?;
        if self.share(old, &new, 0).await? {
            self.context.step(place, FaultStep::Noticed);
        }
        // What waits for one that hangs is answered now.
        self.stage.thaw();
        self.stop(&new).await;
        self.log_fault_end(place);
        self.calm().await;
        Ok(())
    }

    /// An upgrade to a version with which nothing is wrong: the control.
    pub(super) async fn judged_upgrade(&mut self, old: &InstanceSpec, new: &InstanceSpec) -> Result<(), Error> {
        // One that is judged bad is a false alarm, for the report; the upgrade goes on to its end.
        let (context, setting) = (self.context, self.stage.setting.clone());
        tokio::try_join!(self.judge(old, new), disturb(context, &setting, &new.name))?;
        self.stage.publish_joined(&new.name);
        self.print(&format!("stop {}", old.name));
        self.stop(old).await;
        self.check_version(new).await;
        Ok(())
    }

    /// Starts a new version, and judges it beside the old one.
    ///
    /// # Errors
    /// It is not ready in time.
    pub(super) async fn judge(&mut self, old: &InstanceSpec, new: &InstanceSpec) -> Result<Verdict, Error> {
        let (context, name) = (self.context, new.name.as_str());
        self.print(&format!("start {name}, to be judged beside {}", old.name));
        self.stage.start(new, new.fault.is_none()).await?;
        let none = share(old, new, 0)?;
        let no_client_yet = async |stage: &Stage| {
            stage.share(none.clone()).await;
            stage.check_joined(name).await
        };
        self.stage.until(name, "ready", context.plan.timing.ready_within, no_client_yet).await?;
        let [old_one, new_one] = [&old.name, &new.name].map(|name| self.monitor_of(name));

        let pace = |time: Duration| context.plan.timing.speedup.of(time / FASTER);
        let plan = Plan::default();
        let plan = Plan { warm: pace(plan.warm), step: pace(plan.step), bake: pace(plan.bake), ..plan };
        let (mut judge, mut canary) = (Judge::default(), Canary::new(&plan));
        let (began, mut ticks) = (Instant::now(), interval(pace(INTERVAL)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut hangs_at, mut is_to_hang) = (None, new.fault == Some(Fault::Hang));
        loop {
            ticks.tick().await;
            let (old_sample, new_sample) = tokio::join!(old_one.sample(), new_one.sample());
            judge.observe(began.elapsed(), old_sample, new_sample);
            let verdict = judge.verdict();
            context.recorder.add(name, EventKind::Judged(verdict.clone()));
            match canary.next(began.elapsed(), verdict.outcome) {
                Wanted::Share { permille, begins } => {
                    if begins && permille > 0 {
                        judge.begin_step();
                        let part = percent(permille);
                        self.print(&format!("{name} has {part} of new connections"));
                        context.recorder.add(name, EventKind::Mark { mark: MarkKind::Share, text: part });
                        hangs_at = hangs_at.or(Some(Instant::now() + pace(HANGS_AFTER)));
                    }
                    self.stage.share(share(old, new, permille)?).await;
                }
                Wanted::End(_) => {
                    let text = words(&verdict);
                    self.print(&format!("{name} is judged after {:.1?}: {text}", began.elapsed()));
                    if verdict.outcome == Outcome::Undecided {
                        verdict.lacking.iter().for_each(|lacks| self.print(lacks));
                    }
                    context.recorder.add(name, EventKind::Mark { mark: MarkKind::Judged, text });
                    return Ok(verdict);
                }
            }
            if is_to_hang
                && hangs_at.is_some_and(|at| at <= Instant::now())
                && let Some(apiserver) = self.stage.apiserver(name)
            {
                self.print(&format!("{name} hangs"));
                self.stage.freeze(apiserver);
                is_to_hang = false;
            }
        }
    }

    /// Gives the new one this part of new connections; whether both shims took it in time.
    async fn share(&self, old: &InstanceSpec, new: &InstanceSpec, permille: u16) -> Result<bool, Error> {
        let (share, deadline) = (share(old, new, permille)?, Instant::now() + self.context.plan.timing.ready_within);
        while !self.stage.share(share.clone()).await {
            if Instant::now() >= deadline {
                return Ok(false);
            }
            sleep(POLL).await;
        }
        Ok(true)
    }

    fn monitor_of(&self, name: &str) -> Monitor {
        self.monitor.at(self.stage.direct(name).unwrap_or(self.stage.setting.address))
    }
}

/// The storm, if there is to be one, when a version has its first clients, and a store that stands still: both meet what
/// neither of them is to blame for.
async fn disturb(context: &Context<'_>, setting: &StageSetting, name: &str) -> Result<(), Error> {
    if context.plan.load.storm == 0 {
        return Ok(());
    }
    // Or is sent back before.
    let has_clients = |event: &Event| {
        event.subject == name && matches!(event.what, EventKind::Mark { mark: MarkKind::Share | MarkKind::Judged, .. })
    };
    while !context.recorder.read(|log| log.iter().rev().any(has_clients)) {
        sleep(POLL).await;
    }
    let (storm, ()) = tokio::join!(super::storm(context, setting), context.store.stand_still(STANDS_STILL));
    storm
}

/// All clients dial from this machine.
fn share(old: &InstanceSpec, new: &InstanceSpec, permille: u16) -> Result<Share, Error> {
    let id = |instance: &InstanceSpec| InstanceId::parse(&instance.name);
    let (Ok(old), Ok(new)) = (id(old), id(new)) else {
        return Err(Error::Unavailable(format!("{} is no name of an instance", new.name)));
    };
    Ok(Share { old, new, permille, salt: 1, lease_ms: LEASE.as_millis() as u64, local: true })
}

/// A verdict in words, and what is bad.
fn words(verdict: &Verdict) -> String {
    let bad = verdict.rows.iter().filter(|row| row.judgement == Judgement::Bad);
    let mut codes: Vec<String> = bad.map(|row| row.code.to_string()).collect();
    codes.dedup();
    let outcome = format!("{:?}", verdict.outcome).to_lowercase();
    if codes.is_empty() { outcome } else { format!("{outcome}: {}", codes.join(", ")) }
}
