//! Replaces the kernel where BPF programs cannot be loaded, for example in a user namespace. Calls
//! succeed, but no connection is steered. Tests that do not check which listener gets a connection
//! use this module. Only debug builds contain the module, so no release does.

use super::{Refused, Step};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// The environment variable that turns off steering for a test.
pub const UNSTEERED: &str = "BERTH_TEST_UNSTEERED";

/// The warning that is logged if steering is turned off. Operators never see the warning, so the
/// documents do not explain it.
pub const UNSTEERED_WARNING: &str = "NOTHING IS STEERED: BERTH_TEST_UNSTEERED is set, for a test";

/// True if [`UNSTEERED`] is set.
pub fn is_unsteered() -> bool {
    std::env::var_os(UNSTEERED).is_some()
}

/// Returns a replacement for the descriptor of a map, a program or a link: memory that begins as
/// zeroes.
pub(super) fn stand_in_descriptor() -> io::Result<OwnedFd> {
    let memory = memfd_create(c"berth-unsteered", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, 4096)?;
    Ok(memory)
}

/// Refuses a socket that does not listen, as the kernel does.
pub(super) fn check_listens(socket: BorrowedFd<'_>) -> Result<(), Refused> {
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
