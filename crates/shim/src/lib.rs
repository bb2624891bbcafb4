//! What stands before a control plane, in the order in which data flows.

#![forbid(unsafe_code)]

pub mod accept;
pub mod admin;
pub mod app;
pub mod backend;
pub mod config;
pub mod drain;
pub mod handover;
pub mod limits;
pub mod log;
pub mod metrics;
pub mod relay;
pub mod view;
pub mod workers;
