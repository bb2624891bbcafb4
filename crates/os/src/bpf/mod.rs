//! Steering: a BPF program of type sk_lookup chooses the listener of each new connection in a
//! network namespace. Such programs need Linux 5.9 and CAP_NET_ADMIN, and CAP_BPF or CAP_SYS_ADMIN.
//! Connections to localhost have programs of their own, which the kernel runs for connect(2): Linux
//! 5.14.
//!
//! `sk_lookup` and `connect` decide which connections are steered. `parts` has what these two
//! share. A program is short, and depends on addresses that are known only when the program is
//! loaded, so a small assembler makes the program. A library would bring a compiler for BPF or a
//! loader of ELF files, for some 60 instructions a program and eight commands of bpf(2).
//!
//! Programs do not depend on the machine. A program compares and copies addresses in units of four
//! bytes, so the machine's byte order has no effect. The offsets' documentation says which ports
//! the kernel has in host byte order and which in network byte order. Every load and store is
//! aligned, and the verifier checks the alignment on every machine. Memory that is shared with a
//! program begins at the start of a page, whatever the page size, and fits into a single page.
//!
//! Nothing is pinned in the BPF file system. The kernel steers while a descriptor of the link is
//! open. When the process that holds the descriptor ends, for whatever reason, the port's own
//! listeners get new connections again. A child that is forked without execve would hold the
//! descriptor too.

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
pub use unsteered::{UNSTEERED, UNSTEERED_WARNING, is_steering_turned_off};

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;

/// A step of loading, attaching or listing programs. [`Refused`] names the step that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Making the program.
    Assemble,
    /// Making the memory that the program shares with this process, or the program's map of
    /// listeners.
    Map,
    /// Loading the program.
    Program,
    /// Attaching the program to the network namespace.
    Link,
    /// Attaching the program to the cgroup.
    Cgroup,
    /// Putting a socket into the map of listeners. The step fails if the socket does not listen.
    Listener,
    /// Listing the programs that are attached to the network namespace.
    Query,
}

/// The step that the kernel refused, with the kernel's error.
#[derive(Debug)]
pub struct Refused {
    pub step: Step,
    pub source: io::Error,
    /// The log of the kernel's verifier. The log is empty unless the verifier refused a program.
    pub log: String,
}

impl Refused {
    fn at_step(step: Step) -> impl Fn(io::Error) -> Self {
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

/// A program of type sk_lookup that is attached to a network namespace, and so steers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    pub id: u32,
    /// The program's name, and the ID of the user that loaded the program. `None` if this process
    /// has no CAP_SYS_ADMIN.
    pub known: Option<(String, u32)>,
}

impl fmt::Display for Attached {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "BPF program {}", self.id)?;
        match &self.known {
            Some((name, uid)) => write!(to, " ({name:?}, loaded by uid {uid})"),
            None => write!(to, " (CAP_SYS_ADMIN would show the program's name)"),
        }
    }
}

/// Returns the programs that steer in a network namespace, in the order in which the kernel runs
/// them.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN, `EINVAL` if the kernel has no programs of type sk_lookup.
pub fn list_attached(namespace: BorrowedFd<'_>) -> Result<Vec<Attached>, Refused> {
    let ids = sys::list_attached(namespace)?;
    Ok(ids
        .into_iter()
        .map(|id| Attached {
            id,
            known: sys::read_program_info(id).ok(),
        })
        .collect())
}
