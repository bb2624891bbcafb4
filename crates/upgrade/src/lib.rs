//! `berth upgrade`: a rolling upgrade of a static pod. A kubelet by itself never runs the old and
//! the new pod together.
//!
//! The new manifest first runs as a *temporary* pod beside the old one, under a file name and pod
//! name of its own. When the temporary instance is ready and its shim listens, the old pod is
//! stopped. A second hop of the same kind then moves from the temporary pod to the *canonical*
//! file, where kubeadm expects the manifest. At each moment an instance serves. Whatever fails, the
//! old manifest comes back.
//!
//! | module | contents |
//! | --- | --- |
//! | [`machine`] | the steps: from position and observation to the next action. Pure |
//! | [`state`] | the position on disk, and the lock against two runs on the node |
//! | [`pod`] | the fields of a manifest that an upgrade needs, and the temporary pod's manifest |
//! | [`observer`] | files and instances, translated for the machine |
//! | [`judge`] | the new instance beside the old one: its share of the clients, and the verdict |
//! | [`journal`] | why the kubelet cannot start a pod |
//! | [`logs`] | the last lines of a container that failed |
//! | [`begin`] | checks manifests, runs doctor, or resumes an interrupted upgrade |
//! | [`lock`] | keeps two nodes from being upgraded at once |
//! | [`drive`] | the loop that carries the actions out |
//! | [`progress`] | lines for the operator during an upgrade |
//!
//! berth draws a `metadata.uid` for the temporary pod, because a kubelet gives a static pod a UID
//! only where the manifest has none. `BERTH_INSTANCE` is the pod's UID, so the temporary pod's
//! instance is known by that UID. All other instances on the node belong to the canonical pod.

#![forbid(unsafe_code)]
// `print!` and `eprintln!` panic if the pipe is closed or the disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod begin;
pub mod drive;
pub mod journal;
pub mod judge;
pub mod lock;
pub mod logs;
pub mod machine;
pub mod observer;
pub mod pod;
pub mod progress;
pub mod state;
