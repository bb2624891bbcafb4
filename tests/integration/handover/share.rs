//! Shares of new connections: each of two instances gets its part of the connections, and no
//! connection is lost.

use super::node::{Echo, Node, Shim, make_runtime};
use crate::support::eventually;
use crate::support::load;
use crate::support::net::{Backend, client_hello, connect_from, fresh_ip, read};
use crate::support::shim::send_ask;
use berth_node::ipc::wire::{Ask, Reply, Share, Side};
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

const RESULTS: [&str; 3] = ["kept", "passed", "declined"];

/// Number of connections that a test makes for one count.
const CONNECTIONS: usize = 1_000;

/// Range in which the number of connections on the new side must be at a share of 5 %. A count
/// outside of the range has a probability below 10⁻⁹ (binomial distribution). The first 16
/// connections of an address may be on either side.
const AT_5_PERCENT: RangeInclusive<usize> = 12..=115;

/// Two shims that have joined: of the old instance and of the new one.
struct Pair {
    node: Node,
    shims: [Shim; 2],
}

impl Pair {
    fn new([old, new]: [SocketAddr; 2]) -> Self {
        let node = Node::new();
        let shims = [("old", old), ("new", new)]
            .map(|(id, at)| node.joined(id, at, &["--max-openings", "off"]));
        shims.iter().for_each(|shim| shim.until_counted("guard", 1));
        Self { node, shims }
    }

    /// Sets a share on both shims.
    #[track_caller]
    fn put(&self, permille: u16, local: bool, lease_ms: u64) {
        for shim in &self.shims {
            assert_eq!(
                ask_shim(shim, &make_share(permille, local, lease_ms)),
                Reply::Done
            );
        }
    }

    /// Sets a share that includes clients on the node and lasts longer than the test.
    #[track_caller]
    fn put_all(&self, permille: u16) {
        self.put(permille, true, 600_000);
    }

    /// Returns each shim's counts of new connections by result.
    #[track_caller]
    fn counts(&self) -> [[usize; 3]; 2] {
        let count = |shim: &Shim, result| {
            shim.metric("berth_share_connections_total", &[("result", result)]) as usize
        };
        self.shims
            .each_ref()
            .map(|shim| RESULTS.map(|result| count(shim, result)))
    }

    /// Connects once from each address.
    #[track_caller]
    fn clients(&self, addresses: &[Ipv4Addr]) -> Served {
        let answered = || self.shims[1].metric("berth_first_byte_seconds_count", &[]) as usize;
        let (before, answered_before) = (self.counts(), answered());
        let served = |address: &Ipv4Addr| {
            let mut client = connect_from((*address).into(), self.node.listen);
            client.write_all(&client_hello(64)).unwrap();
            read(&mut client, 1) == b"n"
        };
        let new: Vec<_> = addresses.iter().copied().filter(served).collect();
        let of = eventually("all connections to be counted", || {
            let now = self.counts();
            let of =
                [0, 1].map(|shim| [0, 1, 2].map(|result| now[shim][result] - before[shim][result]));
            (of.as_flattened().iter().sum::<usize>() == addresses.len()).then_some(of)
        });
        assert_eq!(
            answered() - answered_before,
            new.len(),
            "the shim counts what its instance answered"
        );
        let [[_, to_new, declined_old], [kept_new, _, declined_new]] = of;
        assert_eq!(
            new.len(),
            kept_new + to_new + declined_new,
            "served by the new instance: {of:?}"
        );
        Served {
            new,
            on_new_side: kept_new + to_new + declined_old,
            declined: declined_old + declined_new,
            of,
        }
    }
}

#[derive(Debug)]
struct Served {
    /// Addresses that the new instance served.
    new: Vec<Ipv4Addr>,
    on_new_side: usize,
    /// Number of clients that a sibling declined. On a busy machine a sibling may not take a client
    /// at once.
    declined: usize,
    /// Counts of new connections by result, for each shim.
    of: [[usize; 3]; 2],
}

fn make_share(permille: u16, local: bool, lease_ms: u64) -> Ask {
    let [old, new] = ["old", "new"].map(|id| id.parse().unwrap());
    Ask::Share(Share {
        old,
        new,
        permille,
        salt: 7,
        lease_ms,
        local,
    })
}

#[track_caller]
fn ask_shim(shim: &Shim, what: &Ask) -> Reply {
    send_ask(&make_runtime(), &shim.path, what).unwrap()
}

/// Starts an instance that sends its clients a name.
fn start_named(name: &'static [u8; 1]) -> SocketAddr {
    Backend::new().serve(move |mut stream| {
        if stream.read(&mut [0; 64]).is_ok_and(|length| length > 0)
            && stream.write_all(name).is_ok()
        {
            // The client closes first, so its port is not used again.
            let _ = stream.read(&mut [0]);
        }
    })
}

fn fresh_addresses(number: usize) -> Vec<Ipv4Addr> {
    let mut fresh = BTreeSet::new();
    while fresh.len() < number {
        fresh.insert(fresh_ip());
    }
    fresh.into_iter().collect()
}

#[test]
fn each_instance_gets_its_share() {
    let pair = Pair::new([b"o", b"n"].map(start_named));
    pair.put_all(50);
    let many = pair.clients(&fresh_addresses(CONNECTIONS));
    assert!(AT_5_PERCENT.contains(&many.on_new_side), "{many:?}");
    assert!(
        many.of
            .iter()
            .all(|[kept, passed, _]| *kept > 0 && *passed > 0),
        "{:?}",
        many.of
    );
    for (shim, side) in pair.shims.iter().zip([Side::Old, Side::New]) {
        let status = shim.status().share.unwrap();
        assert_eq!(
            (status.side, status.share.permille, status.share.local),
            (side, 50, true),
            "{status:?}"
        );
        assert!(status.by_connection < status.by_address / 10, "{status:?}");
    }
    // A larger share moves no address back to the old side.
    pair.put_all(250);
    let again = pair.clients(&many.new);
    assert!(
        again.new.len() + many.declined + again.declined >= many.new.len(),
        "{again:?}"
    );

    pair.put_all(0);
    let none = pair.clients(&fresh_addresses(200));
    assert_eq!(
        (none.on_new_side, none.new.len()),
        (0, none.of[1][2]),
        "{none:?}"
    );
    pair.put_all(1000);
    let all = pair.clients(&fresh_addresses(200));
    assert_eq!(
        (all.on_new_side, all.new.len()),
        (200, 200 - all.of[0][2]),
        "{all:?}"
    );
}

#[test]
fn no_connection_is_lost_when_a_share_changes_or_ends() {
    let instances = [Echo::new(), Echo::new()];
    let pair = Pair::new(instances.each_ref().map(|instance| instance.address));
    let load = load::start_load(pair.node.listen, 16, Duration::from_millis(20));
    for permille in [50, 250, 500, 1000, 0, 500] {
        pair.put_all(permille);
        load.more(200);
    }
    assert!(
        pair.counts()
            .iter()
            .all(|[kept, passed, _]| *kept > 0 && *passed > 0),
        "{:?}",
        pair.counts()
    );
    // No sender renews the share any more. When the share's lease has expired, connections are
    // distributed as without a share.
    pair.put(500, true, 1_000);
    for shim in &pair.shims {
        shim.running.logs("the share of new connections ends");
        assert_eq!(shim.status().share, None);
    }
    // Wait for the connections that began while the share was in force.
    load.more(200);
    let counts = pair.counts();
    let served = || {
        pair.shims
            .each_ref()
            .map(|shim| shim.status().connections_total)
    };
    let before = served();
    eventually("connections of both", || {
        served()
            .iter()
            .zip(before)
            .all(|(now, before)| *now > before + 50)
            .then_some(())
    });
    assert_eq!(pair.counts(), counts);

    // The new instance gets every connection, and then the new shim leaves.
    pair.put_all(1000);
    load.more(200);
    let Pair {
        node: _node,
        shims: [old, new],
    } = pair;
    new.leave();
    let left = old.status().connections_total;
    eventually("connections of the one that stays", || {
        (old.status().connections_total > left + 50).then_some(())
    });
    let record = load.end();
    record.expect_no_loss(&old.running.log());
}

#[test]
fn a_share_is_refused_by_a_shim_that_it_is_not_for() {
    let node = Node::new();
    let instance = Backend::new();
    for shim in [
        node.launch("node", &["--discover"]),
        node.start("other", instance.address(), &[]),
    ] {
        let reply = ask_shim(&shim, &make_share(50, false, 1_000));
        assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
        assert_eq!(shim.status().share, None);
    }
}
