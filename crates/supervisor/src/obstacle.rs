//! Kernels and policies that hinder a supervisor, and the self-test that finds them.

use crate::drive::{Config, Supervisor};
use berth_node::instance::InstanceId;
use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::alarm;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

/// Why clients cannot be handed over here, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    #[error(
        "the kernel has no seccomp notification for this machine: it needs CONFIG_SECCOMP_FILTER, and amd64 or arm64"
    )]
    NoNotification,
    #[error(
        "the kernel refuses the filter: it is older than Linux 5.19, or that of a sandbox such as gVisor: use another kernel, or --pass relay"
    )]
    OldKernel,
    #[error(
        "another process listens to this container's system calls already: take the listener out of its seccomp profile (listenerPath), \
         or use --pass relay"
    )]
    AnotherListener,
    #[error(
        "seccomp(2) is forbidden ({0}): allow it in the container's seccomp profile, the unit's SystemCallFilter=, AppArmor or SELinux"
    )]
    Forbidden(io::Error),
    #[error(
        "the memory of the server cannot be read and written ({0}): set the sysctl kernel.yama.ptrace_scope to 0 or 1, let this uid read \
         the program's file, and allow ptrace in AppArmor or SELinux"
    )]
    Memory(io::Error),
    #[error(
        "/proc does not show the descriptors of the server ({0}): mount it, and allow ptrace (read) in AppArmor or SELinux"
    )]
    Proc(io::Error),
    #[error("the kernel does not put a socket into the server ({0}): allow it in AppArmor or SELinux")]
    Descriptor(io::Error),
    #[error(
        "a process that the server started binds the address, and sockets can be given to the server alone: start kube-apiserver itself, or in a \
         script by exec, or use --pass relay"
    )]
    Descendant,
    #[error("a step of the handover failed ({0}): if that stays so, use --pass relay")]
    Other(io::Error),
}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Self {
        Self::Other(error)
    }
}

impl Obstacle {
    /// Of an error of [`berth_os::seccomp::start`].
    fn at_start(error: io::Error) -> Self {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOSYS) => Self::NoNotification,
            Some(Errno::EINVAL) => Self::OldKernel,
            Some(Errno::EBUSY) => Self::AnotherListener,
            Some(Errno::EPERM | Errno::EACCES) => Self::Forbidden(error),
            // The child was killed, as filters of systemd do.
            None if error.kind() == io::ErrorKind::UnexpectedEof => Self::Forbidden(error),
            _ => Self::Other(error),
        }
    }
}

/// Hands a client over once, to a child of this process.
///
/// To be called by a process with one thread and no other child.
///
/// # Errors
/// See [`Obstacle`].
pub fn self_test() -> Result<(), Obstacle> {
    let mask = SigSet::thread_get_mask().map_err(io::Error::from)?;
    let tried = supervise();
    mask.thread_set_mask().map_err(io::Error::from)?;
    tried
}

fn supervise() -> Result<(), Obstacle> {
    // Shims do not connect.
    let (shims, _other_end) = UnixStream::pair()?;
    let instance = InstanceId::parse("self-test").map_err(io::Error::other)?;
    let config = Config { instance, address: (Ipv4Addr::LOCALHOST, 0).into(), shims: shims.into(), once: false };
    let mut supervisor = Supervisor::launch(config, &Signal::SIGCHLD.into(), serve).map_err(Obstacle::at_start)?;
    let status = supervisor.drive()?;
    supervisor.outcome(status)
}

/// The server dials its own listener.
fn serve() -> io::Error {
    // Ends a hang.
    alarm::set(5);
    let served = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| {
        let mut client = TcpStream::connect(listener.local_addr()?)?;
        let (mut accepted, peer) = listener.accept()?;
        accepted.write_all(&[u8::from(peer == client.local_addr()?)])?;
        let mut is_known = [0];
        client.read_exact(&mut is_known)?;
        if is_known == [1] { Ok(()) } else { Err(Errno::EADDRNOTAVAIL.into()) }
    });
    served.err().unwrap_or_else(|| io::Error::from_raw_os_error(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where doctor splits a message, too.
    #[test]
    fn each_error_of_the_kernel_names_what_to_do() {
        for (number, start, fix) in [
            (
                Errno::ENOSYS,
                "the kernel has no seccomp notification for this machine",
                "it needs CONFIG_SECCOMP_FILTER",
            ),
            (Errno::EINVAL, "the kernel refuses the filter", "use another kernel, or --pass relay"),
            (Errno::EBUSY, "another process listens", "take the listener out"),
            (Errno::EPERM, "seccomp(2) is forbidden (", "allow it in the container's seccomp profile"),
            (Errno::ENOMEM, "a step of the handover failed (", "if that stays so, use --pass relay"),
        ] {
            let message = Obstacle::at_start(number.into()).to_string();
            let (cause, told) = message.rsplit_once(": ").unwrap();
            assert!(cause.starts_with(start) && told.starts_with(fix), "{message}");
        }
        let killed = Obstacle::at_start(io::ErrorKind::UnexpectedEof.into());
        assert!(matches!(killed, Obstacle::Forbidden(_)), "{killed}");
    }
}
