//! A report as data: the schema of `berth rehearse --json`, and all that the page and the table are
//! made from.
//!
//! Times are milliseconds from the start of the load of their run, so the start of the old instance
//! is before zero. Waits are milliseconds from when the timetable wanted a request to its whole
//! answer. Names of instances are those of [`Ran::instances`]; maps by instance have no other keys
//! unless another program answered.
//!
//! `docs/report.schema.json` is made from these types and their comments, and a test compares the two.
//! A change that an old reader would misunderstand gets a new [`VERSION`]. A new field does not: readers pass over what
//! they do not know, and where an older release's report lacks it, it has a default (`#[serde(default)]`, which also keeps it
//! out of the schema's `required`).

pub use crate::plan::Via;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The version of this schema.
pub const VERSION: u32 = 1;

/// A rehearsal: what it was, where it was made, and each of its runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// Version of the schema: 1.
    pub version: u32,
    /// Version of the berth that made it.
    pub berth_version: String,
    /// When it was made, in RFC 3339 and UTC.
    pub made_at: String,
    /// The command that makes it again.
    pub command: Command,
    /// Seed of everything random in the load.
    pub seed: Option<u64>,
    /// Where it was made.
    pub environment: Environment,
    /// Why it ended before its end; what it had gathered until then is here.
    pub aborted: Option<String>,
    /// One a way to the instances, in the order in which they were made.
    pub runs: Vec<Run>,
}

/// A command, for programs and for people.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Command {
    /// Its words.
    pub argv: Vec<String>,
    /// The same, quoted for a shell.
    pub shell: String,
}

/// The machine and the programs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Environment {
    /// Name, release and architecture of the kernel.
    pub kernel: String,
    /// Model of the CPUs.
    pub cpu_model: String,
    /// CPUs that this process may use.
    pub cpus: u32,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// Files that a process may have open.
    pub open_files_limit: u64,
    /// Settings of the kernel that decide how connections fare, by their name for sysctl.
    pub sysctls: BTreeMap<String, String>,
    /// The programs that took part.
    pub programs: Vec<Program>,
}

/// A program that took part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Program {
    /// What it was there for: `old`, `new`, `etcd`, `haproxy`, `berth` where it is another one than that which made the report.
    pub role: String,
    /// Which version, as it reports it.
    pub version: String,
}

/// One upgrade, or several back and forth, one way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Run {
    /// The way from clients to instances.
    pub via: Via,
    /// Which process gets SIGTERM when: `sidecar`, `native-sidecar`, `node` or `run`; or `bridge`, in place.
    pub topology: String,
    /// What came of it.
    pub outcome: RunOutcome,
}

/// What came of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// It was not made, for this reason.
    Skipped(String),
    /// It was made, perhaps not to its end.
    Ran(Box<Ran>),
}

/// A run that was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Ran {
    /// How long the load lasted.
    pub load_ms: u64,
    /// Its apiservers are simulated ones, which are part of berth.
    #[serde(default)]
    pub simulated: bool,
    /// In the order in which they were started.
    pub instances: Vec<Instance>,
    /// What was lost.
    pub verdict: Verdict,
    /// What was promised under each fault, and under a storm, and what came of that.
    pub promises: Vec<Promise>,
    /// Sums.
    pub figures: Figures,
    /// The same over time.
    pub timeline: Timeline,
    /// What happened to the instances, in order.
    pub marks: Vec<Mark>,
    /// One a watch.
    pub watches: Vec<Watch>,
    /// One a client that keeps a copy of objects.
    pub informers: Vec<Informer>,
    /// Connections that dialed the instances themselves meanwhile, by instance: what happens to them
    /// nothing in between can have done.
    pub control_streams: BTreeMap<String, ControlStreams>,
    /// Times for which the Service `kubernetes` named no address; none: not observed.
    pub endpoint_gaps: Option<Vec<Period>>,
    /// Clients that came at one moment; none: no `--storm`, or it did not come to that.
    pub storm: Option<Storm>,
    /// Clients that waited before the shims opened a connection for them; none: the shims have no gate, or there was no `--storm`.
    pub gate: Option<Gate>,
    /// What went past the shims; none: they had no direct path.
    pub direct: Option<Direct>,
}

/// Clients that came at one moment after the first switch, each from an address of its own, and again until they were served.
/// What they ask for is not among the requests.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Storm {
    /// When they came.
    pub from_ms: i64,
    /// How many.
    pub clients: u64,
    /// How many were served.
    pub served: u64,
    /// Time until half of all were; none: they never were.
    pub half_served_ms: Option<f64>,
    /// Time until all were; none: they never were.
    pub all_served_ms: Option<f64>,
    /// Times that one gave up: there was no TLS handshake for 10 s, or no answer for 15 s after it.
    pub gave_up: u64,
    /// Other tries that failed, by kind. A client comes again after 1 s, whatever it was.
    pub failed: Vec<Tally>,
}

/// The gates of all shims together during the load, of all clients. Shims are asked 20 times a second: what one counted just before its SIGKILL is missing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Gate {
    /// Clients that waited and had their turn, by class: `first`, `others`, `late`.
    pub waited: BTreeMap<String, u64>,
    /// Clients that waited and had none, by reason: `full`, `expired`, `left`.
    pub dropped: BTreeMap<String, u64>,
    /// Most that were seen to wait at a time.
    pub most_waiting: u64,
    /// Most that were seen to wait in a step of the timeline, by class. A step without a sample has the last one.
    pub waiting: BTreeMap<String, Vec<u64>>,
    /// Most TLS handshakes in flight, the same way: an instance has a client's first bytes and has not answered yet.
    pub openings: Vec<u64>,
    /// How many there might be at most, the same way.
    pub limit: Vec<u64>,
}

/// New connections that the kernel steered to the instance itself, past the shims.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Direct {
    /// How many there were during the load, those of clients that connected again among them. Shims are
    /// asked four times a second: what one steered just before its SIGKILL is missing.
    pub steered: u64,
    /// Part of the load, from 0 to 1, during which a shim reported that it steers.
    pub on_share: f64,
    /// When that was.
    pub on: Vec<Period>,
}

/// Connections to an instance itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ControlStreams {
    /// How many there were.
    pub opened: u64,
    /// How many of them ended during the load.
    pub ended: u64,
}

/// From when to when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Period {
    /// From when.
    pub from_ms: i64,
    /// Until when.
    pub to_ms: i64,
}

/// An apiserver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Instance {
    /// Its name everywhere else in the run.
    pub name: String,
    /// Which version it serves.
    pub version: String,
}

/// What was lost. *Lost* is a new connection that was refused, reset or not answered within 15 s, or a
/// stream that ended before its instance ended it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Verdict {
    /// Nothing was lost beyond what was promised, every promise was kept, and the run would have shown
    /// it otherwise.
    pub held: bool,
    /// Nothing can be concluded from the run, as it came to too little or its machine was too slow for the load: nothing was seen that berth or an instance did wrong.
    pub inconclusive: bool,
    /// The same, and timers of the clients were so late that this machine was too busy to tell.
    #[serde(default)]
    pub too_busy: bool,
    /// In one sentence.
    pub summary: String,
    /// What was lost, by kind.
    pub lost: Vec<Tally>,
    /// What the instances ended or rejected themselves, and what nobody can tell as this machine was too busy: not lost.
    pub apart: Vec<Tally>,
    /// The same of a run that dialed the instances directly.
    pub control: Option<Vec<Tally>>,
    /// Why nothing can be concluded, or what else was not as it should be.
    pub objections: Vec<String>,
    /// What is worth knowing and is nothing against the run.
    pub notes: Vec<String>,
    /// The first of each kind of loss, in words.
    pub examples: Vec<String>,
}

/// How many there were of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Tally {
    /// The kind's name, which does not change: see [`Timeline::lost`].
    pub kind: String,
    /// The kind in words.
    pub text: String,
    /// How many.
    pub count: u64,
}

/// What berth promises under a fault or a storm, and whether it was kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Promise {
    /// The fault, as `--fault` names it, or `storm`.
    pub fault: String,
    /// To which instance it was done; of a storm, `storm`.
    pub instance: String,
    /// When it began.
    pub from_ms: i64,
    /// When all was as before again; none: that was not seen.
    pub to_ms: Option<i64>,
    /// What is promised, in words.
    pub promise: String,
    /// It was kept.
    pub held: bool,
    /// What was seen of it, in words; if it was not kept, why.
    pub what_happened: Vec<String>,
    /// Losses that it allows, by kind: not lost.
    pub allowed: Vec<Tally>,
}

/// Sums of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Figures {
    /// All requests of all clients.
    pub requests: u64,
    /// Those that had to connect first.
    pub new_connections: u64,
    /// Those by the instance that answered.
    pub new_connections_by_instance: BTreeMap<String, u64>,
    /// Half of the requests waited no longer.
    pub wait_p50_ms: f64,
    /// 99 % of the requests waited no longer.
    pub wait_p99_ms: f64,
    /// The longest wait.
    pub wait_max_ms: f64,
    /// Longest time without any good answer.
    pub longest_silence_ms: f64,
    /// Whole seconds of the load without any good answer.
    pub silent_s: u64,
    /// Events that watches saw.
    pub watch_events: u64,
    /// Times that watches and informers listed again.
    pub relists: u64,
    /// Times that they got 410: their revision was older than what the instance knew.
    pub expired: u64,
    /// Large answers that were read slowly to their end.
    pub slow_reads: u64,
    /// Connections that failed because a certificate was not the right one.
    pub x509_errors: u64,
    /// Lines of apiservers' logs that report a certificate that they do not trust; none: not known.
    pub logged_x509_errors: Option<u64>,
    /// Time for which the Service `kubernetes` named no address: the sum of [`Ran::endpoint_gaps`].
    pub endpoint_gap_ms: Option<f64>,
}

/// A run in steps of equal length from zero on. All lists have the same length.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Timeline {
    /// Length of a step.
    pub step_ms: u64,
    /// Good answers that came in a step, by instance.
    pub answered: BTreeMap<String, Vec<u64>>,
    /// What was seen to be lost in a step, by kind: `refused`, `reset`, `closed`, `unanswered`, `tls`,
    /// `http`, `bad_status`, `stream_ended`, `event_missed`, `event_duplicated`.
    pub lost: BTreeMap<String, Vec<u64>>,
    /// Losses of a step that promises under faults allow.
    pub allowed: Vec<u64>,
    /// Streams that their instance ended.
    pub ended_by_instance: Vec<u64>,
    /// Median wait of the answers that came in a step; none: none came.
    pub wait_p50_ms: Vec<Option<f64>>,
    /// 99 % of them waited no longer.
    pub wait_p99_ms: Vec<Option<f64>>,
    /// The longest.
    pub wait_max_ms: Vec<Option<f64>>,
    /// Kept connections and watches that are open at the end of a step, by instance.
    pub open_connections: BTreeMap<String, Vec<u64>>,
}

/// A moment at which something happened to an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Mark {
    /// When.
    pub at_ms: i64,
    /// To which instance.
    pub instance: String,
    /// What.
    pub what: MarkKind,
    /// More of it in words, such as an exit status, or which fault; may be empty.
    pub text: String,
}

/// What happened.
// A record has these, too, and of a simulated apiserver more than a report has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// Its processes were started.
    Started,
    /// It listens, as a simulated apiserver reports.
    #[cfg_attr(test, schemars(skip))]
    Listening,
    /// Its `/readyz` is 200 from here on.
    Ready,
    /// New connections go to it.
    Joined,
    /// SIGTERM was sent to it.
    Sigterm,
    /// It got SIGTERM: its `/readyz` is 500 from here on, as a simulated apiserver reports.
    #[cfg_attr(test, schemars(skip))]
    Terminating,
    /// New connections no longer go to it.
    Left,
    /// It takes no new connections, or rejects requests, as a simulated apiserver reports.
    #[cfg_attr(test, schemars(skip))]
    Draining,
    /// Its last connection has ended.
    Drained,
    /// Its processes are gone.
    Exited,
    /// It was done some harm.
    Fault,
}

impl fmt::Display for MarkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Started => "started",
            Self::Listening => "listening",
            Self::Ready => "ready",
            Self::Joined => "joined",
            Self::Sigterm => "SIGTERM",
            Self::Terminating => "terminating",
            Self::Left => "left",
            Self::Draining => "draining",
            Self::Drained => "drained",
            Self::Exited => "exited",
            Self::Fault => "fault",
        })
    }
}

/// One client's watch, over all of its connections.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Watch {
    /// Its client.
    pub id: String,
    /// Events that it saw.
    pub events: u64,
    /// Writes that it never saw.
    pub missed: u64,
    /// Writes that it saw twice or too late.
    pub duplicated: u64,
    /// Times that it listed again.
    pub relists: u64,
    /// Times that it got 410: its revision was older than what the instance knew.
    pub expired: u64,
    /// When it was open, and on which instance.
    pub segments: Vec<Segment>,
    /// When it was not.
    pub gaps: Vec<Gap>,
    /// When it noticed what it missed or saw again, in order.
    pub flaws: Vec<Flaw>,
}

/// A moment at which a watch noticed that something was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Flaw {
    /// When.
    pub at_ms: i64,
    /// Writes that it never saw.
    pub missed: u64,
    /// Writes that it saw twice or too late.
    pub duplicated: u64,
}

/// A time for which a watch was open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Segment {
    /// From when.
    pub from_ms: i64,
    /// Until when.
    pub to_ms: i64,
    /// The instance that answered it.
    pub instance: String,
}

/// A time for which a watch was not open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Gap {
    /// From when.
    pub from_ms: i64,
    /// Until when.
    pub to_ms: i64,
    /// Its instance ended it: not lost.
    pub by_instance: bool,
    /// A promise under a fault allows that it was cut: not lost. One that is neither was.
    pub allowed: bool,
    /// How the client saw its end.
    pub reason: String,
}

/// A client that lists and watches to keep a copy of objects, against what was written. One named `informer-N` of
/// all objects, `quiet-N` of objects that are not written during the load.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Informer {
    /// Its client.
    pub id: String,
    /// Objects that were written and not deleted.
    pub written: u64,
    /// Objects that it holds at the end.
    pub held: u64,
    /// Objects that were written and that it does not hold, or never saw before they were deleted.
    pub missing: u64,
    /// Objects that it holds although they were deleted.
    pub stale: u64,
    /// Objects of which it saw an event twice.
    pub duplicated: u64,
    /// Times that it listed again.
    pub relists: u64,
    /// Times that it got 410: its revision was older than what the instance knew.
    pub expired: u64,
}

impl Command {
    /// A command of these words.
    pub fn new(argv: Vec<String>) -> Self {
        let shell = argv.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        Self { argv, shell }
    }
}

/// As a shell reads it, and as a person writes it: `--name='a value'`.
fn quoted(word: &str) -> String {
    let plain = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    match word.split_once('=').filter(|(name, _)| plain(name)) {
        Some((name, value)) => format!("{name}={}", shell_words::quote(value)),
        None => shell_words::quote(word).into_owned(),
    }
}

impl Verdict {
    /// All that was lost.
    pub fn lost(&self) -> u64 {
        self.lost.iter().map(|tally| tally.count).sum()
    }
}

impl Ran {
    /// What was upgraded.
    pub(crate) fn apiservers(&self) -> &'static str {
        if self.simulated { "simulated apiservers" } else { "real kube-apiservers" }
    }

    /// All that promises under faults allowed to be lost.
    pub fn allowed(&self) -> u64 {
        self.promises.iter().flat_map(|promise| &promise.allowed).map(|tally| tally.count).sum()
    }

    /// Promises that were not kept.
    pub(crate) fn broken(&self) -> u64 {
        self.promises.iter().filter(|promise| !promise.held).count() as u64
    }
}

impl Gap {
    /// It was cut, and nothing allows that.
    pub fn lost(&self) -> bool {
        !self.by_instance && !self.allowed
    }
}

/// How many there were of a kind.
pub(crate) fn count_of(tallies: &[Tally], kind: &str) -> u64 {
    tallies.iter().find(|tally| tally.kind == kind).map_or(0, |tally| tally.count)
}

impl Informer {
    /// It holds exactly what was written, and saw each write once.
    pub(crate) fn is_whole(&self) -> bool {
        self.missing + self.stale + self.duplicated == 0
    }

    /// It follows objects that are not written: what it holds is no evidence, only how often it listed again.
    pub(crate) fn is_quiet(&self) -> bool {
        self.id.starts_with("quiet-")
    }
}

impl Mark {
    /// What its words do not have: an exit status.
    pub(crate) fn more(&self) -> &str {
        if self.what == MarkKind::Fault { "" } else { &self.text }
    }

    /// The instance and what happened, in a few words.
    pub fn words(&self) -> String {
        match self.what {
            // A version that is wrong on purpose is named by what is wrong with it.
            MarkKind::Fault if self.text == self.instance => self.text.clone(),
            MarkKind::Fault if !self.text.is_empty() => format!("{} {}", self.instance, self.text),
            what => format!("{} {what}", self.instance),
        }
    }
}

impl Run {
    /// What was made, unless it was skipped.
    pub fn ran(&self) -> Option<&Ran> {
        match &self.outcome {
            RunOutcome::Ran(ran) => Some(ran),
            RunOutcome::Skipped(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `BERTH_BLESS=1 cargo test schema` writes it.
    #[test]
    fn the_schema_that_is_documented_is_the_one_that_is() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/report.schema.json");
        let schema = serde_json::to_string_pretty(&schemars::schema_for!(Report)).unwrap() + "\n";
        if std::env::var_os("BERTH_BLESS").is_some() {
            std::fs::write(path, &schema).unwrap();
        }
        assert!(std::fs::read_to_string(path).unwrap() == schema, "{path}: BERTH_BLESS=1 cargo test schema writes it");
    }

    #[test]
    fn words_are_quoted() {
        let argv = ["berth", "--rate=9", "--new=a b", "--old", "it's; $(x)", ""];
        let command = Command::new(argv.map(String::from).into());
        assert_eq!(command.shell, r"berth --rate=9 --new='a b' --old 'it'\''s; $(x)' ''");
        let text = serde_json::to_string(&command).unwrap();
        assert_eq!(serde_json::from_str::<Command>(&text).unwrap(), command);
    }

    #[test]
    fn kinds_have_steady_names() {
        assert_eq!(serde_json::to_string(&[Via::PortSharing, Via::Haproxy]).unwrap(), r#"["port-sharing","haproxy"]"#);
        assert_eq!(serde_json::to_string(&MarkKind::Sigterm).unwrap(), r#""sigterm""#);
    }
}
