//! Errors: each says why connections cannot be steered, and how to fix that.

use super::self_test::Tried;
use berth_os::bpf::{Refused, Step};
use berth_os::process;
use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "{refused}: steering needs Linux 5.9 or newer with CONFIG_BPF_SYSCALL, and for localhost Linux 5.14 or newer with CONFIG_CGROUP_BPF; this kernel is {kernel}"
    )]
    Kernel { refused: Refused, kernel: String },
    #[error(
        "{refused}: this process lacks {}; run it as root, and in a container add the capabilities BPF and NET_ADMIN",
        .lacks.join(" and ")
    )]
    Capabilities {
        refused: Refused,
        lacks: Vec<&'static str>,
    },
    /// The process has the capabilities, and is refused nevertheless. They count in the first user
    /// namespace only, and a policy may forbid bpf(2).
    #[error(
        "{0}: this process has CAP_BPF and CAP_NET_ADMIN, so the cause is something else: a user namespace (run berth outside), a seccomp or LSM profile without bpf(2), kernel lockdown, or, before Linux 5.11, the limit of locked memory (ulimit -l unlimited)"
    )]
    Forbidden(Refused),
    #[error(
        "the kernel does not accept berth's BPF program: steering needs Linux 5.9 or newer, and for localhost Linux 5.14 or newer; this kernel is {kernel}; if the kernel is new enough, please report this error. {refused}"
    )]
    Verifier { refused: Refused, kernel: String },
    #[error("cannot inspect the listener to steer to: {0}")]
    Listener(io::Error),
    #[error(
        "the listener to steer to belongs to another network namespace: connections would be lost; start the listener and berth in one network namespace"
    )]
    Elsewhere,
    #[error(
        "{0}: 64 programs, the kernel's limit, steer in this network namespace already; end one of the programs (bpftool net)"
    )]
    Full(Refused),
    #[error("cannot open this thread's network namespace: {0}: is /proc mounted?")]
    Namespace(io::Error),
    #[error("cannot open the cgroup {path}: {source}", path = .0.display(), source = .1)]
    Cgroup(PathBuf, io::Error),
    #[error(
        "cannot name this network namespace to the kernel: {0}: steering of localhost needs Linux 5.14 or newer"
    )]
    Cookie(io::Error),
    #[error("{0}")]
    Other(Refused),
    #[error("self-test: a steered connection to {to} did not arrive: {why}")]
    NotArrived {
        to: std::net::SocketAddr,
        why: String,
    },
    #[error("self-test: neither IPv4 ({ipv4}) nor IPv6 ({ipv6}) allows the test")]
    Untried { ipv4: Tried, ipv6: Tried },
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        // If this process's capabilities cannot be read, the error names none as missing.
        explain_refusal(
            refused,
            process::missing_capabilities_for_bpf().unwrap_or_default(),
            process::kernel_release,
        )
    }
}

pub(super) fn explain_refusal(
    refused: Refused,
    lacks: Vec<&'static str>,
    kernel: impl FnOnce() -> String,
) -> Error {
    match (refused.step, refused.source.raw_os_error()) {
        (Step::Program, _) if !refused.log.is_empty() => Error::Verifier {
            refused,
            kernel: kernel(),
        },
        (_, Some(libc::EPERM | libc::EACCES)) if lacks.is_empty() => Error::Forbidden(refused),
        (_, Some(libc::EPERM | libc::EACCES)) => Error::Capabilities { refused, lacks },
        (Step::Link, Some(libc::E2BIG)) => Error::Full(refused),
        // These errors mean that the kernel lacks the system call, the command, the type of map or
        // program, or a field.
        (
            Step::Map | Step::Program | Step::Link | Step::Query,
            Some(libc::ENOSYS | libc::EINVAL | libc::E2BIG),
        ) => Error::Kernel {
            refused,
            kernel: kernel(),
        },
        _ => Error::Other(refused),
    }
}
