//! Edits of Kubernetes manifests that keep comments and order, and code shared by the operator's
//! other commands.
//!
//! Apart from [`file`](mod@file), the edits are pure: text in, text out. [`Manifest::parse`] finds
//! the kube-apiserver in a file. [`inject`] and [`eject`] return a list of [`Edit`]s, each with a
//! reason. [`edit`] writes the edits into the text one after the other, at the places that
//! [`berth_cluster::yaml`] reports, and changes nothing else. A document with forms of YAML that no
//! manifest uses can be read, but not edited. [`kubeadm`] writes the same edits as patches for
//! kubeadm.
//!
//! The text is edited and never regenerated. A library that patches YAML (yamlpatch) can neither
//! leave a reason behind as a comment nor work on one of several documents, and brings along a C
//! parser.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`grant`] | a shim's credentials for the cluster's API |
//! | [`report`] | findings and refusals of all operator commands |
//! | [`command`] | programs of the node, and command lines of processes |
//! | [`wait`] | repeats a question until an answer counts |

#![forbid(unsafe_code)]
// The print macros panic if a pipe is closed or a disk is full.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod command;
mod container;
pub mod edit;
pub mod eject;
pub mod file;
pub mod grant;
pub mod inject;
pub mod kubeadm;
pub mod names;
mod plain;
mod pod;
pub mod report;
pub mod wait;
mod write;

pub use container::{Container, Environment, exec_words};
pub use edit::Edit;
pub use pod::{Flag, Manifest};
pub use pod::{basename, image_tag};
pub use write::write_document;

pub use berth_cluster::yaml::{Problem, split_cause_and_fix};
