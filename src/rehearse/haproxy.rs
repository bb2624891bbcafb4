//! HAProxy as the side-container that berth replaces had it (Lokomotive, 2020): TCP mode, its
//! timeouts, no health check. It shares the port since `SO_REUSEPORT` is its default.

use std::net::SocketAddr;

/// Name of an instance's configuration file.
pub fn file(instance: &str) -> String {
    format!("haproxy-{instance}.cfg")
}

/// The configuration: `listen` to `backend`.
pub fn config(listen: SocketAddr, backend: SocketAddr) -> String {
    format!(
        "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n  timeout tunnel 21d\n\
         frontend kube-apiserver\n  bind {listen}\n  default_backend kube-apiserver\n\
         backend kube-apiserver\n  server apiserver {backend}\n"
    )
}
