//! Describes kernels and policies that keep a supervisor from working.

use nix::errno::Errno;
use std::io;

/// Reason why clients cannot be handed over on this machine. The message contains the fix.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    #[error(
        "the kernel has no seccomp notification for this machine: use a kernel with CONFIG_SECCOMP_FILTER, on amd64 or arm64"
    )]
    NoNotification,
    #[error(
        "the kernel refuses the filter: the kernel is older than Linux 5.19, or is a sandbox such as gVisor: use another kernel, or --pass relay"
    )]
    OldKernel,
    #[error(
        "another process listens to this container's system calls: take the listener out of the container's seccomp profile (listenerPath), \
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
        "/proc does not show the descriptors of the server ({0}): mount /proc, and allow ptrace (read) in AppArmor or SELinux"
    )]
    Proc(io::Error),
    #[error(
        "the kernel does not put a socket into the server ({0}): allow the server in AppArmor or SELinux to receive the socket"
    )]
    Descriptor(io::Error),
    #[error(
        "a process that the server started binds the address, and only the server itself can get sockets: start kube-apiserver directly, or in a \
         script with exec, or use --pass relay"
    )]
    Descendant,
    #[error("a step of the handover failed ({0}): if the error persists, use --pass relay")]
    Other(io::Error),
}

impl From<io::Error> for Obstacle {
    fn from(error: io::Error) -> Self {
        Self::Other(error)
    }
}

impl Obstacle {
    /// Returns the obstacle that an error of [`berth_os::seccomp::start_filtered`] means.
    pub(crate) fn from_start_error(error: io::Error) -> Self {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOSYS) => Self::NoNotification,
            Some(Errno::EINVAL) => Self::OldKernel,
            Some(Errno::EBUSY) => Self::AnotherListener,
            Some(Errno::EPERM | Errno::EACCES) => Self::Forbidden(error),
            // The child was killed before it had installed the filter. systemd's seccomp filter
            // does that to a process that makes a forbidden call.
            None if error.kind() == io::ErrorKind::UnexpectedEof => Self::Forbidden(error),
            _ => Self::Other(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `berth doctor` splits these messages into cause and fix at the last colon, so each must have
    /// one.
    #[test]
    fn each_error_of_the_kernel_names_what_to_do() {
        for (number, start, fix) in [
            (
                Errno::ENOSYS,
                "the kernel has no seccomp notification for this machine",
                "use a kernel with CONFIG_SECCOMP_FILTER",
            ),
            (
                Errno::EINVAL,
                "the kernel refuses the filter",
                "use another kernel, or --pass relay",
            ),
            (
                Errno::EBUSY,
                "another process listens",
                "take the listener out",
            ),
            (
                Errno::EPERM,
                "seccomp(2) is forbidden (",
                "allow it in the container's seccomp profile",
            ),
            (
                Errno::ENOMEM,
                "a step of the handover failed (",
                "if the error persists, use --pass relay",
            ),
        ] {
            let message = Obstacle::from_start_error(number.into()).to_string();
            let (cause, told) = message.rsplit_once(": ").unwrap();
            assert!(
                cause.starts_with(start) && told.starts_with(fix),
                "{message}"
            );
        }
        let killed = Obstacle::from_start_error(io::ErrorKind::UnexpectedEof.into());
        assert!(matches!(killed, Obstacle::Forbidden(_)), "{killed}");
    }
}
