//! Arguments to checked types; every mistake names the option and the mend.

use std::net::SocketAddr;
use std::str::FromStr;

/// An address to listen on, from `--listen ADDR:PORT[,freebind]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen {
    /// Address and port; port 0 lets the kernel choose.
    pub addr: SocketAddr,
    /// Whether the address may be one that this node does not have yet (IP_FREEBIND).
    pub freebind: bool,
}

/// Why a text is no [`Listen`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListenError {
    /// What stands before the first comma is no address with a port.
    #[error("--listen {0:?}: give an IP address with a port, such as 10.0.0.5:6443 or [fd00::5]:6443")]
    Address(String),
    /// What follows a comma is unknown.
    #[error("--listen {0:?}: {1:?} is no option of an address: only ,freebind is")]
    Option(String, String),
}

impl FromStr for Listen {
    type Err = ListenError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.split(',');
        let first = parts.next().unwrap_or_default();
        let mut addr: SocketAddr = first.parse().map_err(|_| ListenError::Address(text.to_owned()))?;
        // Sockets are of one family only, so ::ffff:10.0.0.5 would never bind as IPv6.
        if addr.ip().to_canonical() != addr.ip() {
            addr.set_ip(addr.ip().to_canonical());
        }
        let mut freebind = false;
        for option in parts {
            match option {
                "freebind" => freebind = true,
                other => return Err(ListenError::Option(text.to_owned(), other.to_owned())),
            }
        }
        Ok(Self { addr, freebind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_addresses_of_both_families() {
        let listen = |text: &str| text.parse::<Listen>().map(|listen| (listen.addr.to_string(), listen.freebind));
        assert_eq!(listen("10.0.0.5:6443"), Ok(("10.0.0.5:6443".into(), false)));
        assert_eq!(listen("[fd00::5]:6443,freebind"), Ok(("[fd00::5]:6443".into(), true)));
        assert_eq!(listen("[::ffff:10.0.0.5]:6443"), Ok(("10.0.0.5:6443".into(), false)));
    }

    #[test]
    fn names_what_is_wrong() {
        for bad in ["", "10.0.0.5", ":6443", "localhost:6443", "fd00::5:6443", "10.0.0.5:65536", " 10.0.0.5:6443"] {
            assert_eq!(bad.parse::<Listen>(), Err(ListenError::Address(bad.into())));
        }
        let error = "10.0.0.5:6443,reuse".parse::<Listen>().unwrap_err().to_string();
        assert!(error.contains("--listen") && error.contains("\"reuse\"") && error.contains(",freebind"), "{error}");
    }
}
