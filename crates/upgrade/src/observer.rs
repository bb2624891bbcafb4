//! Observes the files and instances of a node for the machine, and waits for changes.

use super::machine::{Content, InstanceObservation, NodeObservation, Slot, Version};
use super::state::State;
use berth_node::instance_id::InstanceId;
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
    /// Number of running instances, not counting the temporary instance.
    pub others: usize,
    pub temporary: InstanceDetails,
    /// True if a shim exists and did not answer. The next sample may have its answer.
    pub silent: bool,
}

impl NodeDetails {
    pub fn details_of_slot(&self, slot: Slot) -> &InstanceDetails {
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
    /// Time of the shim's last report, if that report says that the instance is in the group.
    joined: Option<Instant>,
    /// True if the shim is a node shim.
    node: bool,
}

impl ProcessHistory {
    fn observe_process(&mut self, process: u64, alive: bool) {
        if self.process.is_some_and(|before| before != process) {
            self.ends += u32::from(!self.dead);
            self.dead = false;
        }
        self.process = Some(process);
        self.ends += u32::from(!alive && !self.dead);
        self.dead |= !alive;
    }

    /// True if the instance may still be in the group although no shim reports so now.
    fn update_silence(&mut self, answered: bool, in_group: bool, now: Instant) -> bool {
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
        let served = find_served_instances(&answers);
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
            // A node shim has a record, but is no instance.
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
            instance.silent = history.update_silence(answered, instance.in_group, Instant::now());
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
        // Ends of a process count also after the removal of the process's record, so the numbers
        // only grow.
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
            history.observe_process(process_key(&listed.record), listed.alive);
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
                let words = status.check_ready().err().unwrap_or_default();
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
                    "the instance's shim does not run yet".into()
                } else {
                    "the instance's process ended".into()
                };
                false
            }
        };
        let ready = matches!(answer, ShimAnswer::Status(status) if status.check_ready().is_ok());
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
                Some(watch) => watch.wait_for_change().await,
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
        Ok(reply) => ShimAnswer::Silent(format!(
            "unexpected reply of the instance's shim: {reply:?}"
        )),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
            ) =>
        {
            ShimAnswer::None
        }
        Err(error) => ShimAnswer::Silent(format!("the instance's shim does not answer: {error}")),
    }
}

/// The instances that a joined node shim reports as ready.
fn find_served_instances(answers: &[ShimAnswer]) -> BTreeSet<InstanceId> {
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
    use crate::state::EmulatedManifest;
    use crate::state::tests::make_state;
    use berth_node::registry::RunDir;
    use berth_node::registry::instance::{Claimant, InstanceClaim, claim};
    use serde_json::{from_value, json};
    use std::os::unix::net::UnixListener;
    use std::sync::{Arc, Mutex};
    use tempfile::TempDir;
    use tokio::time::timeout;

    type Replies = Arc<Mutex<BTreeMap<&'static str, Option<Reply>>>>;

    /// A run directory with instances, and shims that reply as they are told.
    struct Node {
        _temp: TempDir,
        berth: BerthDir,
        observer: NodeObserver,
        claims: BTreeMap<&'static str, InstanceClaim>,
        replies: Replies,
    }

    impl Node {
        fn new() -> Self {
            let temp = tempfile::tempdir().unwrap();
            let path = temp.path().join("run");
            let berth = RunDir::open(&path)
                .unwrap()
                .berth(make_state().address)
                .unwrap();
            Self {
                _temp: temp,
                berth,
                observer: NodeObserver::new(&path),
                claims: BTreeMap::new(),
                replies: Replies::default(),
            }
        }

        fn start_instance(&mut self, id: &'static str, pid: u8) {
            let claimant = Claimant {
                instance: &id.parse().unwrap(),
                advertise: [10, 0, 0, 5].into(),
                supervisor: None,
                pid: Some(pid.into()),
            };
            let address = ([127, 0, 0, pid], 6443).into();
            let claim = claim(&self.berth, &claimant, |_, _| Ok(address)).unwrap();
            self.claims.insert(id, claim);
        }

        fn end_instance(&mut self, id: &str) {
            self.claims.remove(id).unwrap();
        }

        fn socket_path_of(&self, id: &str) -> PathBuf {
            self.berth.socket_path(&id.parse().unwrap()).unwrap()
        }

        /// Sets the reply of a shim. With `None`, the shim closes the connection.
        fn set_shim_reply(&self, id: &'static str, reply: Option<Reply>) {
            if self.replies.lock().unwrap().insert(id, reply).is_some() {
                return;
            }
            let replies = Arc::clone(&self.replies);
            let shim = ipc::Server::bind(&self.socket_path_of(id)).unwrap();
            tokio::spawn(shim.serve(move |request| {
                let reply = replies.lock().unwrap()[id].clone();
                async move {
                    if let Some(reply) = reply {
                        request.reply(&reply).await;
                    }
                }
            }));
        }

        /// Samples the node, with `t` as the temporary instance, until a shim is silent or none is:
        /// on a busy machine a shim may answer too late.
        async fn sample(&mut self, silent: bool) -> ([InstanceObservation; 2], NodeDetails) {
            let temporary = "t".parse().unwrap();
            let sampled = async {
                loop {
                    let (seen, details) = self.observer.sample_instances(&temporary).await.unwrap();
                    if details.silent == silent {
                        return (seen, details);
                    }
                    tokio::task::yield_now().await;
                }
            };
            timeout(Duration::from_secs(60), sampled).await.unwrap()
        }
    }

    /// The status of a shim of one instance, or of a node shim (`n`).
    fn make_status_reply(
        id: &str,
        state: Phase,
        instances: &[(&str, InstanceHealth)],
    ) -> Option<Reply> {
        let instances: Vec<_> = instances
            .iter()
            .map(|(instance, health)| {
                json!({"instance": instance, "address": "127.0.0.1:6443", "own": *instance == id, "standing": health,
                    "since": "", "kube_version": "v1.36.1", "last_probe": "why"})
            })
            .collect();
        let status = json!({"version": 2, "berth": "10.0.0.5:6443", "listen": [], "instance": id, "discover": id == "n",
            "shim_version": "", "pid": 1, "state": state, "since": "", "connections_open": 3, "connections_pending": 0,
            "connections_injected": 2, "connections_total": 9, "held": 0, "fail_open": false, "foreign_listeners": 0,
            "instances": instances, "blocked": false});
        Some(Reply::Status(from_value(status).unwrap()))
    }

    #[tokio::test]
    async fn an_instance_with_a_shim_is_as_the_shim_reports() {
        use InstanceHealth::{Ready, Unready};
        let mut node = Node::new();
        assert_eq!(
            node.sample(false).await.0,
            [InstanceObservation::default(); 2]
        );
        node.start_instance("a", 1);
        node.start_instance("t", 2);
        node.set_shim_reply("a", make_status_reply("a", Phase::Joined, &[("a", Ready)]));
        let ([canonical, temporary], details) = node.sample(false).await;
        let (first, second) = (canonical.process, temporary.process);
        assert!(first.is_some() && second.is_some() && first != second);
        let serves = InstanceObservation {
            alive: true,
            in_group: true,
            drains: true,
            process: first,
            ..InstanceObservation::default()
        };
        let runs = InstanceObservation {
            alive: true,
            process: second,
            ..InstanceObservation::default()
        };
        assert_eq!((canonical, temporary), (serves, runs));
        assert_eq!(details.others, 1);
        let InstanceDetails {
            id,
            berth,
            reason,
            open,
            version,
            socket,
            advertised,
            address,
        } = details.canonical;
        assert_eq!(
            (id.unwrap().to_string(), berth),
            ("a".into(), Some(make_state().address))
        );
        assert_eq!(
            (reason, open, version),
            (String::new(), 5, Some("v1.36.1".into()))
        );
        assert_eq!(
            (socket, advertised),
            (Some(node.socket_path_of("a")), Some(make_state().address))
        );
        assert_eq!(address, Some(([127, 0, 0, 1], 6443).into()));
        assert_eq!(details.temporary.id.unwrap().to_string(), "t");
        assert_eq!(
            details.temporary.reason,
            "the instance's shim does not run yet"
        );

        // The shim's last report counts while the shim does not answer.
        for reply in [Some(Reply::Done), None] {
            node.set_shim_reply("a", reply);
            let ([canonical, _], details) = node.sample(true).await;
            let silent = InstanceObservation {
                in_group: false,
                silent: true,
                ..serves
            };
            assert_eq!(canonical, silent);
            assert!(!details.canonical.reason.is_empty());
        }
        node.set_shim_reply(
            "a",
            make_status_reply("a", Phase::Joined, &[("a", Unready)]),
        );
        let ([canonical, _], details) = node.sample(false).await;
        assert!(!canonical.in_group && !canonical.silent);
        assert_eq!(details.canonical.reason, "unready: why");

        node.end_instance("a");
        node.end_instance("t");
        let ([canonical, temporary], details) = node.sample(false).await;
        let ended = InstanceObservation {
            ends: 1,
            ..InstanceObservation::default()
        };
        let has_shim = InstanceObservation {
            alive: true,
            drains: true,
            ..ended
        };
        assert_eq!((canonical, temporary), (has_shim, ended));
        assert_eq!(details.temporary.reason, "the instance's process ended");
        node.start_instance("a", 3);
        let ([canonical, _], _) = node.sample(false).await;
        assert!(canonical.process.is_some() && canonical.process != first);
        // The ends count without a record, too.
        node.end_instance("a");
        for _ in 0..2 {
            assert_eq!(node.sample(false).await.0.map(|it| it.ends), [2, 1]);
            let _ = std::fs::remove_file(node.berth.instances_path().join("a.json"));
        }
    }

    #[tokio::test]
    async fn instances_without_shims_are_as_the_node_shim_reports() {
        use InstanceHealth::{Failing, Ready};
        let mut node = Node::new();
        // A shim that was killed leaves its socket.
        drop(UnixListener::bind(node.socket_path_of("a")).unwrap());
        for (id, pid) in [("a", 1), ("b", 2)] {
            node.start_instance(id, pid);
        }
        let reports = |phase, a, b| make_status_reply("n", phase, &[("a", a), ("b", b)]);
        for (reply, in_group, id) in [
            (reports(Phase::Waiting, Ready, Ready), false, "a"),
            (reports(Phase::Joined, Failing, Failing), false, "a"),
            (reports(Phase::Joined, Ready, Failing), true, "a"),
            (reports(Phase::Joined, Failing, Ready), true, "b"),
        ] {
            node.set_shim_reply("n", reply);
            let ([canonical, temporary], details) = node.sample(false).await;
            let expected = InstanceObservation {
                alive: true,
                in_group,
                process: canonical.process,
                ..InstanceObservation::default()
            };
            assert_eq!(
                (canonical, temporary),
                (expected, InstanceObservation::default())
            );
            assert_eq!(details.others, 2);
            assert_eq!(details.canonical.id.unwrap().to_string(), id);
        }
        // A node shim that does not answer may still serve the instance, unless that has ended.
        node.set_shim_reply("n", None);
        let ([canonical, _], _) = node.sample(true).await;
        assert!(canonical.silent && !canonical.in_group);
        node.end_instance("b");
        assert!(!node.sample(true).await.0[0].silent);
        node.set_shim_reply("n", reports(Phase::Joined, Failing, Ready));
        assert!(!node.sample(false).await.0[0].in_group, "it has ended");
    }

    #[tokio::test(start_paused = true)]
    async fn files_are_recognized_and_sampled_again_after_a_while() {
        let temp = tempfile::tempdir().unwrap();
        let emulated = EmulatedManifest {
            release: "1.35".into(),
            text: "emulated".into(),
        };
        let mut state = State {
            canonical: temp.path().join("canonical"),
            temporary: temp.path().join("temporary"),
            emulated: Some(emulated),
            ..make_state()
        };
        let mut observer = NodeObserver::new(&temp.path().join("run"));
        for (text, version) in [
            ("old", Some(Version::Old)),
            ("new", Some(Version::New)),
            ("emulated", Some(Version::Emulated)),
            ("temporary", None),
        ] {
            for path in [&state.canonical, &state.temporary] {
                std::fs::write(path, text).unwrap();
            }
            let (seen, _) = observer.sample(&state).await.unwrap();
            let holds = |version: Option<_>| version.map_or(Content::Other, Content::Holds);
            let its = (text == "temporary").then_some(Version::New);
            assert_eq!(
                (seen.canonical_file, seen.temporary_file),
                (holds(version), holds(its))
            );
        }
        state.emulated = None;
        std::fs::write(&state.canonical, "emulated").unwrap();
        let (seen, _) = observer.sample(&state).await.unwrap();
        assert_eq!(seen.canonical_file, Content::Other);
        let began = Instant::now();
        observer.wait_for_change().await;
        assert!(began.elapsed() >= INTERVAL);
    }

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
                history.update_silence(answered, in_group, began + second * after),
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
            history.observe_process(process, alive);
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
