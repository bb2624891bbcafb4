//! What of a node decides whether a second kube-apiserver fits on it.

/// What was seen of a node.
#[derive(Debug, Clone, Default)]
pub struct Facts {}
