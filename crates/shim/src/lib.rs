//! The shim in front of a kube-apiserver, with modules in the order of the data flow.

#![forbid(unsafe_code)]
// For callers that run a shim: `app`, `config`, `drain`, `limits`, `shared`. Other modules are
// public for parts of berth that probe or steer like a shim, and for tests, benchmarks and fuzz
// targets.
#![warn(missing_docs)]

mod accept;
mod admin;
pub mod app;
#[allow(missing_docs, reason = "names and types say enough")]
pub mod backend;
mod cluster;
pub mod config;
pub mod drain;
mod family;
#[allow(missing_docs, reason = "names and types say enough")]
pub mod gate;
#[allow(missing_docs, reason = "names and types say enough")]
pub mod handover;
pub mod limits;
#[allow(missing_docs, reason = "names and types say enough")]
pub mod metrics;
#[allow(missing_docs, reason = "names and types say enough")]
pub mod relay;
#[allow(missing_docs, reason = "names and types say enough")]
pub mod share;
pub mod shared;
pub mod state;
mod view;
mod workers;
