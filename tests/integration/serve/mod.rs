//! The life of `berth serve` and of the commands that ask a shim, with the real binary.

mod descriptors;
mod drain;
mod log;
mod node;
mod start;
mod status;
