//! The stage of a rehearsal: a directory, an address, certificates, and the processes that were started,
//! asked and stopped there. `directory` is removed whatever happens, `process` is one of
//! them, `probe` what can be seen of them from outside, `bridge` a `berth bridge`.

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
pub(crate) use directory::sweep;
pub(crate) use footprint::has_faketime;
pub(crate) use probe::watch_gates;

use super::session::Context;
use crate::config::{Via, apiserver::this};
use crate::load::{Instances, Joined};
use crate::record::{data::MarkKind, event::EventKind, log::Recorder};
use crate::testbed::{
    address::{NETNS, free_address},
    certs,
};
use berth_node::ipc::wire;
use berth_node::registry::instance::ListedInstance;
use berth_os::proc_net;
use directory::Directory;
use etcd::Etcd;
use instance_spec::InstanceSpec;
use layout::{Layout, NODE, ProcessSpec, Role};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use process::StageProcess;
use procfs::process::{Process, all_processes};
use settings::StageSetting;
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
const POLL: Duration = Duration::from_millis(50);

/// Exit status of a berth that lacks a right, a port or a feature of the kernel.
const UNAVAILABLE: i32 = 69;

/// Time that processes get to end when a rehearsal is aborted: half of it until they get SIGTERM again.
const ABORT: Duration = Duration::from_secs(2);

/// Why the stage is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something that every rehearsal needs is not there.
    #[error("{0}")]
    Unavailable(String),
    /// An instance did not do what it should.
    #[error("{instance} {what}; its last lines of log:\n{log}")]
    Instance {
        instance: String,
        /// What it did instead.
        what: String,
        /// Its last lines of log.
        log: String,
    },
}

impl Error {
    /// Makes an error of what every rehearsal needs.
    pub(crate) fn unavailable<E: Display>(what: impl Display) -> impl FnOnce(E) -> Self {
        move |error| Self::Unavailable(format!("{what}: {error}"))
    }

    /// Something that every rehearsal needs failed, and not what is rehearsed.
    pub(crate) fn into_unavailable(self) -> Self {
        Self::Unavailable(self.to_string())
    }
}

impl From<certs::Error> for Error {
    fn from(error: certs::Error) -> Self {
        Self::Unavailable(error.to_string())
    }
}

/// A setting, and its processes.
#[derive(Debug)]
pub(crate) struct Stage {
    /// What the processes know.
    pub(crate) setting: StageSetting,
    /// How instances share the address.
    pub(crate) layout: Layout,
    recorder: Arc<Recorder>,
    processes: Vec<StageProcess>,
    /// The etcd that real apiservers get: its program, and where it listens.
    etcd: Option<(PathBuf, Etcd)>,
    /// The instances' own addresses, where berth does not choose them.
    own: BTreeMap<String, SocketAddr>,
    joined: watch::Sender<Instances>,
    bridge: Option<bridge::Bridge>,
    /// Stopped by SIGSTOP: they handle no other signal before SIGCONT.
    frozen: Vec<Pid>,
    /// Removed when the processes are gone.
    _dir: Directory,
}

/// How an instance ended when it was stopped.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// Exit status of its apiserver (of `berth run`: its own, which is the same); none if it had to
    /// be killed.
    pub(crate) status: Option<ExitStatus>,
    /// It had ended before it was stopped.
    pub(crate) early: bool,
    /// Those that had to be killed.
    pub(crate) killed: Vec<Role>,
}

impl Stage {
    /// Makes the directory and the certificates, and finds an address. No process is started.
    pub(crate) fn new(context: &Context<'_>) -> Result<Self, Error> {
        let Context {
            plan,
            via,
            ref recorder,
            ..
        } = *context;
        let dir = Directory::new().map_err(Error::unavailable(
            "cannot make a temporary directory (TMPDIR names another place)",
        ))?;
        let address = if plan.netns {
            NETNS.into()
        } else {
            free_address().map_err(Error::unavailable(NO_ADDRESS))?
        };
        let etcd = plan
            .etcd
            .as_ref()
            .map(|_| Etcd::new())
            .transpose()
            .map_err(Error::unavailable(NO_ADDRESS))?;
        let setting = StageSetting {
            dir: dir.path().to_owned(),
            address,
            berth: plan.berth.clone().unwrap_or_else(|| this().into()),
            certs: Arc::new(certs::make(dir.path(), &[address.ip()])?),
            etcd: etcd.map(|etcd| etcd.url()),
            probe_with_certificate: plan.old.wants_certificates() || plan.new.wants_certificates(),
            pass: plan.pass,
            speedup: plan.timing.speedup,
            faketime: plan.clock_jumps().then(footprint::faketime).flatten(),
        };
        let stage = Self {
            setting,
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
        stage
            .set_clock(0)
            .map_err(Error::unavailable("cannot write the shims' clock"))?;
        Ok(stage)
    }

    /// Starts the relay that all instances share, again if it ended.
    pub(crate) fn open(&mut self) -> Result<(), Error> {
        match self.layout.shared(&self.setting) {
            Some(part) if self.relay(NODE).is_none() => self.spawn(NODE, &part),
            _ => Ok(()),
        }
    }

    /// Waits until `so` is Ok for an owner; its error is why it is not yet. What it is then, and how long that took.
    ///
    /// # Errors
    /// One of the owner's processes ended before, or it was not so in time.
    pub(crate) async fn until<T>(
        &mut self,
        owner: &str,
        what: &str,
        within: Duration,
        so: impl AsyncFn(&Self) -> Result<T, String>,
    ) -> Result<(T, Duration), Error> {
        let began = Instant::now();
        loop {
            let why = match so(&*self).await {
                Ok(it) => return Ok((it, began.elapsed())),
                Err(why) => why,
            };
            let ended = self.ended(owner);
            let failed = match ended {
                Some(status) => format!("ended before it was {what} ({status})"),
                None if began.elapsed() > within => {
                    format!("was not {what} within {within:?} ({why})")
                }
                None => {
                    sleep(POLL).await;
                    continue;
                }
            };
            let error = self.failed(owner, failed).await;
            let is_unavailable = ended.and_then(|status| status.code()) == Some(UNAVAILABLE);
            return Err(if is_unavailable {
                error.into_unavailable()
            } else {
                error
            });
        }
    }

    /// Starts an etcd if one is wanted, and waits until it is up.
    pub(crate) async fn start_etcd(&mut self) -> Result<(), Error> {
        let Some((program, etcd)) = self.etcd.clone() else {
            return Ok(());
        };
        self.spawn(etcd::NAME, &etcd.part(&program, &self.setting.dir))?;
        let healthy = async |_: &Self| {
            timeout(etcd::UP_WITHIN, etcd.healthy())
                .await
                .unwrap_or_else(|_| Err("no answer".into()))
        };
        self.until(etcd::NAME, "up", etcd::UP_WITHIN, healthy)
            .await
            .map_err(Error::into_unavailable)?;
        Ok(())
    }

    /// Starts the processes of an instance, again if they were there before and ended.
    pub(crate) async fn start(
        &mut self,
        instance: &InstanceSpec,
        serves: bool,
    ) -> Result<(), Error> {
        let name = &instance.name;
        self.plays(instance, serves);
        self.recorder.mark(name, MarkKind::Started);
        self.setting.certs.issue(name)?;
        let own = self.own_address(name)?;
        if self.layout.via == Via::Haproxy {
            let path = self.setting.dir.join(haproxy::file(name));
            std::fs::write(&path, haproxy::config(self.setting.address, own)).map_err(
                Error::unavailable(format!("cannot write {}", path.display())),
            )?;
        }
        for part in self.layout.parts(&self.setting, instance, own) {
            if self
                .process(name, part.role)
                .is_some_and(|p| p.living().is_some())
            {
                continue;
            }
            if let Some(address) = part.awaits {
                self.until_open(name, address).await?;
            }
            self.spawn(name, &part)?;
        }
        Ok(())
    }

    /// Logs that an instance takes part.
    fn plays(&self, instance: &InstanceSpec, serves: bool) {
        self.recorder.add(&instance.name, EventKind::Player(serves));
    }

    pub(crate) fn spawn(&mut self, owner: &str, part: &ProcessSpec) -> Result<(), Error> {
        let on_line = probe::on_line(owner, self.layout, &self.recorder);
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
            .then(|| self.setting.fake_time());
        let process =
            StageProcess::start(owner, part, faketime.unwrap_or_default(), &on_line, over)
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

    /// An instance's own address: the same again when it is started again.
    fn own_address(&mut self, name: &str) -> Result<SocketAddr, Error> {
        if let Some(own) = self.own.get(name) {
            return Ok(*own);
        }
        let mut own = free_address().map_err(Error::unavailable(NO_ADDRESS))?;
        own.set_port(self.setting.address.port());
        self.own.insert(name.to_owned(), own);
        Ok(own)
    }

    /// Waits until an instance listens on its own address.
    async fn until_open(&mut self, name: &str, address: SocketAddr) -> Result<(), Error> {
        let listens = |process: &StageProcess| proc_net::listens(process.pid().as_raw(), address);
        let open =
            async |stage: &Self| match stage.process(name, Role::Apiserver).is_some_and(listens) {
                true => Ok(()),
                false => Err(format!("it does not listen on {address}")),
            };
        self.until(name, "listening", Duration::MAX, open).await?;
        Ok(())
    }

    /// Waits until new connections come to an instance: how, if that was to be chosen, and how long that took.
    pub(crate) async fn joined(
        &mut self,
        name: &str,
        within: Duration,
    ) -> Result<(Option<String>, Duration), Error> {
        let joined = self
            .until(name, "ready", within, async |stage| {
                stage.check_joined(name).await
            })
            .await?;
        self.publish_joined(name);
        Ok(joined)
    }

    /// The instances that joined so far, and from now on.
    pub(crate) fn instances(&self) -> watch::Receiver<Instances> {
        self.joined.subscribe()
    }

    pub(crate) fn publish_joined(&self, name: &str) {
        let Some(address) = self.direct(name) else {
            return;
        };
        self.joined.send_modify(|instances| {
            instances.retain(|other| other.name != name);
            instances.push(Joined::now(name, address));
        });
    }

    /// Whether new connections come to an instance, or why not; and how, if that was to be chosen.
    pub(crate) async fn check_joined(&self, name: &str) -> Result<Option<String>, String> {
        let role = match self.layout.via {
            Via::Berth if !self.layout.bridges() => {
                let status = self.status(name).await?;
                return probe::joined(&status, name, self.setting.pass);
            }
            Via::Haproxy => Role::Proxy,
            _ => Role::Apiserver,
        };
        self.listens(name, role).map(|()| None)
    }

    /// What an instance's shim reports.
    pub(crate) async fn status(&self, name: &str) -> Result<Box<wire::Status>, String> {
        probe::status(&self.setting, self.shim_of(name)).await
    }

    /// Whether new connections do not come to an instance any more. A shim that does not answer in time does not count.
    pub(crate) async fn is_missed(&self, name: &str) -> bool {
        match self.layout.via {
            Via::Berth if !self.layout.bridges() => self
                .status(name)
                .await
                .is_ok_and(|status| probe::is_missed(&status, name)),
            _ => self.check_joined(name).await.is_err(),
        }
    }

    /// The address at which an instance can be dialled with nothing in between: the port itself, if
    /// nothing is. None if the instance is not known.
    pub(crate) fn direct(&self, name: &str) -> Option<SocketAddr> {
        match self.layout.via {
            // Connections from loopback are not steered.
            Via::Berth if self.layout.bridges() => self.own.get(name).copied(),
            Via::Berth => probe::listed(&self.setting, name).map(|listed| listed.record.address),
            Via::Haproxy => self.own.get(name).copied(),
            Via::PortSharing | Via::None => Some(self.setting.address),
        }
    }

    fn shim_of<'a>(&self, name: &'a str) -> &'a str {
        if self.layout.shared(&self.setting).is_some() {
            NODE
        } else {
            name
        }
    }

    fn listens(&self, name: &str, role: Role) -> Result<(), String> {
        let process = self.process(name, role).ok_or("it was not started")?;
        let address = self.layout.bind(self.setting.address);
        if !probe::listens(process.pid(), address) {
            return Err(format!("it does not listen on {address}"));
        }
        if self.recorder.last(name, MarkKind::Joined) < self.recorder.last(name, MarkKind::Started)
        {
            self.recorder.mark(name, MarkKind::Joined);
        }
        Ok(())
    }

    fn process(&self, owner: &str, role: Role) -> Option<&StageProcess> {
        self.processes
            .iter()
            .find(|p| p.owner == owner && p.role == role)
    }

    /// The exit status of the first process of an instance that has ended.
    pub(crate) fn ended(&self, name: &str) -> Option<ExitStatus> {
        self.processes
            .iter()
            .filter(|p| p.owner == name)
            .find_map(StageProcess::status)
    }

    /// Waits until one of an owner's processes has ended.
    pub(crate) async fn any_ended(&self, owner: &str) -> ExitStatus {
        loop {
            match self.ended(owner) {
                Some(status) => return status,
                None => sleep(POLL).await,
            }
        }
    }

    /// Stops an instance as its [`Layout`] requires; SIGKILL for what is there after `grace`.
    pub(crate) async fn stop(&mut self, name: &str, grace: Duration) -> Stopped {
        let early = self.ended(name).is_some();
        let deadline = Instant::now() + grace;
        self.recorder.mark(name, MarkKind::Sigterm);
        for group in self.layout.stop() {
            let signalled: Vec<_> = group
                .iter()
                .filter_map(|(role, signal)| self.process(name, *role).map(|p| (p, *signal)))
                .collect();
            for (process, signal) in &signalled {
                process.signal(*signal);
            }
            let all = all_ended(signalled.iter().map(|(process, _)| *process));
            tokio::select! {
                _ = timeout_at(deadline, all) => {}
                never = self.leaves(name) => match never {},
            }
        }
        let left: Vec<_> = self
            .processes
            .iter()
            .filter(|p| p.owner == name && p.status().is_none())
            .collect();
        let killed: Vec<Role> = left.iter().map(|process| process.role).collect();
        // A kubelet kills all at once. But a large process takes longer to go, and it must not look as if
        // its shim had cut what ends with the apiserver.
        for is_proxy in [false, true] {
            let group = || {
                left.iter()
                    .filter(|process| (process.role == Role::Proxy) == is_proxy)
            };
            group().for_each(|process| process.signal(Signal::SIGKILL));
            all_ended(group().copied()).await;
        }
        let server = self
            .processes
            .iter()
            .find(|p| p.owner == name && p.role != Role::Proxy);
        let status = server
            .filter(|p| !killed.contains(&p.role))
            .and_then(StageProcess::status);
        Stopped {
            status,
            early,
            killed,
        }
    }

    /// Logs when an instance leaves the port, where no shim does.
    async fn leaves(&self, name: &str) -> Infallible {
        let role = if self.layout.via == Via::Haproxy {
            Role::Proxy
        } else {
            Role::Apiserver
        };
        let left =
            self.recorder.last(name, MarkKind::Left) > self.recorder.last(name, MarkKind::Joined);
        if self.layout.via != Via::Berth
            && !left
            && let Some(process) = self.process(name, role)
        {
            while probe::listens(process.pid(), self.layout.bind(self.setting.address)) {
                sleep(POLL).await;
            }
            self.recorder.mark(name, MarkKind::Left);
        }
        std::future::pending().await
    }

    /// The process ID of an instance's apiserver, if it lives.
    pub(crate) fn apiserver(&self, name: &str) -> Option<Pid> {
        let Some(ListedInstance { record, .. }) = probe::living(&self.setting, name) else {
            return self.process(name, Role::Apiserver)?.living();
        };
        // In this process's own PID namespace.
        let pid = i32::try_from(record.pid?).ok()?;
        let is_child = |process: &Process| process.stat().is_ok_and(|stat| stat.ppid == pid);
        Some(Pid::from_raw(match record.supervised {
            true => all_processes().ok()?.flatten().find(is_child)?.pid,
            false => pid,
        }))
    }

    /// The process ID of what relays to an instance, if there is such a process and it lives.
    pub(crate) fn relay(&self, name: &str) -> Option<Pid> {
        self.process(self.shim_of(name), self.layout.relays()?)?
            .living()
    }

    /// Sends SIGKILL to one of an instance's processes, and waits until it is gone. What is left of a
    /// unit follows, as systemd does it with `KillMode=mixed`.
    pub(crate) async fn kill(&self, name: &str, pid: Pid) {
        let apiserver = self.apiserver(name);
        let _ = kill(pid, Signal::SIGKILL);
        // A supervisor ends with its child.
        let process = self
            .processes
            .iter()
            .find(|p| p.pid() == pid)
            .or(self.process(name, Role::Apiserver));
        if let Some(process) = process {
            process.wait().await;
        }
        let Some(unit) = self.process(name, Role::Unit) else {
            return;
        };
        // It ends with its apiserver.
        unit.wait().await;
        if let Some(apiserver) = apiserver.filter(|apiserver| *apiserver != pid) {
            let _ = kill(apiserver, Signal::SIGKILL);
        }
        while probe::living(&self.setting, name).is_some() {
            sleep(POLL).await;
        }
    }

    pub(crate) fn freeze(&mut self, pid: Pid) {
        if kill(pid, Signal::SIGSTOP).is_ok() {
            self.frozen.push(pid);
        }
    }

    /// Sends SIGCONT to all that were stopped.
    pub(crate) fn thaw(&mut self) {
        for pid in self.frozen.drain(..) {
            let _ = kill(pid, Signal::SIGCONT);
        }
    }

    /// The last lines that an instance's processes logged.
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

    /// The very last line of each of an instance's processes.
    pub(crate) async fn last_words(&mut self, name: &str) -> String {
        let mut lines = Vec::new();
        for process in self.processes.iter_mut().filter(|p| p.owner == name) {
            lines.extend(process.log().await.pop());
        }
        lines.join("\n")
    }

    pub(crate) async fn failed(&mut self, name: &str, what: String) -> Error {
        Error::Instance {
            instance: name.to_owned(),
            what,
            log: self.log(name).await,
        }
    }

    /// Ends what still runs.
    pub(crate) async fn close(mut self) {
        self.thaw();
        for process in self.processes.iter().filter(|p| p.role == Role::Store) {
            if let Some(status) = process.status() {
                self.recorder.trouble(format!(
                    "{} ended before it was stopped ({status})",
                    process.owner
                ));
            }
        }
        for wait in [ABORT / 2, ABORT / 2] {
            for process in &self.processes {
                process.signal(Signal::SIGTERM);
            }
            if timeout(wait, all_ended(&self.processes)).await.is_ok() {
                break;
            }
        }
        self.processes
            .iter()
            .for_each(|process| process.signal(Signal::SIGKILL));
        all_ended(&self.processes).await;
    }
}

async fn all_ended<'a>(processes: impl IntoIterator<Item = &'a StageProcess>) {
    for process in processes {
        process.wait().await;
    }
}

impl Drop for Stage {
    /// What was stopped may be no child of this process, and a bridge is none.
    fn drop(&mut self) {
        self.thaw();
        if let Some(bridge) = &self.bridge {
            bridge::kill_left(&self.setting.dir);
            bridge.ends();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Plan, Topology, apiserver::Apiserver};
    use crate::run::session::Context;

    #[tokio::test]
    async fn an_etcd_that_does_not_come_up_is_shown_with_its_log() {
        let plan = Plan {
            etcd: Some("/bin/false".into()),
            ..Plan::default()
        };
        let mut stage = Stage::new(&Context::new(&plan, Via::None)).unwrap();
        let error = stage.start_etcd().await.unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)), "{error}");
        assert!(
            error
                .to_string()
                .starts_with("etcd ended before it was up (exit status: 1); its last"),
            "{error}"
        );
        stage.close().await;
    }

    /// This test's own binary knows no `run --listen`: it ends at once with an error.
    #[tokio::test]
    async fn an_instance_that_cannot_start_is_shown_with_its_log() {
        let plan = Plan {
            topology: Topology::Run,
            ..Plan::default()
        };
        let mut stage = Stage::new(&Context::new(&plan, Via::Berth)).unwrap();
        let dir = stage.setting.dir.clone();
        let old = InstanceSpec {
            name: "old".into(),
            apiserver: Apiserver::default(),
            version: "v1".into(),
            start_delay: Duration::ZERO,
            fault: None,
        };
        stage.start(&old, true).await.unwrap();
        let error = stage
            .joined("old", Duration::from_secs(30))
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("old ended before it was ready (exit status: ")
                && error.contains("listen"),
            "{error}"
        );
        let stopped = stage.stop("old", Duration::from_secs(30)).await;
        assert!(stopped.early && !stopped.status.unwrap().success());
        stage.close().await;
        assert!(!dir.exists());
    }
}
