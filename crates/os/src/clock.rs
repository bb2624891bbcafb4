//! A clock that does not jump, and which boot it counts from.

use nix::time::{ClockId, clock_gettime};
use std::io;
use std::time::Duration;

/// Where the kernel says which boot this is: a random UUID, the same in all containers of a node.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Length of a UUID as text.
const UUID_LEN: usize = 36;

/// Time since this boot, with the time that the machine slept: nobody sets it, and all processes of a node read the
/// same, so that one can say when its word runs out. (A time namespace would shift it; Kubernetes makes none.)
pub fn boottime() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.into())
}

/// Time since this boot, without the time that the machine slept: what BPF programs read. (A time namespace would shift
/// it for a process and not for them.)
pub fn monotonic() -> io::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.into())
}

/// The boot that [`boottime`] counts from.
pub fn boot_id() -> io::Result<String> {
    let failed = |kind, why: &str| io::Error::new(kind, format!("{BOOT_ID}: {why}: is /proc mounted?"));
    let text = std::fs::read_to_string(BOOT_ID).map_err(|error| failed(error.kind(), &error.to_string()))?;
    uuid(&text).map(ToOwned::to_owned).ok_or_else(|| failed(io::ErrorKind::InvalidData, "no UUID"))
}

fn uuid(text: &str) -> Option<&str> {
    let text = text.trim();
    let plain = text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    (plain && text.len() == UUID_LEN).then_some(text)
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
        assert_eq!(uuid(&format!("{good}\n")), Some(good));
        for bad in ["", "\n", &good[1..], &format!("{good}0"), &good.replace('-', "_")] {
            assert_eq!(uuid(bad), None, "{bad:?}");
        }
    }
}
