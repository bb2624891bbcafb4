//! HAProxy, configured like the sidecar that berth replaces (Lokomotive, 2020): TCP mode, the same
//! timeouts, no health check, started when the apiserver's port is open. HAProxies share the port
//! because `SO_REUSEPORT` is HAProxy's default.
//!
//! SIGUSR1 stops HAProxy softly. The official image has had SIGUSR1 as its STOPSIGNAL since 2018
//! (docker-library/haproxy#72), so a container runtime sends SIGUSR1 instead of SIGTERM, on which
//! HAProxy cuts every connection at once. The rehearsal uses the better signal.

use nix::sys::signal::Signal;
use std::net::SocketAddr;

/// Signal to stop HAProxy.
pub(crate) const STOP_SIGNAL: Signal = Signal::SIGUSR1;

/// Returns the name of an instance's configuration file.
pub(crate) fn file_name(instance: &str) -> String {
    format!("haproxy-{instance}.cfg")
}

/// Returns the configuration of a relay from `listen` to `backend`.
pub(crate) fn render_config(listen: SocketAddr, backend: SocketAddr) -> String {
    format!(
        "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n  timeout tunnel 21d\n\
         frontend kube-apiserver\n  bind {listen}\n  default_backend kube-apiserver\n\
         backend kube-apiserver\n  server apiserver {backend}\n"
    )
}
