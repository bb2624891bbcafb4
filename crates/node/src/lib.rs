//! A node's run directory. The run directory contains records and sockets. Shims, instances and
//! commands find each other with the records, and exchange messages on the sockets.

#![forbid(unsafe_code)]

pub mod instance_id;
pub mod ipc;
pub mod registry;
pub mod snapshot;
pub mod terms;

pub const VERSION: &str = env!("CARGO_PKG_VERSION");
