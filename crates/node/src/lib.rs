//! A node's run directory: what shims, instances and commands know of one another, and how they say it.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the crate is not published: what its name says needs no comment")]

pub mod instance;
pub mod ipc;
pub mod registry;
pub mod snapshot;
pub mod terms;

/// Version of this berth.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
