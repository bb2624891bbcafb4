//! Stands in for the kernel where it takes no BPF program, as in a user namespace: nothing is steered, and calls succeed as if connections
//! were. Tests that do not ask which listener gets a connection use this. Debug builds alone have it, so nothing that ships does.

use super::{Refused, Step};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// The environment variable that asks for it.
pub const UNSTEERED: &str = "BERTH_TEST_UNSTEERED";

/// What is logged then. No operator ever sees it, so that it is not among the messages that are explained to one.
pub const UNSTEERED_WARNING: &str = "NOTHING IS STEERED: BERTH_TEST_UNSTEERED is set, for a test";

/// Whether nothing is steered.
pub fn is_unsteered() -> bool {
    std::env::var_os(UNSTEERED).is_some()
}

/// In place of a map, a program or a link: memory that begins as zeroes.
pub(super) fn descriptor() -> io::Result<OwnedFd> {
    let memory = memfd_create(c"berth-unsteered", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, 4096)?;
    Ok(memory)
}

/// What does not listen is refused, as by the kernel.
pub(super) fn check(socket: BorrowedFd<'_>) -> Result<(), Refused> {
    let listens = socket2::SockRef::from(&socket)
        .is_listener()
        .map_err(Refused::at(Step::Listener))?;
    if listens {
        Ok(())
    } else {
        Err(Refused::at(Step::Listener)(io::Error::from_raw_os_error(
            libc::EOPNOTSUPP,
        )))
    }
}
