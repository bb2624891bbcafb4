//! Edits of Kubernetes manifests that keep comments and order.
//!
//! Pure, text in and text out, but for [`file`](mod@file). [`Manifest::parse`] finds the kube-apiserver in a
//! file. [`inject`] and [`eject`] say what to change as a list of [`Edit`]s, each with its reason, and [`edit`]
//! writes them into the text, one after the other, at the places that [`tree`] knows. So nothing is
//! touched that no edit names. A document with forms of YAML that no manifest has is read and not edited. [`kubeadm`] says the same edits as patches for kubeadm.
//!
//! The text is edited and never written anew: a library that patches YAML (yamlpatch) can neither
//! leave a reason behind as a comment nor work on one of several documents, and brings a C parser along.

mod container;
pub mod edit;
pub mod eject;
pub mod file;
pub mod inject;
pub mod kubeadm;
mod plain;
mod pod;
pub mod tree;
mod write;

pub use container::Container;
pub use edit::Edit;
pub use pod::{Flag, Manifest};
pub(crate) use pod::{basename, tag};

/// What is wrong in a manifest, and how to mend it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}: {message}")]
pub struct Problem {
    /// Line of the file, from 1.
    pub line: usize,
    /// Cause and mend.
    pub message: String,
}

impl Problem {
    /// A problem in a line.
    #[must_use]
    pub fn new(line: usize, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }

    /// Cause and mend apart; see [`split`].
    #[must_use]
    pub fn parts(&self) -> (&str, &str) {
        split(&self.message)
    }
}

/// A message's cause and its mend: every message of berth's says both, and the mend after its last colon.
#[must_use]
pub fn split(message: &str) -> (&str, &str) {
    message.rsplit_once(": ").unwrap_or((message, ""))
}
