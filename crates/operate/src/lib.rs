//! The bridge: what of it runs on a node. The command line is `src/commands/bridge`.

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod bridge;
