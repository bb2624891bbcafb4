//! berth.

pub mod cli;
pub mod commands;
#[cfg(feature = "rehearse")]
pub mod rehearse;
