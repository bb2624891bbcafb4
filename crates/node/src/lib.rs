//! A node's run directory: records, which let shims, instances and commands find each other, and
//! the messages between them.

#![forbid(unsafe_code)]

pub mod instance;
pub mod ipc;
pub mod registry;
pub mod snapshot;
pub mod terms;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
