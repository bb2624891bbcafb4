//! The relay through hostile I/O: a whole shim in this process, with plain sockets before and behind it.

mod bytes;
mod ends;
mod gate;
mod limits;
mod opening;
