//! A network namespace for this process. Nothing outside can be reached from the namespace, and
//! nothing inside from outside. The kernel removes the namespace after its last process.

use super::address;
use berth_os::netdevice::{self, InterfaceSetting};
use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getegid, geteuid};
use std::net::Ipv4Addr;
use std::{fs, io};

/// The only interface of a new namespace.
const LOOPBACK: &str = "lo";

/// Alias of the loopback interface, for a second address.
pub const LOOPBACK_ALIAS: &str = "lo:1";

/// Alias of the loopback interface with the storm's network. On a loopback interface, every address
/// of a network is local, so each client of the storm can dial from one of its own.
const STORM_ALIAS: &str = "lo:2";

/// The reason why there is no namespace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused to create a namespace.
    #[error(
        "cannot make a network namespace: {0} (run as root, or allow unprivileged user namespaces: \
         see the sysctls user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns)"
    )]
    Unshare(io::Error),
    /// The namespace was created, but has no usable interface.
    #[error("cannot set up the interface {LOOPBACK} of a network namespace: {0} (run as root)")]
    Interface(io::Error),
}

/// Moves this process to a new network namespace. The process must have a single thread. The
/// loopback interface is up and has `address` in addition to 127.0.0.0/8. Without the privilege, a
/// user namespace is created, too, in which the user stays the same.
///
/// # Errors
/// The error of the kernel. Nothing has changed if the kernel refused the namespace.
pub fn enter_netns(address: Ipv4Addr) -> Result<(), Error> {
    let (uid, gid) = (geteuid(), getegid());
    match enter_netns_without_userns(address) {
        Err(Error::Unshare(error)) if error.raw_os_error() == Some(Errno::EPERM as i32) => {
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET)
                .map_err(|e| Error::Unshare(e.into()))?;
            fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).map_err(Error::Unshare)?;
            // The kernel lets an unprivileged process map its group only if setgroups(2) is denied.
            fs::write("/proc/self/setgroups", "deny").map_err(Error::Unshare)?;
            fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).map_err(Error::Unshare)?;
        }
        done => return done,
    }
    set_up_loopback(address).map_err(Error::Interface)
}

/// Like [`enter_netns`], but never with a user namespace. BPF programs cannot be loaded in a user
/// namespace.
///
/// # Errors
/// The error of the kernel. Nothing has changed if the kernel refused the namespace.
pub fn enter_netns_without_userns(address: Ipv4Addr) -> Result<(), Error> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| Error::Unshare(errno.into()))?;
    set_up_loopback(address).map_err(Error::Interface)
}

/// Sets up the loopback interface. An address on loopback serves as well as one on a dummy or veth
/// interface, which some kernels lack: the kernel routes all traffic to local addresses over
/// loopback.
fn set_up_loopback(address: Ipv4Addr) -> io::Result<()> {
    netdevice::set_interface(LOOPBACK, InterfaceSetting::Up)?;
    netdevice::set_interface(LOOPBACK_ALIAS, InterfaceSetting::Address(address))?;
    netdevice::set_interface(
        LOOPBACK_ALIAS,
        InterfaceSetting::Netmask(Ipv4Addr::BROADCAST),
    )?;
    let [_, storm] = address::STORM_NETWORKS;
    netdevice::set_interface(
        STORM_ALIAS,
        InterfaceSetting::Address(Ipv4Addr::from_bits(storm.to_bits() + 1)),
    )?;
    netdevice::set_interface(
        STORM_ALIAS,
        InterfaceSetting::Netmask(Ipv4Addr::new(255, 255, 0, 0)),
    )
}
