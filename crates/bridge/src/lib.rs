//! `berth bridge`: clients lose nothing while a command replaces a node's kube-apiserver.
//!
//! Meanwhile a *temporary* instance with the arguments of the running kube-apiserver serves
//! clients, behind a shim on loopback. The kernel steers new connections of the port to the shim.
//! Everything ends with the daemon's process, and the port is as before.
//!
//! | module | contents |
//! | --- | --- |
//! | [`plan`] | the operator's options, and a bridge that can be built |
//! | [`claim`] | exclusive use of the directory and of the network namespace |
//! | [`preflight`] | checks that a bridge is possible here, and reports all errors at once |
//! | [`report`] | findings of preflight: errors and notes |
//! | [`temporary_instance`] | the temporary instance: arguments, environment, files, process |
//! | [`etcd`] | keeps etcd available while COMMAND replaces the node's etcd |
//! | [`pod`] | the temporary instance as a container, where kube-apiserver is a static pod |
//! | [`localhost`] | connections to localhost, and the names that tell both instances apart |
//! | [`machine`] | the steps: from observations to the next action. Pure |
//! | [`probe`] | probes of both instances, past the steering |
//! | [`drive`] | the daemon |
//! | [`cgroup`] | the bridge's cgroup, where a cgroup can be created |
//! | [`restore`] | restores the files that the node's kube-apiserver is started from and reads |
//! | [`logs`] | limits the logs' size, and keeps the logs of a failed bridge |
//! | [`process`] | the daemon's process |
//! | [`caller`] | the process that began a bridge, or sends a request to a bridge |
//! | `watch` | output of the caller |
//! | `server` | the socket for requests, with the messages of [`berth_node::ipc::bridge`] |

#![forbid(unsafe_code)]
// The print macros panic if a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod caller;
pub mod cgroup;
pub mod claim;
pub mod drive;
pub mod etcd;
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
pub mod temporary_instance;
pub mod watch;

/// Directory of a bridge's socket and logs. Not in berth's run directory, which containers can
/// write to.
pub const DIRECTORY: &str = "/run/berth-bridge";

/// Lock file of the running bridge. The file stays, and marks a directory as a bridge's.
const LOCK_FILE: &str = "bridge.lock";
