//! The operator's commands for a node: manifests, doctor, upgrade, bridge, credentials.

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod bridge;
pub mod upgrade;
