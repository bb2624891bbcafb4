use super::*;
use crate::backend::TableWriter;
use crate::backend::health::Observation;

fn table(instances: &[(&str, &str, Observation)]) -> Arc<Table> {
    let mut writer = TableWriter::new(1, 1);
    for (id, address, seen) in instances {
        let id = id.parse().unwrap();
        let epoch = writer.insert(&id, address.parse().unwrap(), false, false).unwrap();
        writer.observe(&id, epoch, *seen, "").unwrap();
    }
    writer.table()
}

#[test]
fn it_is_calm_with_one_instance_that_is_ready() {
    use Observation::{Fail, Pass, Refused};
    let why = |instances: &[_], turn| calm(turn, &table(instances)).map(|(own, target)| (own, target.address));
    let own = ("a", "127.1.0.1:6443", Pass);
    for (turn, is_own) in [(Turn::Own, true), (Turn::Sibling, false)] {
        assert_eq!(why(&[own], turn), Ok((is_own, "127.1.0.1:6443".parse().unwrap())));
    }
    let twice = [own, ("b", "127.1.0.1:6443", Refused)];
    assert!(why(&twice, Turn::Own).is_ok(), "two names of one");
    for (instances, turn, expected) in [
        (&[own][..], Turn::NoShim("a sibling joins or leaves"), "a sibling joins or leaves"),
        (&[], Turn::Own, "no instance is known"),
        (&[], Turn::Shared, "the shims give each instance its share of new connections"),
        // One that starts is there before it is ready.
        (&[own, ("b", "127.2.0.1:6443", Refused)], Turn::Own, "there are several instances: a and b"),
        (&[("a", "127.1.0.1:6443", Fail)], Turn::Own, "instance a is unready"),
        (&[("a", "[::1]:6443", Pass)], Turn::Own, "instance a listens on IPv6"),
    ] {
        assert_eq!(why(instances, turn), Err(expected.to_owned()));
    }
    let mut writer = TableWriter::new(1, 1);
    let id: InstanceId = "a".parse().unwrap();
    writer.insert(&id, "127.1.0.1:6443".parse().unwrap(), true, false);
    let mut see = |seen| {
        let epoch = writer.find(&id).unwrap().epoch;
        writer.observe(&id, epoch, seen, "").unwrap();
        target(&writer.table())
    };
    let first = see(Pass).unwrap();
    assert_eq!(see(Fail), Err("instance a is failing".to_owned()));
    let mut patient = TableWriter::new(1, 3);
    patient.insert(&id, "127.1.0.1:6443".parse().unwrap(), true, false);
    for (seen, can) in [(Pass, true), (Fail, false), (Pass, true)] {
        let epoch = patient.find(&id).unwrap().epoch;
        patient.observe(&id, epoch, seen, "").unwrap();
        assert_eq!(
            (target(&patient.table()).is_ok(), patient.table().own().unwrap().health()),
            (can, InstanceHealth::Ready)
        );
    }
    assert_eq!(see(Pass).unwrap(), first);
    assert!(see(Refused).is_err());
    assert_ne!(see(Pass).unwrap(), first, "the listener may be another");
}

/// Of a shim on these addresses, where the self-test ends so.
async fn made(
    mode: DirectMode,
    listen: &[&str],
    tested: Result<(), steering::Error>,
) -> Result<Option<Arc<Direct>>, Error> {
    let listen: Vec<SocketAddr> = listen.iter().map(|address| address.parse().unwrap()).collect();
    Direct::new(mode, listen.into_iter(), Duration::from_secs(3), true, async { tested }).await
}

#[tokio::test]
async fn where_it_cannot_be_auto_relays_and_on_says_why() {
    let old = || {
        let refused = berth_os::bpf::Refused {
            step: berth_os::bpf::Step::Program,
            source: io::Error::from_raw_os_error(libc::EINVAL),
            log: String::new(),
        };
        Err(steering::Error::Kernel { refused, kernel: "5.4.0".into() })
    };
    let node = ["10.0.0.5:6443"];
    assert!(made(DirectMode::Off, &node, Ok(())).await.unwrap().is_none());
    assert!(made(DirectMode::Auto, &node, old()).await.unwrap().is_none());
    let why = made(DirectMode::On, &node, old()).await.unwrap_err().to_string();
    assert!(why.contains("Linux") && why.contains("5.4.0"), "{why}");
    // Not even tried.
    let elsewhere = ["[fd00::5]:6443", "127.0.0.1:6443"];
    assert!(made(DirectMode::Auto, &elsewhere, Ok(())).await.unwrap().is_none());
    let why = made(DirectMode::On, &elsewhere, Ok(())).await.unwrap_err().to_string();
    assert!(why.contains("--direct off"), "{why}");
}

#[tokio::test]
async fn every_address_of_ipv4_is_steered_and_the_others_are_named() {
    let listen = ["10.0.0.5:6443", "[fd00::5]:6443", "10.0.0.6:6443", "10.0.0.5:7443", "127.0.0.1:6443"];
    let direct = made(DirectMode::On, &listen, Ok(())).await.unwrap().unwrap();
    let steered: Vec<_> = addresses_of(&direct.steered).map(|address| address.to_string()).collect();
    assert_eq!(steered, ["10.0.0.5:6443", "10.0.0.6:6443", "10.0.0.5:7443"]);
    let relayed: Vec<_> = direct.relayed.iter().map(ToString::to_string).collect();
    assert_eq!(relayed, ["[fd00::5]:6443", "127.0.0.1:6443"]);
}

#[tokio::test]
async fn an_instance_serves_on_for_the_handshakes_that_began() {
    let direct = made(DirectMode::On, &["10.0.0.5:6443"], Ok(())).await.unwrap().unwrap();
    let start = Instant::now();
    let later = |half| start + HANDSHAKES * half / 2;
    assert!(
        direct.is_settling(start) && !direct.is_settling(later(3)),
        "a shim that was there before may have steered"
    );
    direct.record(Path::On("a".parse().unwrap()), start);
    assert!(direct.is_settling(later(4)));
    direct.record(Path::Off("this shim is not joined".to_owned()), later(4));
    direct.record(Path::Off("another reason".to_owned()), later(5));
    assert!(direct.is_settling(later(5)));
    assert!(!direct.is_settling(later(6)));
    // As a sibling's.
    direct.record(Path::Sibling, later(7));
    direct.record(Path::Off("a sibling joins or leaves".to_owned()), later(9));
    assert!(direct.is_settling(later(11)), "it may hang, and steer until its lease has expired");
    assert!(!direct.is_settling(later(11) + direct.lease));
}

/// A queue whose clients are accepted one by one, however slowly, does not stand still; nor does one whose client waits for a moment.
#[tokio::test]
async fn an_instance_stands_still_that_accepts_nobody_between_two_looks() {
    let direct = made(DirectMode::On, &["10.0.0.5:6443"], Ok(())).await.unwrap().unwrap();
    let (start, listener) = (Instant::now(), "127.1.0.1:6443".parse().unwrap());
    let samples =
        [(0, false), (1, false), (0, false), (3, false), (2, false), (2, true), (5, true), (1, false), (0, false)];
    for (sample, (waiting, stands_still)) in (0..).zip(samples) {
        let at = start + INTERVAL * sample;
        assert_eq!(direct.stands_still(listener, waiting, at), stands_still, "sample {sample}");
        assert_eq!(direct.stands_still(listener, waiting, at + INTERVAL / 2), stands_still, "between two samples");
    }
    direct.now().opened = 10;
    assert!(!direct.stands_still(listener, 5, start + INTERVAL * 20));
    direct.now().opened = 14;
    assert!(!direct.stands_still(listener, 8, start + INTERVAL * 21), "four came, and three more wait");
    direct.now().opened = 15;
    assert!(direct.stands_still(listener, 9, start + INTERVAL * 22));
    assert!(!direct.stands_still("127.1.0.2:6443".parse().unwrap(), 9, start + INTERVAL * 23), "another one");
}

#[tokio::test]
async fn its_metrics_are_called_as_the_reference_has_them() {
    let direct = made(DirectMode::On, &["10.0.0.5:6443"], Ok(())).await.unwrap().unwrap();
    let page = || {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(DirectMetrics(direct.clone())));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        page.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(page(), ["berth_direct_on 0", "berth_direct_connections_total 0"]);
    direct.record(Path::On("a".parse().unwrap()), Instant::now());
    direct.now().opened = 7;
    let lines = page();
    assert_eq!(lines[..2], ["berth_direct_on 1", "berth_direct_connections_total 7"]);
    // Of what the kernel can be asked here, and no more than that.
    assert_eq!(lines.len(), 2 + usize::from(direct.open().is_ok()));
    assert!(lines[2..].iter().all(|line| line.starts_with("berth_direct_connections_open ")), "{lines:?}");
}

#[tokio::test]
async fn the_shims_relay_for_a_while_after_the_last_reason_to() {
    let direct = made(DirectMode::On, &["10.0.0.5:6443"], Ok(())).await.unwrap().unwrap();
    let start = Instant::now();
    let instance = table(&[("a", "127.1.0.1:6443", Observation::Pass)]);
    let chosen = async |turn, half| {
        let at = start + QUIET * half / 2;
        let path = direct.choose(&mut None, calm(turn, &instance), at).await;
        direct.record(path.clone(), at);
        path
    };
    let leaves = Path::Off("a sibling leaves".to_owned());
    assert_eq!(chosen(Turn::NoShim("a sibling leaves"), 0).await, leaves);
    assert_eq!(chosen(Turn::NoShim("a sibling leaves"), 1).await, leaves);
    assert_eq!(chosen(Turn::Sibling, 1).await, Path::Sibling, "a sibling decides for itself");
    assert_eq!(chosen(Turn::Own, 2).await.why_not(), Some("it was not calm a moment ago"));
    // What failed is tried again as late.
    let failed = direct.quiet(Path::Failed("MPTCP".to_owned()), start + QUIET * 3 / 2);
    direct.record(failed.clone(), start + QUIET * 3 / 2);
    assert_eq!(chosen(Turn::Own, 4).await, failed);
    assert_eq!(direct.now().quiet, start + QUIET * 5 / 2);
}

#[test]
fn a_crowd_is_more_than_calm_within_a_second() {
    let start = Instant::now();
    let mut pace = Pace { most: 100, began: start, count: 1000 };
    for (quarters, count, is_crowd) in
        [(1, 1100, false), (2, 1101, true), (4, 1101, true), (5, 1201, false), (7, 1202, true)]
    {
        assert_eq!(pace.is_crowd(count, start + COUNTED_FOR * quarters / 4), is_crowd, "after {quarters} quarters");
    }
}
