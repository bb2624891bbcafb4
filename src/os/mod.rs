//! Raw system calls and /proc. All `unsafe` of the crate is below this module.
#![allow(unsafe_code, reason = "raw system calls live here and nowhere else, each block with its SAFETY comment")]

pub mod holder;
pub mod inotify;
