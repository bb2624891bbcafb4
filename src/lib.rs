//! The command line of berth: options in, exit status out. The crates under `crates/` do the work;
//! `ARCHITECTURE.md` describes them.

#![forbid(unsafe_code)]
// `println!` and `eprintln!` panic if a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cli;
pub mod commands;
mod log;
