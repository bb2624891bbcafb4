//! Finds the addresses at which clients reach kube-apiserver, and checks that the shim listens
//! there. By default, kube-apiserver listens on every address of its node. A shim listens only on
//! the addresses given to it, so a client that dials any other address is refused as soon as the
//! shim has taken kube-apiserver's place.
//!
//! [`Clients::gather`] reads the node's files and connections. [`Clients::find_uncovered`] decides
//! without I/O which addresses the shim lacks. `berth doctor` and `berth inject` use both.

use super::super::Finding;
use super::super::checks::{CLIENT_ADDRESS, NOT_CHECKED};
use super::super::options::is_covered;
use berth_cluster::kubeconfig::ServerUrl;
use berth_cluster::yaml::parse_documents;
use berth_os::file::{decode_text, read_small};
use berth_os::proc_net::{ESTABLISHED_STATE, Entry, processes_of, read_sockets};
use berth_shim::config::Listen;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::Path;

/// Directory below the node's root in which kubeadm and others keep kubeconfigs.
const CONFIG_DIRECTORY: &str = "etc/kubernetes";

/// Maximum number of clients that a finding names for one address.
const MAX_NAMED: usize = 3;

/// Names of kube-apiserver's clients, by the address that each client dials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clients(BTreeMap<SocketAddr, Vec<String>>);

/// An address that clients dial, but on which the shim does not listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UncoveredAddress {
    pub address: SocketAddr,
    /// The names of the clients that dial this address, for a message.
    pub clients: String,
    /// True if the node has the address now. If false, the address may belong to a load balancer,
    /// or be a virtual IP that the node does not have at the moment.
    pub is_on_node: bool,
}

impl Clients {
    /// Finds clients in this node's kubeconfigs (`/etc/kubernetes/*.conf` below `root`) and among
    /// the open connections to these ports.
    pub fn gather(root: &Path, ports: &[u16]) -> Self {
        let mut clients = Self::default();
        let mut named: BTreeMap<(String, u16), Vec<String>> = BTreeMap::new();
        for (path, text) in read_kubeconfigs(root) {
            for place in parse_servers(&text).filter(|(_, port)| ports.contains(port)) {
                named
                    .entry(place)
                    .or_default()
                    .push(format!("/{CONFIG_DIRECTORY}/{path}"));
            }
        }
        // Resolve each name once for all files that contain it, because a resolver may take
        // seconds.
        for ((host, port), files) in named {
            for address in (host, port).to_socket_addrs().into_iter().flatten() {
                files
                    .iter()
                    .for_each(|file| clients.add(address, file.clone()));
            }
        }
        let connections: Vec<_> = ports
            .iter()
            .filter_map(|port| list_connections(*port).ok())
            .flatten()
            .collect();
        let processes = processes_of(
            &connections
                .iter()
                .filter_map(|connection| connection.client)
                .collect(),
        );
        for connection in connections {
            let remote = connection.remote;
            let by = match connection.client.map(|inode| processes.get(&inode)) {
                // The client was a process of this node that has ended.
                None if remote.ip().is_loopback() => continue,
                None => format!("a connection from {}", remote.ip()),
                // Leave out kube-apiserver, which connects to itself, and dials its new address as
                // soon as it runs behind the shim. If a client's process cannot be seen, the client
                // may be kube-apiserver.
                Some(None) => continue,
                Some(Some(process))
                    if matches!(process.name.as_str(), "kube-apiserver" | "berth") =>
                {
                    continue;
                }
                Some(Some(process)) => format!("{} (pid {})", process.name, process.pid),
            };
            clients.add(connection.local, by);
        }
        clients
    }

    pub(in super::super) fn add(&mut self, address: SocketAddr, by: String) {
        let all = self
            .0
            .entry(SocketAddr::new(address.ip().to_canonical(), address.port()))
            .or_default();
        if !all.contains(&by) {
            all.push(by);
        }
    }

    /// Returns the addresses that clients dial and on which the shim does not listen. `own` are the
    /// addresses of the node.
    pub fn find_uncovered(&self, listen: &[Listen], own: &[IpAddr]) -> Vec<UncoveredAddress> {
        let mut found = Vec::new();
        for (address, clients) in self
            .0
            .iter()
            .filter(|(address, _)| !is_covered(**address, listen))
        {
            let more = clients.len().saturating_sub(MAX_NAMED);
            let more = if more > 0 {
                format!(" and {more} more")
            } else {
                String::new()
            };
            let clients = clients
                .iter()
                .take(MAX_NAMED)
                .cloned()
                .collect::<Vec<_>>()
                .join(", ")
                + &more;
            let is_on_node = address.ip().is_loopback() || own.contains(&address.ip());
            found.push(UncoveredAddress {
                address: *address,
                clients,
                is_on_node,
            });
        }
        found
    }
}

impl UncoveredAddress {
    /// Makes a finding. If the node does not have the address now, it may get it later. doctor
    /// cannot tell, so the finding is `not-checked`.
    pub(super) fn make_finding(&self) -> Finding {
        let Self {
            address,
            clients,
            is_on_node,
        } = self;
        let (check, cause, fix) = if *is_on_node {
            (
                CLIENT_ADDRESS,
                format!(
                    "{clients} reaches kube-apiserver at {address}, where the shim does not listen: the client is refused as soon as \
                     kube-apiserver runs behind berth"
                ),
                format!(
                    "add {address} to `berth inject --listen …` after the present addresses, or let the client dial one of the present addresses"
                ),
            )
        } else {
            (
                NOT_CHECKED,
                format!(
                    "{clients} dials {address}, which this node does not have now: if the address is a virtual IP that moves to this \
                     node later, the client is refused"
                ),
                format!(
                    "for a virtual IP, add {address},freebind to `berth inject --listen …` after the present addresses; for a load balancer, there is nothing to do"
                ),
            )
        };
        check.make_finding(address.to_string(), cause, fix)
    }
}

/// Returns names and texts of the node's kubeconfigs, sorted by name.
pub(super) fn read_kubeconfigs(root: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(root.join(CONFIG_DIRECTORY))
        .into_iter()
        .flatten()
        .flatten();
    let read = |entry: fs::DirEntry| {
        let name = entry
            .file_name()
            .into_string()
            .ok()
            .filter(|name| name.ends_with(".conf"))?;
        Some((name, read_small(&entry.path()).and_then(decode_text).ok()?))
    };
    let mut found: Vec<_> = entries.filter_map(read).collect();
    found.sort();
    found
}

/// Returns host and port of each server in a kubeconfig. The host may be a name.
fn parse_servers(text: &str) -> impl Iterator<Item = (String, u16)> {
    let documents = parse_documents(text).unwrap_or_default();
    let clusters = documents.iter().flat_map(|root| root.list("clusters"));
    let urls = clusters.filter_map(|cluster| cluster.find_path(&["cluster", "server"])?.text());
    let places: Vec<_> = urls
        .filter_map(|url| ServerUrl::parse(url).ok())
        .map(|place| (place.host, place.port))
        .collect();
    places.into_iter()
}

/// An established connection of a client to a port of this node. IPv4 addresses are stored as IPv4,
/// not as mapped IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Connection {
    /// Address that the client dialled.
    local: SocketAddr,
    remote: SocketAddr,
    /// Inode of the client's socket. `None` if the client is outside of this network namespace.
    client: Option<u64>,
}

/// Returns the established connections to a port, in this thread's network namespace.
fn list_connections(port: u16) -> io::Result<Vec<Connection>> {
    Ok(pair_sockets(port, &read_sockets()?))
}

/// Finds the established connections to a port among the sockets, and the client's socket of each.
/// The client's socket may be in another state, if the client has closed its direction.
fn pair_sockets(port: u16, entries: &[Entry]) -> Vec<Connection> {
    let plain = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
    let ends = |entry: &Entry| (plain(entry.local), plain(entry.remote));
    let clients: HashMap<_, _> = entries
        .iter()
        .map(|entry| (ends(entry), entry.inode))
        .collect();
    let established =
        |entry: &&Entry| entry.state == ESTABLISHED_STATE && entry.local.port() == port;
    let accepted = entries.iter().filter(established).map(ends);
    accepted
        .map(|(local, remote)| Connection {
            local,
            remote,
            client: clients.get(&(remote, local)).copied(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::net::{TcpListener, TcpStream};

    fn make_clients(all: &[(&str, &str)]) -> Clients {
        let mut clients = Clients::default();
        all.iter()
            .for_each(|(address, by)| clients.add(address.parse().unwrap(), (*by).to_owned()));
        clients
    }

    fn list_uncovered(dialled: &str, listen: &[&str]) -> Vec<(String, bool)> {
        let listen: Vec<Listen> = listen
            .iter()
            .map(|text| berth_options::check::parse_listen(text).unwrap())
            .collect();
        let own = ["10.0.0.5".parse().unwrap(), "fd00::5".parse().unwrap()];
        let found = make_clients(&[(dialled, "a")]).find_uncovered(&listen, &own);
        found
            .into_iter()
            .map(|one| (one.address.to_string(), one.is_on_node))
            .collect()
    }

    #[test]
    fn what_the_shim_listens_on_is_covered() {
        for (dialled, listen) in [
            ("10.0.0.5:6443", "10.0.0.5:6443"),
            ("[::ffff:10.0.0.5]:6443", "10.0.0.5:6443"),
            ("10.0.0.9:6443", "10.0.0.9:6443,freebind"),
            ("127.0.0.1:6443", "0.0.0.0:6443"),
            ("[::1]:6443", "[::]:6443"),
            ("10.0.0.5:6443", "192.0.2.1:6443"),
        ] {
            assert_eq!(list_uncovered(dialled, &[listen]), [], "{dialled} {listen}");
        }
        let here = |address: &str| vec![(address.to_owned(), true)];
        assert_eq!(
            list_uncovered("127.0.0.1:6443", &["10.0.0.5:6443"]),
            here("127.0.0.1:6443")
        );
        assert_eq!(
            list_uncovered("127.0.0.1:6443", &["192.0.2.1:6443"]),
            here("127.0.0.1:6443")
        );
        assert_eq!(
            list_uncovered("[fd00::5]:6443", &["10.0.0.5:6443", "0.0.0.0:6443"]),
            here("[fd00::5]:6443")
        );
        assert_eq!(
            list_uncovered("10.0.0.5:6443", &["10.0.0.5:7443"]),
            here("10.0.0.5:6443")
        );
        assert_eq!(
            list_uncovered("10.0.0.9:6443", &["10.0.0.5:6443"]),
            [("10.0.0.9:6443".to_owned(), false)]
        );
    }

    #[test]
    fn an_address_is_reported_once_with_some_of_its_users() {
        let users = ["a", "b", "a", "c", "d", "e"].map(|by| ("127.0.0.1:6443", by));
        let found = make_clients(&users).find_uncovered(&[], &[]);
        assert_eq!(
            (found.len(), found[0].clients.as_str()),
            (1, "a, b, c and 2 more")
        );
    }

    #[test]
    fn kubeconfigs_and_connections_are_looked_at() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join(CONFIG_DIRECTORY);
        fs::create_dir_all(&directory).unwrap();
        let write = |name: &str, server: &str| {
            let text =
                format!("kind: Config\nclusters:\n- name: a\n  cluster: {{server: '{server}'}}\n");
            fs::write(directory.join(name), text).unwrap();
        };
        let listener = TcpListener::bind("127.83.2.1:0").unwrap();
        let bound = listener.local_addr().unwrap();
        let port = bound.port();
        write("admin.conf", &format!("https://10.0.0.9:{port}"));
        write("kubelet.conf", &format!("https://localhost:{port}"));
        write("other-port.conf", "https://10.0.0.9:1");
        write("admin.conf.bak", &format!("https://10.0.0.10:{port}"));
        fs::write(directory.join("torn.conf"), "a: [").unwrap();
        let client = TcpStream::connect(bound).unwrap();
        let found = Clients::gather(root.path(), &[port]);
        let by = |address: SocketAddr| found.0.get(&address).map(|by| by.join(" "));
        assert_eq!(
            by(format!("10.0.0.9:{port}").parse().unwrap()).as_deref(),
            Some("/etc/kubernetes/admin.conf")
        );
        let local = format!("127.0.0.1:{port}").parse().unwrap();
        assert_eq!(by(local).as_deref(), Some("/etc/kubernetes/kubelet.conf"));
        let own = format!("(pid {})", std::process::id());
        assert!(
            by(bound).is_some_and(|by| by.ends_with(&own)),
            "{found:?} {client:?}"
        );
        let _another = TcpStream::connect(bound).unwrap();
        let inodes: HashSet<_> = list_connections(port)
            .unwrap()
            .iter()
            .filter_map(|one| one.client)
            .collect();
        assert_eq!(processes_of(&inodes).len(), 2);
        assert!(
            !found
                .0
                .keys()
                .any(|address| address.port() == 1 || address.ip().to_string() == "10.0.0.10")
        );
    }

    fn parse_address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_connection_is_paired_with_its_client() {
        let socket = |local: &str, remote: &str, inode| Entry {
            local: parse_address(local),
            remote: parse_address(remote),
            state: ESTABLISHED_STATE,
            uid: 0,
            inode,
        };
        // The server's socket is of both address families and shows the client as a mapped address;
        // the client's socket is IPv4.
        let entries = [
            socket("[::ffff:10.0.0.5]:6443", "[::ffff:10.0.0.5]:40000", 1),
            Entry {
                state: 0x04,
                ..socket("10.0.0.5:40000", "10.0.0.5:6443", 2)
            },
            socket("10.0.0.5:6443", "10.0.0.9:40000", 3),
        ];
        let connection = |remote: &str, client| Connection {
            local: parse_address("10.0.0.5:6443"),
            remote: parse_address(remote),
            client,
        };
        assert_eq!(
            pair_sockets(6443, &entries),
            [
                connection("10.0.0.5:40000", Some(2)),
                connection("10.0.0.9:40000", None)
            ]
        );
    }
}
