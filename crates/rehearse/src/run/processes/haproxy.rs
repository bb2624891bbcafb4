//! HAProxy as the sidecar that berth replaces had it (Lokomotive, 2020): TCP mode, its
//! timeouts, no health check, started when the apiserver's port is open. It shares the port since
//! `SO_REUSEPORT` is its default.
//!
//! It is stopped by SIGUSR1, its soft stop: the official image has had that as its STOPSIGNAL since 2018
//! (docker-library/haproxy#72), and a container runtime sends that instead of SIGTERM, by which
//! HAProxy cuts every connection at once. So it gets the better one of the two.

use nix::sys::signal::Signal;
use std::net::SocketAddr;

/// What stops it.
pub(crate) const STOP: Signal = Signal::SIGUSR1;

/// Name of an instance's configuration file.
pub(crate) fn file(instance: &str) -> String {
    format!("haproxy-{instance}.cfg")
}

/// The configuration: `listen` to `backend`.
pub(crate) fn config(listen: SocketAddr, backend: SocketAddr) -> String {
    format!(
        "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n  timeout tunnel 21d\n\
         frontend kube-apiserver\n  bind {listen}\n  default_backend kube-apiserver\n\
         backend kube-apiserver\n  server apiserver {backend}\n"
    )
}
