//! Edits of Kubernetes manifests that keep comments and order, and what the operator's other commands share.
//!
//! Pure, text in and text out, but for [`file`](mod@file). [`Manifest::parse`] finds the kube-apiserver in a
//! file. [`inject`] and [`eject`] give what to change as a list of [`Edit`]s, each with its reason, and [`edit`]
//! writes them into the text, one after the other, at the places that [`berth_cluster::yaml`] knows. So nothing is
//! touched that no edit names. A document with forms of YAML that no manifest has is read and not edited. [`kubeadm`] writes the same edits as patches for kubeadm.
//!
//! The text is edited and never regenerated: a library that patches YAML (yamlpatch) can neither
//! leave a reason behind as a comment nor work on one of several documents, and brings a C parser along.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`grant`] | a shim's credentials for the cluster's API |
//! | [`report`] | findings and refusals of every command of an operator |
//! | [`command`] | programs of the node, and command lines of processes |
//! | [`wait`] | asks again until an answer counts |

#![forbid(unsafe_code)]
// They panic where a pipe is closed or a disk is full.
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
pub use pod::{basename, tag};
pub use write::document;

pub use berth_cluster::yaml::{Problem, split};
