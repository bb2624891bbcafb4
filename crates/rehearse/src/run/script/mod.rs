//! The script of a run: start the old instance and the load, start the new instance, wait until it
//! has joined, stop the old instance, and so on. Then end the load and stop the last instance.
//!
//! `faults` injects faults during an upgrade. `bridge` upgrades in place, under `berth bridge`.

mod bridge;
mod faults;

use super::monitor::Monitor;
use super::processes::{
    self, Error, Stage, instance_spec::InstanceSpec, layout::Role, settings::StageSetting,
};
use super::session::Context;
use crate::config::{Plan, UNANSWERED, Via, fault::Fault};
use crate::load::{self, Load, Target, grant};
use crate::record::{
    event::{Answer, Attempt, Event, EventKind, Failure},
    log::attempts,
    stamp::Stamp,
    verdict::{NEW, OLD},
};
use crate::testbed::store;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

/// Time limit for the address in the Service `kubernetes`. kube-apiserver's reconciler restores the
/// survivor's address within ten seconds.
const SERVICE_BACK_WITHIN: Duration = Duration::from_secs(30);

/// Duration of the load after a fault, before the next step.
const SETTLE: Duration = Duration::from_millis(1500);

/// Time between two polls.
const POLL: Duration = Duration::from_millis(50);

/// Runs the script. The log then has the events of clients and instances.
pub(crate) async fn play(context: &Context<'_>, stage: &mut Stage) -> Result<(), Error> {
    let Context {
        plan, ref recorder, ..
    } = *context;
    let path = stage.setting.store();
    let what = format!(
        "cannot make the socket {} (TMPDIR names another place)",
        path.display()
    );
    let socket = UnixListener::bind(&path).map_err(Error::unavailable(what))?;
    // The tasks are aborted if this future is dropped.
    let mut background = JoinSet::new();
    background.spawn(store::serve(
        socket,
        Arc::clone(&context.store),
        Arc::clone(recorder),
    ));
    if plan.etcd.is_none() && !plan.old.is_simulated() {
        context.print("--etcd-servers is given: what this rehearsal writes stays there");
    }
    stage.start_etcd().await?;
    let monitor = Monitor::new(&stage.setting);
    let service = (plan.netns && !plan.old.is_simulated())
        .then(|| background.spawn(monitor.clone().watch_service(Arc::clone(recorder))));
    if service.is_none() && !plan.old.is_simulated() {
        context.print("the Service kubernetes is not observed: no loopback address can be in it (see --netns)");
    }
    let mut play = Play {
        context,
        stage,
        monitor,
    };

    play.stage.open()?;
    let old = instance(plan, 0);
    play.start(&old).await?;
    play.joined(&old).await?;
    play.first(&old).await?;
    if service.is_some() {
        play.service_back().await;
    }
    if !plan.old.is_simulated() {
        grant(play.stage.setting.address, &play.stage.setting.certs)
            .await
            .map_err(Error::Unavailable)?;
    }
    watch_gates(context, &play.stage.setting, &mut background);
    let load = start_load(context, play.stage).await?;
    let mut old = old;
    let until = plan
        .lasts
        .filter(|_| context.via == plan.via)
        .map(|lasts| Instant::now() + lasts);
    let (drawn, mut random) = (plan.drawn(), fastrand::Rng::with_seed(plan.load.seed));
    for upgrade in 1.. {
        let faults: BTreeSet<Fault> = match until {
            Some(_) => random.choice(&drawn).copied().into_iter().collect(),
            None if upgrade == 1 => plan.faults.clone(),
            None => BTreeSet::new(),
        };
        old = play.round(old, upgrade, &faults).await?;
        if service.is_some() {
            play.service_back().await;
        }
        if until.map_or(upgrade >= plan.upgrades, |until| Instant::now() >= until) {
            break;
        }
    }
    if let Some(service) = service {
        service.abort();
    }
    finish(load, context).await;
    play.print(&format!("load ended, stop {}", old.name));
    play.stop(&old).await;
    Ok(())
}

/// Starts the load, and lets the first phase of it pass.
async fn start_load(context: &Context<'_>, stage: &Stage) -> Result<Load, Error> {
    let Context {
        plan, ref recorder, ..
    } = *context;
    let load = &plan.load;
    context.print(&format!(
        "load: {} new connections a second, {} kept connections, {} watches, seed {}",
        load.rate, load.clients, load.watches, load.seed
    ));
    let target = target(&stage.setting)?;
    let load = Load::start(load, &target, &stage.instances(), recorder)
        .await
        .map_err(Error::Unavailable)?;
    recorder.add("", EventKind::LoadBegan);
    sleep(plan.timing.phase).await;
    Ok(load)
}

/// Logs the gates' metrics if the plan has a storm.
fn watch_gates(context: &Context<'_>, setting: &StageSetting, background: &mut JoinSet<()>) {
    if context.plan.load.storm > 0 {
        background.spawn(processes::watch_gates(
            setting.clone(),
            Arc::clone(&context.recorder),
        ));
    }
}

fn target(setting: &StageSetting) -> Result<Target, Error> {
    Target::new(setting.address, &setting.certs)
        .map_err(Error::unavailable("cannot use the certificates just made"))
}

/// Runs the storm if the plan has one and there was none yet. Returns when every client of the
/// storm was served or has given up.
async fn storm(context: &Context<'_>, setting: &StageSetting) -> Result<(), Error> {
    let (clients, recorder) = (context.plan.load.storm, &context.recorder);
    let began = |log: &[Event]| {
        log.iter()
            .any(|event| matches!(event.what, EventKind::StormBegan(_)))
    };
    if clients == 0 || recorder.read(began) {
        return Ok(());
    }
    context.print(&format!("storm: {clients} clients come at once"));
    let (began, mut served) = (Instant::now(), 0);
    recorder.add("", EventKind::StormBegan(clients));
    let mut storm = load::StormClients::start(clients, &target(setting)?)
        .map_err(Error::unavailable("no thread for the storm's clients"))?;
    while let Some((at, answer)) = storm.tries.recv().await {
        served += u32::from(matches!(answer, Answer::Good { .. }));
        recorder.add_at(at, "", EventKind::StormTry(answer));
    }
    recorder.add("", EventKind::StormEnded);
    context.print(&format!(
        "{served} of the storm's clients were served, within {:.1?}",
        began.elapsed()
    ));
    Ok(())
}

async fn finish(load: Load, context: &Context<'_>) {
    context.recorder.add("", EventKind::LoadEnded);
    if let Err(broken) = load.finish().await {
        context.trouble(broken);
    }
}

/// Returns the instance that serves after this number of upgrades.
fn instance(plan: &Plan, upgrades: u32) -> InstanceSpec {
    let new = !upgrades.is_multiple_of(2);
    let (side, apiserver) = if new {
        (NEW, &plan.new)
    } else {
        (OLD, &plan.old)
    };
    let name = if upgrades < 2 {
        side.to_owned()
    } else {
        format!("{side}-{}", upgrades / 2 + 1)
    };
    let version = plan.versions[usize::from(new)].clone();
    // The first instance is ready when the load begins, so its start may be fast.
    let start_delay = if upgrades > 0 {
        plan.timing.start_delay
    } else {
        Duration::ZERO
    };
    InstanceSpec {
        name,
        apiserver: apiserver.clone(),
        version,
        start_delay,
        fault: None,
    }
}

/// Returns the instance of an upgrade that is to fail.
fn failing(plan: &Plan, fault: Fault) -> InstanceSpec {
    InstanceSpec {
        name: fault.to_string(),
        fault: Some(fault),
        ..instance(plan, 1)
    }
}

/// State of the script.
struct Play<'a> {
    context: &'a Context<'a>,
    stage: &'a mut Stage,
    monitor: Monitor,
}

impl Play<'_> {
    fn print(&self, what: &str) {
        self.context.print(what);
    }

    /// Lets the load run after a fault.
    async fn settle(&self) {
        sleep(self.context.plan.timing.speedup.of(SETTLE)).await;
    }

    async fn storm(&self) -> Result<(), Error> {
        storm(self.context, &self.stage.setting).await
    }

    /// Makes an upgrade, with faults before and during the upgrade. Returns the instance that
    /// serves afterwards.
    async fn round(
        &mut self,
        old: InstanceSpec,
        upgrade: u32,
        faults: &BTreeSet<Fault>,
    ) -> Result<InstanceSpec, Error> {
        for fault in faults.iter().filter(|fault| fault.fails_the_upgrade()) {
            self.failing_upgrade(&old, *fault).await?;
        }
        let meanwhile: Vec<Fault> = faults
            .iter()
            .copied()
            .filter(|fault| !fault.fails_the_upgrade())
            .collect();
        let new = instance(self.context.plan, upgrade);
        self.upgrade(&old, &new, &meanwhile).await?;
        self.storm().await?;
        sleep(self.context.plan.timing.phase).await;
        if self.context.plan.lasts.is_some() {
            self.stage.log_footprints().await;
        }
        Ok(new)
    }

    async fn upgrade(
        &mut self,
        old: &InstanceSpec,
        new: &InstanceSpec,
        faults: &[Fault],
    ) -> Result<(), Error> {
        if self.stage.layout.bridges() {
            return self.bridged_upgrade(old, new, faults).await;
        }
        let alone = self.context.via == Via::None;
        if alone {
            // The port belongs to a single instance.
            self.print(&format!("stop {}", old.name));
            self.stop(old).await;
            self.refuses().await;
        }
        self.start(new).await?;
        self.joined(new).await?;
        if alone {
            let took = self.ready(new).await?;
            self.print(&format!("{} is ready after {took:.1?}", new.name));
        } else {
            sleep(self.context.plan.timing.settle).await;
        }
        for fault in faults {
            self.harm(old, new, *fault).await?;
        }
        if !alone {
            self.print(&format!("stop {}", old.name));
            self.stop(old).await;
        }
        self.check_version(new).await;
        Ok(())
    }

    /// Waits until a client was refused. Otherwise an apiserver that starts between two clients
    /// would show no loss.
    async fn refuses(&self) {
        let (gone, deadline) = (Stamp::now(), Instant::now() + UNANSWERED);
        let refused = |a: &Attempt| a.done >= gone && a.answer == Answer::Failed(Failure::Refused);
        let seen = || {
            self.context
                .recorder
                .read(|log| attempts(log).rev().any(refused))
        };
        while Instant::now() < deadline && !seen() {
            sleep(POLL / 10).await;
        }
    }

    /// Waits until the first instance is ready, even for ways where joined means only listening.
    /// Losses during the first start are not losses of an upgrade.
    async fn first(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        self.ready(old).await?;
        self.check_version(old).await;
        Ok(())
    }

    /// Waits until the only instance is ready. Returns the duration of the wait.
    async fn ready(&mut self, alone: &InstanceSpec) -> Result<Duration, Error> {
        let (monitor, within) = (&self.monitor, self.context.plan.timing.ready_within);
        Ok(self
            .stage
            .until(&alone.name, "ready", within, async |_| {
                monitor.is_ready().await
            })
            .await?
            .1)
    }

    async fn service_back(&self) {
        let own = self.stage.setting.address.ip();
        if timeout(SERVICE_BACK_WITHIN, self.monitor.service_names(own))
            .await
            .is_err()
        {
            self.context.trouble(format!(
                "the Service kubernetes was empty for {SERVICE_BACK_WITHIN:?} and more"
            ));
        }
    }

    /// Checks the version through the berth while there is only one instance.
    async fn check_version(&self, alone: &InstanceSpec) {
        let (name, expected) = (&alone.name, &alone.version);
        let deadline = Instant::now() + self.context.plan.timing.ready_within;
        let version = loop {
            match self.monitor.version().await {
                // The answer may be late on a busy machine.
                Err(_) if Instant::now() < deadline => sleep(POLL).await,
                version => break version,
            }
        };
        let trouble = match version {
            Ok(version) if version == *expected => None,
            Ok(version) => Some(format!(
                "{name} should be {expected}, and its /version is {version}"
            )),
            Err(why) => Some(format!("{name} did not report its version: {why}")),
        };
        match trouble {
            None => self
                .context
                .recorder
                .add(name, EventKind::Version(expected.clone())),
            Some(trouble) => self.context.trouble(trouble),
        }
    }

    async fn start(&mut self, instance: &InstanceSpec) -> Result<(), Error> {
        self.print(&format!(
            "start {} behind {}",
            instance.name, self.stage.setting.address
        ));
        self.stage.start(instance, true).await
    }

    async fn joined(&mut self, instance: &InstanceSpec) -> Result<(), Error> {
        let (way, took) = self
            .stage
            .joined(&instance.name, self.context.plan.timing.ready_within)
            .await?;
        // Only a shim waits for a ready instance before it listens.
        let what = if self.context.via == Via::Berth && !self.stage.layout.bridges() {
            "is ready and joined"
        } else {
            "listens"
        };
        self.print(&format!("{} {what} after {took:.1?}", instance.name));
        if let Some(way) = way {
            self.context.log_note(&format!(
                "--pass {}: {way}",
                self.context.plan.pass.as_str()
            ));
        }
        Ok(())
    }

    /// Stops an instance and logs unexpected behaviour.
    async fn stop(&mut self, instance: &InstanceSpec) {
        let (name, began) = (&instance.name, Instant::now());
        let stopped = self.stage.stop(name, self.context.plan.timing.grace).await;
        let serves = |role: &Role| matches!(role, Role::Apiserver | Role::Unit);
        if !instance.apiserver.is_simulated() && stopped.killed.iter().any(serves) {
            let grace = humantime::format_duration(self.context.plan.timing.grace);
            let note = format!(
                "{name} was still there {grace} after SIGTERM and was killed, as a kubelet does: kube-apiserver waits up \
                 to a minute for watches, unless --shutdown-watch-termination-grace-period ends them before"
            );
            return self.context.log_note(&note);
        }
        let trouble = match stopped.status {
            _ if !stopped.killed.is_empty() => Some(format!(
                "{name} was still there {:?} after SIGTERM and had to be killed",
                self.context.plan.timing.grace
            )),
            Some(status) if stopped.early => {
                Some(format!("{name} ended before it was stopped ({status})"))
            }
            Some(status) if !status.success() => Some(format!("{name} ended with {status}")),
            _ => None,
        };
        match trouble {
            None => self.print(&format!("{name} is gone after {:.1?}", began.elapsed())),
            Some(trouble) => {
                let log = self.stage.log(name).await;
                self.print(&format!("{trouble}; its last lines of log:\n{log}"));
                self.context.trouble(trouble);
            }
        }
    }
}
