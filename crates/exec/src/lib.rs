//! How an instance starts: its own 127.x address, and the arguments that give it to kube-apiserver.
//!
//! `berth exec` does it, doctor checks it, the rehearsal draws addresses as it does. A shim needs none of it: it reads
//! what is recorded of an instance ([`berth_node::registry::instance`]).

#![forbid(unsafe_code)]

pub mod address;
pub mod args;
