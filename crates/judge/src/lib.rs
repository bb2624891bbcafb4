//! The judge of an upgrade: samples of the old and the new kube-apiserver in, a verdict out. The
//! judge does no I/O, and time is passed in, so the same code judges an upgrade and a simulation.
//!
//! A page of metrics ([`metrics`], [`histogram`]) becomes signals of an instance ([`signals`]), and
//! two samples give the increments between them (`history`). The increments of both instances at
//! the same time ([`judge`]) go through a test that may be checked at any time ([`sequential`]),
//! and end in the [`verdict`]. [`canary`] defines the steps in which clients come to the new
//! instance.

pub mod canary;
pub mod histogram;
mod history;
pub mod judge;
pub mod metrics;
pub mod sequential;
pub mod signals;
#[cfg(test)]
mod tests;
pub mod verdict;

pub use canary::{Canary, Plan, Wanted};
pub use judge::Judge;
pub use signals::{Connections, Sample, Signal};
pub use verdict::{Judgement, Outcome, Row, Verdict};
