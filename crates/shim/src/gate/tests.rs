//! Handshake slots and places in queues: bounds and shares hold, nothing free is left free, and each is given back once, in whatever
//! order clients go.

use super::*;
use proptest::prelude::*;
use std::future::poll_fn;
use std::net::Ipv4Addr;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::task::Poll;

const TO: u64 = 1;

const SOURCES: u8 = 5;

fn address(number: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, number).into()
}

fn source(number: u8) -> Source {
    Source::of(address(number))
}

#[derive(Debug, Clone)]
enum Event {
    Enter {
        source: u8,
    },
    /// A handshake ends, or its attempt is abandoned.
    End(usize),
    GiveUp(usize),
    /// One that waits checks whether it is its turn, or leaves: it may have got a slot already.
    Poll(usize),
    Leave(usize),
}

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0..SOURCES).prop_map(|source| Event::Enter { source }),
        1 => any::<usize>().prop_map(Event::End),
        1 => any::<usize>().prop_map(Event::GiveUp),
        2 => any::<usize>().prop_map(Event::Poll),
        1 => any::<usize>().prop_map(Event::Leave),
    ]
}

fn take<T>(from: &mut Vec<T>, at: usize) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(at % from.len()))
}

/// Whether it is its turn now.
async fn poll_turn(mut waiting: Waiting) -> Result<HandshakeSlot, Waiting> {
    let turn = {
        let mut turn = pin!(waiting.turn());
        poll_fn(|cx| Poll::Ready(turn.as_mut().poll(cx))).await
    };
    match turn {
        Poll::Ready(Ok(opening)) => Ok(opening),
        Poll::Ready(Err(why)) => panic!("{why:?}"),
        Poll::Pending => Err(waiting),
    }
}

fn check(gate: &Gate, bound: usize, opened: usize, waiting: usize) {
    let instances = gate.instances();
    let Some(instance) = instances.get(&TO) else { return };
    assert_eq!(instance.in_flight, instance.of_source.values().sum::<usize>());
    assert!(
        instance.in_flight <= bound
            && instance.of_source.values().all(|openings| *openings <= bound.div_ceil(SOURCE_SHARE)),
        "{instance:?}"
    );
    // Those that have a slot and did not check yet.
    assert_eq!(instance.in_flight - opened, waiting - instance.queue.len(), "{instance:?}");
    assert_eq!(instance.waiting.len(), instance.queue.len());
    let mut free = (0..SOURCES)
        .map(source)
        .filter(|source| instance.in_flight < bound && has_room(&instance.of_source, source, bound));
    assert!(free.all(|source| !instance.queue.has(&source)), "no client waits for what is free: {instance:?}");
}

proptest! {
    #[test]
    fn every_place_is_given_back(events in prop::collection::vec(events(), 0..200), bound in 1..6usize) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let gate = Gate::new(MaxOpenings::Fixed(NonZeroUsize::new(bound).unwrap()), Vec::new()).unwrap();
            let (mut opened, mut waiting) = (Vec::new(), Vec::new());
            for event in events {
                match event {
                    Event::Enter { source } => {
                        match gate.enter(TO, address(source), 300, Instant::now()) {
                            Entry::Open(opening) => opened.push(opening),
                            Entry::Wait(one) => waiting.push(one),
                        }
                    }
                    Event::End(at) => drop(take(&mut opened, at).map(HandshakeSlot::end)),
                    Event::GiveUp(at) => drop(take(&mut opened, at)),
                    Event::Poll(at) => {
                        if let Some(one) = take(&mut waiting, at) {
                            match poll_turn(one).await {
                                Ok(opening) => opened.push(opening),
                                Err(one) => waiting.push(one),
                            }
                        }
                    }
                    Event::Leave(at) => drop(take(&mut waiting, at)),
                }
                check(&gate, bound, opened.len(), waiting.len());
            }
            drop((opened, waiting));
            check(&gate, bound, 0, 0);
            assert!(gate.instances().values().all(|instance| instance.is_idle() && instance.of_source.is_empty()));
        });
    }
}

#[test]
fn room_is_made_at_another_instance_where_the_longest_queue_has_none() {
    let first = vec!["10.0.0.1/32".parse().unwrap()];
    let gate = Gate::new(MaxOpenings::Fixed(NonZeroUsize::MIN), first).unwrap();
    let enter = |to, client| gate.enter(to, client, 300, Instant::now());
    let _first = [(); 3].map(|()| enter(TO, address(1)));
    let _others = [(); 2].map(|()| enter(TO + 1, address(2)));
    assert!(gate.make_room());
    assert!(!gate.make_room(), "the others are of the first class");
}
