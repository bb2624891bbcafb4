//! A report as data: the schema of `berth rehearse --json`, and all that the page and the table are
//! made from.
//!
//! Times are milliseconds from the start of the load of their run, so the start of the old instance
//! is before zero. Waits are milliseconds from when the timetable wanted a request to its whole
//! answer. Names of instances are those of [`Ran::instances`]; maps by instance have no other keys
//! unless another program answered.
//!
//! `docs/report.schema.json` is made from these types and their comments, and a test compares the two.
//! A change that an old reader would misunderstand gets a new [`VERSION`]. A new field or row does not: readers pass over what they do not know.

use super::format;
pub use crate::config::Via;
pub use crate::record::loss::{Loss, Losses};
pub use crate::record::verdict::Verdict;
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
    /// The command that makes it again, with the seed of everything random in the load, quoted for a shell.
    pub command: String,
    /// Where it was made.
    pub environment: Environment,
    /// Why it ended before its end; what it had gathered until then is here.
    pub aborted: Option<String>,
    /// One a way to the instances, in the order in which they were made.
    pub runs: Vec<Run>,
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
    pub simulated: bool,
    /// In the order in which they were started.
    pub instances: Vec<Instance>,
    /// What it came to.
    pub verdict: Verdict,
    /// What was lost, by kind.
    pub lost: Losses,
    /// Why nothing can be concluded, or what else was not as it should be.
    pub objections: Vec<String>,
    /// What is worth knowing and is nothing against the run.
    pub notes: Vec<String>,
    /// The first of each kind of loss, in words.
    pub examples: Vec<String>,
    /// What was promised under each fault, and under a storm, and what came of that.
    pub promises: Vec<Promise>,
    /// All figures, in the order in which the table and the page have them.
    pub rows: Vec<Row>,
    /// Answers and losses over time.
    pub timeline: Timeline,
    /// What happened to the instances, in order.
    pub marks: Vec<Mark>,
}

/// A figure of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Row {
    /// Its name, by which runs are compared.
    pub name: String,
    /// The figure and its unit.
    #[serde(flatten)]
    pub value: Value,
    /// More of it in words; may be empty.
    pub note: String,
    /// It is one of those that matter most, which are printed without `--verbose`.
    pub main: bool,
}

/// A figure with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "unit", content = "value", rename_all = "snake_case")]
pub enum Value {
    /// How many.
    Count(u64),
    /// Milliseconds.
    Ms(f64),
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
    pub allowed: Losses,
}

/// A run in steps of equal length from zero on. All lists have the same length.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Timeline {
    /// Length of a step.
    pub step_ms: u64,
    /// Good answers that came in a step, by instance.
    pub answered: BTreeMap<String, Vec<u64>>,
    /// What was seen to be lost in a step, by kind.
    pub lost: BTreeMap<Loss, Vec<u64>>,
    /// Losses of a step that promises under faults allow.
    pub allowed: Vec<u64>,
    /// Streams that their instance ended.
    pub ended_by_instance: Vec<u64>,
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

impl Ran {
    /// The verdict in words.
    pub(crate) fn words(&self) -> &'static str {
        match self.verdict {
            Verdict::Held if self.allowed() > 0 => {
                "nothing was lost but what faults may cost, every promise held"
            }
            Verdict::Held => "nothing was lost",
            Verdict::Unproven => "nothing was seen to be lost, but the run proves nothing",
            Verdict::Wrong => {
                "nothing was seen to be lost, but a process did not do what it should"
            }
            Verdict::TooBusy => "this machine was too busy to tell",
            Verdict::Broken => "a promise was broken",
            Verdict::Lost => "something was lost",
        }
    }

    /// Adds a figure, which does not matter most and has no note unless that is said.
    pub(crate) fn add(&mut self, name: impl Into<String>, value: Value) -> &mut Row {
        self.rows.push(Row {
            name: name.into(),
            value,
            note: String::new(),
            main: false,
        });
        self.rows.last_mut().expect("a row was added")
    }

    /// The figure of this name, if there is one.
    pub fn figure(&self, name: &str) -> Option<Value> {
        self.rows
            .iter()
            .find(|row| row.name == name)
            .map(|row| row.value)
    }

    /// What was upgraded.
    pub(crate) fn apiservers(&self) -> &'static str {
        if self.simulated {
            "simulated apiservers"
        } else {
            "real kube-apiservers"
        }
    }

    /// All that promises under faults allowed to be lost.
    pub fn allowed(&self) -> u64 {
        self.promises
            .iter()
            .flat_map(|promise| promise.allowed.values())
            .sum()
    }

    /// Objects to what was rehearsed.
    pub(crate) fn object(&mut self, objection: String) {
        self.objections.push(objection);
        self.verdict = self.verdict.max(Verdict::Wrong);
    }

    /// Objects to the run: another one, or one on a faster machine, may prove more.
    pub(crate) fn doubt(&mut self, objection: String) {
        self.objections.push(objection);
        self.verdict = self.verdict.max(Verdict::Unproven);
    }

    /// Objects to the run by the clients' own timers: this machine was too busy to tell.
    pub(crate) fn too_busy(&mut self, objection: String) {
        self.objections.push(objection);
        self.verdict = self.verdict.max(Verdict::TooBusy);
    }

    /// Objects to requests that this machine could not make, by their reasons.
    pub(crate) fn doubt_machine(&mut self, failed: BTreeMap<&str, u64>) {
        for (why, count) in failed {
            self.doubt(format!(
                "{count} requests failed on this machine ({why}): a lower --rate or --storm helps"
            ));
        }
    }
}

impl Row {
    /// Marks the row as a main figure, which every table shows.
    pub(crate) fn main(&mut self) -> &mut Self {
        self.main = true;
        self
    }

    pub(crate) fn note(&mut self, note: impl Into<String>) {
        self.note = note.into();
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => f.write_str(&format::count(*count)),
            Self::Ms(ms) => f.write_str(&format::wait(*ms)),
        }
    }
}

impl Mark {
    /// What happened, in a few words.
    pub(crate) fn words(&self) -> String {
        match self.what {
            MarkKind::Fault if !self.text.is_empty() => self.text.clone(),
            what => what.to_string(),
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
        assert!(
            std::fs::read_to_string(path).unwrap() == schema,
            "{path}: BERTH_BLESS=1 cargo test schema writes it"
        );
    }

    #[test]
    fn kinds_have_steady_names() {
        assert_eq!(
            serde_json::to_string(&[Via::PortSharing, Via::Haproxy]).unwrap(),
            r#"["port-sharing","haproxy"]"#
        );
        assert_eq!(
            serde_json::to_string(&MarkKind::Sigterm).unwrap(),
            r#""sigterm""#
        );
    }
}
