//! The parent of an instance (`berth exec` with `--pass inject`). A shim sends clients' sockets to
//! the supervisor, which makes the instance's accept(2) return them. No byte is relayed, the
//! instance sees its clients' addresses, and connections outlive the shim.
//!
//! The supervisor needs no privilege: the kernel lets a parent answer system calls of its child
//! (seccomp_unotify(2), `berth_os::seccomp`). When the instance binds its address, the supervisor
//! replaces the instance's socket by a socket that both processes hold. So the supervisor can wake
//! the instance, and also gets the clients that dial the instance's own address. The instance ends
//! with the supervisor.
//!
//! A server waits for its listener with a blocking accept(2) or an edge-triggered epoll(7), as Go
//! does: a level-triggered epoll(7) would always report the listener as readable.
//!
//! `machine.rs` decides, `drive.rs` acts; [`self_test()`] finds out whether sockets can be handed
//! over on this machine.

#![forbid(unsafe_code)]

mod drive;
mod machine;
mod obstacle;
mod self_test;

pub use drive::{Config, Supervisor};
pub use obstacle::Obstacle;
pub use self_test::self_test;
