//! The environment of kube-apiserver. Pure: no I/O, no log.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// The variable with settings of Go's runtime: `key=value`, separated by commas. Of one key the last counts.
pub const GODEBUG: &str = "GODEBUG";

/// From Go 1.24 a listener is one of MPTCP where the kernel has that (net.mptcp.enabled=1), and the kernel does not
/// steer to such a one. A shim and its instance are on one node: a second path would be of no use.
const MULTIPATH: &str = "multipathtcp";

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Godebug {
    /// The new value: the old one, with plain TCP listeners.
    Set(OsString),
    /// It stays, since it has a value for `multipathtcp`: this one.
    Kept(OsString),
}

/// From the value that there is.
#[must_use]
pub fn godebug(given: Option<&OsStr>) -> Godebug {
    let given = given.unwrap_or_default();
    let settings = given.as_bytes().split(|byte| *byte == b',');
    let chosen = |setting: &[u8]| setting.strip_prefix(MULTIPATH.as_bytes())?.strip_prefix(b"=").map(<[u8]>::to_vec);
    match settings.filter_map(chosen).next_back() {
        Some(value) => Godebug::Kept(OsStr::from_bytes(&value).to_owned()),
        None => {
            let mut value = given.to_owned();
            if !value.is_empty() {
                value.push(",");
            }
            value.push(MULTIPATH);
            value.push("=0");
            Godebug::Set(value)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(given: &str) -> Godebug {
        godebug(Some(given.as_ref()))
    }

    #[test]
    fn listeners_of_tcp_are_asked_for_beside_what_is_there() {
        let set = |value: &str| Godebug::Set(value.into());
        assert_eq!(godebug(None), set("multipathtcp=0"));
        for (given, now) in [
            ("", "multipathtcp=0"),
            ("http2server=0", "http2server=0,multipathtcp=0"),
            ("a=1,b=2", "a=1,b=2,multipathtcp=0"),
            // Other keys, and none that Go knows.
            ("xmultipathtcp=1,multipathtcps=1", "xmultipathtcp=1,multipathtcps=1,multipathtcp=0"),
            ("multipathtcp", "multipathtcp,multipathtcp=0"),
        ] {
            assert_eq!(of(given), set(now), "{given}");
        }
        let bytes = OsStr::from_bytes(b"a=\xff");
        assert_eq!(godebug(Some(bytes)), Godebug::Set(OsStr::from_bytes(b"a=\xff,multipathtcp=0").into()));
    }

    #[test]
    fn who_has_chosen_is_left_alone() {
        for (given, value) in [
            ("multipathtcp=1", "1"),
            ("a=1,multipathtcp=2,b=2", "2"),
            ("multipathtcp=0,multipathtcp=3", "3"),
            ("multipathtcp=", ""),
        ] {
            assert_eq!(of(given), Godebug::Kept(value.into()), "{given}");
        }
    }
}
