//! What comes out: an outcome, and a table of what was compared.

use crate::signals::Signal;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Good,
    Bad,
    /// Not enough to judge.
    Undecided,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub outcome: Outcome,
    pub rows: Vec<Row>,
    /// What "good" lacks, if it is undecided.
    pub lacking: Vec<String>,
    /// Intervals of this step that count, and that were left out.
    pub intervals: u32,
    pub left_out: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub code: Signal,
    pub subject: String,
    /// Requests of the new instance (or connections, or samples), and which share of them is bad; the old one's share,
    /// for the same mix of requests; the share that is allowed.
    pub compared: u64,
    pub old: f64,
    pub new: f64,
    pub limit: f64,
    pub judgement: Judgement,
    pub note: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Judgement {
    Good,
    Bad,
    /// Bad, and accepted beforehand.
    Accepted,
    NotCompared,
}
