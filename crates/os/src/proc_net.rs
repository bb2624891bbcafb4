//! Finds the process that holds a port, by /proc, so that the error of a failed bind can name the
//! process.
//!
//! Used for messages and by `berth doctor`: no decision of a shim depends on this module. To list
//! only listeners, [`super::sock_diag`] is cheaper.

use crate::file::none_if_missing;
use nix::unistd::Uid;
use procfs::net::TcpNetEntries;
use procfs::process::{FDTarget, Process, all_processes};
use procfs::{FromBufReadSI as _, current_system_info};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// State of a listening socket in /proc/net/tcp (TCP_LISTEN in the kernel's tcp_states.h).
pub const LISTEN_STATE: u8 = 0x0a;

/// State of an established connection in /proc/net/tcp (TCP_ESTABLISHED).
pub const ESTABLISHED_STATE: u8 = 0x01;

/// Files that list the TCP sockets of this thread's network namespace. Without `thread-self`,
/// /proc/net shows the namespace of the process's first thread.
const TABLES: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];

/// A socket, as a line of /proc/net/tcp or /proc/net/tcp6 describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    pub local: SocketAddr,
    /// Address of the peer. Unspecified (0.0.0.0 or ::) if the socket listens.
    pub remote: SocketAddr,
    /// State of the socket, as a number of the kernel's tcp_states.h. 0x0a means that the socket
    /// listens.
    pub state: u8,
    /// Effective user ID of the process that created the socket.
    pub uid: u32,
    /// Inode of the socket; 0 if the socket has no file any more.
    pub inode: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedProcess {
    pub pid: i32,
    /// Name of the process, at most 15 bytes, without control characters.
    pub name: String,
}

/// Lists the sockets in this thread's network namespace: sockets with a file, and closed sockets of
/// connections that are not over yet.
///
/// # Errors
/// /proc/net/tcp cannot be read. A missing tcp6 means that the kernel has no IPv6.
pub fn read_sockets() -> io::Result<Vec<Entry>> {
    let mut all: Vec<_> = read_entries(TABLES[0])?.collect::<io::Result<_>>()?;
    all.extend(
        none_if_missing(read_entries(TABLES[1]).and_then(Iterator::collect::<io::Result<Vec<_>>>))?
            .into_iter()
            .flatten(),
    );
    Ok(all)
}

/// Returns the process that has the socket with this inode. If a parent and a child both have the
/// socket, for example a supervisor and its server, the child is returned. But if the child was
/// forked and has not executed its program yet, it still has its parent's files, and the parent is
/// returned. `None` if the holder is in another PID namespace or may not be inspected.
pub fn process_of(inode: u64) -> Option<NamedProcess> {
    processes_of(&HashSet::from([inode])).remove(&inode)
}

/// Finds the processes of many sockets, as [`process_of`] does for one socket. Reads the list of
/// every process's open files, but only once.
pub fn processes_of(inodes: &HashSet<u64>) -> HashMap<u64, NamedProcess> {
    let mut found = HashMap::<u64, NamedProcess>::new();
    for process in all_processes().into_iter().flatten().flatten() {
        let mut named = None;
        for inode in socket_inodes_of(&process).filter(|inode| inodes.contains(inode)) {
            let named = named.get_or_insert_with(|| {
                let holder = find_forking_parent(&process, inode);
                let holder = holder.as_ref().unwrap_or(&process);
                NamedProcess {
                    pid: holder.pid,
                    name: process_name(holder),
                }
            });
            let known = found.entry(inode).or_insert_with(|| named.clone());
            if known.pid != named.pid
                && process.pid == named.pid
                && process.stat().is_ok_and(|stat| stat.ppid == known.pid)
            {
                known.clone_from(named);
            }
        }
    }
    found
}

/// Returns the parent of a process that has this socket, if the process was forked and has not
/// executed a program of its own yet.
fn find_forking_parent(process: &Process, inode: u64) -> Option<Process> {
    let parent = Process::new(process.stat().ok()?.ppid).ok()?;
    let is_same = parent.exe().ok()? == process.exe().ok()?
        && socket_inodes_of(&parent).any(|of| of == inode);
    is_same.then_some(parent)
}

/// True if a process has a socket that listens on this address, in the process's network namespace.
pub fn process_listens(pid: i32, address: SocketAddr) -> bool {
    let table = format!(
        "/proc/{pid}/net/{}",
        if address.is_ipv6() { "tcp6" } else { "tcp" }
    );
    // /proc/net/tcp lists listening sockets first, so the first other socket ends the search.
    let listeners = read_entries(&table)
        .into_iter()
        .flatten()
        .flatten()
        .take_while(|entry| entry.state == LISTEN_STATE);
    let inodes: HashSet<_> = listeners
        .filter(|entry| entry.local == address)
        .map(|entry| entry.inode)
        .collect();
    Process::new(pid)
        .is_ok_and(|process| socket_inodes_of(&process).any(|inode| inodes.contains(&inode)))
}

/// Returns the inodes of a process's sockets. The iterator is empty if the process may not be
/// inspected.
fn socket_inodes_of(process: &Process) -> impl Iterator<Item = u64> {
    process
        .fd()
        .into_iter()
        .flatten()
        .filter_map(|fd| match fd.ok()?.target {
            FDTarget::Socket(inode) => Some(inode),
            _ => None,
        })
}

fn process_name(process: &Process) -> String {
    process.stat().map_or(String::new(), |stat| {
        stat.comm.replace(char::is_control, "?")
    })
}

/// Explains why bind(2) on `wanted` failed with EADDRINUSE. Returns a sentence that names the
/// process with the port, and the fix.
pub fn explain_in_use(wanted: SocketAddr) -> String {
    match read_sockets() {
        Ok(entries) => {
            explain_in_use_from_entries(wanted, Uid::effective().as_raw(), &entries, process_of)
        }
        Err(error) => format!(
            "{wanted} is held by an unknown process (/proc/net/tcp cannot be read: {error})"
        ),
    }
}

/// Works as [`explain_in_use`], but from a list of sockets that the caller has read. `our_uid` is
/// the effective user ID of the process that wants the port.
pub fn explain_in_use_from_entries(
    wanted: SocketAddr,
    our_uid: u32,
    entries: &[Entry],
    process_of: impl Fn(u64) -> Option<NamedProcess>,
) -> String {
    // Prefer a socket that listens, and then a socket on exactly the wanted address. A listener on
    // `::` may not serve IPv4, so it must not be named if there is a listener on the IPv4 address.
    let elsewhere = |entry: &Entry| entry.local.ip().to_canonical() != wanted.ip().to_canonical();
    let clashing = entries
        .iter()
        .filter(|entry| addresses_clash(wanted, entry.local));
    let Some(entry) = clashing.min_by_key(|entry| (entry.state != LISTEN_STATE, elsewhere(entry)))
    else {
        return format!(
            "{wanted} is held by a socket that is bound and does not listen (a waiting shim of another uid or \
             without SO_REUSEPORT): /proc does not show the process of that socket; this process is uid {our_uid}"
        );
    };
    let owner = Owner(entry.uid, process_of(entry.inode));
    let (state, port) = (entry.state, wanted.port());
    if state != LISTEN_STATE {
        return format!(
            "{wanted} is held by a connection from that port (state {state:#04x}, {owner}), not by a listener: the \
             address is free when the connection ends"
        );
    }
    if entry.local.ip().is_unspecified() != wanted.ip().is_unspecified() {
        let holder = entry.local;
        // berth's documents use 7443 as the second port of an apiserver. If 7443 is the wanted port
        // itself, propose 8443.
        let other = if port == 7443 { 8443 } else { 7443 };
        return format!(
            "{wanted} is held by {holder} of {owner}: a wildcard listener takes the port on every address, and so \
             clashes with a 127.x listener on the same port. List the addresses instead, each with its own --listen \
             (--listen HOST_IP:{port} --listen 127.0.0.1:{port}); or, where truly all addresses are needed, move the \
             apiserver to another port (--listen HOST_IP:{other} --listen 0.0.0.0:{port})"
        );
    }
    if entry.uid == our_uid {
        format!(
            "{wanted} is held by {owner}, which listens without SO_REUSEPORT: stop that process, or take another port"
        )
    } else {
        format!(
            "{wanted} is held by {owner}, this process is uid {our_uid}: SO_REUSEPORT needs the same effective uid"
        )
    }
}

/// True if two sockets of the same port cannot be bound to these addresses together. A listener on
/// `::` counts for IPv4 and IPv6, as is the default; only berth's own IPv6 sockets are IPv6 only.
pub fn addresses_clash(wanted: SocketAddr, other: SocketAddr) -> bool {
    let (wanted_ip, other_ip) = (wanted.ip().to_canonical(), other.ip().to_canonical());
    let any_family = other_ip == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    wanted.port() == other.port()
        && (wanted_ip == other_ip
            || any_family
            || (wanted_ip.is_ipv4() == other_ip.is_ipv4()
                && (wanted_ip.is_unspecified() || other_ip.is_unspecified())))
}

#[derive(Debug)]
pub struct Owner(u32, Option<NamedProcess>);

impl Owner {
    /// Finds the process that has the socket, and the socket's owner.
    pub fn of(entry: &Entry) -> Self {
        Self(entry.uid, process_of(entry.inode))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid {}", self.0)?;
        match &self.1 {
            Some(NamedProcess { pid, name }) => write!(f, " (pid {pid}, {name})"),
            None if Uid::effective().is_root() => write!(f, " (in another process namespace)"),
            None => write!(f, " (process not readable from here)"),
        }
    }
}

/// Reads the sockets in one of the TABLES. Skips lines that describe no socket, such as the
/// heading.
fn read_entries(table: &str) -> io::Result<impl Iterator<Item = io::Result<Entry>>> {
    let lines = BufReader::new(fs::File::open(table)?).lines();
    Ok(lines.filter_map(|line| line.map(|line| parse_line(&line)).transpose()))
}

/// Parses a line of /proc/net/tcp or /proc/net/tcp6. `None` if the line is not an entry.
///
/// Parse lines one at a time: procfs rejects the whole table if it cannot parse a single line.
pub fn parse_line(line: &str) -> Option<Entry> {
    // procfs skips the first line, because it expects a heading there.
    let table =
        TcpNetEntries::from_buf_read(["\n", line].concat().as_bytes(), current_system_info())
            .ok()?;
    let entry = table.0.into_iter().next()?;
    Some(Entry {
        local: entry.local_address,
        remote: entry.remote_address,
        state: entry.state.to_u8(),
        uid: entry.uid,
        inode: entry.inode,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sock_diag;
    use proptest::prelude::*;
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::os::unix::process::CommandExt as _;

    fn parse_address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn listening_entry(local: &str, uid: u32) -> Entry {
        Entry {
            local: parse_address(local),
            remote: parse_address("0.0.0.0:0"),
            state: LISTEN_STATE,
            uid,
            inode: 7,
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn socket_lines_of_both_families_are_read() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:192B 00000000:0000 0A 00000000:00000000 00:00000000 00000000 65534        0 4711 1 0000000000000000 100 0 0 10 0
   1: 0500000A:192B 0600000A:B3C2 01 00000000:00000000 02:000A7D8C 00000000     0        0 4712 2 0000000000000000 20 4 30 10 -1
   2: B80D0120000000000000000001000000:192B 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 99 1 0000000000000000 100 0 0 10 0
   3: 0100007F:192B garbage
";
        let entry = |local: &str, remote: &str, state, uid, inode| Entry {
            local: parse_address(local),
            remote: parse_address(remote),
            state,
            uid,
            inode,
        };
        assert_eq!(
            text.lines().filter_map(parse_line).collect::<Vec<_>>(),
            [
                entry("127.0.0.1:6443", "0.0.0.0:0", LISTEN_STATE, 65534, 4711),
                entry(
                    "10.0.0.5:6443",
                    "10.0.0.6:46018",
                    ESTABLISHED_STATE,
                    0,
                    4712
                ),
                entry("[2001:db8::1]:6443", "[::]:0", LISTEN_STATE, 0, 99)
            ]
        );
    }

    #[test]
    fn listeners_of_this_process_are_found() {
        for local in ["127.83.1.2:0", "[::1]:0"] {
            let Ok(socket) = TcpListener::bind(local) else {
                continue;
            };
            let bound = socket.local_addr().unwrap();
            let found = read_sockets().unwrap();
            let entry = found.iter().find(|entry| entry.local == bound).unwrap();
            assert_eq!(sock_diag::listeners_at(bound).unwrap(), [*entry]);
            assert_eq!(sock_diag::list_listeners(bound.port()).unwrap(), [*entry]);
            assert_eq!(entry.uid, Uid::effective().as_raw());
            assert_eq!(
                process_of(entry.inode).unwrap().pid,
                std::process::id() as i32
            );
            assert!(explain_in_use(bound).contains("without SO_REUSEPORT"));
            let other = explain_in_use_from_entries(bound, entry.uid + 1, &[*entry], process_of);
            assert!(other.contains("needs the same effective uid"));
        }
        assert_eq!(process_of(0), None);
    }

    #[test]
    fn a_forked_child_is_not_named_before_its_execve() {
        let socket = TcpListener::bind("127.83.1.2:0").unwrap();
        let bound = socket.local_addr().unwrap();
        let ((mut forked, mut tell), (mut wait, mut go_on)) =
            (io::pipe().unwrap(), io::pipe().unwrap());
        let mut command = std::process::Command::new("true");
        // SAFETY: the closure makes system calls only.
        unsafe {
            command.pre_exec(move || {
                tell.write_all(&std::process::id().to_ne_bytes())?;
                wait.read_exact(&mut [0])
            })
        };
        let child = std::thread::spawn(move || command.status());
        let mut pid = [0; 4];
        forked.read_exact(&mut pid).unwrap();
        let inode = sock_diag::listeners_at(bound).unwrap()[0].inode;
        let child_process = Process::new(i32::from_ne_bytes(pid)).unwrap();
        assert!(socket_inodes_of(&child_process).any(|of| of == inode));
        assert_eq!(
            find_forking_parent(&child_process, inode).unwrap().pid,
            std::process::id() as i32
        );
        go_on.write_all(&[0]).unwrap();
        assert!(child.join().unwrap().unwrap().success());
    }

    #[test]
    fn a_server_is_named_instead_of_its_supervisor() {
        let socket = TcpListener::bind("127.83.1.2:0").unwrap();
        let inode = sock_diag::listeners_at(socket.local_addr().unwrap()).unwrap()[0].inode;
        let (stdin, _ends) = io::pipe().unwrap();
        // The duplicate becomes a child's standard output, so it stays open through execve(2).
        let duplicate = std::os::fd::OwnedFd::from(socket.try_clone().unwrap());
        let mut server = std::process::Command::new("cat")
            .stdin(stdin)
            .stdout(duplicate)
            .spawn()
            .unwrap();
        assert_eq!(
            process_of(inode).unwrap(),
            NamedProcess {
                pid: server.id() as i32,
                name: "cat".into()
            }
        );
        server.kill().unwrap();
        server.wait().unwrap();
        assert_eq!(process_of(inode).unwrap().pid, std::process::id() as i32);
    }

    #[test]
    fn a_listener_is_found_until_it_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(process_listens(nix::unistd::getpid().as_raw(), address));
        assert!(!process_listens(nix::unistd::getppid().as_raw(), address));
        drop(listener);
        assert!(!process_listens(nix::unistd::getpid().as_raw(), address));
    }

    #[test]
    fn the_holder_of_a_port_is_named_by_its_kind() {
        let shown = |wanted: &str, entries: &[Entry]| {
            let process = |inode| {
                (inode == 7).then(|| NamedProcess {
                    pid: 812,
                    name: "kube-apiserver".into(),
                })
            };
            explain_in_use_from_entries(parse_address(wanted), 65534, entries, process)
        };
        assert_eq!(
            shown("10.0.0.5:6443", &[listening_entry("10.0.0.5:6443", 0)]),
            "10.0.0.5:6443 is held by uid 0 (pid 812, kube-apiserver), this process is uid 65534: SO_REUSEPORT needs \
             the same effective uid"
        );
        assert!(
            shown("10.0.0.5:6443", &[listening_entry("10.0.0.5:6443", 65534)])
                .contains("listens without SO_REUSEPORT")
        );
        for wildcard in ["0.0.0.0:6443", "[::]:6443"] {
            let text = shown("127.1.2.3:6443", &[listening_entry(wildcard, 0)]);
            assert!(text.contains("HOST_IP:7443"), "{text}");
        }
        assert!(
            shown("0.0.0.0:6443", &[listening_entry("127.1.2.3:6443", 0)]).contains("wildcard")
        );
        assert!(
            shown("10.0.0.5:6443", &[listening_entry("10.0.0.6:6443", 0)])
                .contains("does not listen")
        );
        assert!(
            shown("[::1]:6443", &[listening_entry("0.0.0.0:6443", 0)]).contains("does not listen")
        );
        let connection = Entry {
            state: 1,
            ..listening_entry("10.0.0.5:6443", 0)
        };
        assert!(shown("10.0.0.5:6443", &[connection]).contains("a connection from that port"));
    }

    proptest! {
        #[test]
        fn any_fields_are_parsed_without_a_panic(fields in prop::collection::vec("[0-9A-Fa-f:+é]{0,34}|[0-9]{1,22}", 0..14)) {
            let _ = parse_line(&fields.join(" "));
        }
    }
}
