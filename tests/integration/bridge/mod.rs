//! `berth bridge` on a node in a network namespace of its own. The node's kube-apiserver is a
//! simulated apiserver without any knowledge of berth.

mod ends;
mod etcd;
mod families;
mod kills;
mod localhost;
mod node;
mod refusals;
mod replacement;
mod temporary;
