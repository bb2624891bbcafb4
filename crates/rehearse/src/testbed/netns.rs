//! A network namespace of this process's own: nothing outside can be reached from it, and nothing in
//! it from outside. The kernel removes it when no process is in it.

use super::address;
use berth_os::netdevice::{self, InterfaceSetting};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};
use std::net::Ipv4Addr;
use std::{fs, io};

/// The one interface that a new namespace has.
const LOOPBACK: &str = "lo";

/// A further address of it.
pub const ALIAS: &str = "lo:1";

/// A further network of it: a loopback interface has all addresses of its networks.
const STORM_ALIAS: &str = "lo:2";

/// Why there is no namespace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel does not make one.
    #[error(
        "cannot make a network namespace: {0} (root can, or any user where unprivileged user namespaces are allowed: \
         see the sysctls user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns)"
    )]
    Unshare(io::Error),
    /// It was made, and has no usable interface.
    #[error("cannot set up the interface {LOOPBACK} of a network namespace: {0} (root can)")]
    Interface(io::Error),
}

/// Moves this process, which must have one thread only, to a new network namespace whose loopback
/// interface is up and has `address` in addition to 127.0.0.0/8. Without the privilege, it comes with a user
/// namespace in which this user is the same.
///
/// # Errors
/// What the kernel refused. Nothing has changed if it was the namespace.
pub fn enter(address: Ipv4Addr) -> Result<(), Error> {
    let (uid, gid) = (geteuid(), getegid());
    match enter_as_root(address) {
        Err(Error::Unshare(error)) if error.raw_os_error() == Some(Errno::EPERM as i32) => {
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)
                .map_err(|e| Error::Unshare(e.into()))?;
            fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).map_err(Error::Unshare)?;
            // Without it, a process without privilege may not map its group.
            fs::write("/proc/self/setgroups", "deny").map_err(Error::Unshare)?;
            fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).map_err(Error::Unshare)?;
        }
        done => return done,
    }
    set_up(address).map_err(Error::Interface)
}

/// The same without a user namespace, in which no BPF program may be loaded.
///
/// # Errors
/// What the kernel refused. Nothing has changed if it was the namespace.
pub fn enter_as_root(address: Ipv4Addr) -> Result<(), Error> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| Error::Unshare(errno.into()))?;
    set_up(address).map_err(Error::Interface)
}

/// An address on loopback is as good as one on a dummy or a veth, which not every kernel has: the kernel
/// sends what goes to any address of its own by way of it.
fn set_up(address: Ipv4Addr) -> io::Result<()> {
    netdevice::set(LOOPBACK, InterfaceSetting::Up)?;
    netdevice::set(ALIAS, InterfaceSetting::Address(address))?;
    netdevice::set(ALIAS, InterfaceSetting::Netmask(Ipv4Addr::BROADCAST))?;
    let [_, storm] = address::STORM;
    netdevice::set(
        STORM_ALIAS,
        InterfaceSetting::Address(Ipv4Addr::from_bits(storm.to_bits() + 1)),
    )?;
    netdevice::set(
        STORM_ALIAS,
        InterfaceSetting::Netmask(Ipv4Addr::new(255, 255, 0, 0)),
    )
}
