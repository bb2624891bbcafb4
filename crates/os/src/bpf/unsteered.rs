//! Stands in for the kernel's bpf(2) where a process may load no BPF program, for example in a user
//! namespace. Calls succeed, but no connection is steered. Tests that do not check which listener
//! gets a connection use this module. Only debug builds contain the module, so no release does.

use super::{Refused, Step};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// The environment variable that turns off steering for a test.
pub const UNSTEERED: &str = "BERTH_TEST_UNSTEERED";

/// The warning that is logged if steering is turned off. Operators never see the warning, so the
/// documents do not explain it.
pub const UNSTEERED_WARNING: &str = "NOTHING IS STEERED: BERTH_TEST_UNSTEERED is set, for a test";

/// True if the environment variable [`UNSTEERED`] turns off steering in this process.
pub fn is_steering_turned_off() -> bool {
    std::env::var_os(UNSTEERED).is_some()
}

/// Returns a memfd of zeroes, which stands for the descriptor of a map, a program or a link.
pub(super) fn stand_in_descriptor() -> io::Result<OwnedFd> {
    let memory = memfd_create(c"berth-unsteered", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, 4096)?;
    Ok(memory)
}

/// Returns an error if a socket does not listen, as the kernel does when a socket is put into a
/// map.
pub(super) fn check_listens(socket: BorrowedFd<'_>) -> Result<(), Refused> {
    let listens = socket2::SockRef::from(&socket)
        .is_listener()
        .map_err(Refused::at_step(Step::Listener))?;
    if listens {
        Ok(())
    } else {
        Err(Refused::at_step(Step::Listener)(
            io::Error::from_raw_os_error(libc::EOPNOTSUPP),
        ))
    }
}
