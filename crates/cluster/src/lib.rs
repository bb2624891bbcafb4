//! Access to the cluster's API: kubeconfigs, a client, and the objects that berth reads and writes.

#![forbid(unsafe_code)]

pub mod account;
pub mod client;
pub mod http;
pub mod kubeconfig;
pub mod lease;
pub mod service;
pub mod tls;
pub mod yaml;

pub use client::{Client, Error};
pub use kubeconfig::{Access, KubeconfigError};
