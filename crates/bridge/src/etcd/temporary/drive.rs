//! Observes both etcds, and does what the machine wants.

use super::database::{Database, Look};
use super::machine::{
    EtcdMachine, EtcdObservation, EtcdWanted, Holder, Opened, OwnEtcd, Process, Route,
    TemporaryEtcd,
};
use super::plan::{self, Plan};
use super::rescue::{Rescued, record_rescue, rescue_database};
use super::{probe, relay};
use crate::localhost::ETCD;
use crate::logs;
use crate::temporary_instance::{RESTART, Template, TemporaryProcess};
use berth_node::ipc::bridge::{EtcdStatus, EtcdStep};
use berth_node::terms::Speedup;
use berth_os::explained;
use berth_os::file::make_private_directory;
use berth_os::process::HeldProcess;
use berth_os::{proc_net, process, sock_diag};
use berth_steering::Steering;
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::SocketAddrV4;
use std::path::Path;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep};

/// Time between two observations.
const INTERVAL: Duration = Duration::from_millis(50);

/// Number of ancestors of an etcd process among which the bridge looks for the process that it
/// started: a container runtime may be between the two.
const ANCESTORS: usize = 4;

/// Number of pauses in the status.
const PAUSES: usize = 8;

/// Pause before a failed copy is tried again.
pub const RESCUES: Duration = Duration::from_secs(30);

/// Stands in for the node's etcd until dropped.
pub struct EtcdDaemon {
    plan: Plan,
    machine: EtcdMachine,
    process: TemporaryProcess,
    /// True if the process was told to end.
    is_ending: bool,
    steering: Steering,
    route: watch::Sender<Route>,
    /// Each change ends the relay's connections.
    ends: watch::Sender<u64>,
    ended: bool,
    cannot_end: bool,
    own: watch::Receiver<bool>,
    temporary: watch::Receiver<bool>,
    /// Tasks of the probes and the relay.
    tasks: JoinSet<()>,
    /// Inode of the listener of the node's etcd, and the process that listens.
    listens: Option<(u64, i32)>,
    /// The node's etcd that last had the data. Only the PID if the process cannot be held.
    last: Option<Result<HeldProcess, i32>>,
    /// The last raft snapshot from a time at which the serving process had the database that the
    /// path names.
    snapshot: Option<Option<OsString>>,
    /// Saves the database of a node's etcd that serves from another file.
    rescue: JoinSet<Option<Rescued>>,
    rescued: Vec<Rescued>,
    /// The process of the last rescue, which is not tried twice.
    rescues: Option<i32>,
    /// Time at which a failed copy is tried again.
    rescue_due: Option<Instant>,
    /// Time since which clients wait.
    held: Option<Instant>,
    status: watch::Sender<EtcdStatus>,
}

impl EtcdDaemon {
    /// # Errors
    /// The relay, the steering or the temporary etcd cannot be prepared.
    pub fn new(
        plan: Plan,
        directory: &Path,
        speedup: Speedup,
        status: watch::Sender<EtcdStatus>,
    ) -> Result<Self, String> {
        let failed =
            |error: &dyn std::fmt::Display| format!("cannot prepare the temporary etcd: {error}");
        let own = directory.join(ETCD);
        make_private_directory(&own).map_err(|error| failed(&error))?;
        let template = Template::from_etcd_plan(&plan, &own, &directory.join(logs::ETCD))
            .map_err(|error| failed(&error))?;
        let steering =
            relay::steer_to_relay(plan.members.own, &plan.relay).map_err(|error| failed(&error))?;
        let listener = plan
            .relay
            .try_clone()
            .and_then(TcpListener::from_std)
            .map_err(|error| failed(&error))?;
        let (route, routes) = watch::channel(Route::Own);
        let (ends, ended) = watch::channel(0);
        let mut tasks = JoinSet::new();
        tasks.spawn(relay::relay_clients(listener, plan.members, routes, ended));
        let mut follow = |to: SocketAddrV4| {
            let (answers, known) = watch::channel(to == plan.members.own);
            tasks.spawn(probe::probe_forever(
                plan.members.source.into(),
                to.into(),
                plan.tls.clone(),
                answers,
            ));
            known
        };
        let (own, temporary) = (follow(plan.members.own), follow(plan.members.temporary));
        Ok(Self {
            machine: EtcdMachine::new(speedup),
            process: TemporaryProcess::new(template),
            is_ending: false,
            steering,
            route,
            ends,
            ended: false,
            cannot_end: false,
            own,
            temporary,
            tasks,
            listens: None,
            last: None,
            snapshot: None,
            rescue: JoinSet::new(),
            rescued: Vec::new(),
            rescues: None,
            rescue_due: None,
            held: None,
            status,
            plan,
        })
    }

    /// Runs the loop, and never returns. Must be called on a thread that lives as long as this
    /// process.
    pub async fn run(mut self, commanding: watch::Receiver<bool>) {
        let began = Instant::now();
        loop {
            self.process.send_sign_of_life();
            self.process.reap_if_exited();
            self.is_ending &= self.process.is_running();
            let seen = self.observe(*commanding.borrow());
            let serves = seen.own.answers && seen.own.opened == Opened::Named;
            // The rescue is over if another process serves, or if the rescued process serves after
            // the end of its defragmentation.
            let is_over = |it: &Rescued| seen.own.process != Some(it.pid) || it.is_unrecovered();
            if serves && self.rescue.is_empty() && self.rescued.iter().any(is_over) {
                self.rescued.retain(|it| !is_over(it));
                self.rescues = None;
            }
            let step = self.machine.step();
            let wanted = self.machine.next(&seen, began.elapsed());
            self.apply_wanted(wanted);
            if wanted.rescues {
                self.begin_rescue(seen.own.process);
            }
            if self.machine.step() != step {
                self.log_step();
            }
            self.publish_status();
            tokio::select! {
                () = sleep(INTERVAL) => {}
                Ok(()) = self.own.changed() => {}
                Ok(()) = self.temporary.changed() => {}
                () = self.process.wait_for_exit() => {}
                Some(done) = self.rescue.join_next() => self.end_rescue(done),
                Some(_) = self.tasks.join_next() => tracing::warn!(
                    code = %explained::ETCD_TASK,
                    "a task of the etcd relay failed"
                ),
            }
        }
    }

    fn observe(&mut self, commanding: bool) -> EtcdObservation {
        let (answers, running) = (*self.own.borrow(), self.process.is_running());
        let (look, is_gone) = match self.plan.database.observe_database() {
            Ok(look) => (Some(look), false),
            Err(error) => {
                tracing::debug!(%error, "cannot see which process has etcd's database");
                // COMMAND has moved or removed the data: writes that the temporary etcd
                // acknowledges would be lost.
                (None, error.kind() == io::ErrorKind::NotFound)
            }
        };
        let process = self.own_process();
        let lock = look.as_ref().and_then(Look::lock_holder);
        let is_temporary = |pid| running && self.is_temporary(pid);
        let (had_by_temporary, is_own) = (
            lock.is_some_and(is_temporary),
            lock.is_some() && lock == process,
        );
        let opened = match &look {
            Some(_) if had_by_temporary => Opened::Named,
            Some(look) if running && look.other_lock_holders().any(is_temporary) => Opened::Other,
            None if running && is_gone => Opened::Other,
            _ => Opened::Unseen,
        };
        let own = OwnEtcd {
            process,
            answers,
            opened: match process {
                Some(_) if is_own => Opened::Named,
                Some(pid) => self.file_opened_by_own(pid),
                None => Opened::Unseen,
            },
        };
        // An etcd that has not served since it opened the file may yet refuse the file: a snapshot
        // may be newer.
        if let Some(look) = &look
            && (is_own && answers || had_by_temporary)
        {
            self.snapshot = Some(look.snapshot.clone());
        }
        let holder = match (&look, lock) {
            (Some(_), Some(_)) if had_by_temporary => Holder::Temporary,
            (Some(_), Some(pid)) => {
                self.keep_process_handle(pid);
                Holder::Another
            }
            // While a temporary etcd runs or a database is copied, the data does not count as free:
            // the temporary etcd may get the lock in the next moment, and the database that is
            // being copied may be the only one with all data.
            (Some(look), None)
                if !running
                    && own.opened == Opened::Unseen
                    && self.rescue.is_empty()
                    && self.is_free(look) =>
            {
                Holder::Nobody
            }
            _ => Holder::Unknown,
        };
        let temporary = TemporaryEtcd {
            running,
            ending: self.is_ending,
            ends: self.process.ends,
            answers: *self.temporary.borrow(),
            opened,
        };
        let unrecovered = self.rescued.iter().any(Rescued::is_unrecovered);
        EtcdObservation {
            own,
            temporary,
            holder,
            size: look.map_or(0, |look| look.size),
            commanding,
            unrecovered,
        }
    }

    /// The file that the node's etcd has opened as its database: checked against the path that the
    /// bridge knows, and otherwise against the path in the process's arguments.
    fn file_opened_by_own(&self, pid: i32) -> Opened {
        let opened = match self.plan.database.file_opened_by(pid).0 {
            // COMMAND may have moved the etcd's data.
            Opened::Other => {
                Database::of_process(pid).map_or(Opened::Other, |own| own.file_opened_by(pid).0)
            }
            opened => opened,
        };
        // Another process has the lock of this file, so the observation is outdated.
        if opened == Opened::Named && self.plan.database.file_opened_by(pid).0 == Opened::Named {
            return Opened::Unseen;
        }
        opened
    }

    /// Holds the process that has the data, to notice its end. Another process may have the same
    /// PID later.
    fn keep_process_handle(&mut self, pid: i32) {
        let is_held = self
            .last
            .as_ref()
            .is_some_and(|last| matches!(last, Ok(it) if it.pid == pid && !has_ended(last)));
        if !is_held {
            self.last = Some(HeldProcess::of(pid).map_err(|_| pid));
        }
    }

    /// True if no process has the data, and none may be about to write to the data.
    fn is_free(&self, look: &Look) -> bool {
        let is_free = self.plan.database.is_free(look).unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot see whether a process still holds etcd's data");
            false
        });
        is_free && self.last.as_ref().is_none_or(has_ended)
    }

    /// Starts a rescue, once for each process unless the copy fails.
    fn begin_rescue(&mut self, process: Option<i32>) {
        let is_due = self.rescue_due.is_some_and(|due| Instant::now() >= due);
        let is_new = |pid: &i32| (is_due || self.rescues != Some(*pid)) && self.rescue.is_empty();
        let Some(pid) = process.filter(is_new) else {
            return;
        };
        self.rescues = Some(pid);
        let (database, known) = (self.plan.database.clone(), self.snapshot.clone());
        tracing::warn!(
            code = %explained::DELETED_DATABASE,
            pid,
            "the node's etcd serves from a database file that was deleted or renamed: the bridge copies the database"
        );
        self.rescue
            .spawn_blocking(move || rescue_database(pid, &database, known.as_ref()));
    }

    fn end_rescue(&mut self, done: Result<Option<Rescued>, JoinError>) {
        self.rescue_due = None;
        let pid = self.rescues;
        let rescued = done.unwrap_or_else(|panic| Some(Rescued::failed(pid?, panic.to_string())));
        match &rescued {
            // A defragmentation ended well, so there was nothing to rescue. The next
            // defragmentation of the process may fail, so the process may be rescued later.
            None => self.rescues = None,
            Some(rescued) => {
                if let Err(error) = &rescued.copy {
                    self.rescue_due = Some(Instant::now() + RESCUES);
                    tracing::warn!(
                        code = %explained::DATABASE_NOT_COPIED,
                        error,
                        "the database of the node's etcd was not copied"
                    );
                }
                tracing::warn!("etcd: {}", rescued.trouble());
            }
        }
        record_rescue(&mut self.rescued, pid, rescued);
    }

    /// Trouble for the operator to resolve.
    fn trouble(&self) -> Option<String> {
        let troubles: Vec<_> = self.rescued.iter().map(Rescued::trouble).collect();
        if troubles.is_empty() {
            return self.machine.trouble();
        }
        Some(troubles.join("; "))
    }

    /// The process of the node's etcd. Searched once for each listener, since the search reads all
    /// of /proc.
    fn own_process(&mut self) -> Option<i32> {
        let at = self.plan.members.own;
        let inode = plan::find_listener(at)?;
        if self.listens.is_none_or(|(known, _)| known != inode) {
            self.listens = proc_net::process_of(inode).map(|owner| (inode, owner.pid));
        }
        self.listens.map(|(_, pid)| pid)
    }

    /// True if the process is the temporary etcd: a descendant of the started process, which
    /// supervises it.
    fn is_temporary(&self, pid: i32) -> bool {
        let child = self
            .process
            .pid()
            .and_then(|child| i32::try_from(child).ok());
        let mut ancestors =
            std::iter::successors(process::parent_of(pid), |pid| process::parent_of(*pid))
                .take(ANCESTORS);
        let cgroups = || fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        ancestors.any(|ancestor| Some(ancestor) == child) || cgroups().contains(&self.plan.cgroup())
    }

    fn apply_wanted(&mut self, wanted: EtcdWanted) {
        let EtcdWanted {
            route,
            ends_connections,
            steers,
            temporary,
            ..
        } = wanted;
        match (route == Route::Hold, self.held) {
            (true, None) => self.held = Some(Instant::now()),
            (false, Some(since)) => {
                self.held = None;
                // A wait during a slow answer, without a change of hands, does not count as a
                // pause.
                if self.ended || self.machine.step() != EtcdStep::Own {
                    self.status.send_modify(|status| {
                        let pause = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
                        status.pauses.push(pause);
                        let more = status.pauses.len().saturating_sub(PAUSES);
                        status.pauses.drain(..more);
                    });
                }
            }
            _ => {}
        }
        if steers {
            // Each call also renews the steering.
            self.steering.start();
        } else {
            self.steering.stop();
        }
        self.route
            .send_if_modified(|known| std::mem::replace(known, route) != route);
        if ends_connections && !std::mem::replace(&mut self.ended, ends_connections) {
            self.ends.send_modify(|ends| *ends = ends.wrapping_add(1));
        }
        self.ended = ends_connections;
        if ends_connections && steers {
            self.end_connections();
        }
        match temporary {
            Process::Run if !self.process.is_running() => {
                self.process.start(RESTART);
            }
            Process::Terminate
                if self.process.is_running() && !std::mem::replace(&mut self.is_ending, true) =>
            {
                self.process.send_signal(Signal::SIGTERM);
            }
            Process::Kill if self.process.is_running() => {
                self.is_ending = true;
                self.process
                    .send_signal(self.process.template.kill_signal());
            }
            Process::Run | Process::Terminate | Process::Kill => {}
        }
    }

    /// Ends the connections to the node's etcd, which otherwise waits 7 s for kube-apiserver's
    /// endless streams before it stops. Steered connections belong to a marked listener, and are
    /// not ended.
    fn end_connections(&mut self) {
        if let Err(error) = sock_diag::destroy_unmarked_connections(self.plan.members.own.port())
            && !std::mem::replace(&mut self.cannot_end, true)
        {
            tracing::info!(%error, "cannot end the connections to the node's etcd: etcd takes up to 7 s longer to stop");
        }
    }

    fn log_step(&self) {
        let step = self.machine.step();
        let (pauses, trouble) = (self.status.borrow().pauses.clone(), self.trouble());
        match trouble {
            Some(trouble) => tracing::warn!(%step, ?pauses, "etcd: {trouble}"),
            None => tracing::info!(%step, ?pauses, "etcd"),
        }
    }

    fn publish_status(&self) {
        let (step, pid, trouble) = (self.machine.step(), self.process.pid(), self.trouble());
        self.status.send_if_modified(|status| {
            let is_new = (status.step, status.pid, &status.trouble) != (step, pid, &trouble);
            (status.step, status.pid, status.trouble) = (step, pid, trouble.clone());
            is_new
        });
    }
}

fn has_ended(process: &Result<HeldProcess, i32>) -> bool {
    match process {
        Ok(process) => process.ends_within(Duration::ZERO).unwrap_or_default(),
        Err(pid) => !Path::new(&format!("/proc/{pid}")).exists(),
    }
}
