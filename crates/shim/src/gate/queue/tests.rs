use super::*;
use proptest::prelude::*;
use std::net::{IpAddr, Ipv4Addr};

const SMALL: QueueCapacity = QueueCapacity {
    clients: 12,
    bytes: 100,
};

fn make_source(number: u8) -> Source {
    Source::from_client(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
}

/// Returns a queue with room for all clients, with the given number of clients of each source.
fn filled_queue(sources: &[(u8, bool, usize)], since: Instant) -> Queue {
    let mut queue = Queue::new(QueueCapacity {
        clients: usize::MAX,
        bytes: usize::MAX,
    });
    let clients = sources
        .iter()
        .flat_map(|(number, is_first, count)| std::iter::repeat_n((*number, *is_first), *count));
    for (number, is_first) in clients {
        assert!(
            queue
                .push_client((make_source(number), is_first), 1, since, since)
                .1
                .is_empty()
        );
    }
    queue
}

/// Returns the classes and the sources of the next clients.
fn take_turns(queue: &mut Queue, count: usize, now: Instant) -> (Vec<Class>, Vec<Source>) {
    (0..count)
        .filter_map(|_| queue.pop_next(now, |_| true))
        .map(|next| (next.class, next.source))
        .unzip()
}

fn count_equal<T: PartialEq>(which: &T, all: &[T]) -> usize {
    all.iter().filter(|it| *it == which).count()
}

#[test]
fn a_source_with_a_thousand_clients_takes_turns() {
    let start = Instant::now();
    let mut queue = filled_queue(&[(1, false, 1000), (2, false, 10), (3, false, 10)], start);
    let (_, sources) = take_turns(&mut queue, 30, start);
    for number in 1..=3 {
        assert_eq!(
            count_equal(&make_source(number), &sources),
            10,
            "{sources:?}"
        );
    }
    assert_eq!(queue.longest_queue(), Some((990, make_source(1))));
}

/// A queue that was empty for a moment does not get ahead of the queues that were not.
#[test]
fn a_source_with_one_client_at_a_time_waits_like_all() {
    let start = Instant::now();
    let mut queue = filled_queue(&[(1, false, 1), (2, false, 5), (3, false, 5)], start);
    let mut sources = Vec::new();
    for _ in 0..9 {
        let of = queue.pop_next(start, |_| true).unwrap().source;
        if of == make_source(1) {
            queue.push_client((of, false), 1, start, start);
        }
        sources.push(of);
    }
    assert_eq!(count_equal(&make_source(1), &sources), 3, "{sources:?}");
}

#[test]
fn no_class_starves_another() {
    let start = Instant::now();
    let mut queue = filled_queue(&[(1, true, 500), (2, false, 500)], start);
    let (classes, _) = take_turns(&mut queue, 100, start);
    assert_eq!(
        (
            count_equal(&Class::First, &classes),
            count_equal(&Class::Others, &classes)
        ),
        (60, 40)
    );

    let now = start + LATE_AFTER;
    for nth in (0..250).cycle().take(1000) {
        queue.push_client((make_source(3 + nth % 2), nth % 2 == 0), 1, now, now);
    }
    let (classes, _) = take_turns(&mut queue, 100, now);
    assert_eq!(
        Class::ALL.map(|class| count_equal(&class, &classes)),
        [50, 40, 10]
    );
}

/// In each row: the sources and classes of the waiting clients, those of the newcomer, the room for
/// clients and for bytes, and the client that is rejected.
#[test]
fn beyond_the_room_the_longest_queue_loses_its_newest() {
    let (first, other) = ((1, true), (2, false));
    let rows: [(&[_], _, usize, usize, Option<usize>); 7] = [
        (&[other], other, 2, 100, None),
        (&[other, other], other, 2, 100, Some(2)),
        (&[other, other], (3, false), 2, 100, Some(1)),
        (&[other, other], other, 9, 30, None),
        (&[other, other], other, 9, 29, Some(2)),
        // The first class has half of the places.
        (&[first, first, other, other], first, 4, 100, Some(4)),
        (&[first, other, other, other], first, 4, 100, Some(3)),
    ];
    for (waiting, comes, clients, bytes, rejected) in rows {
        let (mut queue, now) = (Queue::new(QueueCapacity { clients, bytes }), Instant::now());
        let mut push =
            |(number, is_first)| queue.push_client((make_source(number), is_first), 10, now, now);
        let tickets: Vec<_> = waiting
            .iter()
            .chain([&comes])
            .map(|client| push(*client))
            .collect();
        let (last, before) = tickets.split_last().unwrap();
        assert!(before.iter().all(|(_, rejected)| rejected.is_empty()));
        let expected: Vec<_> = rejected.map(|nth| tickets[nth].0).into_iter().collect();
        assert_eq!(last.1, expected, "{waiting:?} {comes:?} {clients} {bytes}");
    }
}

#[derive(Debug, Clone)]
enum Event {
    Push {
        source: u8,
        is_first: bool,
        bytes: usize,
        waited: u64,
    },
    Remove(usize),
    Next {
        full: u8,
    },
    Pass(u64),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..5u8, any::<bool>(), 0..40usize, 0..16u64)
            .prop_map(|(source, is_first, bytes, waited)| Event::Push { source, is_first, bytes, waited }),
        1 => any::<usize>().prop_map(Event::Remove),
        3 => (0..5u8).prop_map(|full| Event::Next { full }),
        2 => (0..5u64).prop_map(Event::Pass),
    ]
}

/// A waiting client, in the test's own books.
#[derive(Debug, Clone, Copy)]
struct Client {
    ticket: Ticket,
    source: u8,
    is_first: bool,
    bytes: usize,
    since: Instant,
}

proptest! {
    #[test]
    fn every_client_is_in_one_place_and_bounds_hold(events in prop::collection::vec(any_event(), 0..200)) {
        let mut now = Instant::now();
        let start = now;
        let mut queue = Queue::new(SMALL);
        let mut waiting: Vec<Client> = Vec::new();
        for event in events {
            match event {
                Event::Push { source: number, is_first, bytes, waited } => {
                    let since = (now - Duration::from_secs(waited.min((now - start).as_secs()))).max(start);
                    let (ticket, rejected) = queue.push_client((make_source(number), is_first), bytes, since, now);
                    waiting.push(Client { ticket, source: number, is_first, bytes, since });
                    waiting.retain(|c| now < c.since + MAX_WAIT);
                    let is_too_much = waiting.len() > SMALL.clients || waiting.iter().map(|c| c.bytes).sum::<usize>() > SMALL.bytes;
                    prop_assert_eq!(rejected.is_empty(), !is_too_much);
                    for ticket in rejected {
                        // A client that was late at the last check has lost its class.
                        let of_first = |c: &&Client| c.is_first && now < c.since + LATE_AFTER;
                        let firsts = waiting.iter().filter(of_first).count();
                        let at = waiting.iter().position(|c| c.ticket == ticket).expect("a waiting client");
                        let rejected = waiting.remove(at);
                        let all_first = waiting.iter().all(|c| of_first(&c));
                        prop_assert!(!of_first(&&rejected) || firsts > SMALL.clients / FIRST_DIVISOR || all_first, "{:?}", rejected);
                    }
                }
                Event::Remove(at) => {
                    if !waiting.is_empty() {
                        let gone = waiting.remove(at % waiting.len());
                        prop_assert!(queue.remove_client(gone.ticket));
                        prop_assert!(!queue.remove_client(gone.ticket));
                    }
                }
                Event::Next { full } => {
                    let next = queue.pop_next(now, |of| *of != make_source(full));
                    waiting.retain(|c| now < c.since + MAX_WAIT);
                    match next {
                        None => prop_assert!(waiting.iter().all(|c| c.source == full), "{:?}", waiting),
                        Some(NextClient { ticket, source: of, class, .. }) => {
                            let at = waiting.iter().position(|c| c.ticket == ticket);
                            let client = waiting.remove(at.expect("a waiting client, not expired"));
                            prop_assert_eq!(of, make_source(client.source));
                            prop_assert_ne!(client.source, full, "it has its share");
                            prop_assert_eq!(class == Class::Late, now >= client.since + LATE_AFTER);
                            prop_assert_eq!(class == Class::First, now < client.since + LATE_AFTER && client.is_first);
                            let before = |c: &&Client| {
                                let late = |c: &Client| now >= c.since + LATE_AFTER;
                                c.source == client.source && late(c) == late(&client)
                                    && (late(c) || c.is_first == client.is_first) && (c.since, c.ticket) < (client.since, client.ticket)
                            };
                            prop_assert_eq!(waiting.iter().filter(before).count(), 0, "not in the order of their queue");
                        }
                    }
                }
                Event::Pass(seconds) => now += Duration::from_secs(seconds),
            }
            let of_queue: usize = Class::ALL.iter().map(|class| queue.count_waiting(*class)).sum();
            let clients = queue.clients.len();
            prop_assert_eq!(of_queue, clients);
            prop_assert!(clients <= SMALL.clients && queue.bytes <= SMALL.bytes);
            prop_assert!(waiting.iter().all(|c| queue.clients.contains_key(&c.ticket)));
            prop_assert!(clients == waiting.len() || waiting.iter().any(|c| now >= c.since + MAX_WAIT) || clients > waiting.len());
            prop_assert_eq!(queue.bytes, queue.clients.values().map(|c| c.bytes).sum::<usize>());
            let queued: usize = queue.queues.values().map(|queue| queue.places.len()).sum();
            prop_assert_eq!((queued, queue.lengths.iter().map(BTreeSet::len).sum(), queue.turns.len()), (clients, queue.queues.len(), queue.queues.len()));
            prop_assert_eq!(queue.ages.iter().map(BTreeSet::len).sum::<usize>(), clients);
            prop_assert_eq!(queue.is_empty(), clients == 0);
        }
    }
}
