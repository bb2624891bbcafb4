//! The command line of berth: options in, exit status out. What it does is in the crates under `crates/`; where what
//! is, `ARCHITECTURE.md` says.

#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
#[cfg(feature = "rehearse")]
pub mod config;
mod log;
