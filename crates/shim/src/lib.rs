//! What stands before a control plane, in the order in which data flows.

#![forbid(unsafe_code)]

mod accept;
mod admin;
pub mod app;
pub mod backend;
mod cluster;
pub mod config;
mod direct;
pub mod drain;
pub mod gate;
pub mod handover;
pub mod limits;
pub mod metrics;
pub mod relay;
mod shared;
pub mod steering;
mod view;
mod workers;
