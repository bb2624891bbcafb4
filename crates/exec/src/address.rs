//! Chooses an instance's own address. It is a random address in 127.0.0.0/8 on which the berth's
//! port is free.
//!
//! Addresses are random instead of counted up, so that two instances that start at once need not
//! agree on anything.

use berth_os::{proc_net, socket};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Number of random addresses that are tried. If the port is in use on all of them, it counts as
/// held on every address of 127.0.0.0/8. A random address is in use with a chance of one in 16
/// million, so two would be enough; the rest is a margin.
const MAX_TRIES: usize = 16;

/// The reason why no free address was found.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct AddressError(String);

fn suggest_fix(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EADDRNOTAVAIL) => ": is the loopback interface up?",
        Some(libc::EACCES) => {
            ": a port below 1024 needs CAP_NET_BIND_SERVICE, or give a higher port"
        }
        _ => "",
    }
}

/// True if an instance may have this address. It must be in 127.0.0.0/8, but not in 127.0.0.0/16,
/// where resolvers and other daemons listen. Its last octet must be neither 0 nor 255.
#[must_use]
pub fn is_usable(address: Ipv4Addr) -> bool {
    let [a, b, _, d] = address.octets();
    a == 127 && b != 0 && d != 0 && d != 255
}

/// Returns a random address that [`is_usable`].
///
/// # Errors
/// The system has no random bytes to give.
pub fn random_address() -> Result<Ipv4Addr, getrandom::Error> {
    loop {
        let [b, c, d, _] = getrandom::u32()?.to_ne_bytes();
        let address = Ipv4Addr::new(127, b, c, d);
        if is_usable(address) {
            return Ok(address);
        }
    }
}

/// Returns the previous address if it is free, or else a random free address that no instance has.
///
/// # Errors
/// See [`AddressError`]; the message names the process that holds the port.
pub fn choose_address(
    port: u16,
    previous: Option<SocketAddr>,
    taken: &[SocketAddr],
) -> Result<SocketAddr, AddressError> {
    let previous = previous
        .filter(|previous| previous.port() == port)
        .and_then(|previous| match previous.ip() {
            IpAddr::V4(ip) if is_usable(ip) => Some(ip),
            _ => None,
        });
    let mut last = None;
    for tried in 0..MAX_TRIES {
        let ip = match previous {
            Some(ip) if tried == 0 => ip,
            _ => random_address().map_err(|error| {
                AddressError(format!(
                    "the system gives no random bytes for an address: {error}"
                ))
            })?,
        };
        let address = SocketAddr::from((ip, port));
        if taken.contains(&address) {
            continue;
        }
        // The check binds with SO_REUSEADDR, as kube-apiserver does, so that connections of an
        // earlier instance in TIME_WAIT do not count. Its socket does not listen: a client that
        // dials a restarting instance meanwhile would be reset.
        match socket::is_listened_on(address) {
            Ok(false) => return Ok(address),
            Ok(true) => last = Some(address),
            Err(error) => {
                return Err(AddressError(format!(
                    "cannot bind {address}: {error}{}",
                    suggest_fix(&error)
                )));
            }
        }
    }
    let why = proc_net::explain_in_use(last.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, port).into()));
    Err(AddressError(format!(
        "port {port} is held on every 127.x address that was tried ({MAX_TRIES}): {why}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn random_addresses_are_usable() {
        for _ in 0..1000 {
            assert!(is_usable(random_address().unwrap()));
        }
        for bad in [
            [127, 0, 3, 4],
            [127, 1, 2, 0],
            [127, 1, 2, 255],
            [10, 1, 2, 3],
        ] {
            assert!(!is_usable(bad.into()), "{bad:?}");
        }
    }

    #[test]
    fn the_previous_address_is_preferred_while_it_is_free_and_usable() {
        let held = TcpListener::bind((random_address().unwrap(), 0)).unwrap();
        let held = held.local_addr().map(|address| (held, address)).unwrap();
        let port = held.1.port();
        let previous = SocketAddr::from((random_address().unwrap(), port));
        assert_eq!(choose_address(port, Some(previous), &[]).unwrap(), previous);
        assert_ne!(
            choose_address(port, Some(previous), &[previous]).unwrap(),
            previous
        );
        assert_ne!(choose_address(port, Some(held.1), &[]).unwrap(), held.1);
        let outside = SocketAddr::from(([127, 0, 0, 1], port));
        assert_ne!(choose_address(port, Some(outside), &[]).unwrap(), outside);
        assert_eq!(
            choose_address(port, Some(SocketAddr::new(previous.ip(), 1)), &[])
                .unwrap()
                .port(),
            port
        );
    }

    #[test]
    fn a_wildcard_listener_is_explained() {
        let wildcard = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = wildcard.local_addr().unwrap().port();
        let error = choose_address(port, None, &[]).unwrap_err().to_string();
        assert!(error.contains("7443"), "{error}");
    }
}
