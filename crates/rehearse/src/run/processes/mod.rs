//! The processes of a run: started, queried and stopped, with a directory, an address and
//! certificates.
//!
//! The `directory` is removed in every case. `process` is a child process, `probe` observes
//! instances from outside, and `bridge` runs `berth bridge`.

mod bridge;
mod directory;
mod etcd;
mod footprint;
mod haproxy;
pub(crate) mod instance_spec;
pub(crate) mod layout;
mod probe;
mod process;
pub(crate) mod settings;

pub(crate) use bridge::Status;
pub(crate) use directory::sweep_directories;
pub(crate) use footprint::has_faketime;
pub(crate) use probe::watch_gates;

use super::session::Session;
use crate::config::{Via, apiserver::this_binary};
use crate::load::{Instances, Joined};
use crate::record::{data::MarkKind, event::EventKind, log::Recorder};
use crate::testbed::{
    address::{NETNS_ADDRESS, free_address},
    certs,
};
use berth_node::ipc::wire;
use berth_node::registry::instance::ListedInstance;
use berth_os::proc_net;
use directory::Directory;
use etcd::Etcd;
use instance_spec::InstanceSpec;
use layout::{Layout, NODE_SHIM, ProcessSpec, Role};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use process::ChildProcess;
use procfs::process::{Process, all_processes};
use settings::Settings;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Display;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

const NO_ADDRESS: &str = "no free address in 127.0.0.0/8";

/// Time between two polls of an instance.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Exit status of a berth that lacks a privilege, a port or a kernel feature.
const EX_UNAVAILABLE: i32 = 69;

/// Time limit for processes to end when a rehearsal is aborted. After half of the time they get
/// SIGTERM again.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a run could not begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A prerequisite of every rehearsal is missing.
    #[error("{0}")]
    Unavailable(String),
    /// An instance misbehaved.
    #[error("{instance} {what}; its last lines of log:\n{log}")]
    Instance {
        instance: String,
        /// The instance's behaviour, in words.
        what: String,
        /// The last lines of the instance's log.
        log: String,
    },
}

impl Error {
    /// Returns a function that turns an error into an error about a missing prerequisite.
    pub(crate) fn unavailable_error<E: Display>(what: impl Display) -> impl FnOnce(E) -> Self {
        move |error| Self::Unavailable(format!("{what}: {error}"))
    }

    /// Turns the error into an error about a missing prerequisite, so that the rehearsed instances
    /// are not blamed.
    pub(crate) fn into_unavailable(self) -> Self {
        Self::Unavailable(self.to_string())
    }
}

impl From<certs::Error> for Error {
    fn from(error: certs::Error) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// The processes of a run and their settings.
#[derive(Debug)]
pub(crate) struct Processes {
    /// Settings that the processes need.
    pub(crate) settings: Settings,
    /// How instances share the address.
    pub(crate) layout: Layout,
    recorder: Arc<Recorder>,
    processes: Vec<ChildProcess>,
    /// Program and addresses of the etcd for real apiservers.
    etcd: Option<(PathBuf, Etcd)>,
    /// Addresses that this rehearsal chose for instances, because berth does not choose them. By
    /// the instance's name.
    own: BTreeMap<String, SocketAddr>,
    joined: watch::Sender<Instances>,
    bridge: Option<bridge::Bridge>,
    /// Processes that SIGSTOP has stopped. Before SIGCONT, they handle no signal but SIGKILL.
    frozen: Vec<Pid>,
    /// The directory, removed after the processes have ended.
    _dir: Directory,
}

/// The result of stopping an instance.
#[derive(Debug)]
pub(crate) struct StoppedInstance {
    /// Exit status of the apiserver, or of `berth run`, which exits with the same status. `None` if
    /// the process had to be killed.
    pub(crate) status: Option<ExitStatus>,
    /// True if the instance had ended before the stop.
    pub(crate) early: bool,
    /// Roles of processes that had to be killed.
    pub(crate) killed: Vec<Role>,
}

impl Processes {
    /// Creates the directory and the certificates, and finds an address. Starts no process.
    pub(crate) fn new(session: &Session<'_>) -> Result<Self, Error> {
        let Session {
            plan,
            via,
            ref recorder,
            ..
        } = *session;
        let dir = Directory::new().map_err(Error::unavailable_error(
            "cannot make a temporary directory (set TMPDIR to use another directory)",
        ))?;
        let address = if plan.netns {
            NETNS_ADDRESS.into()
        } else {
            free_address().map_err(Error::unavailable_error(NO_ADDRESS))?
        };
        let etcd = plan
            .etcd
            .as_ref()
            .map(|_| Etcd::new())
            .transpose()
            .map_err(Error::unavailable_error(NO_ADDRESS))?;
        let settings = Settings {
            dir: dir.path().to_owned(),
            address,
            berth: plan.berth.clone().unwrap_or_else(|| this_binary().into()),
            certs: Arc::new(certs::make_certs(dir.path(), &[address.ip()])?),
            etcd: etcd.map(|etcd| etcd.url()),
            probe_with_certificate: plan.old.wants_certificates() || plan.new.wants_certificates(),
            pass: plan.pass,
            speedup: plan.timing.speedup,
            faketime: plan.clock_jumps().then(footprint::find_faketime).flatten(),
        };
        let processes = Self {
            settings,
            layout: Layout {
                via,
                topology: plan.topology,
            },
            recorder: Arc::clone(recorder),
            processes: Vec::new(),
            etcd: plan.etcd.clone().zip(etcd),
            own: BTreeMap::new(),
            joined: watch::Sender::default(),
            bridge: None,
            frozen: Vec::new(),
            _dir: dir,
        };
        processes
            .set_clock(0)
            .map_err(Error::unavailable_error("cannot write the shims' clock"))?;
        Ok(processes)
    }

    /// Starts the relay that all instances share, if the layout has one. Restarts an ended relay.
    pub(crate) fn start_node_shim(&mut self) -> Result<(), Error> {
        match self.layout.shared_process(&self.settings) {
            Some(part) if self.relay_pid(NODE_SHIM).is_none() => self.spawn(NODE_SHIM, &part),
            _ => Ok(()),
        }
    }

    /// Polls `check` until `check` returns `Ok`. Before that, the error of `check` says what is
    /// still missing. Returns the value of `check` and the duration of the wait.
    ///
    /// # Errors
    /// A process of the owner ended before `check` returned `Ok`, or the time is over.
    pub(crate) async fn wait_until<T>(
        &mut self,
        owner: &str,
        what: &str,
        within: Duration,
        check: impl AsyncFn(&Self) -> Result<T, String>,
    ) -> Result<(T, Duration), Error> {
        let began = Instant::now();
        loop {
            let why = match check(&*self).await {
                Ok(it) => return Ok((it, began.elapsed())),
                Err(why) => why,
            };
            let ended = self.exit_status(owner);
            let failed = match ended {
                Some(status) => format!("ended before it was {what} ({status})"),
                None if began.elapsed() > within => {
                    format!("was not {what} within {within:?} ({why})")
                }
                None => {
                    sleep(POLL_INTERVAL).await;
                    continue;
                }
            };
            let error = self.instance_error(owner, failed).await;
            let is_unavailable = ended.and_then(|status| status.code()) == Some(EX_UNAVAILABLE);
            return Err(if is_unavailable {
                error.into_unavailable()
            } else {
                error
            });
        }
    }

    /// Starts etcd if the plan has one, and waits until etcd is healthy.
    pub(crate) async fn start_etcd(&mut self) -> Result<(), Error> {
        let Some((program, etcd)) = self.etcd.clone() else {
            return Ok(());
        };
        self.spawn(etcd::NAME, &etcd.process_spec(&program, &self.settings.dir))?;
        let healthy = async |_: &Self| {
            timeout(etcd::START_TIMEOUT, etcd.check_health())
                .await
                .unwrap_or_else(|_| Err("no answer".into()))
        };
        self.wait_until(etcd::NAME, "up", etcd::START_TIMEOUT, healthy)
            .await
            .map_err(Error::into_unavailable)?;
        Ok(())
    }

    /// Starts the processes of an instance. Restarts ended processes.
    pub(crate) async fn start_instance(
        &mut self,
        instance: &InstanceSpec,
        serves: bool,
    ) -> Result<(), Error> {
        let name = &instance.name;
        self.log_participating_instance(instance, serves);
        self.recorder.add_mark(name, MarkKind::Started);
        self.settings.certs.issue_certificate(name)?;
        let own = self.own_address(name)?;
        if self.layout.via == Via::Haproxy {
            let path = self.settings.dir.join(haproxy::file_name(name));
            std::fs::write(&path, haproxy::render_config(self.settings.address, own)).map_err(
                Error::unavailable_error(format!("cannot write {}", path.display())),
            )?;
        }
        for part in self.layout.process_specs(&self.settings, instance, own) {
            if self
                .find_process(name, part.role)
                .is_some_and(|p| p.live_pid().is_some())
            {
                continue;
            }
            if let Some(address) = part.awaits {
                self.wait_until_port_is_open(name, address).await?;
            }
            self.spawn(name, &part)?;
        }
        Ok(())
    }

    /// Logs that an instance takes part in the run.
    fn log_participating_instance(&self, instance: &InstanceSpec, serves: bool) {
        self.recorder.add(&instance.name, EventKind::Player(serves));
    }

    pub(crate) fn spawn(&mut self, owner: &str, part: &ProcessSpec) -> Result<(), Error> {
        let on_line = probe::line_listener(owner, self.layout, &self.recorder);
        let (recorder, name, role) = (Arc::clone(&self.recorder), owner.to_owned(), part.role);
        let over = move |status: ExitStatus| match role {
            Role::Apiserver | Role::Unit => {
                recorder.add(
                    &name,
                    EventKind::Mark {
                        mark: MarkKind::Exited,
                        text: status.to_string(),
                    },
                );
            }
            Role::Proxy | Role::Bridge | Role::Store => {}
        };
        let faketime = (part.role == Role::Proxy && self.layout.via == Via::Berth)
            .then(|| self.settings.fake_time_variables());
        let process =
            ChildProcess::start(owner, part, faketime.unwrap_or_default(), &on_line, over)
                .map_err(|error| {
                    let program = part
                        .argv
                        .first()
                        .map(|program| program.display().to_string())
                        .unwrap_or_default();
                    Error::Unavailable(format!("cannot start {program} for {owner}: {error}"))
                })?;
        self.processes
            .retain(|p| p.owner != owner || p.role != part.role);
        self.processes.push(process);
        Ok(())
    }

    /// Returns an address for an instance alone. A restarted instance gets the same address.
    fn own_address(&mut self, name: &str) -> Result<SocketAddr, Error> {
        if let Some(own) = self.own.get(name) {
            return Ok(*own);
        }
        let mut own = free_address().map_err(Error::unavailable_error(NO_ADDRESS))?;
        own.set_port(self.settings.address.port());
        self.own.insert(name.to_owned(), own);
        Ok(own)
    }

    /// Waits until an instance listens on the address.
    async fn wait_until_port_is_open(
        &mut self,
        name: &str,
        address: SocketAddr,
    ) -> Result<(), Error> {
        let listens =
            |process: &ChildProcess| proc_net::process_listens(process.pid().as_raw(), address);
        let open = async |processes: &Self| match processes
            .find_process(name, Role::Apiserver)
            .is_some_and(listens)
        {
            true => Ok(()),
            false => Err(format!("the process does not listen on {address}")),
        };
        self.wait_until(name, "listening", Duration::MAX, open)
            .await?;
        Ok(())
    }

    /// Waits until new connections reach an instance. Returns the chosen pass mode, if there was a
    /// choice, and the duration of the wait.
    pub(crate) async fn wait_until_joined(
        &mut self,
        name: &str,
        within: Duration,
    ) -> Result<(Option<String>, Duration), Error> {
        let joined = self
            .wait_until(name, "ready", within, async |processes| {
                processes.check_joined(name).await
            })
            .await?;
        self.publish_joined(name);
        Ok(joined)
    }

    /// Returns a receiver of the instances that have joined so far.
    pub(crate) fn instances(&self) -> watch::Receiver<Instances> {
        self.joined.subscribe()
    }

    pub(crate) fn publish_joined(&self, name: &str) {
        let Some(address) = self.direct_address(name) else {
            return;
        };
        self.joined.send_modify(|instances| {
            instances.retain(|other| other.name != name);
            instances.push(Joined::at_current_time(name, address));
        });
    }

    /// Checks that new connections reach an instance. Returns the chosen pass mode, if there was a
    /// choice. The error says why not.
    pub(crate) async fn check_joined(&self, name: &str) -> Result<Option<String>, String> {
        let role = match self.layout.via {
            Via::Berth if !self.layout.is_bridged() => {
                let status = self.status(name).await?;
                return probe::check_joined(&status, name, self.settings.pass);
            }
            Via::Haproxy => Role::Proxy,
            _ => Role::Apiserver,
        };
        self.check_listens(name, role).map(|()| None)
    }

    /// Asks an instance's shim for its status.
    pub(crate) async fn status(&self, name: &str) -> Result<Box<wire::Status>, String> {
        probe::ask_status(&self.settings, self.shim_of(name)).await
    }

    /// True if new connections no longer reach an instance. False if the shim does not answer in
    /// time.
    pub(crate) async fn is_unreachable(&self, name: &str) -> bool {
        match self.layout.via {
            Via::Berth if !self.layout.is_bridged() => self
                .status(name)
                .await
                .is_ok_and(|status| probe::is_unreachable(&status, name)),
            _ => self.check_joined(name).await.is_err(),
        }
    }

    /// Returns the address at which an instance can be dialled without a proxy between. The address
    /// is the port itself if there is no proxy. `None` if the instance is unknown.
    pub(crate) fn direct_address(&self, name: &str) -> Option<SocketAddr> {
        match self.layout.via {
            // The bridge does not steer connections from loopback.
            Via::Berth if self.layout.is_bridged() => self.own.get(name).copied(),
            Via::Berth => {
                probe::listed_instance(&self.settings, name).map(|listed| listed.record.address)
            }
            Via::Haproxy => self.own.get(name).copied(),
            Via::PortSharing | Via::None => Some(self.settings.address),
        }
    }

    fn shim_of<'a>(&self, name: &'a str) -> &'a str {
        if self.layout.shared_process(&self.settings).is_some() {
            NODE_SHIM
        } else {
            name
        }
    }

    fn check_listens(&self, name: &str, role: Role) -> Result<(), String> {
        let process = self
            .find_process(name, role)
            .ok_or("the process was not started")?;
        let address = self.layout.listen_address(self.settings.address);
        if !probe::is_listening(process.pid(), address) {
            return Err(format!("the process does not listen on {address}"));
        }
        if self.recorder.last_mark_time(name, MarkKind::Joined)
            < self.recorder.last_mark_time(name, MarkKind::Started)
        {
            self.recorder.add_mark(name, MarkKind::Joined);
        }
        Ok(())
    }

    fn find_process(&self, owner: &str, role: Role) -> Option<&ChildProcess> {
        self.processes
            .iter()
            .find(|p| p.owner == owner && p.role == role)
    }

    /// Returns the exit status of an instance's first ended process. `None` if every process runs.
    pub(crate) fn exit_status(&self, name: &str) -> Option<ExitStatus> {
        self.processes
            .iter()
            .filter(|p| p.owner == name)
            .find_map(ChildProcess::status)
    }

    /// Waits until one of an owner's processes has ended. The owner is an instance, or for example
    /// etcd.
    pub(crate) async fn wait_for_any_end(&self, owner: &str) -> ExitStatus {
        loop {
            match self.exit_status(owner) {
                Some(status) => return status,
                None => sleep(POLL_INTERVAL).await,
            }
        }
    }

    /// Stops an instance as the [`Layout`] says. Processes left after `grace` get SIGKILL.
    pub(crate) async fn stop_instance(&mut self, name: &str, grace: Duration) -> StoppedInstance {
        let early = self.exit_status(name).is_some();
        let deadline = Instant::now() + grace;
        self.recorder.add_mark(name, MarkKind::Sigterm);
        for group in self.layout.stop_groups() {
            let signalled: Vec<_> = group
                .iter()
                .filter_map(|(role, signal)| self.find_process(name, *role).map(|p| (p, *signal)))
                .collect();
            for (process, signal) in &signalled {
                process.signal(*signal);
            }
            let all = wait_for_all_ends(signalled.iter().map(|(process, _)| *process));
            tokio::select! {
                _ = timeout_at(deadline, all) => {}
                never = self.log_leaving(name) => match never {},
            }
        }
        let left: Vec<_> = self
            .processes
            .iter()
            .filter(|p| p.owner == name && p.status().is_none())
            .collect();
        let killed: Vec<Role> = left.iter().map(|process| process.role).collect();
        // The shim is killed last, although a kubelet kills all processes at once. A large
        // apiserver takes longer to end than a shim, and then the shim would seem to cut the
        // connections that end with the apiserver.
        for is_proxy in [false, true] {
            let group = || {
                left.iter()
                    .filter(|process| (process.role == Role::Proxy) == is_proxy)
            };
            group().for_each(|process| process.signal(Signal::SIGKILL));
            wait_for_all_ends(group().copied()).await;
        }
        let server = self
            .processes
            .iter()
            .find(|p| p.owner == name && p.role != Role::Proxy);
        let status = server
            .filter(|p| !killed.contains(&p.role))
            .and_then(ChildProcess::status);
        StoppedInstance {
            status,
            early,
            killed,
        }
    }

    /// Logs when an instance leaves the port, for ways without a shim.
    async fn log_leaving(&self, name: &str) -> Infallible {
        let role = if self.layout.via == Via::Haproxy {
            Role::Proxy
        } else {
            Role::Apiserver
        };
        let left = self.recorder.last_mark_time(name, MarkKind::Left)
            > self.recorder.last_mark_time(name, MarkKind::Joined);
        if self.layout.via != Via::Berth
            && !left
            && let Some(process) = self.find_process(name, role)
        {
            while probe::is_listening(
                process.pid(),
                self.layout.listen_address(self.settings.address),
            ) {
                sleep(POLL_INTERVAL).await;
            }
            self.recorder.add_mark(name, MarkKind::Left);
        }
        std::future::pending().await
    }

    /// Returns the process ID of an instance's apiserver. `None` if the apiserver has ended.
    pub(crate) fn apiserver_pid(&self, name: &str) -> Option<Pid> {
        let Some(ListedInstance { record, .. }) = probe::running_instance(&self.settings, name)
        else {
            return self.find_process(name, Role::Apiserver)?.live_pid();
        };
        // The record has the PID as seen in this process's PID namespace.
        let pid = i32::try_from(record.pid?).ok()?;
        let is_child = |process: &Process| process.stat().is_ok_and(|stat| stat.ppid == pid);
        Some(Pid::from_raw(match record.supervised {
            true => all_processes().ok()?.flatten().find(is_child)?.pid,
            false => pid,
        }))
    }

    /// Returns the process ID of the relay to an instance. `None` if there is no relay or it has
    /// ended.
    pub(crate) fn relay_pid(&self, name: &str) -> Option<Pid> {
        self.find_process(self.shim_of(name), self.layout.relay_role()?)?
            .live_pid()
    }

    /// Sends SIGKILL to a process of an instance and waits for its end. The other processes of a
    /// unit are killed next, as by systemd with `KillMode=mixed`.
    pub(crate) async fn kill_process(&self, name: &str, pid: Pid) {
        let apiserver = self.apiserver_pid(name);
        let _ = kill(pid, Signal::SIGKILL);
        // If the killed process is the child of a supervisor, wait for the supervisor, which ends
        // with its child.
        let process = self
            .processes
            .iter()
            .find(|p| p.pid() == pid)
            .or(self.find_process(name, Role::Apiserver));
        if let Some(process) = process {
            process.wait().await;
        }
        let Some(unit) = self.find_process(name, Role::Unit) else {
            return;
        };
        // `berth run` ends when its apiserver has ended.
        unit.wait().await;
        if let Some(apiserver) = apiserver.filter(|apiserver| *apiserver != pid) {
            let _ = kill(apiserver, Signal::SIGKILL);
        }
        while probe::running_instance(&self.settings, name).is_some() {
            sleep(POLL_INTERVAL).await;
        }
    }

    pub(crate) fn freeze(&mut self, pid: Pid) {
        if kill(pid, Signal::SIGSTOP).is_ok() {
            self.frozen.push(pid);
        }
    }

    /// Sends SIGCONT to all stopped processes.
    pub(crate) fn thaw(&mut self) {
        for pid in self.frozen.drain(..) {
            let _ = kill(pid, Signal::SIGCONT);
        }
    }

    /// Returns the last log lines of an instance's processes.
    pub(crate) async fn log(&mut self, name: &str) -> String {
        let mut lines = Vec::new();
        for process in self.processes.iter_mut().filter(|p| p.owner == name) {
            lines.extend(
                process
                    .log()
                    .await
                    .into_iter()
                    .map(|line| format!("  {line}")),
            );
        }
        lines.extend(self.bridge_log(name));
        lines.join("\n")
    }

    /// Returns the last log line of each process of an instance.
    pub(crate) async fn last_log_lines(&mut self, name: &str) -> String {
        let mut lines = Vec::new();
        for process in self.processes.iter_mut().filter(|p| p.owner == name) {
            lines.extend(process.log().await.pop());
        }
        lines.join("\n")
    }

    pub(crate) async fn instance_error(&mut self, name: &str, what: String) -> Error {
        Error::Instance {
            instance: name.to_owned(),
            what,
            log: self.log(name).await,
        }
    }

    /// Ends all running processes.
    pub(crate) async fn stop_all(mut self) {
        self.thaw();
        for process in self.processes.iter().filter(|p| p.role == Role::Store) {
            if let Some(status) = process.status() {
                self.recorder.add_trouble(format!(
                    "{} ended before it was stopped ({status})",
                    process.owner
                ));
            }
        }
        for wait in [ABORT_TIMEOUT / 2, ABORT_TIMEOUT / 2] {
            for process in &self.processes {
                process.signal(Signal::SIGTERM);
            }
            if timeout(wait, wait_for_all_ends(&self.processes))
                .await
                .is_ok()
            {
                break;
            }
        }
        self.processes
            .iter()
            .for_each(|process| process.signal(Signal::SIGKILL));
        wait_for_all_ends(&self.processes).await;
    }
}

async fn wait_for_all_ends<'a>(processes: impl IntoIterator<Item = &'a ChildProcess>) {
    for process in processes {
        process.wait().await;
    }
}

impl Drop for Processes {
    /// Continues stopped processes and kills the bridge. Stopped processes and the bridge may not
    /// be children of this process, and then do not end with this process.
    fn drop(&mut self) {
        self.thaw();
        if let Some(bridge) = &self.bridge {
            bridge::kill_leftover(&self.settings.dir);
            bridge.wait_for_end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Plan, Topology, apiserver::Apiserver};
    use crate::run::session::Session;

    #[tokio::test]
    async fn an_etcd_that_does_not_come_up_is_shown_with_its_log() {
        let plan = Plan {
            etcd: Some("/bin/false".into()),
            ..Plan::default()
        };
        let mut processes = Processes::new(&Session::new(&plan, Via::None)).unwrap();
        let error = processes.start_etcd().await.unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)), "{error}");
        assert!(
            error
                .to_string()
                .starts_with("etcd ended before it was up (exit status: 1); its last"),
            "{error}"
        );
        processes.stop_all().await;
    }

    /// The test binary has no `run --listen`, so it ends at once with an error.
    #[tokio::test]
    async fn an_instance_that_cannot_start_is_shown_with_its_log() {
        let plan = Plan {
            topology: Topology::Run,
            ..Plan::default()
        };
        let mut processes = Processes::new(&Session::new(&plan, Via::Berth)).unwrap();
        let dir = processes.settings.dir.clone();
        let old = InstanceSpec {
            name: "old".into(),
            apiserver: Apiserver::default(),
            version: "v1".into(),
            start_delay: Duration::ZERO,
            fault: None,
        };
        processes.start_instance(&old, true).await.unwrap();
        let error = processes
            .wait_until_joined("old", Duration::from_secs(30))
            .await
            .unwrap_err();
        assert!(
            matches!(&error, Error::Instance { instance, what, log }
                if instance == "old" && what.contains("exit status") && log.contains("listen")),
            "{error}"
        );
        let stopped = processes
            .stop_instance("old", Duration::from_secs(30))
            .await;
        assert!(stopped.early && !stopped.status.unwrap().success());
        processes.stop_all().await;
        assert!(!dir.exists());
    }
}
