//! Makes the kernel steer: new connections to a port of this node go to a listener of this process,
//! whichever process listens on the port. `berth bridge` steers to its own shim.
//!
//! [`Steering`] owns the program ([`berth_os::bpf`]) and decides when the program steers.
//! [`self_test()`] tries steering on a free port before anything is changed. Every [`Error`] means
//! that a requirement is missing (exit status 69), and that nothing has changed.

#![forbid(unsafe_code)]

mod error;
mod self_test;

pub use berth_os::bpf::Purpose;
pub use error::Error;
pub use self_test::{Tried, self_test, self_test_of_localhost};

use berth_os::bpf::{self, Link, Slot, Steerer};
use berth_os::{clock, socket};
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

/// The path of this thread's network namespace. /proc/self would be the namespace of the process's
/// first thread.
const NAMESPACE: &str = "/proc/thread-self/ns/net";

/// A port of this network namespace with its steering. The kernel steers the port's new connections
/// while this value exists, is switched on, and is renewed.
#[derive(Debug)]
pub struct Steering {
    /// The attachment of the program to the network namespace. As the first field, it is dropped
    /// first.
    _link: Link,
    /// The attachments of the programs that steer connections to localhost.
    localhost: Vec<Link>,
    program: Steerer,
    namespace: File,
    /// Time after a renewal until steering ends if no further renewal comes.
    lease: Duration,
}

impl Steering {
    /// Prepares steering of a port. `addresses` are those of the listener that is replaced:
    /// `0.0.0.0` and `::` stand for every address of their family, and an empty list for every
    /// address of either family. At first, steering is off and has no listener.
    ///
    /// Connections from 127.0.0.0/8 and `::1` are not steered. Programs that already steer in this
    /// network namespace are logged first; while steering is on, the choice of berth's program
    /// replaces theirs.
    ///
    /// # Errors
    /// A requirement is missing.
    pub fn new(
        purpose: Purpose,
        port: u16,
        addresses: &[IpAddr],
        lease: Duration,
    ) -> Result<Self, Error> {
        let namespace = File::open(NAMESPACE).map_err(Error::Namespace)?;
        for other in bpf::list_attached(namespace.as_fd())? {
            tracing::info!(
                port,
                "{other} steers in this network namespace already: berth's program takes precedence while berth steers"
            );
        }
        #[cfg(debug_assertions)]
        if bpf::is_steering_turned_off() {
            use berth_os::explained;
            tracing::warn!(code = %explained::UNSTEERED, port, "{}", bpf::UNSTEERED_WARNING);
        }
        let program = Steerer::load(purpose, port, addresses)?;
        let link = program.attach(namespace.as_fd())?;
        Ok(Self {
            _link: link,
            localhost: Vec::new(),
            program,
            namespace,
            lease,
        })
    }

    /// Steers connections to localhost, too: connections from processes below a cgroup of version 2
    /// to the port at 127.0.0.0/16 or `::1`, if these addresses belong to the replaced listener.
    /// Connections of threads named `exempt` are left alone. This steering is switched on and off
    /// together with the port's. Needs Linux 5.14.
    ///
    /// # Errors
    /// A requirement is missing. The port is steered nevertheless.
    pub fn cover_localhost(
        &mut self,
        cgroup: &Path,
        exempt: &str,
        port: u16,
        addresses: &[IpAddr],
    ) -> Result<(), Error> {
        let open = File::open(cgroup).map_err(|error| Error::Cgroup(cgroup.to_owned(), error))?;
        let cookie = socket::namespace_cookie().map_err(Error::Cookie)?;
        self.localhost = self.program.attach_localhost_programs(
            (open.as_fd(), cookie),
            exempt,
            port,
            addresses,
        )?;
        Ok(())
    }

    /// Makes a listener the target for new connections of its address family. This value does not
    /// keep the listener open. If the listener stops listening and listens again, call this
    /// function again.
    ///
    /// # Errors
    /// The socket does not listen, the kernel cannot steer to it, or it belongs to another network
    /// namespace.
    pub fn steer_to(&self, listener: BorrowedFd<'_>) -> Result<(), Error> {
        // The kernel would accept a listener of another namespace, but connections that are steered
        // to it would be lost.
        let namespace = socket::network_namespace(listener).map_err(Error::Listener)?;
        if socket::read_inode(namespace.as_fd()) != socket::read_inode(self.namespace.as_fd()) {
            return Err(Error::Elsewhere);
        }
        let address = socket::local_address(listener).map_err(Error::Listener)?;
        let slot = if address.is_ipv4() {
            Slot::Ipv4
        } else {
            Slot::Ipv6
        };
        Ok(self.program.set_listener(slot, listener)?)
    }

    /// Switches steering on, from the next new connection on. The kernel steers while
    /// [`Self::renew_lease`] is called in time.
    pub fn start(&self) {
        // If the clock cannot be read, the last lease stays.
        if let Ok(now) = clock::read_monotonic() {
            self.program.steer_until(now.saturating_add(self.lease));
        }
        self.program.set_steering(true);
    }

    /// Switches steering off: from the next new connection on, the port's own listeners get
    /// connections. A connection with a handshake in progress still arrives at the steered
    /// listener.
    pub fn stop(&self) {
        self.program.set_steering(false);
    }

    /// Renews the lease, to show that this process still accepts. When the lease has expired, the
    /// program stops steering, so that connections do not go to a shim that hangs. An expired lease
    /// is not renewed. Only [`Steering::start`] begins a new lease. So the holder notices the
    /// lapse, and allows for handshakes that reached the port's own listeners during the lapse.
    pub fn renew_lease(&self) {
        let last = self.program.steering_deadline();
        // If the clock cannot be read, the lease is not renewed and expires.
        let Ok(now) = clock::read_monotonic() else {
            return;
        };
        let next = now.saturating_add(self.lease);
        if self.program.is_steering() && now <= last && self.program.replace_deadline(last, next) {
            // This process may have been stopped since, until after the end of the lease. If
            // another thread has started a new lease meanwhile, the new lease stays.
            if clock::read_monotonic().is_ok_and(|now| now > last) {
                self.program.replace_deadline(next, last);
            }
        }
    }

    /// True if the kernel steers new connections now: steering is switched on, and the lease has
    /// not expired.
    pub fn is_steering(&self) -> bool {
        self.program.is_steering()
            && clock::read_monotonic().is_ok_and(|now| now <= self.program.steering_deadline())
    }

    /// Returns the number of connections that were steered so far. Connections to localhost count
    /// if [`Self::cover_localhost`] covers them.
    pub fn count_steered_connections(&self) -> u64 {
        self.program.count_steered_connections()
    }
}

#[cfg(test)]
mod tests;
