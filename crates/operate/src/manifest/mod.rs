//! Edits of Kubernetes manifests that keep comments and order.
//!
//! Pure, text in and text out, but for [`file`](mod@file). [`Manifest::parse`] finds the kube-apiserver in a
//! file. [`inject`] and [`eject`] give what to change as a list of [`Edit`]s, each with its reason, and [`edit`]
//! writes them into the text, one after the other, at the places that [`berth_cluster::yaml`] knows. So nothing is
//! touched that no edit names. A document with forms of YAML that no manifest has is read and not edited. [`kubeadm`] writes the same edits as patches for kubeadm.
//!
//! The text is edited and never regenerated: a library that patches YAML (yamlpatch) can neither
//! leave a reason behind as a comment nor work on one of several documents, and brings a C parser along.

mod container;
pub mod edit;
pub mod eject;
pub mod file;
pub mod inject;
pub mod kubeadm;
pub(crate) mod names;
mod plain;
mod pod;
mod write;

pub use container::Container;
pub(crate) use container::exec_words;
pub use edit::Edit;
pub use pod::{Flag, Manifest};
pub(crate) use pod::{basename, tag};
pub use write::document;

pub use berth_cluster::yaml::{Problem, split};
