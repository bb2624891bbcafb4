//! A clock that does not jump, and which boot it counts from.

use nix::time::{ClockId, clock_gettime};
use procfs::sys::kernel::random;
use std::io;
use std::time::Duration;

/// Time since this boot, with the time that the machine slept. It cannot be set, and all processes of a node read the
/// same, so expiry times can be exchanged. (A time namespace would shift it; Kubernetes makes none.)
pub fn boottime() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.into())
}

/// Time since this boot, without the time that the machine slept: what BPF programs read. (A time namespace would shift
/// it for a process and not for them.)
pub fn monotonic() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into())
}

/// The boot that [`boottime`] counts from: a random UUID, the same in all containers of a node.
pub fn boot_id() -> io::Result<String> {
    let failed = |why: &dyn std::fmt::Display| {
        io::Error::other(format!("the boot's ID cannot be read: {why}: is /proc mounted?"))
    };
    match random::boot_id().map_err(|error| failed(&error))? {
        id if id.is_empty() => Err(failed(&"its file is empty")),
        id => Ok(id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_within_one_boot() {
        let before = boottime().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert!(boottime().unwrap() >= before + Duration::from_millis(2));
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
    }

    #[test]
    fn a_boot_id_is_a_uuid() {
        let id = boot_id().unwrap();
        assert!(id.len() == 36 && id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-'), "{id:?}");
    }
}
