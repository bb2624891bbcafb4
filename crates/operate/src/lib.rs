//! What an operator does to a node: manifests, doctor, upgrade.

#![forbid(unsafe_code)]

pub mod doctor;
pub mod manifest;
pub mod upgrade;
