//! Steering by the kernel: new connections to a port of this node go to a listener of this process,
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
use berth_os::explained;
use berth_os::{clock, socket};
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::time::Duration;

/// The path is not /proc/self, which is the namespace of the process's first thread.
const NAMESPACE: &str = "/proc/thread-self/ns/net";

/// A steered port of this network namespace. The kernel steers while the value lives, is on, and is
/// renewed.
#[derive(Debug)]
pub struct Steering {
    /// The attachment of the program to the network namespace. Dropped first.
    _link: Link,
    /// The attachments of the programs for localhost.
    localhost: Vec<Link>,
    program: Steerer,
    namespace: File,
    /// Time for which a renewal is valid.
    lease: Duration,
}

impl Steering {
    /// Prepares steering of a port on the addresses of the replaced listener: `0.0.0.0` and `::`
    /// stand for every address of their family, and an empty list for every address of either
    /// family. Steering begins off and without listeners.
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
                "{other} steers in this network namespace already: berth's program takes precedence until it is off"
            );
        }
        #[cfg(debug_assertions)]
        if bpf::is_unsteered() {
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
    /// Connections of threads named `exempt` are left alone. Switched on and off together with the
    /// port. Linux 5.14.
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
        self.localhost =
            self.program
                .cover_localhost((open.as_fd(), cookie), exempt, port, addresses)?;
        Ok(())
    }

    /// Gives new connections of the listener's family to the listener. The listener is not kept
    /// open. A socket that stopped listening and listens again has to be given again.
    ///
    /// # Errors
    /// The socket does not listen, the kernel cannot steer to it, or it belongs to another network
    /// namespace.
    pub fn give_to(&self, listener: BorrowedFd<'_>) -> Result<(), Error> {
        // The kernel would accept a listener of another namespace, and lose the connections that
        // are steered to it.
        let namespace = socket::network_namespace(listener).map_err(Error::Listener)?;
        if namespace_inode(namespace.as_fd()) != namespace_inode(self.namespace.as_fd()) {
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

    /// Steers from the next new connection on, while the lease is renewed.
    pub fn start(&self) {
        self.renew();
        self.program.switch(true);
    }

    /// Stops steering: from the next new connection on, the port's own listeners get connections.
    /// Connections with a handshake in progress still arrive here.
    pub fn stop(&self) {
        self.program.switch(false);
    }

    /// Renews the lease, to show that the accepting process is alive. The program passes once the
    /// lease has expired, so that a hung shim does not swallow connections.
    pub fn renew(&self) {
        // If the clock fails, the lease ends.
        if let Ok(now) = clock::read_monotonic() {
            self.program.steer_until(now.saturating_add(self.lease));
        }
    }

    /// True if new connections are steered now: steering is on, and the lease is valid.
    pub fn is_steering(&self) -> bool {
        self.program.is_on() && clock::read_monotonic().is_ok_and(|now| now <= self.program.until())
    }

    /// Returns the number of connections that were steered so far, including covered connections to
    /// localhost.
    pub fn steered(&self) -> u64 {
        self.program.steered()
    }
}

/// Returns the inode of a network namespace, which identifies the namespace.
fn namespace_inode(namespace: BorrowedFd<'_>) -> Option<u64> {
    socket::read_inode(namespace)
}

#[cfg(test)]
mod tests;
