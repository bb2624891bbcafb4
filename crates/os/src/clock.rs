//! Clocks that nobody can set, and the ID of the boot from which they count.

use nix::time::{ClockId, clock_gettime};
use procfs::sys::kernel::random;
use std::io;
use std::time::Duration;

/// Returns the time since boot, including time in which the machine slept. Nobody can set this
/// clock, and every process of a node reads the same time, so processes can exchange expiry times.
/// (A time namespace would shift the clock; Kubernetes makes none.)
pub fn read_boottime() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.into())
}

/// Returns the time since boot, excluding time in which the machine slept. BPF programs read this
/// clock. (A time namespace would shift the clock for a process, but not for BPF programs.)
pub fn read_monotonic() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into())
}

/// Returns the ID of the boot from which [`read_boottime`] counts: a random UUID, equal in every
/// container of a node.
pub fn boot_id() -> io::Result<String> {
    let failed = |why: &dyn std::fmt::Display| {
        io::Error::other(format!(
            "the boot's ID cannot be read: {why}: is /proc mounted?"
        ))
    };
    let id = random::boot_id().map_err(|error| failed(&error))?;
    if is_uuid(&id) {
        Ok(id)
    } else {
        Err(failed(&format_args!("{id:?} is no UUID")))
    }
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boottime_advances_within_one_boot() {
        let before = read_boottime().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert!(read_boottime().unwrap() >= before + Duration::from_millis(2));
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
    }

    #[test]
    fn a_boot_id_is_a_uuid() {
        let good = "0f2c6e3a-8f4e-4c7e-9a57-1f2d3c4b5a69";
        assert!(is_uuid(good) && is_uuid(&boot_id().unwrap()));
        for bad in [
            "",
            "\n",
            &good[1..],
            &format!("{good}0"),
            &good.replace('-', "_"),
        ] {
            assert!(!is_uuid(bad), "{bad:?}");
        }
    }
}
