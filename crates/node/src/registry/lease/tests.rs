//! Tests of shims' leases.

use super::*;
use crate::registry::tests::{assert_ignored, berth, id};
use proptest::prelude::*;
use std::os::unix::fs::{MetadataExt, symlink};

/// A lease of format 1, byte for byte. Never change the file: a shim of another version may have
/// written such a lease.
const GOLDEN: &[u8] = include_bytes!("../../../../../tests/data/golden/lease-v1.json");

const OTHER_BOOT: &str = "ffffffff-8f4e-4c7e-9a57-1f2d3c4b5a69";

/// Returns the lease that [`GOLDEN`] contains.
pub(in crate::registry) fn golden_lease() -> Lease {
    Lease {
        version: 1,
        instance: id("v1.34_b"),
        holder_identity: ShimId(0x00c0_ffee_0bad_cafe),
        lease_duration_seconds: 3,
        acquire_time: wall_time("2026-05-04T03:02:01.000001Z"),
        renew_time: wall_time("2026-05-04T03:02:07.25Z"),
        lease_transitions: 2,
        backend: Some(SocketAddr::from(([127, 155, 125, 53], 6443))),
        state: Phase::Joined,
        ready: true,
        reachable: true,
        listen: vec![
            SocketAddr::from(([10, 0, 0, 5], 6443)),
            "[fd00::5]:6443".parse().unwrap(),
        ],
        berth_version: "0.1.0".into(),
        boot_id: "0f2c6e3a-8f4e-4c7e-9a57-1f2d3c4b5a69".into(),
        expires_boottime_ms: 86_403_123,
    }
}

fn wall_time(text: &str) -> SystemTime {
    humantime::parse_rfc3339(text).unwrap()
}

fn make_lease(instance: &str, holder: u64) -> Lease {
    Lease {
        instance: id(instance),
        holder_identity: ShimId(holder),
        ..golden_lease()
    }
}

fn listed_ids(berth: &BerthDir) -> Vec<String> {
    let listing = list(berth).unwrap();
    assert_eq!(listing.problems, []);
    listing
        .found
        .iter()
        .map(|lease| lease.instance.to_string())
        .collect()
}

#[test]
fn a_lease_keeps_its_format() {
    assert_eq!(
        Lease::parse(GOLDEN, &id("v1.34_b")).unwrap(),
        golden_lease()
    );
    assert_eq!(
        String::from_utf8(file::to_bytes(&golden_lease()).unwrap()).unwrap(),
        String::from_utf8_lossy(GOLDEN)
    );
    let (_temp, berth) = berth();
    write(&berth, &golden_lease()).unwrap();
    assert_eq!(
        fs::read(berth.leases_path().join("v1.34_b.json")).unwrap(),
        GOLDEN
    );
}

#[test]
fn fields_of_a_later_version_are_ignored() {
    let text = std::str::from_utf8(GOLDEN).unwrap();
    let later = text
        .replace("\"ready\"", "\"later\": [{}], \"ready\"")
        .replace("\"backend\"", "\"unknown\"");
    assert_eq!(
        Lease::parse(later.as_bytes(), &id("v1.34_b")).unwrap(),
        Lease {
            backend: None,
            ..golden_lease()
        }
    );
    let next = Lease::parse(br#"{"version": 2}"#, &id("a")).unwrap_err();
    assert_eq!(next, "the file has format 2, this berth reads format 1");
}

#[test]
fn a_holder_has_exactly_one_text_form() {
    assert_eq!(ShimId(0xab).to_string(), "00000000000000ab");
    assert_eq!("00000000000000ab".parse(), Ok(ShimId(0xab)));
    for bad in [
        "",
        "ab",
        "00000000000000AB",
        "+0000000000000ab",
        "000000000000000ab",
        "000000000000000g",
    ] {
        assert!(bad.parse::<ShimId>().is_err(), "{bad:?}");
    }
}

#[test]
fn invalid_leases_are_refused_when_read_and_when_written() {
    let (_temp, berth) = berth();
    let addr = |text: &str| text.parse::<SocketAddr>().unwrap();
    let mut bad = Vec::new();
    for seconds in [0, MAX_DURATION + 1] {
        bad.push((
            Lease {
                lease_duration_seconds: seconds,
                ..golden_lease()
            },
            "duration",
        ));
    }
    let nobody = [
        "10.0.0.5:0",
        "224.0.0.1:1",
        "255.255.255.255:1",
        "[ff02::1]:1",
        "[::ffff:224.0.0.1]:1",
    ]
    .map(addr);
    for address in nobody {
        bad.push((
            Lease {
                backend: Some(address),
                ..golden_lease()
            },
            "backend",
        ));
        bad.push((
            Lease {
                listen: vec![address],
                ..golden_lease()
            },
            "listen address",
        ));
    }
    for address in ["0.0.0.0:6443", "[::]:6443", "[::ffff:0.0.0.0]:6443"].map(addr) {
        bad.push((
            Lease {
                backend: Some(address),
                ..golden_lease()
            },
            "backend",
        ));
        assert!(
            Lease {
                listen: vec![address],
                ..golden_lease()
            }
            .check_fields()
            .is_ok()
        );
    }
    bad.push((
        Lease {
            listen: vec![addr("10.0.0.5:6443"); MAX_LISTEN + 1],
            ..golden_lease()
        },
        "65 listen",
    ));
    for text in ["", "a b", "a\n", "ä", &"x".repeat(MAX_TEXT + 1)] {
        bad.push((
            Lease {
                berth_version: text.into(),
                ..golden_lease()
            },
            "berthVersion",
        ));
        bad.push((
            Lease {
                boot_id: text.into(),
                ..golden_lease()
            },
            "bootId",
        ));
    }
    for (lease, part) in bad {
        let error = Lease::parse(&file::to_bytes(&lease).unwrap(), &lease.instance)
            .unwrap_err()
            .to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(
            write(&berth, &lease).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
    assert_eq!(fs::read_dir(berth.leases_path()).unwrap().count(), 0);
}

#[test]
fn a_lease_is_live_only_in_its_boot_and_for_a_limited_time() {
    let mut lease = golden_lease();
    let boot = lease.boot_id.clone();
    let ms = Duration::from_millis;
    lease.renew(ms(5_000), wall_time("2026-05-04T03:02:08Z"));
    assert_eq!(
        (lease.expires(), lease.renew_time),
        (ms(8_000), wall_time("2026-05-04T03:02:08Z"))
    );
    assert_eq!(
        lease.last_renewal_lower_bound(),
        ms(4_000),
        "at most a second too early"
    );
    assert!(lease.is_live(&boot, ms(5_000)) && !lease.is_live(OTHER_BOOT, ms(5_000)));
    lease.expires_boottime_ms = 5_000 + 90_000;
    assert!(lease.is_live(&boot, ms(5_000)) && !lease.is_live(&boot, ms(4_999)));
    lease.renew(Duration::MAX, SystemTime::UNIX_EPOCH);
    assert!(!lease.is_live(&boot, Duration::ZERO));
}

#[test]
fn times_of_wrong_clocks_are_clamped() {
    let early = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
    let late = wall_time("9999-12-31T23:59:59Z") + Duration::from_secs(1);
    let lease = Lease {
        acquire_time: early,
        renew_time: late,
        ..golden_lease()
    };
    let read = Lease::parse(&file::to_bytes(&lease).unwrap(), &lease.instance).unwrap();
    assert_eq!(
        (read.acquire_time, read.renew_time),
        (SystemTime::UNIX_EPOCH, wall_time("9999-12-31T23:59:59Z"))
    );
}

#[test]
fn writing_replaces_and_removing_needs_the_same_holder() {
    let (_temp, berth) = berth();
    let (a, b) = (make_lease("a", 1), make_lease("b", 1));
    assert_eq!(read(&berth, &a.instance), Ok(None));
    assert!(is_missing(&berth, &a.instance));
    // This file is the leftover of an earlier owner of the ID, who died during a write.
    fs::write(berth.leases_path().join(".a.lease.new"), "half").unwrap();
    write(&berth, &a).unwrap();
    write(&berth, &b).unwrap();
    assert_eq!(listed_ids(&berth), ["a", "b"]);
    let meta = fs::metadata(berth.leases_path().join("a.json")).unwrap();
    assert_eq!(meta.mode() & 0o777, 0o600);
    assert!(!is_missing(&berth, &a.instance));

    let successor = make_lease("a", 2);
    write(&berth, &successor).unwrap();
    remove(&berth, &a).unwrap();
    assert_eq!(read(&berth, &a.instance), Ok(Some(successor.clone())));
    remove(&berth, &successor).unwrap();
    remove(&berth, &successor).unwrap();
    assert_eq!(listed_ids(&berth), ["b"]);
    assert_eq!(
        fs::read_dir(berth.leases_path()).unwrap().count(),
        1,
        "nothing left over"
    );
}

#[test]
fn a_link_in_the_way_is_replaced_and_not_followed() {
    let (_temp, berth) = berth();
    let path = |name: &str| berth.leases_path().join(name);
    let kept = file::to_bytes(&make_lease("a", 2)).unwrap();
    fs::write(berth.path().join("target"), &kept).unwrap();
    for link in ["a.json", ".a.lease.new"] {
        symlink(berth.path().join("target"), path(link)).unwrap();
    }
    let lease = make_lease("a", 1);
    assert!(read(&berth, &lease.instance).is_err());
    write(&berth, &lease).unwrap();
    assert!(fs::symlink_metadata(path("a.json")).unwrap().is_file());
    assert_eq!(fs::read(berth.path().join("target")).unwrap(), kept);
    fs::remove_file(path("a.json")).unwrap();
    fs::create_dir(path("a.json")).unwrap();
    assert!(write(&berth, &lease).is_err());
    assert!(!path(".a.lease.new").exists());
}

#[test]
fn expired_leases_are_pruned_after_another_duration() {
    let (_temp, berth) = berth();
    let lease = golden_lease();
    let prune_at = |ms| prune(&berth, &lease.boot_id, Duration::from_millis(ms)).unwrap();
    write(&berth, &lease).unwrap();
    write(
        &berth,
        &Lease {
            boot_id: OTHER_BOOT.into(),
            ..make_lease("earlier", 1)
        },
    )
    .unwrap();
    fs::write(berth.leases_path().join("torn.json"), "{").unwrap();
    assert_eq!(prune_at(lease.expires_boottime_ms + 3_000), 1);
    assert_eq!(list(&berth).unwrap().found, std::slice::from_ref(&lease));
    assert_eq!(prune_at(lease.expires_boottime_ms + 3_001), 1);
    assert!(
        berth.leases_path().join("torn.json").exists(),
        "its owner is unknown"
    );
    fs::remove_dir_all(berth.leases_path()).unwrap();
    assert_eq!((prune_at(0), listed_ids(&berth)), (0, vec![]));
}

#[test]
fn old_half_written_files_are_pruned() {
    let (_temp, berth) = berth();
    let [half, of_others @ ..] =
        [".a.lease.new", ".a.lease", "a.lease.new"].map(|name| berth.leases_path().join(name));
    let file = fs::File::create(&half).unwrap();
    let old = SystemTime::now() - 2 * LEFTOVER_AGE;
    of_others
        .iter()
        .for_each(|path| fs::File::create(path).unwrap().set_modified(old).unwrap());
    let prune = || prune(&berth, OTHER_BOOT, Duration::ZERO).unwrap();
    assert_eq!(prune(), 0, "the file may be in use");
    file.set_modified(old).unwrap();
    assert_eq!(prune(), 1);
    assert!(!half.exists() && of_others.iter().all(|path| path.exists()));
}

#[test]
fn pruning_continues_after_a_file_that_cannot_be_removed() {
    let (_temp, berth) = berth();
    // The directory has the name and the age of a leftover file, but cannot be removed as a file.
    let directory = berth.leases_path().join(".a.lease.new");
    fs::create_dir(&directory).unwrap();
    fs::File::open(&directory)
        .unwrap()
        .set_modified(SystemTime::now() - 2 * LEFTOVER_AGE)
        .unwrap();
    assert!(write(&berth, &make_lease("a", 1)).is_err());
    for instance in ["b", "c"] {
        write(&berth, &make_lease(instance, 1)).unwrap();
    }
    assert!(prune(&berth, OTHER_BOOT, Duration::ZERO).is_err());
    assert_eq!(listed_ids(&berth), [""; 0]);
}

#[test]
fn readers_and_pruners_never_see_a_torn_lease() {
    let (_temp, berth) = berth();
    let mut lease = golden_lease();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..300 {
                    assert_eq!(list(&berth).unwrap().problems, []);
                    prune(&berth, &golden_lease().boot_id, Duration::ZERO).unwrap();
                }
            });
        }
        for n in 0..300 {
            lease.renew(Duration::from_secs(n), SystemTime::now());
            write(&berth, &lease).unwrap();
        }
    });
    assert_eq!(listed_ids(&berth), ["v1.34_b"]);
}

#[test]
fn hostile_files_are_reported_and_ignored() {
    let (_temp, berth) = berth();
    write(&berth, &make_lease("good", 1)).unwrap();
    let path = |name: &str| berth.leases_path().join(name);
    let good = fs::read_to_string(path("good.json")).unwrap();
    let put = |name: &str, from: &str, to: &str| {
        let named = good.replace("\"good\"", &format!("\"{name}\""));
        fs::write(path(&format!("{name}.json")), named.replace(from, to)).unwrap();
    };
    fs::write(path("torn.json"), &good[..good.len() / 2]).unwrap();
    fs::write(path("empty.json"), "").unwrap();
    fs::write(path("other.json"), &good).unwrap();
    put("later", "\"version\": 1", "\"version\": 2");
    put("holder", "0000000000000001", "1");
    put(
        "ready",
        "\"ready\": true",
        &format!("\"ready\": \"\\u001b[31m{}\"", "x".repeat(9_000)),
    );
    put("time", "T03:02:07.250000Z", "T03:02:07.250000Q");
    fs::write(path("huge.json"), vec![b' '; 70_000]).unwrap();
    fs::write(path("new\nline"), "").unwrap();
    fs::create_dir(path("folder.json")).unwrap();
    symlink(path("good.json"), path("link.json")).unwrap();
    nix::unistd::mkfifo(&path("fifo.json"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let mut expected = vec![
        ("empty.json", "not a lease"),
        ("fifo.json", "no regular file"),
        ("folder.json", "no regular file"),
        ("holder.json", "16 lower-case"),
        ("huge.json", "70000 bytes"),
        ("later.json", "format 2"),
        ("link.json", "symbolic link"),
        ("new\u{fffd}line", "name"),
        ("other.json", "for the instance good"),
        ("ready.json", "invalid type"),
        ("time.json", "not a lease"),
        ("torn.json", "not a lease"),
    ];
    if nix::unistd::geteuid().is_root() {
        put("foreign", "", "");
        std::os::unix::fs::chown(path("foreign.json"), Some(65534), None).unwrap();
        expected.insert(3, ("foreign.json", "uid 65534"));
    }
    let listing = list(&berth).unwrap();
    assert_eq!(listing.found, [make_lease("good", 1)]);
    assert_ignored(&listing.problems, &expected);
    assert_eq!(
        prune(&berth, OTHER_BOOT, Duration::ZERO).unwrap(),
        1,
        "only readable leases are pruned"
    );
}

fn any_address() -> impl Strategy<Value = SocketAddr> {
    any::<(IpAddr, u16)>()
        .prop_map(SocketAddr::from)
        .prop_filter("usable", |address| is_usable_address(*address))
}

prop_compose! {
    fn any_lease()(
        lease_duration_seconds in 1..=MAX_DURATION,
        times in prop::array::uniform2(0..253_402_300_799_999_999u64),
        backend in prop::option::of(any_address().prop_filter("one", |a| !a.ip().to_canonical().is_unspecified())),
        state in prop::sample::select(vec![Phase::Waiting, Phase::Joined, Phase::Left, Phase::Refusing]),
        listen in prop::collection::vec(any_address(), 0..=MAX_LISTEN),
        texts in prop::array::uniform2("[!-~]{1,64}"),
    ) -> Lease {
        let [acquire_time, renew_time] = times.map(|micros| SystemTime::UNIX_EPOCH + Duration::from_micros(micros));
        let [berth_version, boot_id] = texts;
        Lease { lease_duration_seconds, acquire_time, renew_time, backend, state, listen, berth_version, boot_id, ..golden_lease() }
    }
}

proptest! {
    #[test]
    fn a_written_lease_is_read_back(lease in any_lease()) {
        let bytes = file::to_bytes(&lease).unwrap();
        prop_assert!((bytes.len() as u64) < file::MAX_SIZE);
        prop_assert_eq!(Lease::parse(&bytes, &lease.instance).unwrap(), lease);
    }

    #[test]
    fn a_renewed_lease_lives_until_it_expires_and_is_pruned_later(mut lease in any_lease(), now in 0..u64::MAX / 2) {
        let now = Duration::from_millis(now);
        lease.renew(now, SystemTime::now());
        prop_assert!(lease.is_live(&lease.boot_id, now));
        for later in [0, 1, 999, 1_000, 1_001, 2_000, 2_001].map(|thousandths| lease.duration() * thousandths / 1_000) {
            let (live, stale) =
                (lease.is_live(&lease.boot_id, now + later), lease.is_stale(&lease.boot_id, now + later));
            prop_assert_eq!((live, stale), (later < lease.duration(), later > 2 * lease.duration()));
        }
    }
}
