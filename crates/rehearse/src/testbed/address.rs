//! Unused addresses.

use berth_exec::address::random;
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};

/// The berth in a network namespace of the rehearsal's own, where kube-apiserver can advertise it.
pub const NETNS: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(10, 123, 0, 5), 6443);

/// Where the clients of a storm come from, each from an address of its own: they share no queue in a gate. Those of a network
/// namespace are none of the node's own ([`netns`](crate::testbed::netns) has the network).
pub(crate) const STORM: [Ipv4Addr; 2] =
    [Ipv4Addr::new(127, 124, 0, 0), Ipv4Addr::new(10, 124, 0, 0)];

/// How many addresses are tried before none counts as free.
const TRIES: usize = 100;

/// A random unused address as instances have it, and a port below the range of outgoing connections.
pub fn free_address() -> io::Result<SocketAddr> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..TRIES {
        let ip = random().map_err(|error| io::Error::other(error.to_string()))?;
        let port = fastrand::u16(10_000..30_000);
        // The port must be free on all of 127/8: the apiservers get it too, on addresses of their own.
        match bind((Ipv4Addr::UNSPECIFIED, port).into()) {
            Ok(()) => return Ok(SocketAddr::new(IpAddr::V4(ip), port)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether an address can be bound. The socket does not listen, so that the address can be bound again at once: another thread may
/// fork meanwhile, and its child has a duplicate of the socket until it runs its program.
fn bind(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.bind(&address.into())?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)
}

/// The address of a storm's client that dials this one. A /16 is more than [`plan::STORM`](crate::config::STORM).
pub(crate) fn source(dialled: IpAddr, client: u32) -> IpAddr {
    let [loopback, netns] = STORM;
    let network = if dialled.is_loopback() {
        loopback
    } else {
        netns
    };
    // .0 is no host's, and .1 the interface's.
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
            assert_eq!(source(dialled, 0).to_string(), first);
            assert!(
                source(dialled, last).to_string().starts_with(end)
                    && source(dialled, last) != source(dialled, last - 1)
            );
        }
    }
}
