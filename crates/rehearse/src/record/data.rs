//! The data of a report: the schema of `berth rehearse --json`. The page and the table are made
//! from this data alone.
//!
//! Times are milliseconds from the start of the run's load, so the start of the old instance is
//! before zero. Waits are milliseconds from when a request was due by the timetable until its
//! answer was complete. Names of instances are those of [`Ran::instances`]. Maps by instance have
//! no other keys unless another program answered.
//!
//! A test compares `docs/report.schema.json` with these types and their comments. A change that
//! misleads an old reader needs a new [`SCHEMA_VERSION`]. A new field or row does not: readers skip
//! unknown fields and rows.

use super::format;
pub use crate::config::Via;
pub use crate::record::loss::{Loss, Losses};
pub use crate::record::verdict::Verdict;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Version of the schema.
pub const SCHEMA_VERSION: u32 = 1;

/// A rehearsal: command, machine and runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Report {
    /// Version of the schema: 1.
    pub version: u32,
    /// Version of the berth that made the report.
    pub berth_version: String,
    /// Time of the report, in RFC 3339 and UTC.
    pub made_at: String,
    /// The command that repeats the rehearsal, quoted for a shell. It includes the seed of the
    /// load's random numbers.
    pub command: String,
    /// The machine and the programs of the rehearsal.
    pub environment: Environment,
    /// Why the rehearsal was aborted. The report contains the data gathered until then. `None` if
    /// the rehearsal was completed.
    pub aborted: Option<String>,
    /// Runs, one for each way to the instances, in order.
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
    /// Limit of open files for a process.
    pub open_files_limit: u64,
    /// Kernel settings that affect connections, by sysctl name.
    pub sysctls: BTreeMap<String, String>,
    /// Programs used in the rehearsal.
    pub programs: Vec<Program>,
}

/// A program used in the rehearsal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Program {
    /// Role of the program: `old`, `new`, `etcd`, `haproxy`, or `berth` if another berth than the
    /// one that wrote the report.
    pub role: String,
    /// Version that the program reports.
    pub version: String,
}

/// A run: one upgrade, or several back and forth, over one way to the instances.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Run {
    /// The way from clients to instances.
    pub via: Via,
    /// Topology, which decides what process gets SIGTERM when: `sidecar`, `native-sidecar`, `node`,
    /// `run`, or `bridge` for an upgrade in place.
    pub topology: String,
    /// The result of the run.
    pub outcome: RunOutcome,
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// The run was skipped for this reason.
    Skipped(String),
    /// The run was made, perhaps not to its end.
    Ran(Box<Ran>),
}

/// The data of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Ran {
    /// Duration of the load.
    pub load_ms: u64,
    /// True if the apiservers are berth's simulated ones.
    pub simulated: bool,
    /// Instances, in the order of their start.
    pub instances: Vec<Instance>,
    /// Verdict of the run.
    pub verdict: Verdict,
    /// Number of losses by kind.
    pub lost: Losses,
    /// Reasons why the run proves nothing, and errors in the run.
    pub objections: Vec<String>,
    /// Remarks that are no objection to the run.
    pub notes: Vec<String>,
    /// The first loss of each kind, in words.
    pub examples: Vec<String>,
    /// Promises under faults and under a storm, and whether berth kept them.
    pub promises: Vec<Promise>,
    /// Figures, in the order of the table and the page.
    pub rows: Vec<Row>,
    /// Answers and losses over time.
    pub timeline: Timeline,
    /// Events of the instances, in order.
    pub marks: Vec<Mark>,
}

/// A figure of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Row {
    /// Name of the figure. Figures of the same name are compared across runs.
    pub name: String,
    /// Value and unit of the figure.
    #[serde(flatten)]
    pub value: Value,
    /// Details in words. May be empty.
    pub note: String,
    /// True for a main figure, which the table shows without `--verbose`.
    pub main: bool,
}

/// A figure with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "unit", content = "value", rename_all = "snake_case")]
pub enum Value {
    /// A number of things.
    Count(u64),
    /// A duration in milliseconds.
    Ms(f64),
}

/// An apiserver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Instance {
    /// Name of the instance in the rest of the report.
    pub name: String,
    /// Version that the instance serves.
    pub version: String,
}

/// A promise of berth for a fault or a storm, and whether berth kept the promise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Promise {
    /// Name of the fault as in `--fault`, or `storm`.
    pub fault: String,
    /// Instance in which the fault was injected, or `storm`.
    pub instance: String,
    /// Start of the fault.
    pub from_ms: i64,
    /// End of the fault. `None` if the end was not seen.
    pub to_ms: Option<i64>,
    /// The promise in words.
    pub promise: String,
    /// True if berth kept the promise.
    pub held: bool,
    /// Observations in words. For a broken promise the reasons come first.
    pub what_happened: Vec<String>,
    /// Losses that the promise allows, by kind. Allowed losses are not counted as lost.
    pub allowed: Losses,
}

/// A run in steps of equal length, from zero. The lists have equal lengths.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Timeline {
    /// Length of a step.
    pub step_ms: u64,
    /// Good answers in each step, by instance.
    pub answered: BTreeMap<String, Vec<u64>>,
    /// Losses seen in each step, by kind.
    pub lost: BTreeMap<Loss, Vec<u64>>,
    /// Losses in each step that promises allow.
    pub allowed: Vec<u64>,
    /// Streams in each step that were ended by the instance.
    pub ended_by_instance: Vec<u64>,
}

/// An event of an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Mark {
    /// Time of the event.
    pub at_ms: i64,
    /// Name of the instance.
    pub instance: String,
    /// Kind of the event.
    pub what: MarkKind,
    /// Details, such as an exit status or the fault. May be empty.
    pub text: String,
}

/// Kind of an instance's event.
// Records use this type, too, with events of simulated apiservers that a report leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// The instance's processes were started.
    Started,
    /// A simulated apiserver reported that it listens.
    #[cfg_attr(test, schemars(skip))]
    Listening,
    /// The instance's `/readyz` turned 200.
    Ready,
    /// New connections go to the instance.
    Joined,
    /// SIGTERM was sent to the instance.
    Sigterm,
    /// A simulated apiserver reported SIGTERM: `/readyz` is 500 from now on.
    #[cfg_attr(test, schemars(skip))]
    Terminating,
    /// New connections no longer go to the instance.
    Left,
    /// A simulated apiserver reported that it accepts no new connections, or rejects requests.
    #[cfg_attr(test, schemars(skip))]
    Draining,
    /// The instance's last connection has ended.
    Drained,
    /// The instance's processes have ended.
    Exited,
    /// A fault was injected in the instance.
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
    /// Returns the verdict in words.
    pub(crate) fn describe_verdict(&self) -> &'static str {
        match self.verdict {
            Verdict::Held if self.count_allowed_losses() > 0 => {
                "only losses that the injected faults may cause were seen, and every promise held"
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

    /// Adds a figure. The caller can mark the row as a main figure and add a note.
    pub(crate) fn add(&mut self, name: impl Into<String>, value: Value) -> &mut Row {
        self.rows.push(Row {
            name: name.into(),
            value,
            note: String::new(),
            main: false,
        });
        self.rows.last_mut().expect("a row was added")
    }

    /// Returns the figure of this name. `None` if the run has no such figure.
    pub fn find_figure(&self, name: &str) -> Option<Value> {
        self.rows
            .iter()
            .find(|row| row.name == name)
            .map(|row| row.value)
    }

    /// Returns the kind of the apiservers, in words.
    pub(crate) fn describe_apiservers(&self) -> &'static str {
        if self.simulated {
            "simulated apiservers"
        } else {
            "real kube-apiservers"
        }
    }

    /// Returns the number of losses that promises allow.
    pub fn count_allowed_losses(&self) -> u64 {
        self.promises
            .iter()
            .flat_map(|promise| promise.allowed.values())
            .sum()
    }

    /// Adds an objection against berth or an instance: the verdict is at best [`Verdict::Wrong`].
    pub(crate) fn add_objection(&mut self, objection: String) {
        self.objections.push(objection);
        self.verdict = self.verdict.max(Verdict::Wrong);
    }

    /// Adds an objection against the run: the verdict is at best [`Verdict::Unproven`]. Another
    /// run, or a faster machine, may prove more.
    pub(crate) fn add_doubt(&mut self, objection: String) {
        self.objections.push(objection);
        self.verdict = self.verdict.max(Verdict::Unproven);
    }

    /// Adds an objection because of late timers: the machine was too busy for a verdict.
    pub(crate) fn mark_too_busy(&mut self, objection: String) {
        self.objections.push(objection);
        self.verdict = self.verdict.max(Verdict::TooBusy);
    }

    /// Adds an objection for each reason why this machine could not make requests.
    pub(crate) fn add_machine_doubts(&mut self, failed: BTreeMap<&str, u64>) {
        for (why, count) in failed {
            self.add_doubt(format!(
                "{count} requests failed on this machine ({why}): give a lower --rate or --storm"
            ));
        }
    }
}

impl Row {
    /// Marks the row as a main figure, which every table shows.
    pub(crate) fn mark_as_main(&mut self) -> &mut Self {
        self.main = true;
        self
    }

    pub(crate) fn set_note(&mut self, note: impl Into<String>) {
        self.note = note.into();
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => f.write_str(&format::format_count(*count)),
            Self::Ms(ms) => f.write_str(&format::format_wait_time(*ms)),
        }
    }
}

impl Mark {
    /// Returns the event in a few words.
    pub(crate) fn describe_mark(&self) -> String {
        match self.what {
            MarkKind::Fault if !self.text.is_empty() => self.text.clone(),
            what => what.to_string(),
        }
    }
}

impl Run {
    /// Returns the data of the run. `None` if the run was skipped.
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

    /// Run `BERTH_BLESS=1 cargo test schema` to write the file.
    #[test]
    fn the_documented_schema_matches_the_types() {
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
