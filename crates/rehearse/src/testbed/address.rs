//! Addresses of a rehearsal.

use berth_exec::address::random_address;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

/// Address of the berth in the rehearsal's network namespace. kube-apiserver can advertise this
/// address.
pub const NETNS_ADDRESS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 123, 0, 5), 6443);

/// Networks of the storm's clients, on loopback and in a network namespace. Each client has a
/// separate address, so clients share no queue in a gate. The addresses in a network namespace are
/// not the node's own ([`netns`](super::netns) adds the network).
pub(crate) const STORM_NETWORKS: [Ipv4Addr; 2] =
    [Ipv4Addr::new(127, 124, 0, 0), Ipv4Addr::new(10, 124, 0, 0)];

/// Number of tries to find a free address.
const TRIES: usize = 100;

/// Returns a random unused loopback address for an instance, with a port below the range of
/// outgoing connections.
pub fn free_address() -> io::Result<SocketAddr> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        let ip = random_address().map_err(|error| io::Error::other(error.to_string()))?;
        let port = fastrand::u16(10_000..30_000);
        // The port must be free in all of 127/8, because the apiservers use the same port on their
        // addresses.
        match check_bindable((Ipv4Addr::UNSPECIFIED, port).into()) {
            Ok(()) => return Ok(SocketAddr::new(IpAddr::V4(ip), port)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Checks that an address can be bound. The socket does not listen, so the address can be bound
/// again at once, even if another thread forks meanwhile and its child holds a duplicate of the
/// socket until execve.
fn check_bindable(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.bind(&address.into())?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)
}

/// Returns the source address of a storm's client that dials `dialled`. A /16 has room for
/// [`STORM`](crate::config::STORM) clients.
pub(crate) fn storm_source(dialled: IpAddr, client: u32) -> IpAddr {
    let [loopback, netns] = STORM_NETWORKS;
    let network = if dialled.is_loopback() {
        loopback
    } else {
        netns
    };
    // Skip .0, which is no host's address, and .1, the address of the interface.
    Ipv4Addr::from_bits(network.to_bits() + 2 + client).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_clients_of_a_storm_share_an_address() {
        let last = *crate::config::STORM.end() - 1;
        for (dialled, first, end) in [
            ("127.1.2.3", "127.124.0.2", "127.124."),
            ("10.123.0.5", "10.124.0.2", "10.124."),
            ("10.96.0.1", "10.124.0.2", "10.124."),
        ] {
            let dialled = dialled.parse().unwrap();
            assert_eq!(storm_source(dialled, 0).to_string(), first);
            assert!(
                storm_source(dialled, last).to_string().starts_with(end)
                    && storm_source(dialled, last) != storm_source(dialled, last - 1)
            );
        }
    }
}
