//! `berth rehearse`: an upgrade under load on this machine, with everything real but the apiserver.

pub mod certs;
pub mod hub;
pub mod plan;
pub mod record;
pub mod stand_in;
pub mod store;
pub mod wire;
