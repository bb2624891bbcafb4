//! What judges found in a record: what was lost, what the instances ended themselves, and whether the run was a test at all.
//!
//! **Lost** is a new connection that was refused, reset, or not answered within
//! 15 s of being dialled, or a stream that ended before its instance ended it.

use super::data::Figures;
use super::event::StreamId;
use super::stamp::Stamp;
use std::collections::BTreeMap;

pub use super::loss::Loss;

/// The instance that is replaced.
pub const OLD: &str = "old";

/// The instance that replaces it.
pub const NEW: &str = "new";

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Verdict {
    /// Sums, as a report has them.
    pub figures: Figures,
    /// What was lost, by kind.
    pub lost: BTreeMap<Loss, u64>,
    /// When each of those was seen that has a moment: a write that a watch never saw has none.
    pub losses: Vec<(Stamp, Loss)>,
    /// The streams that their instance ended, and when their client saw it.
    pub ends_by_instance: Vec<(Stamp, StreamId)>,
    /// The streams whose end a promise under a fault allows.
    pub ends_allowed: Vec<StreamId>,
    /// The first of each kind of failure, in words.
    pub examples: Vec<String>,
    /// Requests that an instance answered with 429 or 503 because it was shutting down.
    pub rejected: u64,
    /// What was promised under faults, and what came of it.
    pub promises: Vec<Promise>,
    /// What of it clients saw that dialed a node: one a node, in the order of the record.
    pub nodes: Vec<LostAtNode>,
    /// What else is worth knowing.
    pub notes: Vec<String>,
    /// Why nothing can be concluded, or what else was not as it should be.
    pub objections: Vec<String>,
    /// Some of these are to what was rehearsed, and not only to this run.
    pub(crate) at_fault: bool,
}

/// A promise and what came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Promise {
    /// As `--fault` names it, or `storm`.
    pub(crate) fault: String,
    /// To which instance it was done; a storm comes to whoever serves.
    pub(crate) instance: String,
    pub(crate) text: &'static str,
    /// When the fault was injected.
    pub(crate) at: Stamp,
    /// When all was as before again; none: never.
    pub(crate) over: Option<Stamp>,
    /// What was seen, in words.
    pub(crate) seen: Vec<String>,
    /// Losses that the promise allows, and when they were seen.
    pub(crate) allowed: Vec<(Stamp, Loss)>,
    /// It was done to the instance that new connections were steered to.
    pub(crate) on_direct: bool,
    /// Why it did not hold; empty: it held. What was lost beyond is counted as lost and not here.
    pub(crate) broken: Vec<String>,
}

impl Promise {
    pub(crate) fn held(&self) -> bool {
        self.broken.is_empty()
    }

    /// How many new connections were lost since the instance was killed to which they were steered.
    pub(crate) fn lost_on_direct(&self) -> u64 {
        let new = self.allowed.iter().filter(|(_, loss)| self.on_direct && *loss != Loss::StreamEnded);
        new.count() as u64
    }

    /// How many losses of each kind it allows.
    pub(crate) fn allowed_by_kind(&self) -> BTreeMap<Loss, u64> {
        let mut kinds = BTreeMap::new();
        for (_, loss) in &self.allowed {
            *kinds.entry(*loss).or_default() += 1;
        }
        kinds
    }
}

/// What clients saw that dialed a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LostAtNode {
    /// What was lost, by kind.
    pub lost: BTreeMap<Loss, u64>,
    /// Losses that promises under faults allow.
    pub allowed: u64,
}

impl Verdict {
    pub fn lost(&self) -> u64 {
        self.lost.values().sum()
    }

    /// Losses that promises under faults allow.
    pub(crate) fn allowed(&self) -> u64 {
        self.promises.iter().map(|promise| promise.allowed.len() as u64).sum()
    }

    /// Nothing was lost in a run that would have shown it, and every promise held.
    pub fn held(&self) -> bool {
        self.lost() == 0 && self.objections.is_empty() && self.kept()
    }

    /// The run says nothing, as its machine was too slow for the load: nothing was seen that berth or an instance did wrong.
    pub fn is_inconclusive(&self) -> bool {
        self.lost() == 0 && self.kept() && !self.objections.is_empty() && !self.at_fault
    }

    /// Every promise under faults was kept.
    pub(crate) fn kept(&self) -> bool {
        self.promises.iter().all(Promise::held)
    }

    pub(crate) fn lose(&mut self, loss: Loss, count: u64) {
        if count > 0 {
            *self.lost.entry(loss).or_default() += count;
        }
    }

    /// Objects to what was rehearsed.
    pub(crate) fn object(&mut self, objection: String) {
        self.at_fault = true;
        self.objections.push(objection);
    }

    /// Objects to the run: another one, or one on a faster machine, may say more.
    pub(crate) fn doubt(&mut self, objection: String) {
        self.objections.push(objection);
    }

    /// Objects to requests that this machine could not make, by their reasons.
    pub(crate) fn doubt_machine(&mut self, failed: BTreeMap<&str, u64>) {
        for (why, count) in failed {
            self.doubt(format!(
                "{count} requests failed on this machine's own account ({why}): a lower --rate or --storm helps"
            ));
        }
    }
}
