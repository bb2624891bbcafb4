//! What an operator does to a node: manifests, doctor, upgrade, bridge, credentials.

#![forbid(unsafe_code)]

pub mod bridge;
pub mod cluster_status;
pub mod doctor;
pub mod grant;
pub mod manifest;
pub mod upgrade;
