use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Pseudorandom numbers: SplitMix64.
fn draw_number(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn make_address(number: u64) -> IpAddr {
    match number % 2 {
        0 => Ipv4Addr::from(0x0a00_0000 + number as u32).into(),
        // Each address in its own /64.
        _ => Ipv6Addr::from((0x2001_0db8_0000_0000 + u128::from(number)) << 64 | 1).into(),
    }
}

/// Clients of `addresses` addresses. The larger `skew`, the more connections come from few
/// addresses.
#[derive(Debug, Clone)]
struct Clients {
    addresses: u64,
    skew: i32,
    seed: u64,
}

impl Clients {
    /// Returns new connections, each from another port.
    fn connections(&self, number: u16) -> impl Iterator<Item = SocketAddr> {
        let (
            mut state,
            Self {
                addresses, skew, ..
            },
        ) = (self.seed, self.clone());
        (0..number).map(move |port| {
            let uniform = draw_number(&mut state) as f64 / 2_f64.powi(64);
            (
                make_address((uniform.powi(skew) * addresses as f64) as u64),
                port,
            )
                .into()
        })
    }
}

fn any_clients() -> impl Strategy<Value = Clients> {
    let addresses = prop_oneof![Just(1_u64), 2..30_u64, 1_000..5_000_u64];
    (addresses, 1..8, any::<u64>()).prop_map(|(addresses, skew, seed)| Clients {
        addresses,
        skew,
        seed,
    })
}

fn any_permille() -> impl Strategy<Value = u16> {
    prop_oneof![1 => Just(0), 1 => Just(1000), 6 => 1..1000_u16]
}

/// Returns the side of a connection, and true if the side follows the client's address.
fn draw_side(sides: &mut Sides, permille: u16, client: SocketAddr) -> (Side, bool) {
    let before = sides.by_address;
    (
        sides.choose_side(permille, client),
        sides.by_address > before,
    )
}

/// Bounds the error of a sum of independent draws, which have these sizes and this chance. A larger
/// error happens once in 10¹² times (Bernstein's inequality).
fn bound_draw_error(draws: impl Iterator<Item = u64> + Clone, chance: f64) -> f64 {
    let log = (2e12_f64).ln();
    let variance: f64 = draws
        .clone()
        .map(|size| (size * size) as f64 * chance * (1.0 - chance))
        .sum();
    let largest = log * draws.max().unwrap_or_default() as f64 / 3.0;
    largest + (largest * largest + 2.0 * variance * log).sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Two shims divide the connections that the kernel gives them. The new side gets its part of
    /// all of them, even if the kernel gives one shim more than the other.
    #[test]
    fn each_side_gets_its_share_of_the_clients(clients in any_clients(), salt: u64, permille in any_permille(), uneven in 1..4_u64) {
        const CONNECTIONS: u16 = 10_000;
        let mut shims = [Sides::new(salt), Sides::new(salt)];
        let (mut kernel, mut new, mut one_by_one) = (!clients.seed, 0, 0);
        let mut whole = BTreeMap::<IpAddr, u64>::new();
        for client in clients.connections(CONNECTIONS) {
            let shim = &mut shims[usize::from(draw_number(&mut kernel).is_multiple_of(uneven + 1))];
            let (side, by_address) = draw_side(shim, permille, client);
            new += u64::from(side == Side::New);
            if by_address {
                *whole.entry(client.ip()).or_default() += 1;
            } else {
                one_by_one += 1;
            }
        }
        let chance = f64::from(permille) / 1000.0;
        let draws = whole.values().copied().chain((0..one_by_one).map(|_| 1));
        let off = (new as f64 - chance * f64::from(CONNECTIONS)).abs();
        prop_assert!(off <= bound_draw_error(draws, chance), "{new} of {CONNECTIONS}");
        // No address that is placed as a whole has many connections, so the error is small for any
        // clients.
        let smaller = permille.min(1000 - permille);
        if smaller > 0 {
            let most = 2 * MIN_CONNECTIONS + u64::from(CONNECTIONS) * u64::from(smaller) / (1000 * ADDRESS_DIVISOR);
            prop_assert!(whole.values().all(|connections| *connections <= most), "{most} {whole:?}");
        } else {
            prop_assert_eq!(new, u64::from(CONNECTIONS) * u64::from(permille / 1000));
        }
    }

    /// A larger part takes clients from the old side only, and an unchanged part takes no clients.
    #[test]
    fn clients_keep_their_side(clients in any_clients(), salt: u64, parts in prop::collection::vec(any_permille(), 1..4)) {
        let (mut sides, mut parts) = (Sides::new(salt), parts);
        parts.sort_unstable();
        let (mut by_address, mut by_connection) = (BTreeMap::new(), BTreeMap::new());
        for part in parts {
            for client in clients.connections(2_000) {
                let (side, is_whole) = draw_side(&mut sides, part, client);
                prop_assert!(!is_whole || !by_connection.keys().any(|(ip, _)| *ip == client.ip()), "whole again");
                let known = if is_whole {
                    by_address.insert(client.ip(), (side, part))
                } else {
                    by_connection.insert((client.ip(), client.port()), (side, part))
                };
                if let Some((was, at)) = known {
                    let grows = side == Side::New && at < part;
                    prop_assert!(side == was || grows, "{client} {was:?} {at} {side:?} {part}");
                }
            }
        }
    }
}

#[test]
fn many_equal_addresses_are_taken_as_a_whole_and_one_address_is_not() {
    let mut sides = Sides::new(1);
    let many: Vec<SocketAddr> = (0..30_000)
        .map(|n| (make_address(n % 3_000), (n / 3_000) as u16).into())
        .collect();
    let new: BTreeSet<_> = many
        .iter()
        .filter(|client| sides.choose_side(250, **client) == Side::New)
        .map(SocketAddr::ip)
        .collect();
    assert_eq!((sides.by_address, sides.by_connection), (30_000, 0));
    assert!(
        many.iter()
            .all(|client| (sides.choose_side(250, *client) == Side::New)
                == new.contains(&client.ip()))
    );
    let mut sides = Sides::new(1);
    for port in 0..1_000 {
        sides.choose_side(250, (make_address(1), port).into());
    }
    assert_eq!(
        (sides.by_address, sides.by_connection),
        (MIN_CONNECTIONS, 1_000 - MIN_CONNECTIONS)
    );
}

/// An address has too many connections if it has more than a sixteenth of the smaller side's: of
/// 288 connections, half of them on each side, the limit is nine.
#[test]
fn an_address_has_too_many_connections_beyond_its_part_of_them() {
    for (others, one_by_one) in [(278, 1), (279, 0)] {
        let mut sides = Sides::new(1);
        let others_and_nine = (2..others + 2)
            .map(|n| (make_address(n), 1))
            .chain((1..=9).map(|port| (make_address(1), port)));
        for client in others_and_nine {
            sides.choose_side(500, client.into());
        }
        assert_eq!(
            sides.by_connection,
            one_by_one,
            "the ninth of {}",
            others + 9
        );
    }
}

#[test]
fn a_side_without_a_part_gets_no_client() {
    for (permille, all) in [(0, Side::Old), (1000, Side::New)] {
        let mut sides = Sides::new(1);
        // The clients are so many that some hash to the first thousandth, and some to the last.
        let clients = (0..20_000).map(|n| (make_address(n % 19_000), (n / 19_000) as u16).into());
        assert!(
            clients
                .chain((0..100).map(|port| (make_address(1), port).into()))
                .all(|it| sides.choose_side(permille, it) == all)
        );
        assert_eq!(sides.by_connection, 0);
    }
}

#[test]
fn a_network_of_ipv6_is_one_client_and_an_address_has_two_forms() {
    for salt in 0..100 {
        let side = |client: &str| {
            Sides::new(salt).choose_side(500, (client.parse::<IpAddr>().unwrap(), 1).into())
        };
        assert_eq!(side("2001:db8::1"), side("2001:db8::ffff:1"));
        assert_eq!(side("::ffff:10.0.0.1"), side("10.0.0.1"));
    }
}

/// Shims of two versions must agree.
#[test]
fn sides_are_the_same_in_all_versions() {
    let of = |by: fn(u8) -> (u8, u16)| -> String {
        let mut sides = Sides::new(7);
        let side = |n| {
            let (d, port) = by(n);
            if sides.choose_side(500, ([10, 0, 0, d], port).into()) == Side::New {
                'n'
            } else {
                'o'
            }
        };
        (0..32).map(side).collect()
    };
    assert_eq!(of(|n| (n, 1)), "ononoonnnnnoononnnnnnnonnnnoooon");
    assert_eq!(of(|n| (1, n.into())), "nnnnnnnnnonnnoonnoooonooonoooonn");
}
