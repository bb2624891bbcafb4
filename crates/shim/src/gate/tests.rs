//! Tests of handshake slots and of places in queues. In whatever order clients come and go, bounds
//! and shares hold, no slot stays free while a client may have it, and each slot and place is given
//! back once.

use super::queue::LATE_AFTER;
use super::*;
use proptest::prelude::*;
use std::future::poll_fn;
use std::net::Ipv4Addr;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::task::Poll;

const TO: u64 = 1;

const SOURCES: u8 = 5;

fn make_address(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, number).into()
}

fn make_source(number: u8) -> Source {
    Source::from_client(make_address(number))
}

#[derive(Debug, Clone)]
enum Event {
    Enter {
        source: u8,
    },
    /// A handshake ends, or its attempt is abandoned.
    End(usize),
    GiveUp(usize),
    /// A waiting client checks whether its turn has come, or leaves. The client may have got a slot
    /// already.
    Poll(usize),
    Leave(usize),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..SOURCES).prop_map(|source| Event::Enter { source }),
        1 => any::<usize>().prop_map(Event::End),
        1 => any::<usize>().prop_map(Event::GiveUp),
        2 => any::<usize>().prop_map(Event::Poll),
        1 => any::<usize>().prop_map(Event::Leave),
    ]
}

fn take_at<T>(from: &mut Vec<T>, at: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(at % from.len()))
}

/// Returns the slot if the client's turn has come.
async fn poll_turn(mut waiting: QueuePlace) -> Result<HandshakeSlot, QueuePlace> {
    let turn = {
        let mut turn = pin!(waiting.wait_for_turn());
        poll_fn(|cx| Poll::Ready(turn.as_mut().poll(cx))).await
    };
    match turn {
        Poll::Ready(Ok(opening)) => Ok(opening),
        Poll::Ready(Err(why)) => panic!("{why:?}"),
        Poll::Pending => Err(waiting),
    }
}

fn check_gate(gate: &Gate, bound: usize, opened: usize, waiting: usize) {
    let instances = gate.lock_instances();
    let Some(instance) = instances.get(&TO) else {
        return;
    };
    assert_eq!(
        instance.in_flight,
        instance.of_source.values().sum::<usize>()
    );
    assert!(
        instance.in_flight <= bound
            && instance
                .of_source
                .values()
                .all(|openings| *openings <= bound.div_ceil(SOURCE_DIVISOR)),
        "{instance:?}"
    );
    // Both numbers count the clients that have a slot and have not checked for it yet.
    assert_eq!(
        instance.in_flight - opened,
        waiting - instance.queue.len(),
        "{instance:?}"
    );
    assert_eq!(instance.waiting.len(), instance.queue.len());
    let mut free = (0..SOURCES).map(make_source).filter(|source| {
        instance.in_flight < bound && has_room(&instance.of_source, source, bound)
    });
    assert!(
        free.all(|source| !instance.queue.has_source(&source)),
        "no client waits for what is free: {instance:?}"
    );
}

proptest! {
    #[test]
    fn every_place_is_given_back(events in prop::collection::vec(any_event(), 0..200), bound in 1..6usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let gate = Gate::new(MaxOpenings::Fixed(NonZeroUsize::new(bound).unwrap()), Vec::new()).unwrap();
            let (mut opened, mut waiting) = (Vec::new(), Vec::new());
            for event in events {
                match event {
                    Event::Enter { source } => {
                        match gate.enter_client(TO, make_address(source), 300, Instant::now()) {
                            GateEntry::Open(opening) => opened.push(opening),
                            GateEntry::Wait(one) => waiting.push(one),
                        }
                    }
                    Event::End(at) => drop(take_at(&mut opened, at).map(HandshakeSlot::end_handshake)),
                    Event::GiveUp(at) => drop(take_at(&mut opened, at)),
                    Event::Poll(at) => {
                        if let Some(one) = take_at(&mut waiting, at) {
                            match poll_turn(one).await {
                                Ok(opening) => opened.push(opening),
                                Err(one) => waiting.push(one),
                            }
                        }
                    }
                    Event::Leave(at) => drop(take_at(&mut waiting, at)),
                }
                check_gate(&gate, bound, opened.len(), waiting.len());
            }
            drop((opened, waiting));
            check_gate(&gate, bound, 0, 0);
            assert!(gate.lock_instances().values().all(|instance| instance.is_idle() && instance.of_source.is_empty()));
        });
    }
}

#[test]
fn room_is_made_at_another_instance_where_the_longest_queue_has_none() {
    let first = vec!["10.0.0.1/32".parse().unwrap()];
    let gate = Gate::new(MaxOpenings::Fixed(NonZeroUsize::MIN), first).unwrap();
    let enter = |to, client| gate.enter_client(to, client, 300, Instant::now());
    let _first = [(); 3].map(|()| enter(TO, make_address(1)));
    let _others = [(); 2].map(|()| enter(TO + 1, make_address(2)));
    assert!(gate.make_room());
    assert!(!gate.make_room(), "the others are of the first class");
}

fn make_gate(bound: usize) -> Arc<Gate> {
    Gate::new(
        MaxOpenings::Fixed(NonZeroUsize::new(bound).unwrap()),
        Vec::new(),
    )
    .unwrap()
}

fn expect_open(entry: GateEntry) -> HandshakeSlot {
    let GateEntry::Open(slot) = entry else {
        panic!("it waits")
    };
    slot
}

fn expect_wait(entry: GateEntry) -> QueuePlace {
    let GateEntry::Wait(waiting) = entry else {
        panic!("it has a slot")
    };
    waiting
}

#[test]
fn a_source_has_half_of_the_slots_at_most() {
    for (bound, most) in [(1, 1), (4, 2), (5, 3)] {
        let gate = make_gate(bound);
        let enter = |client| gate.enter_client(TO, make_address(client), 300, Instant::now());
        let mut slots: Vec<_> = (0..most).map(|_| expect_open(enter(1))).collect();
        let waiting = expect_wait(enter(1));
        slots.extend((most..bound).map(|_| expect_open(enter(2))));
        assert!(slots[0].has_waiting_clients());
        drop(waiting);
        assert!(!slots[0].has_waiting_clients());
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_has_five_seconds_for_its_hello_and_an_instance_for_its_answer() {
    let gate = make_gate(1);
    let slot = expect_open(gate.enter_client(TO, make_address(1), 300, Instant::now()));
    assert_eq!(
        [gate.hello_deadline(), slot.end_time()],
        [Instant::now() + Duration::from_secs(5); 2]
    );
}

/// The gate keeps an instance without handshakes in flight until the next new instance comes.
#[test]
fn the_newest_instance_and_those_with_handshakes_are_known() {
    let gate = make_gate(1);
    let enter = |to| expect_open(gate.enter_client(to, make_address(1), 300, Instant::now()));
    let known = || {
        let mut known: Vec<u64> = gate.lock_instances().keys().copied().collect();
        known.sort_unstable();
        (known, gate.status().limit)
    };
    let (one, two) = (enter(1), enter(2));
    assert_eq!(known(), (vec![1, 2], 2));
    drop(one);
    assert_eq!(known(), (vec![1, 2], 1));
    drop(two);
    drop(enter(2));
    assert_eq!(known(), (vec![1, 2], 1));
    drop(enter(3));
    assert_eq!(known(), (vec![3], 1));
}

#[tokio::test(start_paused = true)]
async fn each_refusal_has_its_reason() {
    let gate = make_gate(1);
    let enter = |to| gate.enter_client(to, make_address(1), 300, Instant::now());
    let slot = expect_open(enter(1));
    let mut rejected = expect_wait(enter(1));
    assert!(gate.make_room());
    assert_eq!(
        rejected.wait_for_turn().await.err(),
        Some(GateRefusal::Full)
    );
    let mut expires = expect_wait(enter(1));
    assert_eq!(
        expires.wait_for_turn().await.err(),
        Some(GateRefusal::Expired),
        "its own timer"
    );
    let mut expires = expect_wait(enter(1));
    tokio::time::advance(MAX_WAIT).await;
    drop(slot);
    drop(enter(2));
    assert_eq!(
        expires.wait_for_turn().await.err(),
        Some(GateRefusal::Expired),
        "its instance is forgotten"
    );
}

#[tokio::test(start_paused = true)]
async fn status_and_metrics_have_the_names_of_the_reference() {
    let gate = make_gate(1);
    let page = |what: &str| {
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register_collector(Box::new(GateMetrics(gate.clone())));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        let lines = page
            .lines()
            .filter_map(|line| line.strip_prefix("berth_gate_")?.strip_prefix(what));
        lines.map(str::to_owned).collect::<Vec<_>>().join(" ")
    };
    let enter =
        |to, client: &str| gate.enter_client(to, client.parse().unwrap(), 300, Instant::now());
    let slots = [enter(1, "10.0.0.1"), enter(2, "10.0.0.2")].map(expect_open);
    let late = expect_wait(enter(1, "10.0.0.3"));
    tokio::time::advance(LATE_AFTER).await;
    let mut waiting: Vec<_> = ["2001:db8::1", "2001:db8::2", "127.0.0.1"]
        .map(|client| expect_wait(enter(1, client)))
        .into();
    waiting.push(expect_wait(enter(2, "10.0.0.1")));
    let longest = Some(LongestQueue {
        source: "2001:db8::/64".to_owned(),
        clients: 2,
    });
    assert_eq!(
        gate.status(),
        GateStatus {
            openings: 2,
            limit: 2,
            waiting: 5,
            longest
        }
    );
    assert_eq!(
        (page("openings "), page("openings_limit ")),
        ("2".to_owned(), "2".to_owned())
    );
    assert_eq!(
        page("waiting"),
        r#"{class="first"} 1 {class="others"} 3 {class="late"} 1"#
    );
    for why in GateRefusal::ALL {
        waiting.pop().unwrap().refuse_client(why);
    }
    let dropped = r#"_total{reason="full"} 1 _total{reason="expired"} 1 _total{reason="left"} 1"#;
    assert_eq!(page("dropped"), dropped);
    tokio::time::advance(Duration::from_secs(1)).await;
    slots.into_iter().for_each(HandshakeSlot::end_handshake);
    assert_eq!(page("opening_seconds_sum"), " 18.0");
    assert_eq!(
        page("wait_seconds_sum"),
        r#"{class="first"} 0.0 {class="others"} 1.0 {class="late"} 0.0"#
    );
    drop(late);
}

#[tokio::test]
async fn the_nodes_addresses_are_listed_while_the_gate_exists() {
    let gate = make_gate(1);
    let mut keep = pin!(gate.keep_node_addresses_current());
    assert!(
        poll_fn(|cx| Poll::Ready(keep.as_mut().poll(cx)))
            .await
            .is_pending()
    );
}
