//! `berth upgrade`: a rolling upgrade of a static pod, which a kubelet never overlaps by itself.
//!
//! The new manifest first runs as a *temporary* pod, under another file and pod name, together with the old one. When it is
//! ready and has joined the group, the old one goes, and then the same again from the temporary pod to the
//! *canonical* file, where kubeadm expects it. At each moment an instance serves; whatever fails, the old
//! manifest comes back.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`machine`] | the steps: from position and observation to the next action. Pure |
//! | [`state`] | the position on disk, and the lock against two runs on the node |
//! | [`pod`] | what matters of a manifest, and the temporary one |
//! | [`observer`] | the files and instances as the machine sees them |
//! | [`judge`] | the new instance beside the old one: its part of the clients, and what comes of it |
//! | [`journal`] | why the kubelet cannot start a pod |
//! | [`logs`] | the last lines of a container that failed |
//! | [`begin`] | checks manifests, runs doctor, or resumes an interrupted upgrade |
//! | [`lock`] | keeps two nodes from being upgraded at once |
//! | [`drive`] | the loop that does it |
//! | [`progress`] | what a person reads meanwhile |
//!
//! Which instance belongs to which pod is known because the temporary pod has a `metadata.uid` that berth draws:
//! a kubelet gives a static pod one only where there is none, and `BERTH_INSTANCE` is that UID. All other instances on
//! the node are the canonical pod's.

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
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
