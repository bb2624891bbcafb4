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

/// The first value of the second octet that IPv4 clients do not get. Few networks have addresses
/// there, unlike 10.240.0.0/16 or 10.0.0.0/16.
const HASHED: u8 = 252;

/// Most connections from one source to one address and port; further connections use the next
/// source. The kernel has 28,232 ports (`net.ipv4.ip_local_port_range`), and takes long to find one
/// of the last free ports.
const MOST: u32 = 24_000;

/// Replaces `MOST` where Linux tries only the even ports at first. When the even ports have run
/// out, from 14,116 connections on, each connect() takes some milliseconds.
const MOST_EVEN: u32 = 8_000;

/// The sources in use.
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
        let most = if socket::takes_every_port() {
            MOST
        } else {
            MOST_EVEN
        };
        Self {
            key: ((key >> 64) as u64, key as u64),
            most,
            in_use: Mutex::default(),
        }
    }

    /// Returns the first source of a client that has room, from number `number` on.
    pub(super) fn acquire(self: &Arc<Self>, client: IpAddr, mut number: u32) -> Source {
        let mut in_use = self.lock_in_use();
        loop {
            let address = self.address(client, number);
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

    fn address(&self, client: IpAddr, number: u32) -> Ipv4Addr {
        let client = client.to_canonical();
        if let (IpAddr::V4(client), 0) = (client, number) {
            let [_, b, c, d] = client.octets();
            let name = Ipv4Addr::new(127, b, c, d);
            // The source 127.0.0.1 stands for a process of this node.
            let local = name == Ipv4Addr::LOCALHOST && client != Ipv4Addr::LOCALHOST;
            if b < HASHED && !local && name != Ipv4Addr::new(127, 0, 0, 0) {
                return name;
            }
        }
        self.hashed_address(client, number)
    }

    fn hashed_address(&self, client: IpAddr, number: u32) -> Ipv4Addr {
        let [.., b, c, d] = hash_client(self.key, client, number).to_be_bytes();
        let address = Ipv4Addr::new(127, b | HASHED, c, d);
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
    reason = "its successor has no key, and may be another function in another version of berth"
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

/// A source in use by a connection, until dropped.
#[derive(Debug)]
pub(super) struct Source {
    sources: Arc<Sources>,
    pub(super) address: Ipv4Addr,
    /// Number of the source among the client's sources.
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

    fn acquire_name(sources: &Arc<Sources>, client: &str) -> Ipv4Addr {
        sources.acquire(client.parse().unwrap(), 0).address
    }

    fn is_hashed(address: Ipv4Addr) -> bool {
        address.octets()[0] == 127
            && address.octets()[1] >= HASHED
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
                acquire_name(&sources, client),
                Ipv4Addr::from(expected),
                "{client}"
            );
        }
    }

    /// A client without a name of its own gets a name that no other client has, and keeps the name.
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
            .map(|client| acquire_name(&here, client))
            .collect();
        assert_eq!(names.len(), clients.len(), "{names:?}");
        assert!(names.iter().all(|name| is_hashed(*name)), "{names:?}");
        for client in clients {
            assert_eq!(
                acquire_name(&here, client),
                acquire_name(&again, client),
                "all shims of a node agree"
            );
            assert_ne!(
                acquire_name(&here, client),
                acquire_name(&later, client),
                "the key is the boot's"
            );
        }
        // The exact numbers, which another version of berth must return as well.
        assert_eq!(
            acquire_name(&here, "2001:db8::1"),
            Ipv4Addr::new(127, 253, 104, 169)
        );
    }

    #[test]
    fn a_source_without_room_is_followed_by_others() {
        let sources = make_sources(BOOT, 2);
        let client = "10.1.2.3".parse().unwrap();
        let mut used: Vec<_> = (0..6).map(|_| sources.acquire(client, 0)).collect();
        let of = |used: &[Source]| used.iter().map(|source| source.address).collect::<Vec<_>>();
        let addresses = of(&used);
        assert_eq!(addresses[..2], [Ipv4Addr::new(127, 1, 2, 3); 2]);
        assert!(
            addresses[2] == addresses[3]
                && addresses[4] == addresses[5]
                && addresses[2] != addresses[4]
        );
        assert!(addresses[2..].iter().all(|address| is_hashed(*address)));
        assert_ne!(
            acquire_name(&sources, "10.1.2.4"),
            addresses[2],
            "another client has its own"
        );
        // A source is passed over if other processes have its ports.
        assert_eq!(sources.acquire(client, 1).number, 3);
        used.remove(0);
        assert_eq!(sources.acquire(client, 0).address, addresses[0]);
        drop(used);
        assert!(sources.lock_in_use().is_empty());
    }
}
