//! The judge of an upgrade: samples of the old and the new kube-apiserver in, a verdict out. No I/O, and time is passed
//! in, so that one piece of code judges an upgrade and a simulation.
//!
//! Data flows from a page of metrics ([`metrics`], [`histogram`]) to what it says of an instance ([`signals`]), from two
//! samples of each to what came between them (`history`), and from both instances at the same time ([`judge`]) through
//! a test that may be looked at always ([`sequential`]) to the [`verdict`]. The steps in which clients come to the new one
//! are in [`canary`].

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
