//! Addresses that nobody uses.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener};

/// The berth in a network namespace of the rehearsal's own, where kube-apiserver can advertise it.
pub const NETNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 123, 0, 5), 6443);

/// Addresses that are tried before it is said that none is free.
const TRIES: usize = 100;

/// A random address that nobody uses: never in 127.0.0.0/16, the last octet neither 0 nor 255, and a
/// port below the range of outgoing connections.
pub fn free_address() -> io::Result<SocketAddr> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        let mut random = [0; 5];
        getrandom::fill(&mut random).map_err(|e| io::Error::other(e.to_string()))?;
        let [x, y, z, high, low] = random;
        if x == 0 || z == 0 || z == 255 {
            continue;
        }
        let port = 10_000 + u16::from_be_bytes([high, low]) % 20_000;
        // The port must be free on all of 127/8: the apiservers get it too, on addresses of their own.
        match TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)) {
            Ok(_) => return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, x, y, z)), port)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_where_they_should_be() {
        for _ in 0..50 {
            let address = free_address().unwrap();
            let IpAddr::V4(ip) = address.ip() else { panic!("{address}") };
            let [a, x, _, z] = ip.octets();
            assert!(a == 127 && x != 0 && z != 0 && z != 255, "{address}");
            assert!((10_000..30_000).contains(&address.port()), "{address}");
        }
    }
}
