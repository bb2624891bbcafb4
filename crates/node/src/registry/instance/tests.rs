//! Tests of instance records.

use super::*;
use crate::registry::tests::{assert_ignored, berth, id};
use std::os::unix::fs::symlink;

const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 5));

fn test_address(last: u8) -> SocketAddr {
    SocketAddr::from(([127, 1, 2, last], 6443))
}

fn claim_instance_with(
    berth: &BerthDir,
    instance: &str,
    address: SocketAddr,
) -> Result<InstanceClaim, ClaimError> {
    let claimant = Claimant {
        instance: &id(instance),
        advertise: HOST,
        supervisor: None,
        pid: Some(7),
    };
    claim(berth, &claimant, |previous, _| {
        Ok(previous.unwrap_or(address))
    })
}

fn listed_states(berth: &BerthDir) -> Vec<(String, SocketAddr, bool)> {
    let listing = list(berth).unwrap();
    assert_eq!(listing.problems, []);
    let state = |l: ListedInstance| (l.record.instance.to_string(), l.record.address, l.alive);
    listing.found.into_iter().map(state).collect()
}

#[test]
fn an_instance_is_alive_while_claimed_and_keeps_its_address_when_dead() {
    let (_temp, berth) = berth();
    let a = claim_instance_with(&berth, "a", test_address(1)).unwrap();
    let b = claim_instance_with(&berth, "b", test_address(2)).unwrap();
    assert_eq!(
        listed_states(&berth),
        [
            ("a".into(), test_address(1), true),
            ("b".into(), test_address(2), true)
        ]
    );
    let refused = claim_instance_with(&berth, "a", test_address(3)).unwrap_err();
    assert!(
        matches!(refused, ClaimError::Alive { pid: Some(7), .. }),
        "{refused}"
    );
    drop(a);
    assert_eq!(
        listed_states(&berth),
        [
            ("a".into(), test_address(1), false),
            ("b".into(), test_address(2), true)
        ]
    );
    let a = claim_instance_with(&berth, "a", test_address(3)).unwrap();
    assert_eq!(a.record().address, test_address(1));
    assert_eq!(fs::metadata(a.path()).unwrap().mode() & 0o777, 0o600);
    b.remove();
    assert_eq!(listed_states(&berth), [("a".into(), test_address(1), true)]);
}

#[test]
fn choose_gets_the_addresses_of_the_other_instances() {
    let (_temp, berth) = berth();
    let _live = claim_instance_with(&berth, "live", test_address(1)).unwrap();
    drop(claim_instance_with(&berth, "dead", test_address(2)).unwrap());
    drop(claim_instance_with(&berth, "own", test_address(3)).unwrap());
    let claimant = Claimant {
        instance: &id("own"),
        advertise: HOST,
        supervisor: None,
        pid: None,
    };
    let own = claim(&berth, &claimant, |previous, taken| {
        assert_eq!(
            (previous, taken),
            (
                Some(test_address(3)),
                &[test_address(2), test_address(1)][..]
            )
        );
        Ok(test_address(4))
    });
    assert_eq!(own.unwrap().record().address, test_address(4));
}

#[test]
fn a_choice_that_fails_leaves_the_earlier_record() {
    let (_temp, berth) = berth();
    drop(claim_instance_with(&berth, "a", test_address(1)).unwrap());
    let claimant = Claimant {
        instance: &id("a"),
        advertise: HOST,
        supervisor: None,
        pid: None,
    };
    let refused = claim(&berth, &claimant, |_, _| Err("no address".into()));
    assert!(matches!(refused, Err(ClaimError::Address(_))));
    assert_eq!(
        listed_states(&berth),
        [("a".into(), test_address(1), false)]
    );
}

#[test]
fn listing_and_pruning_do_not_block_claims() {
    let (_temp, berth) = berth();
    let _kept = claim_instance_with(&berth, "kept", test_address(1)).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..300 {
                    for listed in list(&berth).unwrap().found {
                        assert!(listed.alive || listed.record.instance != id("kept"));
                    }
                    prune(&berth, SystemTime::now()).unwrap();
                }
            });
        }
        for _ in 0..200 {
            drop(claim_instance_with(&berth, "b", test_address(2)).unwrap());
        }
    });
}

#[test]
fn of_concurrent_claims_of_one_id_exactly_one_succeeds() {
    let (_temp, berth) = berth();
    let claims: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..=4)
            .map(|n| {
                scope.spawn({
                    let berth = &berth;
                    move || claim_instance_with(berth, "a", test_address(n))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 1);
}

#[test]
fn dead_records_are_pruned_ten_minutes_after_death_was_seen() {
    let (_temp, berth) = berth();
    let claim = claim_instance_with(&berth, "a", test_address(1)).unwrap();
    let path = claim.path().to_owned();
    // The record was written long ago, and its instance has been alive since.
    let old = SystemTime::now() - 10 * DEAD_RECORD_LIFETIME;
    claim
        .lock
        .set_times(FileTimes::new().set_modified(old))
        .unwrap();
    let later = |wait| SystemTime::now() + wait;
    assert_eq!(prune(&berth, later(2 * DEAD_RECORD_LIFETIME)).unwrap(), 0);
    drop(claim);
    assert_eq!(
        prune(&berth, later(2 * DEAD_RECORD_LIFETIME)).unwrap(),
        0,
        "nobody has seen the record dead yet"
    );
    listed_states(&berth);
    let seen = fs::metadata(&path).unwrap().modified().unwrap();
    assert!(seen > old);
    listed_states(&berth);
    assert_eq!(
        fs::metadata(&path).unwrap().modified().unwrap(),
        seen,
        "recorded once"
    );
    assert_eq!(prune(&berth, seen + DEAD_RECORD_LIFETIME).unwrap(), 0);
    fs::write(berth.instances_path().join(".b.new"), "left over").unwrap();
    assert_eq!(
        prune(&berth, seen + DEAD_RECORD_LIFETIME + Duration::from_secs(1)).unwrap(),
        2
    );
    assert_eq!(listed_states(&berth), []);
}

#[test]
fn prune_does_not_wait_for_a_claim() {
    let (_temp, berth) = berth();
    let _names = lock_record_names(&berth.instances_path(), Duration::ZERO).unwrap();
    assert_eq!(prune(&berth, SystemTime::now()).unwrap(), 0);
    assert!(matches!(
        lock_record_names(&berth.instances_path(), Duration::ZERO),
        Err(ClaimError::Busy { .. })
    ));
}

/// Writes files that are not valid as records, and then claims over them. The tests of leases have
/// the files that are valid neither as records nor as leases.
#[test]
fn hostile_files_are_reported_and_ignored() {
    let (_temp, berth) = berth();
    let _good = claim_instance_with(&berth, "good", test_address(1)).unwrap();
    let path = |name: &str| berth.instances_path().join(name);
    let good = fs::read_to_string(path("good.json")).unwrap();
    fs::write(path("torn.json"), &good[..good.len() / 2]).unwrap();
    fs::write(path("other.json"), &good).unwrap();
    fs::write(path("later.json"), r#"{"version": 2}"#).unwrap();
    fs::write(
        path("away.json"),
        good.replace("good", "away")
            .replace("127.1.2.1", "10.0.0.9"),
    )
    .unwrap();
    fs::write(
        path("six.json"),
        good.replace("good", "six").replace("127.1.2.1", "[::1]"),
    )
    .unwrap();
    fs::create_dir(path("folder.json")).unwrap();
    symlink(path("good.json"), path("link.json")).unwrap();
    nix::unistd::mkfifo(&path("fifo.json"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let listing = list(&berth).unwrap();
    assert_eq!(listing.found.len(), 1);
    let expected = [
        ("away.json", "10.0.0.9:6443"),
        ("fifo.json", "no regular file"),
        ("folder.json", "no regular file"),
        ("later.json", "format 2"),
        ("link.json", "symbolic link"),
        ("other.json", "for the instance good"),
        ("six.json", "[::1]"),
        ("torn.json", "not a record"),
    ];
    assert_ignored(&listing.problems, &expected);
    for name in ["torn", "link", "fifo"] {
        assert_eq!(
            claim_instance_with(&berth, name, test_address(9))
                .unwrap()
                .record()
                .address,
            test_address(9)
        );
    }
    assert!(fs::symlink_metadata(path("link.json")).unwrap().is_file());
    assert!(claim_instance_with(&berth, "folder", test_address(9)).is_err());
    assert_eq!(
        fs::read_to_string(path("good.json")).unwrap(),
        good,
        "a link's target is not written"
    );
}

#[test]
fn a_locked_record_of_a_later_format_is_alive() {
    let (_temp, berth) = berth();
    fs::write(berth.instances_path().join("a.json"), r#"{"version": 2}"#).unwrap();
    let file = File::open(berth.instances_path().join("a.json")).unwrap();
    let _lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
    assert!(matches!(
        claim_instance_with(&berth, "a", test_address(1)),
        Err(ClaimError::Alive { pid: None, .. })
    ));
}

#[test]
fn an_instance_record_keeps_its_format() {
    let golden = br#"{
  "version": 1,
  "instance": "a",
  "address": "127.1.2.3:6443",
  "advertise": "10.0.0.5",
  "pid": 7,
  "started": "2026-05-04T03:02:01Z"
}"#;
    let record = Record::parse(golden, &id("a")).unwrap();
    assert_eq!(serde_json::to_vec_pretty(&record).unwrap(), golden);
    let minimal = br#"{"version":1,"instance":"a","address":"127.1.2.3:6443","advertise":"::1",
        "started":"2026-05-04T03:02:01Z","later":[1]}"#;
    assert_eq!(Record::parse(minimal, &id("a")).unwrap().pid, None);
}
