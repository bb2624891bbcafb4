//! berth.

pub mod cli;
pub mod commands;
pub mod config;
pub mod instance;
pub mod os;
pub mod registry;
#[cfg(feature = "rehearse")]
pub mod rehearse;
