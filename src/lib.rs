//! The command line of berth: options in, exit status out. The work is done by the crates under `crates/`;
//! `ARCHITECTURE.md` describes them.

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cli;
pub mod commands;
mod log;
