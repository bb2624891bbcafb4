//! Observes the files and instances of a node for the machine, and waits for changes.

use super::machine::{Content, InstanceObservation, NodeObservation, Slot, Version};
use super::state::State;
use berth_node::instance::InstanceId;
use berth_node::ipc;
use berth_node::ipc::wire::{Ask, Reply, Status};
use berth_node::registry::instance::Record;
use berth_node::registry::watch::Watch;
use berth_node::registry::{BerthDir, Error};
use berth_node::snapshot::{KnownInstance, RunDirSnapshot};
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::file::none_if_missing;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;

/// Longest time between two samples. Changes of a shim's phase or of a file send no notification.
const INTERVAL: Duration = Duration::from_millis(200);

/// How long the last answer of a silent shim counts: a shim on a busy node takes seconds to answer.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

/// Details of an instance, for messages.
#[derive(Debug, Clone, Default)]
pub struct InstanceDetails {
    pub id: Option<InstanceId>,
    pub berth: Option<SocketAddr>,
    /// Why the instance is not in the group.
    pub reason: String,
    /// Open connections of the shim.
    pub open: u64,
    /// The version that the apiserver reports.
    pub version: Option<String>,
    pub socket: Option<PathBuf>,
    /// The address that the instance advertises, and the address where it listens.
    pub advertised: Option<SocketAddr>,
    pub address: Option<SocketAddr>,
}

#[derive(Debug, Clone, Default)]
pub struct NodeDetails {
    /// The canonical pod's instance. A running instance is preferred.
    pub canonical: InstanceDetails,
    /// How many instances run, without the temporary one.
    pub others: usize,
    pub temporary: InstanceDetails,
    /// True if a shim exists and did not answer. The next sample may have its answer.
    pub silent: bool,
}

impl NodeDetails {
    pub fn of_slot(&self, slot: Slot) -> &InstanceDetails {
        match slot {
            Slot::Canonical => &self.canonical,
            Slot::Temporary => &self.temporary,
        }
    }
}

pub struct NodeObserver {
    run_dir: PathBuf,
    histories: BTreeMap<InstanceId, ProcessHistory>,
    watch: Option<Watch>,
}

/// The history of an instance's processes.
#[derive(Debug, Default)]
struct ProcessHistory {
    process: Option<u64>,
    dead: bool,
    ends: u32,
    /// When the shim reported the instance as in the group, if the last report did so.
    joined: Option<Instant>,
    /// True if the shim is a node shim.
    node: bool,
}

impl ProcessHistory {
    fn observe(&mut self, process: u64, alive: bool) {
        if self.process.is_some_and(|before| before != process) {
            self.ends += u32::from(!self.dead);
            self.dead = false;
        }
        self.process = Some(process);
        self.ends += u32::from(!alive && !self.dead);
        self.dead |= !alive;
    }

    /// True if the instance may still be in the group although no shim reports so now.
    fn is_silent(&mut self, answered: bool, in_group: bool, now: Instant) -> bool {
        if answered {
            self.joined = in_group.then_some(now);
        }
        !answered
            && self
                .joined
                .is_some_and(|joined| now.saturating_duration_since(joined) < SILENCE_LIMIT)
    }
}

impl NodeObserver {
    pub fn new(run_dir: &Path) -> Self {
        Self {
            run_dir: run_dir.to_owned(),
            histories: BTreeMap::new(),
            watch: None,
        }
    }

    /// Samples the instances. `temporary` is the ID of the temporary instance.
    /// Every other instance belongs to the canonical pod.
    ///
    /// # Errors
    /// The run directory cannot be read.
    pub async fn sample_instances(
        &mut self,
        temporary: &InstanceId,
    ) -> Result<([InstanceObservation; 2], NodeDetails), Error> {
        let node = RunDirSnapshot::read(Some(&self.run_dir))?;
        if self.watch.is_none() {
            self.watch = node.instances.first().map(|known| Watch::new(&known.berth));
        }
        let mut answers = Vec::new();
        for known in &node.instances {
            answers.push(ask_shim(&known.berth, &known.id, known.socket).await);
        }
        let served = find_served(&answers);
        let mut node_silent = false;
        for (known, answer) in node.instances.iter().zip(&answers) {
            let history = self.histories.entry(known.id.clone()).or_default();
            match answer {
                ShimAnswer::Status(status) => history.node = status.discover,
                ShimAnswer::Silent(_) => node_silent |= history.node,
                ShimAnswer::None => {}
            }
        }
        let mut seen = [InstanceObservation::default(); 2];
        let silent = answers
            .iter()
            .any(|answer| matches!(answer, ShimAnswer::Silent(_)));
        let mut details = NodeDetails {
            silent,
            ..NodeDetails::default()
        };
        for (known, answer) in node.instances.iter().zip(answers) {
            let own = known.id == *temporary;
            // A node shim is no instance.
            if self
                .histories
                .get(&known.id)
                .is_some_and(|history| history.node)
            {
                continue;
            }
            let (mut instance, detail) =
                self.observe_instance(known, &answer, served.contains(&known.id));
            let answered = match answer {
                ShimAnswer::Status(_) => true,
                ShimAnswer::Silent(_) => false,
                // For an instance without a shim of its own, the node shim reports the state.
                ShimAnswer::None => !node_silent || instance.process.is_none(),
            };
            let history = self.histories.entry(known.id.clone()).or_default();
            instance.silent = history.is_silent(answered, instance.in_group, Instant::now());
            let all = &mut seen[usize::from(own)];
            details.others += usize::from(!own && instance.alive);
            if own {
                details.temporary = detail;
            } else if details.canonical.id.is_none()
                || (instance.alive, instance.in_group) > (all.alive, all.in_group)
            {
                details.canonical = detail;
            }
            all.alive |= instance.alive;
            all.in_group |= instance.in_group;
            all.drains |= instance.drains;
            all.silent |= instance.silent;
            all.process = instance.process.or(all.process);
        }
        // Pruned records count too, so the numbers only grow.
        for (id, history) in &self.histories {
            seen[usize::from(id == temporary)].ends += history.ends;
        }
        Ok((seen, details))
    }

    fn observe_instance(
        &mut self,
        known: &KnownInstance,
        answer: &ShimAnswer,
        served: bool,
    ) -> (InstanceObservation, InstanceDetails) {
        let history = self.histories.entry(known.id.clone()).or_default();
        let runs = known.record.as_ref().is_some_and(|listed| listed.alive);
        if let Some(listed) = &known.record {
            history.observe(process_key(&listed.record), listed.alive);
        }
        let mut detail = InstanceDetails {
            id: Some(known.id.clone()),
            berth: Some(known.berth.address()),
            ..InstanceDetails::default()
        };
        if let Some(listed) = &known.record {
            let Record {
                advertise, address, ..
            } = listed.record;
            detail.advertised = Some(SocketAddr::new(advertise, address.port()));
            detail.address = Some(address);
        }
        detail.socket = known.berth.socket_path(&known.id).ok();
        let shim = match answer {
            ShimAnswer::Status(status) => {
                let words = status.ready().err().unwrap_or_default();
                let name = format!("instance {} is ", status.instance);
                detail.reason = words.strip_prefix(&name).unwrap_or(&words).to_owned();
                detail.open = status.connections_open + status.connections_injected;
                let own = status.instances.iter().find(|instance| instance.own);
                detail.version = own.and_then(|own| own.kube_version.clone());
                true
            }
            ShimAnswer::Silent(why) => {
                detail.reason.clone_from(why);
                true
            }
            ShimAnswer::None => {
                detail.reason = if runs {
                    "its shim does not run yet".into()
                } else {
                    "its process ended".into()
                };
                false
            }
        };
        let ready = matches!(answer, ShimAnswer::Status(status) if status.ready().is_ok());
        let instance = InstanceObservation {
            alive: runs || shim,
            in_group: ready || (served && runs),
            drains: shim,
            process: history.process.filter(|_| runs),
            ..InstanceObservation::default()
        };
        (instance, detail)
    }

    /// Samples the manifests and the instances.
    ///
    /// # Errors
    /// A file or the run directory cannot be read.
    pub async fn sample(&mut self, state: &State) -> io::Result<(NodeObservation, NodeDetails)> {
        let ([canonical, temporary], details) = self
            .sample_instances(&state.uid)
            .await
            .map_err(io::Error::other)?;
        let canonical_file = read_content(&state.canonical, |text| match text {
            text if text == state.old => Some(Version::Old),
            text if text == state.new => Some(Version::New),
            text if state
                .emulated
                .as_ref()
                .is_some_and(|emulated| text == emulated.text) =>
            {
                Some(Version::Emulated)
            }
            _ => None,
        })?;
        let temporary_file = read_content(&state.temporary, |text| {
            (text == state.temporary_text).then_some(Version::New)
        })?;
        Ok((
            NodeObservation {
                canonical_file,
                temporary_file,
                canonical,
                temporary,
            },
            details,
        ))
    }

    /// Waits until something may have changed.
    pub async fn wait_for_change(&mut self) {
        let event = async {
            match &mut self.watch {
                Some(watch) => watch.changed().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = event => {}
            () = tokio::time::sleep(INTERVAL) => {}
        }
    }
}

enum ShimAnswer {
    Status(Box<Status>),
    /// The shim exists and does not answer.
    Silent(String),
    None,
}

async fn ask_shim(berth: &BerthDir, id: &InstanceId, socket: bool) -> ShimAnswer {
    let Some(path) = socket.then(|| berth.socket_path(id).ok()).flatten() else {
        return ShimAnswer::None;
    };
    match ipc::ask_shim(&path, Ask::Status, ipc::PATIENCE).await {
        Ok(Reply::Status(status)) => ShimAnswer::Status(status),
        Ok(reply) => ShimAnswer::Silent(format!("unexpected reply of its shim: {reply:?}")),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
            ) =>
        {
            ShimAnswer::None
        }
        Err(error) => ShimAnswer::Silent(format!("its shim does not answer: {error}")),
    }
}

/// The instances that a joined node shim reports as ready.
fn find_served(answers: &[ShimAnswer]) -> BTreeSet<InstanceId> {
    let nodes = answers.iter().filter_map(|answer| match answer {
        ShimAnswer::Status(status) if status.discover && status.state == Phase::Joined => {
            Some(status)
        }
        _ => None,
    });
    let ready = nodes
        .flat_map(|status| &status.instances)
        .filter(|instance| instance.health == InstanceHealth::Ready);
    ready.map(|instance| instance.instance.clone()).collect()
}

/// Distinguishes a process from its predecessor. The process ID alone is 1 in every container.
fn process_key(record: &Record) -> u64 {
    let mut hasher = DefaultHasher::new();
    (record.started, record.pid).hash(&mut hasher);
    hasher.finish()
}

fn read_content(path: &Path, which: impl Fn(&str) -> Option<Version>) -> io::Result<Content> {
    let failed = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("cannot read {}: {error}", path.display()),
        )
    };
    let Some(bytes) = none_if_missing(std::fs::read(path)).map_err(failed)? else {
        return Ok(Content::Absent);
    };
    let known = std::str::from_utf8(&bytes).ok().and_then(which);
    Ok(known.map_or(Content::Other, Content::Holds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_shim_counts_as_in_the_group_for_30_s() {
        let began = Instant::now();
        let (mut history, second) = (ProcessHistory::default(), Duration::from_secs(1));
        for (after, answered, in_group, silent) in [
            (0, false, false, false),
            (1, true, true, false),
            (2, false, false, true),
            (30, false, false, true),
            (31, false, false, false),
            (32, true, true, false),
            (33, false, false, true),
            (34, true, false, false),
            (35, false, false, false),
        ] {
            assert_eq!(
                history.is_silent(answered, in_group, began + second * after),
                silent,
                "{after} s"
            );
        }
    }

    #[test]
    fn ends_of_processes_are_counted_once() {
        let mut history = ProcessHistory::default();
        for (process, alive, ends) in [
            (1, true, 0),
            (1, true, 0),
            (1, false, 1),
            (1, false, 1),
            (2, true, 1),
            (3, true, 2),
            (4, false, 4),
        ] {
            history.observe(process, alive);
            assert_eq!(history.ends, ends, "{process} {alive}");
        }
    }

    #[test]
    fn a_file_is_recognized_only_byte_for_byte() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a");
        let read =
            || read_content(&path, |text| (text == "new\n").then_some(Version::New)).unwrap();
        assert_eq!(read(), Content::Absent);
        for (bytes, holds) in [
            (&b"new\n"[..], Content::Holds(Version::New)),
            (b"new", Content::Other),
            (b"\xff", Content::Other),
        ] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(read(), holds);
        }
    }
}
