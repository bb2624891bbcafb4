//! Steering by the kernel: new connections to a port of this node go to a listener of this process, whichever process listens on the
//! port. `berth bridge` steers to its own shim.
//!
//! [`Steering`] owns the program ([`berth_os::bpf`]) and decides when it steers. [`self_test()`] tries it on a free port
//! before anything is changed. Every [`Error`] means that something necessary is missing (exit status 69), and that
//! nothing has changed.

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

/// Not /proc/self, which is the namespace of the process's first thread.
const NAMESPACE: &str = "/proc/thread-self/ns/net";

/// A port of this network namespace that is steered while this lives, is on, and is renewed.
#[derive(Debug)]
pub struct Steering {
    /// What makes the kernel run the program. It is dropped first.
    _link: Link,
    /// The same for localhost.
    localhost: Vec<Link>,
    program: Steerer,
    namespace: File,
    /// How long a renewal is good for.
    lease: Duration,
}

impl Steering {
    /// For a port on the addresses of the listener that is replaced: `0.0.0.0` and `::` are all of their family, and
    /// no address is all of both. It begins off and without listeners.
    ///
    /// Connections from 127.0.0.0/8 and `::1` are not steered. Programs that steer in this network namespace already are
    /// logged first; while this one is on, its choice replaces theirs.
    ///
    /// # Errors
    /// Something necessary is missing.
    pub fn new(
        purpose: Purpose,
        port: u16,
        addresses: &[IpAddr],
        lease: Duration,
    ) -> Result<Self, Error> {
        let namespace = File::open(NAMESPACE).map_err(Error::Namespace)?;
        for other in bpf::attached(namespace.as_fd())? {
            tracing::info!(
                port,
                "{other} steers in this network namespace already: until berth's is off, berth's goes before"
            );
        }
        #[cfg(debug_assertions)]
        if bpf::is_unsteered() {
            tracing::warn!(port, "{}", bpf::UNSTEERED_WARNING);
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

    /// Covers localhost, too: what processes below a cgroup of version 2 connect to the port at 127.0.0.0/16 or `::1`, where these addresses
    /// are among those of the listener that is replaced; but not what threads of this name connect. On and off with the rest. Linux 5.14.
    ///
    /// # Errors
    /// Something necessary is missing, and the rest goes on without.
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

    /// Gives new connections of the listener's family to it. It is not kept open; one that stopped listening and listens
    /// again has to be given again.
    ///
    /// # Errors
    /// It does not listen, or is none that the kernel steers to, or belongs to another network namespace.
    pub fn give_to(&self, listener: BorrowedFd<'_>) -> Result<(), Error> {
        // The kernel would take one of another namespace, and lose what is steered to it.
        let namespace = socket::network_namespace(listener).map_err(Error::Listener)?;
        if inode(namespace.as_fd()) != inode(self.namespace.as_fd()) {
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

    /// From the next new connection on, for as long as it is renewed.
    pub fn on(&self) {
        self.renew();
        self.program.switch(true);
    }

    /// From the next new connection on, the port's own listeners get them. Connections whose handshake has begun still come.
    pub fn off(&self) {
        self.program.switch(false);
    }

    /// Shows that the process that accepts is alive. Otherwise the program passes when the lease has expired, so that a hung
    /// shim does not swallow connections.
    pub fn renew(&self) {
        // If there is no clock, the lease ends.
        if let Ok(now) = clock::monotonic() {
            self.program.steer_until(now.saturating_add(self.lease));
        }
    }

    /// Whether new connections are steered now: it is on, and renewed.
    pub fn is_steering(&self) -> bool {
        self.program.is_on() && clock::monotonic().is_ok_and(|now| now <= self.program.until())
    }

    /// New connections that were steered so far, and those to localhost that are covered.
    pub fn steered(&self) -> u64 {
        self.program.steered()
    }
}

/// Which network namespace it is.
fn inode(namespace: BorrowedFd<'_>) -> Option<u64> {
    socket::inode(namespace)
}

#[cfg(test)]
mod tests;
