//! The source address of connections to an instance, which names the client in the `sourceIPs` of
//! an audit log.
//!
//! | client | source |
//! | --- | --- |
//! | a.b.c.d, b below 252 | 127.b.c.d |
//! | IPv6; a.252.0.0 and above; 127.0.0.1's name (x.0.0.1), 127.0.0.0 | a hash in 127.252.0.0/14 |
//! | a client with more connections than a source has ports | further hashes in 127.252.0.0/14 |
//!
//! The hash is keyed by the boot's ID. All shims of a node agree on the hash until the next boot,
//! and a remote client cannot choose an address with the source of another client. Two clients
//! share a source with a chance of 1 in 260,000.

use berth_os::socket;
use std::collections::HashMap;
use std::hash::Hasher;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// IPv4 clients with this second octet or a higher one get a hashed source address. Few networks
/// have such addresses, unlike 10.240.0.0/16 or 10.0.0.0/16.
const FIRST_HASHED_OCTET: u8 = 252;

/// Most connections from one source to one address and port; further connections use the next
/// source. The kernel has 28,232 ports (`net.ipv4.ip_local_port_range`), and takes long to find one
/// of the last free ports.
const MAX_CONNECTIONS: u32 = 24_000;

/// Replaces `MAX_CONNECTIONS` where Linux tries only the even ports at first. When the even ports
/// have run out, from 14,116 connections on, each connect() takes some milliseconds.
const MAX_EVEN_CONNECTIONS: u32 = 8_000;

/// Source addresses in use, with the number of connections of each.
#[derive(Debug)]
pub struct Sources {
    key: (u64, u64),
    most: u32,
    in_use: Mutex<HashMap<Ipv4Addr, u32>>,
}

impl Sources {
    pub fn new(boot_id: &str) -> Self {
        // A UUID.
        let digits: String = boot_id.chars().filter(char::is_ascii_hexdigit).collect();
        let key = u128::from_str_radix(&digits, 16).unwrap_or_default();
        let most = if socket::supports_local_port_range() {
            MAX_CONNECTIONS
        } else {
            MAX_EVEN_CONNECTIONS
        };
        Self {
            key: ((key >> 64) as u64, key as u64),
            most,
            in_use: Mutex::default(),
        }
    }

    /// Returns the client's first source address that has room, counted from `number` on.
    pub(super) fn acquire_source(self: &Arc<Self>, client: IpAddr, mut number: u32) -> Source {
        let mut in_use = self.lock_in_use();
        loop {
            let address = self.source_address(client, number);
            let used = in_use.entry(address).or_default();
            if *used < self.most {
                *used += 1;
                return Source {
                    sources: self.clone(),
                    address,
                    number,
                };
            }
            number += 1;
        }
    }

    fn source_address(&self, client: IpAddr, number: u32) -> Ipv4Addr {
        let client = client.to_canonical();
        if let (IpAddr::V4(client), 0) = (client, number) {
            let [_, b, c, d] = client.octets();
            let name = Ipv4Addr::new(127, b, c, d);
            // 127.0.0.1 stands for a process of this node, and no other client gets this source
            // address.
            let local = name == Ipv4Addr::LOCALHOST && client != Ipv4Addr::LOCALHOST;
            if b < FIRST_HASHED_OCTET && !local && name != Ipv4Addr::new(127, 0, 0, 0) {
                return name;
            }
        }
        self.hashed_address(client, number)
    }

    fn hashed_address(&self, client: IpAddr, number: u32) -> Ipv4Addr {
        let [.., b, c, d] = hash_client(self.key, client, number).to_be_bytes();
        let address = Ipv4Addr::new(127, b | FIRST_HASHED_OCTET, c, d);
        // 127.255.255.255 is the broadcast address.
        if address == Ipv4Addr::new(127, 255, 255, 255) {
            Ipv4Addr::new(127, 255, 255, 254)
        } else {
            address
        }
    }

    fn lock_in_use(&self) -> MutexGuard<'_, HashMap<Ipv4Addr, u32>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hashes a client. All versions of berth must agree.
#[expect(
    deprecated,
    reason = "SipHasher's successor has no key, and may be another function in another version of berth"
)]
pub(crate) fn hash_client(key: (u64, u64), client: IpAddr, number: u32) -> u64 {
    let mut hasher = std::hash::SipHasher::new_with_keys(key.0, key.1);
    match client {
        IpAddr::V4(client) => hasher.write(&client.octets()),
        IpAddr::V6(client) => hasher.write(&client.octets()),
    }
    hasher.write(&number.to_be_bytes());
    hasher.finish()
}

/// A source address that a connection uses, until dropped.
#[derive(Debug)]
pub(super) struct Source {
    sources: Arc<Sources>,
    pub(super) address: Ipv4Addr,
    /// Number of the address among the client's source addresses.
    pub(super) number: u32,
}

impl Drop for Source {
    fn drop(&mut self) {
        let mut in_use = self.sources.lock_in_use();
        if let Some(used) = in_use.get_mut(&self.address) {
            *used -= 1;
            if *used == 0 {
                in_use.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const BOOT: &str = "a1c08b3e-61a4-4dc9-b52b-0d8f86d6a1ee";

    fn make_sources(boot_id: &str, most: u32) -> Arc<Sources> {
        Arc::new(Sources {
            most,
            ..Sources::new(boot_id)
        })
    }

    fn acquire_source_address(sources: &Arc<Sources>, client: &str) -> Ipv4Addr {
        sources.acquire_source(client.parse().unwrap(), 0).address
    }

    fn is_hashed_address(address: Ipv4Addr) -> bool {
        address.octets()[0] == 127
            && address.octets()[1] >= FIRST_HASHED_OCTET
            && address != Ipv4Addr::new(127, 255, 255, 255)
    }

    #[test]
    fn the_source_names_the_client() {
        let sources = make_sources(BOOT, 10);
        for (client, expected) in [
            ("10.1.2.3", [127, 1, 2, 3]),
            ("10.0.0.5", [127, 0, 0, 5]),
            ("192.251.255.255", [127, 251, 255, 255]),
            ("127.5.6.7", [127, 5, 6, 7]),
            ("127.0.0.1", [127, 0, 0, 1]),
            ("::ffff:10.1.2.3", [127, 1, 2, 3]),
        ] {
            assert_eq!(
                acquire_source_address(&sources, client),
                Ipv4Addr::from(expected),
                "{client}"
            );
        }
    }

    /// A client without an address in 127.0.0.0/8 that names it gets a hashed address. No other
    /// client has that address, and the client keeps it.
    #[test]
    fn clients_without_a_name_get_a_hash() {
        let (here, again, later) = (
            make_sources(BOOT, 10),
            make_sources(BOOT, 10),
            make_sources("0e", 10),
        );
        let clients = [
            "10.0.0.1",
            "192.0.0.1",
            "10.0.0.0",
            "10.252.0.0",
            "127.255.255.255",
            "2001:db8::1",
            "2001:db8::2",
        ];
        let names: HashSet<_> = clients
            .iter()
            .map(|client| acquire_source_address(&here, client))
            .collect();
        assert_eq!(names.len(), clients.len(), "{names:?}");
        assert!(
            names.iter().all(|name| is_hashed_address(*name)),
            "{names:?}"
        );
        for client in clients {
            assert_eq!(
                acquire_source_address(&here, client),
                acquire_source_address(&again, client),
                "all shims of a node agree"
            );
            assert_ne!(
                acquire_source_address(&here, client),
                acquire_source_address(&later, client),
                "the key is the boot's"
            );
        }
        // The exact numbers, which another version of berth must return as well.
        assert_eq!(
            acquire_source_address(&here, "2001:db8::1"),
            Ipv4Addr::new(127, 253, 104, 169)
        );
    }

    #[test]
    fn a_source_without_room_is_followed_by_others() {
        let sources = make_sources(BOOT, 2);
        let client = "10.1.2.3".parse().unwrap();
        let mut used: Vec<_> = (0..6).map(|_| sources.acquire_source(client, 0)).collect();
        let of = |used: &[Source]| used.iter().map(|source| source.address).collect::<Vec<_>>();
        let addresses = of(&used);
        assert_eq!(addresses[..2], [Ipv4Addr::new(127, 1, 2, 3); 2]);
        assert!(
            addresses[2] == addresses[3]
                && addresses[4] == addresses[5]
                && addresses[2] != addresses[4]
        );
        assert!(
            addresses[2..]
                .iter()
                .all(|address| is_hashed_address(*address))
        );
        assert_ne!(
            acquire_source_address(&sources, "10.1.2.4"),
            addresses[2],
            "another client has its own"
        );
        // A source is passed over if other processes have its ports.
        assert_eq!(sources.acquire_source(client, 1).number, 3);
        used.remove(0);
        assert_eq!(sources.acquire_source(client, 0).address, addresses[0]);
        drop(used);
        assert!(sources.lock_in_use().is_empty());
    }
}
