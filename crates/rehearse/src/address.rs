//! Addresses that nobody uses.

use berth_exec::address::random;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};

/// The berth in a network namespace of the rehearsal's own, where kube-apiserver can advertise it.
pub const NETNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 123, 0, 5), 6443);

/// Addresses that are tried before it is said that none is free.
const TRIES: usize = 100;

/// A random address as instances have it, that nobody uses, and a port below the range of outgoing connections.
pub fn free_address() -> io::Result<SocketAddr> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        let ip = random().map_err(|error| io::Error::other(error.to_string()))?;
        let port = fastrand::u16(10_000..30_000);
        // The port must be free on all of 127/8: the apiservers get it too, on addresses of their own.
        match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)) {
            Ok(_) => return Ok(SocketAddr::new(IpAddr::V4(ip), port)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_exec::address::is_usable;

    #[test]
    fn addresses_are_where_they_should_be() {
        for _ in 0..50 {
            let address = free_address().unwrap();
            let IpAddr::V4(ip) = address.ip() else { panic!("{address}") };
            assert!(is_usable(ip), "{address}");
            assert!((10_000..30_000).contains(&address.port()), "{address}");
        }
    }
}
