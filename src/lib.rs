//! berth.

pub mod accept;
pub mod admin;
pub mod app;
pub mod backend;
pub mod cli;
pub mod commands;
pub mod config;
pub mod control;
pub mod drain;
pub mod handover;
pub mod instance;
pub mod metrics;
pub mod node;
pub mod os;
pub mod phase;
pub mod registry;
#[cfg(feature = "rehearse")]
pub mod rehearse;
pub mod relay;
pub mod workers;

/// Version of this berth.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
