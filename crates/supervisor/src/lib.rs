//! The parent of an instance (`berth exec` with `--pass inject`). A shim sends it the sockets of clients, and each becomes the result of
//! the instance's accept(2): no byte is relayed, the instance sees its clients' addresses, and connections outlive the shim.
//!
//! It needs no privilege: the kernel lets a parent answer system calls of its child (seccomp_unotify(2), `berth_os::seccomp`). When
//! the instance binds its address, the supervisor replaces the instance's socket by one that both hold. So the supervisor can wake the
//! instance, and also takes the clients that dial the instance's own address. The instance ends with the supervisor.
//!
//! A server waits for its listener by a blocking accept(2) or by an edge-triggered epoll(7), as Go's does: to a level-triggered one the
//! listener would always seem readable.
//!
//! `machine.rs` decides, `drive.rs` does; [`self_test`] finds out whether that works here.

#![forbid(unsafe_code)]

mod drive;
mod machine;
mod obstacle;
mod self_test;

pub use drive::{Config, Supervisor};
pub use obstacle::Obstacle;
pub use self_test::self_test;
