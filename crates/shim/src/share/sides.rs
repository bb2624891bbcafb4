//! Decides on which side a new connection is: the old instance's, or the new instance's. Pure.
//!
//! A hash of the salt and the client's address (of IPv6 the /64) is a number of thousandths. Below
//! the new instance's part, the client is on the new side. So a client keeps its side while salt
//! and part last, and a larger part takes clients from the old side only. With many addresses, the
//! new side also gets its part of the connections. With few addresses (behind a balancer or NAT, an
//! address is everybody), the part of the connections could be wrong. So if an address has too many
//! connections, each of its connections is placed separately, by a hash of address and port.
//!
//! Each shim decides alone about the connections that the kernel gave to its listener, and yet the
//! part of all connections comes out right. The kernel chooses the listener by a hash with a secret
//! of the kernel. So the part on the new side is equal in each shim, however unevenly the kernel
//! divides. Salt and hash are equal in both shims, so an address that both shims place as a whole
//! is on the same side in both. The shims may disagree on which addresses have too many
//! connections. Such a disagreement changes the side of some connections, but not the part: by
//! either hash, each connection is on the new side with equal probability.
//!
//! Connections are counted in a fixed number of buckets, by the address's hash, because the number
//! of addresses has no limit. The connections of every address in a bucket with too many
//! connections are placed separately, which is right on average.

use crate::gate::Source;
use crate::relay::source::hash_client;
use berth_node::ipc::wire::Side;
use std::net::SocketAddr;

/// Number of buckets that count connections by address. With one address in each bucket, no address
/// has too many connections for a part of 1 %.
const BUCKETS: usize = 4096;

/// An address may have the `ADDRESS_DIVISOR`th part of the smaller side's connections. If every
/// address has so many, the part is off by a quarter (standard deviation).
const ADDRESS_DIVISOR: u64 = 16;

/// With so few connections in a bucket, nothing can be concluded.
const MIN_CONNECTIONS: u64 = 8;

/// No port.
const ADDRESS_KEY: u32 = u32::MAX;

/// Decides on which side each new connection is, by hashes with this salt.
#[derive(Debug)]
pub(super) struct Sides {
    pub(super) salt: u64,
    buckets: Box<[Bucket]>,
    /// Number of connections so far that were placed by address (all connections of an address on
    /// one side), and number of connections that were placed separately.
    pub(super) by_address: u64,
    pub(super) by_connection: u64,
}

#[derive(Debug, Clone, Default)]
struct Bucket {
    connections: u64,
    /// True if the connections of the bucket are placed separately. The flag is never reset,
    /// because otherwise clients would change sides time and again.
    is_split: bool,
}

impl Sides {
    pub(super) fn new(salt: u64) -> Self {
        Self {
            salt,
            buckets: vec![Bucket::default(); BUCKETS].into(),
            by_address: 0,
            by_connection: 0,
        }
    }

    /// Returns the side of a client's new connection. `permille` is the new side's part.
    pub(super) fn choose_side(&mut self, permille: u16, client: SocketAddr) -> Side {
        let hash = |address, number| hash_client((self.salt, 0), address, number);
        let mut drawn = hash(Source::from_client(client.ip()).into(), ADDRESS_KEY);
        let connections = self.by_address + self.by_connection + 1;
        let bucket = &mut self.buckets[drawn as usize % BUCKETS];
        bucket.connections += 1;
        let smaller = u64::from(permille.min(1000_u16.saturating_sub(permille)));
        let is_frequent = bucket.connections * 1000 * ADDRESS_DIVISOR > connections * smaller;
        bucket.is_split |= smaller > 0 && bucket.connections > MIN_CONNECTIONS && is_frequent;
        if bucket.is_split {
            drawn = hash(client.ip().to_canonical(), client.port().into());
            self.by_connection += 1;
        } else {
            self.by_address += 1;
        }
        let thousandth = (u128::from(drawn) * 1000) >> 64;
        if thousandth < permille.into() {
            Side::New
        } else {
            Side::Old
        }
    }
}

#[cfg(test)]
mod tests;
