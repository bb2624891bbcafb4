//! `berth bridge`: whatever is done to a node's kube-apiserver, clients lose nothing.
//!
//! A *temporary* instance with the running one's arguments serves meanwhile, behind a shim on loopback to which the kernel
//! steers the port's new connections. Everything ends with the daemon's process, and then the port is as it was.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`plan`] | what the operator wants, and a bridge that can be built |
//! | [`claim`] | the directory and the network namespace that it has alone |
//! | [`preflight`] | whether it can be done here: all that is missing at once |
//! | [`report`] | what preflight finds: errors and notes |
//! | [`instance`] | the temporary instance: its arguments, and what it takes from the running one |
//! | [`etcd`] | what serves while COMMAND replaces the node's etcd |
//! | [`pod`] | the same where the running one is in a static pod |
//! | [`localhost`] | what is dialled there, and the names by which both instances are told apart |
//! | [`machine`] | the steps: from observations to the next action. Pure |
//! | [`probe`] | probes of both instances, past the steering |
//! | [`drive`] | the daemon |
//! | [`cgroup`] | a cgroup of its own, where one can be created |
//! | [`restore`] | restores the files that the node's own is started from and reads |
//! | [`logs`] | their bound, and what is kept of a bridge that failed |
//! | [`process`] | the daemon's process |
//! | [`caller`] | the process that began a bridge, or that asks one |
//! | `watch` | what it prints |
//! | `server` | the socket on which it answers commands, with the messages of [`berth_node::ipc::bridge`] |

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod caller;
pub mod cgroup;
pub mod claim;
pub mod drive;
pub mod etcd;
pub mod instance;
pub mod localhost;
pub mod logs;
pub mod machine;
pub mod plan;
pub mod pod;
pub mod preflight;
pub mod probe;
pub mod process;
pub mod report;
pub mod restore;
mod server;
pub mod watch;

/// Where a bridge keeps its socket and logs. Not in berth's run directory, which containers write into.
pub const DIRECTORY: &str = "/run/berth-bridge";

/// What is locked by the bridge that is on, and stays: by it a directory is known as a bridge's.
const LOCK: &str = "bridge.lock";
