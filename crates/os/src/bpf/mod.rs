//! Steering: a BPF program of type sk_lookup, which the kernel runs to find the listener of each new connection in a
//! network namespace. Linux 5.9; CAP_NET_ADMIN, and CAP_BPF or CAP_SYS_ADMIN. Connections to localhost have others, which it runs for
//! connect(2): Linux 5.14.
//!
//! What it decides is in `sk_lookup` and `connect`, and what these share in `parts`. The program is short, and depends on addresses that are known when it is loaded;
//! so a small assembler makes it. A library would bring a compiler for BPF or a loader of ELF files, for some 60 instructions
//! each and eight commands of bpf(2).
//!
//! Programs do not depend on the machine. Addresses are compared and passed on as their four bytes, whatever these are as a number; which
//! ports the kernel has in the host's order and which in the network's stands beside the offsets. What is loaded and stored is aligned,
//! and the verifier checks it everywhere. Memory that is shared with a program begins at a page of whatever size, and has room in one.
//!
//! Nothing is pinned. What steers is a descriptor: when its holder ends in whatever way, the port's own listeners
//! get new connections again. A child that is forked without execve would hold it too.

mod asm;
mod connect;
mod parts;
mod sk_lookup;
mod sys;
#[cfg(debug_assertions)]
mod unsteered;

pub use parts::Slot;
pub use sk_lookup::{Link, Purpose, Steerer};
#[cfg(debug_assertions)]
pub use unsteered::{UNSTEERED, UNSTEERED_WARNING, is_unsteered};

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

/// What could not be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The program could not be made.
    Assemble,
    /// Memory that the program shares, or its map of listeners.
    Map,
    /// The program was not loaded.
    Program,
    /// It was not attached to the network namespace.
    Link,
    /// It was not attached to the cgroup.
    Cgroup,
    /// A socket was not taken for a listener.
    Listener,
    /// What is attached there is not shown.
    Query,
}

/// A step that the kernel refused.
#[derive(Debug)]
pub struct Refused {
    pub step: Step,
    pub source: io::Error,
    /// The log of the kernel's verifier; mostly empty.
    pub log: String,
}

impl Refused {
    fn at(step: Step) -> impl Fn(io::Error) -> Self {
        move |source| Self {
            step,
            source,
            log: String::new(),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.step {
            Step::Assemble => "cannot make the BPF program",
            Step::Map => "cannot make a BPF map",
            Step::Program => "cannot load the BPF program",
            Step::Link => "cannot attach the BPF program to the network namespace",
            Step::Cgroup => "cannot attach the BPF program to the root of cgroup v2",
            Step::Listener => "cannot steer to this socket",
            Step::Query => {
                "cannot list the BPF programs that are attached to the network namespace"
            }
        };
        write!(to, "{what}: {}", self.source)?;
        if self.log.is_empty() {
            Ok(())
        } else {
            write!(to, "\n{}", self.log)
        }
    }
}

impl std::error::Error for Refused {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// A program that steers already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    pub id: u32,
    /// Its name, and the user ID that loaded it. None without CAP_SYS_ADMIN.
    pub known: Option<(String, u32)>,
}

impl fmt::Display for Attached {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "BPF program {}", self.id)?;
        match &self.known {
            Some((name, uid)) => write!(to, " ({name:?}, loaded by uid {uid})"),
            None => write!(to, " (CAP_SYS_ADMIN would show its name)"),
        }
    }
}

/// The programs that steer in a network namespace, in the order in which the kernel runs them.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN, `EINVAL` where the kernel has no such programs.
pub fn attached(namespace: BorrowedFd<'_>) -> Result<Vec<Attached>, Refused> {
    let ids = sys::attached(namespace)?;
    Ok(ids
        .into_iter()
        .map(|id| Attached {
            id,
            known: sys::program_info(id).ok(),
        })
        .collect())
}
