//! What the programs of this crate share.

#![forbid(unsafe_code)]

pub mod client_hello;
pub mod memory;
pub mod start;
pub mod stats;
