//! How an instance starts: its own 127.x address, and the arguments that pass the address to
//! kube-apiserver.
//!
//! `berth exec` uses this crate to start an instance, doctor to check one, and the rehearsal to
//! draw addresses. A shim does not use this crate: it reads the record of an instance
//! ([`berth_node::registry::instance`]).

#![forbid(unsafe_code)]

pub mod address;
pub mod args;
