//! The shim in front of a kube-apiserver, its modules in the order in which data flows.

#![forbid(unsafe_code)]
// For what runs a shim: `app`, `config`, `drain`, `limits`, `shared`. The other modules are public for parts of berth that probe or steer as
// a shim does, and for tests, benchmarks and fuzz targets.
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
