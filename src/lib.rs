//! The command line of berth, from options to an exit status. The crates under `crates/` do the
//! work; `ARCHITECTURE.md` describes them.

#![forbid(unsafe_code)]
// These macros panic if a pipe is closed or a disk is full, so the crate must not print with them.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cli;
pub mod commands;
mod log;
