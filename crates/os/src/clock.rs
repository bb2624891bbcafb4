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
    fn time_goes_on_within_one_boot() {
        let before = boottime().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert!(boottime().unwrap() >= before + Duration::from_millis(2));
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
