use super::*;
use berth_node::registry::RunDir;
use std::net::IpAddr;
use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;

const AFAR: &str = "10.9.9.9";

struct Shim {
    sharing: Sharing,
    berth: BerthDir,
    _temp: tempfile::TempDir,
}

impl Shim {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let berth = RunDir::open(&temp.path().join("run"))
            .unwrap()
            .berth("10.0.0.5:6443".parse().unwrap())
            .unwrap();
        Self {
            sharing: Sharing::default(),
            berth,
            _temp: temp,
        }
    }

    /// Puts a share into the shim of instance a.
    fn put_share(&self, share: Share, now: Instant) -> Result<(), String> {
        self.sharing
            .set_share(share, &"a".parse().unwrap(), &self.berth, now)
    }

    /// True if the connection of a client goes to the sibling.
    fn goes_to_sibling(&self, client: &str, now: Instant) -> bool {
        let client = SocketAddr::new(client.parse::<IpAddr>().unwrap(), 1);
        let socket = self
            .sharing
            .choose_sibling(client, "10.0.0.5:6443".parse().ok(), now);
        assert!(
            socket.iter().all(|path| path.ends_with("b.sock")),
            "{socket:?}"
        );
        socket.is_some()
    }

    fn placement_counts(&self) -> [u64; 3] {
        Placement::ALL.map(|(placed, _)| self.sharing.connections[placed as usize].load(Relaxed))
    }
}

fn make_share(old: &str, new: &str, permille: u16) -> Share {
    let [old, new] = [old, new].map(|id| id.parse().unwrap());
    Share {
        old,
        new,
        permille,
        salt: 1,
        lease_ms: 10_000,
        local: false,
    }
}

#[test]
fn all_or_no_clients_go_to_the_sibling() {
    let now = Instant::now();
    for (of, permille, elsewhere) in [
        (("a", "b"), 0, false),
        (("a", "b"), 1000, true),
        (("b", "a"), 0, true),
        (("b", "a"), 1000, false),
    ] {
        let shim = Shim::new();
        assert!(!shim.goes_to_sibling(AFAR, now), "none is in force");
        shim.put_share(make_share(of.0, of.1, permille), now)
            .unwrap();
        assert_eq!(
            shim.goes_to_sibling(AFAR, now),
            elsewhere,
            "{of:?} {permille}"
        );
        assert_eq!(shim.placement_counts(), [u64::from(!elsewhere), 0, 0]);
    }
}

#[test]
fn clients_on_the_node_are_on_the_old_side() {
    let (shim, now) = (Shim::new(), Instant::now());
    for (old, new, local, elsewhere) in [
        ("a", "b", false, false),
        ("a", "b", true, true),
        ("b", "a", false, true),
    ] {
        shim.put_share(
            Share {
                local,
                ..make_share(old, new, 1000)
            },
            now,
        )
        .unwrap();
        for client in [
            "127.0.0.1",
            "127.4.5.6",
            "::1",
            "::ffff:127.0.0.1",
            "10.0.0.5",
            "::ffff:10.0.0.5",
        ] {
            assert_eq!(
                shim.goes_to_sibling(client, now),
                elsewhere,
                "{client} {old} {new} {local}"
            );
        }
    }
}

#[test]
fn a_share_ends_with_its_lease_or_on_request() {
    let (shim, now) = (Shim::new(), Instant::now());
    let seconds = |seconds| now + Duration::from_secs(seconds);
    let is_on = |at| {
        // The answer is the same before and after the control plane has ended the share.
        let elsewhere = shim.goes_to_sibling(AFAR, at);
        shim.sharing.expire(at);
        assert_eq!(shim.goes_to_sibling(AFAR, at), elsewhere);
        assert_eq!(
            (shim.sharing.is_on(), shim.sharing.expiry().is_some()),
            (elsewhere, elsewhere)
        );
        elsewhere
    };
    shim.put_share(make_share("a", "b", 1000), now).unwrap();
    assert!(is_on(seconds(9)));
    assert!(!is_on(seconds(10)));
    shim.put_share(make_share("a", "b", 1000), now).unwrap();
    shim.put_share(make_share("a", "b", 1000), seconds(5))
        .unwrap();
    assert!(is_on(seconds(14)), "it was renewed");
    let shorter = |lease_ms| Share {
        lease_ms,
        ..make_share("a", "b", 1000)
    };
    shim.put_share(shorter(1_000), seconds(5)).unwrap();
    assert!(is_on(seconds(5)));
    shim.put_share(shorter(0), seconds(5)).unwrap();
    assert!(!is_on(seconds(5)));
}

/// A share with the same salt goes on with the counts of connections.
#[test]
fn a_step_goes_on_from_the_last_one() {
    let (shim, now) = (Shim::new(), Instant::now());
    let counts = || {
        shim.sharing
            .status()
            .map(|status| status.by_address + status.by_connection)
    };
    shim.put_share(make_share("a", "b", 50), now).unwrap();
    shim.goes_to_sibling(AFAR, now);
    shim.put_share(make_share("a", "b", 250), now).unwrap();
    shim.goes_to_sibling(AFAR, now);
    assert_eq!(counts(), Some(2));
    shim.put_share(
        Share {
            salt: 2,
            ..make_share("a", "b", 250)
        },
        now,
    )
    .unwrap();
    assert_eq!(counts(), Some(0));
}

#[test]
fn metrics_have_the_names_of_the_reference() {
    let Shim {
        sharing,
        berth,
        _temp,
    } = Shim::new();
    let sharing = Arc::new(sharing);
    let page = || {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(ShareMetrics(sharing.clone())));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        page.lines()
            .filter(|line| !line.starts_with('#'))
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let connections = |[kept, passed, declined]: [u64; 3]| {
        [("kept", kept), ("passed", passed), ("declined", declined)].map(|(result, count)| {
            format!("berth_share_connections_total{{result=\"{result}\"}} {count}")
        })
    };
    assert_eq!(page(), connections([0, 0, 0]));
    for (old, new, ratio) in [("a", "b", "0.95"), ("b", "a", "0.05")] {
        sharing
            .set_share(
                make_share(old, new, 50),
                &"a".parse().unwrap(),
                &berth,
                Instant::now(),
            )
            .unwrap();
        assert_eq!(page()[0], format!("berth_share_ratio {ratio}"));
    }
    [Placement::Kept, Placement::Passed, Placement::Passed]
        .into_iter()
        .for_each(|placed| sharing.count_placement(placed));
    assert_eq!(page()[1..], connections([1, 2, 0]));
}

/// Counts log events.
struct Logged(Arc<AtomicU64>);

impl tracing::Subscriber for Logged {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// A share is renewed every few seconds, too often for a log line each time.
#[test]
fn a_share_is_logged_when_it_begins_and_changes_and_not_when_it_is_renewed() {
    let (shim, now, logged) = (Shim::new(), Instant::now(), Arc::<AtomicU64>::default());
    let subscriber = Dispatch::new(Logged(logged.clone()));
    // Beside a single subscriber, tracing asks the thread that first reaches a log line, and
    // another test's thread has none: the line would be off for good.
    let _second = Dispatch::new(NoSubscriber::new());
    tracing::dispatcher::with_default(&subscriber, || {
        for (permille, lease_ms, messages) in [
            (50, 10_000, 1),
            (50, 10_000, 1),
            (50, 600_000, 1),
            (51, 600_000, 2),
        ] {
            shim.put_share(
                Share {
                    lease_ms,
                    ..make_share("a", "b", permille)
                },
                now,
            )
            .unwrap();
            assert_eq!(logged.load(Relaxed), messages, "{permille} {lease_ms}");
        }
    });
}

#[test]
fn the_status_has_the_end_of_the_share() {
    let (shim, before) = (Shim::new(), SystemTime::now());
    shim.put_share(
        Share {
            lease_ms: 600_000,
            ..make_share("a", "b", 50)
        },
        Instant::now(),
    )
    .unwrap();
    let until = humantime::parse_rfc3339(&shim.sharing.status().unwrap().until).unwrap();
    assert!(until > before && until <= SystemTime::now() + MAX_LEASE);
}

#[test]
fn an_invalid_share_is_refused_and_changes_nothing() {
    let (shim, now) = (Shim::new(), Instant::now());
    shim.put_share(make_share("a", "b", 1000), now).unwrap();
    for share in [
        make_share("a", "a", 50),
        make_share("b", "c", 50),
        make_share("a", "b", 1001),
        Share {
            lease_ms: 600_001,
            ..make_share("a", "b", 50)
        },
        Share {
            lease_ms: u64::MAX,
            ..make_share("a", "b", 50)
        },
    ] {
        let refused = shim.put_share(share.clone(), now);
        assert!(refused.is_err(), "{share:?}");
        assert!(shim.goes_to_sibling(AFAR, now));
    }
}
