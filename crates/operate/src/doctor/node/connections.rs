//! Connections to a port of this node, each with its client's socket.

use berth_os::proc_net::{ESTABLISHED, Entry, sockets};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;

/// An established connection to a port of this network namespace. Addresses of IPv4 are in their own form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Connection {
    /// Address that the client dialled.
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    /// Inode of the client's socket, if the client is in this network namespace too.
    pub(super) client: Option<u64>,
}

/// The established connections to this port in this thread's network namespace.
pub(super) fn connections(port: u16) -> io::Result<Vec<Connection>> {
    Ok(pair(port, &sockets()?))
}

/// The established connections to a port, each with its client's socket, which may be in another state: of a client
/// that has half closed.
fn pair(port: u16, entries: &[Entry]) -> Vec<Connection> {
    let plain = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let ends = |entry: &Entry| (plain(entry.local), plain(entry.remote));
    let clients: HashMap<_, _> = entries.iter().map(|entry| (ends(entry), entry.inode)).collect();
    let established = |entry: &&Entry| entry.state == ESTABLISHED && entry.local.port() == port;
    let accepted = entries.iter().filter(established).map(ends);
    accepted
        .map(|(local, remote)| Connection { local, remote, client: clients.get(&(remote, local)).copied() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_os::proc_net::{process_of, processes_of};
    use std::collections::HashSet;
    use std::net::{TcpListener, TcpStream};

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_connection_is_known_with_its_client() {
        let socket = |local: &str, remote: &str, inode| Entry {
            local: address(local),
            remote: address(remote),
            state: ESTABLISHED,
            uid: 0,
            inode,
        };
        // A server's socket of both families, and its client's of one.
        let entries = [
            socket("[::ffff:10.0.0.5]:6443", "[::ffff:10.0.0.5]:40000", 1),
            Entry { state: 0x04, ..socket("10.0.0.5:40000", "10.0.0.5:6443", 2) },
            socket("10.0.0.5:6443", "10.0.0.9:40000", 3),
        ];
        let connection =
            |remote: &str, client| Connection { local: address("10.0.0.5:6443"), remote: address(remote), client };
        assert_eq!(pair(6443, &entries), [connection("10.0.0.5:40000", Some(2)), connection("10.0.0.9:40000", None)]);

        let listener = TcpListener::bind("127.83.1.3:0").unwrap();
        let bound = listener.local_addr().unwrap();
        let client = TcpStream::connect(bound).unwrap();
        let found = connections(bound.port()).unwrap();
        let own = found.iter().find(|one| one.remote == client.local_addr().unwrap()).unwrap();
        assert_eq!((own.local, process_of(own.client.unwrap()).unwrap().pid), (bound, std::process::id() as i32));

        let more = TcpStream::connect(bound).unwrap();
        let found = connections(bound.port()).unwrap();
        let inodes: HashSet<_> = found.iter().filter_map(|one| one.client).chain([0]).collect();
        assert_eq!(inodes.len(), 3, "{found:?} {more:?}");
        let processes = processes_of(&inodes);
        assert!(!processes.contains_key(&0) && processes.len() == 2, "{processes:?}");
        assert!(processes.values().all(|process| process.pid == std::process::id() as i32));
    }
}
