//! The surroundings of a rehearsal: addresses, a network namespace, certificates, and the simulated
//! kube-apiserver with the store that it has in place of etcd.

pub mod address;
pub mod certs;
pub mod netns;
pub mod simulated;
pub mod store;
