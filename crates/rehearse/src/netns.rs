//! A network namespace of this process's own: nothing outside can be reached from it, and nothing in
//! it from outside. The kernel removes it when the last process in it has ended.

use berth_os::netdevice::{self, Setting};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};
use std::fs;
use std::io;
use std::net::Ipv4Addr;

/// The one interface that a new namespace has.
const LOOPBACK: &str = "lo";

/// A further address of it.
const ALIAS: &str = "lo:1";

/// Why there is no namespace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel does not make one.
    #[error(
        "cannot make a network namespace: {0} (root can, or anybody where unprivileged user namespaces are allowed: \
         see the sysctls user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns)"
    )]
    Unshare(io::Error),
    /// It was made, and has no usable interface.
    #[error("cannot set up the interface {LOOPBACK} of a network namespace: {0} (root can)")]
    Interface(io::Error),
}

/// Moves this process, which must have one thread only, to a new network namespace whose loopback
/// interface is up and has `address` beside 127.0.0.0/8. Without the privilege, it comes with a user
/// namespace in which this user is the same.
///
/// # Errors
/// What the kernel refused. Nothing has changed if it was the namespace.
pub fn enter(address: Ipv4Addr) -> Result<(), Error> {
    let (uid, gid) = (geteuid(), getegid());
    match unshare(CloneFlags::CLONE_NEWNET) {
        Err(Errno::EPERM) => {
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET).map_err(|e| Error::Unshare(e.into()))?;
            fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).map_err(Error::Unshare)?;
            // Without it, a process without privilege may not map its group.
            fs::write("/proc/self/setgroups", "deny").map_err(Error::Unshare)?;
            fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).map_err(Error::Unshare)?;
        }
        done => done.map_err(|e| Error::Unshare(e.into()))?,
    }
    set_up(address).map_err(Error::Interface)
}

/// An address on loopback is as good as one on a dummy or a veth, which not every kernel has: the kernel
/// sends what goes to any address of its own by way of it.
fn set_up(address: Ipv4Addr) -> io::Result<()> {
    netdevice::set(LOOPBACK, Setting::Up)?;
    netdevice::set(ALIAS, Setting::Address(address))?;
    netdevice::set(ALIAS, Setting::Netmask(Ipv4Addr::BROADCAST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    /// What a thread unshares is its own; its descendants share it.
    #[test]
    fn a_namespace_has_the_address_and_nothing_else() {
        let outside = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = outside.local_addr().unwrap().port();
        // One thread among others can have no user namespace: this needs the privilege.
        if std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join().unwrap().is_err() {
            return;
        }
        let inside = std::thread::spawn(move || {
            let address = Ipv4Addr::new(10, 123, 0, 5);
            enter(address).unwrap();
            let listener = TcpListener::bind((address, 6443)).unwrap();
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            TcpListener::bind("127.8.9.10:6443").unwrap();
            assert!(TcpListener::bind("10.123.0.6:6443").is_err());
            assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
        });
        inside.join().unwrap();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
    }
}
