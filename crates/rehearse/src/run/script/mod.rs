//! The script of a run: start the old instance and the load, start the new instance, wait until it
//! has joined, stop the old instance, and so on. Then end the load and stop the last instance.
//!
//! `faults` injects faults during an upgrade. `bridge` upgrades in place, under `berth bridge`.

mod bridge;
mod faults;

use super::monitor::Monitor;
use super::processes::{
    self, Error, Processes, instance_spec::InstanceSpec, layout::Role, settings::Settings,
};
use super::session::Session;
use crate::config::{ANSWER_TIMEOUT, Plan, Via, fault::Fault};
use crate::load::{self, Load, Target, grant_client_rights};
use crate::record::{
    event::{Answer, Attempt, Event, EventKind, Failure},
    log::attempts_at_tested_address,
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
const SERVICE_TIMEOUT: Duration = Duration::from_secs(30);

/// Duration of the load after a fault, before the next step.
const SETTLE: Duration = Duration::from_millis(1500);

/// Time between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs the script. The log then has the events of clients and instances.
pub(crate) async fn play_script(
    session: &Session<'_>,
    processes: &mut Processes,
) -> Result<(), Error> {
    let Session {
        plan, ref recorder, ..
    } = *session;
    let path = processes.settings.store_path();
    let what = format!(
        "cannot make the socket {} (set TMPDIR to use another directory)",
        path.display()
    );
    let socket = UnixListener::bind(&path).map_err(Error::unavailable_error(what))?;
    // The tasks are aborted if this future is dropped.
    let mut background = JoinSet::new();
    background.spawn(store::serve(
        socket,
        Arc::clone(&session.store),
        Arc::clone(recorder),
    ));
    if plan.etcd.is_none() && !plan.old.is_simulated() {
        session.print_progress(
            "--etcd-servers is given: the objects of this rehearsal stay in that etcd",
        );
    }
    processes.start_etcd().await?;
    let monitor = Monitor::new(&processes.settings);
    let service = (plan.netns && !plan.old.is_simulated())
        .then(|| background.spawn(monitor.clone().watch_service(Arc::clone(recorder))));
    if service.is_none() && !plan.old.is_simulated() {
        session.print_progress("the Service kubernetes is not observed, since no loopback address can be in the Service (see --netns)");
    }
    let mut play = Play {
        session,
        processes,
        monitor,
    };

    play.processes.start_node_shim()?;
    let old = instance_after(plan, 0);
    play.start_instance(&old).await?;
    play.wait_until_joined(&old).await?;
    play.wait_for_first_instance(&old).await?;
    if service.is_some() {
        play.wait_for_service().await;
    }
    if !plan.old.is_simulated() {
        grant_client_rights(
            play.processes.settings.address,
            &play.processes.settings.certs,
        )
        .await
        .map_err(Error::Unavailable)?;
    }
    watch_gates(session, &play.processes.settings, &mut background);
    let load = start_load(session, play.processes).await?;
    let mut old = old;
    let until = plan
        .lasts
        .filter(|_| session.via == plan.via)
        .map(|lasts| Instant::now() + lasts);
    let (drawn, mut random) = (
        plan.drawable_faults(),
        fastrand::Rng::with_seed(plan.load.seed),
    );
    for upgrade in 1.. {
        let faults: BTreeSet<Fault> = match until {
            Some(_) => random.choice(&drawn).copied().into_iter().collect(),
            None if upgrade == 1 => plan.faults.clone(),
            None => BTreeSet::new(),
        };
        old = play.play_round(old, upgrade, &faults).await?;
        if service.is_some() {
            play.wait_for_service().await;
        }
        if until.map_or(upgrade >= plan.upgrades, |until| Instant::now() >= until) {
            break;
        }
    }
    if let Some(service) = service {
        service.abort();
    }
    finish_load(load, session).await;
    play.print_progress(&format!("load ended, stop {}", old.name));
    play.stop_instance(&old).await;
    Ok(())
}

/// Starts the load, and waits for the end of the load's first phase.
async fn start_load(session: &Session<'_>, processes: &Processes) -> Result<Load, Error> {
    let Session {
        plan, ref recorder, ..
    } = *session;
    let load = &plan.load;
    session.print_progress(&format!(
        "load: {} new connections a second, {} kept connections, {} watches, seed {}",
        load.rate, load.clients, load.watches, load.seed
    ));
    let target = make_target(&processes.settings)?;
    let load = Load::start(load, &target, &processes.instances(), recorder)
        .await
        .map_err(Error::Unavailable)?;
    recorder.add("", EventKind::LoadBegan);
    sleep(plan.timing.phase).await;
    Ok(load)
}

/// Logs the gates' metrics if the plan has a storm.
fn watch_gates(session: &Session<'_>, settings: &Settings, background: &mut JoinSet<()>) {
    if session.plan.load.storm > 0 {
        background.spawn(processes::watch_gates(
            settings.clone(),
            Arc::clone(&session.recorder),
        ));
    }
}

fn make_target(settings: &Settings) -> Result<Target, Error> {
    Target::new(settings.address, &settings.certs).map_err(Error::unavailable_error(
        "cannot use the certificates just made",
    ))
}

/// Runs the storm if the plan has one and there was none yet. Returns when every client of the
/// storm was served or has given up.
async fn run_storm(session: &Session<'_>, settings: &Settings) -> Result<(), Error> {
    let (clients, recorder) = (session.plan.load.storm, &session.recorder);
    let began = |log: &[Event]| {
        log.iter()
            .any(|event| matches!(event.what, EventKind::StormBegan(_)))
    };
    if clients == 0 || recorder.read(began) {
        return Ok(());
    }
    session.print_progress(&format!("storm: {clients} clients come at once"));
    let (began, mut served) = (Instant::now(), 0);
    recorder.add("", EventKind::StormBegan(clients));
    let mut storm = load::StormClients::start(clients, &make_target(settings)?).map_err(
        Error::unavailable_error("cannot start a thread for the storm's clients"),
    )?;
    while let Some((at, answer)) = storm.tries.recv().await {
        served += u32::from(matches!(answer, Answer::Good { .. }));
        recorder.add_at(at, "", EventKind::StormTry(answer));
    }
    recorder.add("", EventKind::StormEnded);
    session.print_progress(&format!(
        "{served} of the storm's clients were served, within {:.1?}",
        began.elapsed()
    ));
    Ok(())
}

async fn finish_load(load: Load, session: &Session<'_>) {
    session.recorder.add("", EventKind::LoadEnded);
    if let Err(broken) = load.finish().await {
        session.record_trouble(broken);
    }
}

/// Returns the instance that serves after this number of upgrades.
fn instance_after(plan: &Plan, upgrades: u32) -> InstanceSpec {
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
    // The start delay matters only under load, and the load begins when the first instance is
    // ready.
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
fn failing_instance(plan: &Plan, fault: Fault) -> InstanceSpec {
    InstanceSpec {
        name: fault.to_string(),
        fault: Some(fault),
        ..instance_after(plan, 1)
    }
}

/// State of the script.
struct Play<'a> {
    session: &'a Session<'a>,
    processes: &'a mut Processes,
    monitor: Monitor,
}

impl Play<'_> {
    fn print_progress(&self, what: &str) {
        self.session.print_progress(what);
    }

    /// Lets the load go on for [`SETTLE`] after a fault.
    async fn wait_to_settle(&self) {
        sleep(self.session.plan.timing.speedup.shorten(SETTLE)).await;
    }

    async fn run_storm(&self) -> Result<(), Error> {
        run_storm(self.session, &self.processes.settings).await
    }

    /// Makes an upgrade, with faults before and during the upgrade. Returns the instance that
    /// serves afterwards.
    async fn play_round(
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
        let new = instance_after(self.session.plan, upgrade);
        self.upgrade(&old, &new, &meanwhile).await?;
        self.run_storm().await?;
        sleep(self.session.plan.timing.phase).await;
        if self.session.plan.lasts.is_some() {
            self.processes.log_footprints().await;
        }
        Ok(new)
    }

    async fn upgrade(
        &mut self,
        old: &InstanceSpec,
        new: &InstanceSpec,
        faults: &[Fault],
    ) -> Result<(), Error> {
        if self.processes.layout.is_bridged() {
            return self.bridged_upgrade(old, new, faults).await;
        }
        let alone = self.session.via == Via::None;
        if alone {
            // Without port sharing, only one instance at a time can listen on the port.
            self.print_progress(&format!("stop {}", old.name));
            self.stop_instance(old).await;
            self.wait_until_client_is_refused().await;
        }
        self.start_instance(new).await?;
        self.wait_until_joined(new).await?;
        if alone {
            let took = self.wait_until_ready(new).await?;
            self.print_progress(&format!("{} is ready after {took:.1?}", new.name));
        } else {
            sleep(self.session.plan.timing.settle).await;
        }
        for fault in faults {
            self.inject_fault(old, new, *fault).await?;
        }
        if !alone {
            self.print_progress(&format!("stop {}", old.name));
            self.stop_instance(old).await;
        }
        self.check_version(new).await;
        Ok(())
    }

    /// Waits until a client was refused. Without this wait, an apiserver that starts again between
    /// the connections of two clients would show no loss.
    async fn wait_until_client_is_refused(&self) {
        let (gone, deadline) = (Stamp::now(), Instant::now() + ANSWER_TIMEOUT);
        let refused = |a: &Attempt| a.done >= gone && a.answer == Answer::Failed(Failure::Refused);
        let seen = || {
            self.session
                .recorder
                .read(|log| attempts_at_tested_address(log).rev().any(refused))
        };
        while Instant::now() < deadline && !seen() {
            sleep(POLL_INTERVAL / 10).await;
        }
    }

    /// Waits until the first instance is ready, because with some ways "joined" means only that the
    /// instance listens. The load begins later, so that no loss during this first start counts as a
    /// loss of an upgrade.
    async fn wait_for_first_instance(&mut self, old: &InstanceSpec) -> Result<(), Error> {
        self.wait_until_ready(old).await?;
        self.check_version(old).await;
        Ok(())
    }

    /// Waits until the only instance is ready. Returns the duration of the wait.
    async fn wait_until_ready(&mut self, alone: &InstanceSpec) -> Result<Duration, Error> {
        let (monitor, within) = (&self.monitor, self.session.plan.timing.ready_within);
        Ok(self
            .processes
            .wait_until(&alone.name, "ready", within, async |_| {
                monitor.is_ready().await
            })
            .await?
            .1)
    }

    async fn wait_for_service(&self) {
        let own = self.processes.settings.address.ip();
        if timeout(SERVICE_TIMEOUT, self.monitor.wait_for_address(own))
            .await
            .is_err()
        {
            self.session.record_trouble(format!(
                "the Service kubernetes was empty for {SERVICE_TIMEOUT:?} and more"
            ));
        }
    }

    /// Checks the version through the berth while there is only one instance.
    async fn check_version(&self, alone: &InstanceSpec) {
        let (name, expected) = (&alone.name, &alone.version);
        let deadline = Instant::now() + self.session.plan.timing.ready_within;
        let version = loop {
            match self.monitor.version().await {
                // The answer may be late on a busy machine.
                Err(_) if Instant::now() < deadline => sleep(POLL_INTERVAL).await,
                version => break version,
            }
        };
        let trouble = match version {
            Ok(version) if version == *expected => None,
            Ok(version) => Some(format!(
                "{name} should have version {expected}, but its /version reports {version}"
            )),
            Err(why) => Some(format!("{name} did not report its version: {why}")),
        };
        match trouble {
            None => self
                .session
                .recorder
                .add(name, EventKind::Version(expected.clone())),
            Some(trouble) => self.session.record_trouble(trouble),
        }
    }

    async fn start_instance(&mut self, instance: &InstanceSpec) -> Result<(), Error> {
        self.print_progress(&format!(
            "start {} behind {}",
            instance.name, self.processes.settings.address
        ));
        self.processes.start_instance(instance, true).await
    }

    async fn wait_until_joined(&mut self, instance: &InstanceSpec) -> Result<(), Error> {
        let (way, took) = self
            .processes
            .wait_until_joined(&instance.name, self.session.plan.timing.ready_within)
            .await?;
        // Only a shim waits for a ready instance before it listens.
        let what = if self.session.via == Via::Berth && !self.processes.layout.is_bridged() {
            "is ready and joined"
        } else {
            "listens"
        };
        self.print_progress(&format!("{} {what} after {took:.1?}", instance.name));
        if let Some(way) = way {
            self.session.log_note(&format!(
                "--pass {}: {way}",
                self.session.plan.pass.as_str()
            ));
        }
        Ok(())
    }

    /// Stops an instance and logs unexpected behaviour.
    async fn stop_instance(&mut self, instance: &InstanceSpec) {
        let (name, began) = (&instance.name, Instant::now());
        let stopped = self
            .processes
            .stop_instance(name, self.session.plan.timing.grace)
            .await;
        let serves = |role: &Role| matches!(role, Role::Apiserver | Role::Unit);
        if !instance.apiserver.is_simulated() && stopped.killed.iter().any(serves) {
            let grace = humantime::format_duration(self.session.plan.timing.grace);
            let note = format!(
                "{name} still ran {grace} after SIGTERM and was killed, as a kubelet does: kube-apiserver waits up \
                 to a minute for watches, unless --shutdown-watch-termination-grace-period ends the watches earlier"
            );
            return self.session.log_note(&note);
        }
        let trouble = match stopped.status {
            _ if !stopped.killed.is_empty() => Some(format!(
                "{name} still ran {:?} after SIGTERM and had to be killed",
                self.session.plan.timing.grace
            )),
            Some(status) if stopped.early => {
                Some(format!("{name} ended before it was stopped ({status})"))
            }
            Some(status) if !status.success() => Some(format!("{name} ended with {status}")),
            _ => None,
        };
        match trouble {
            None => self.print_progress(&format!("{name} is gone after {:.1?}", began.elapsed())),
            Some(trouble) => {
                let log = self.processes.log(name).await;
                self.print_progress(&format!("{trouble}; its last lines of log:\n{log}"));
                self.session.record_trouble(trouble);
            }
        }
    }
}
