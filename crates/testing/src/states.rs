//! Explores the states of a model, breadth-first. So the list of events that leads to a mistake is
//! as short as possible.
//!
//! The search keeps only 40 bytes per state: a 128-bit hash, the predecessor and the event between
//! them. To visit a state again, the search repeats the state's events. Most of them are also
//! events of the state visited before, and need no repetition.

use std::collections::HashSet;
use std::fmt::Debug;
use std::hash::{BuildHasherDefault, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A state machine and its environment, of which a search visits every state. The model panics if a
/// property is violated.
pub trait Model: Clone {
    type Event: Copy + Debug;

    /// Returns the events that are possible in this state.
    fn events(&self) -> Vec<Self::Event>;

    fn happen(&mut self, event: Self::Event);

    /// Hashes every field that decides which events follow. For a deadline, hashes the time that is
    /// left.
    fn digest(&self, digest: &mut Digest);

    /// Checks a state that the search visits for the first time, as number `nth`.
    fn check_state(&self, _nth: usize) {}
}

/// The result of a search through the states of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explored {
    pub states: usize,
    /// Number of events that were tried, counted once for each state in which an event is possible.
    pub events: usize,
    /// Number of events from the initial state to the state that was found last.
    pub depth: usize,
    /// True if every state of the model was visited, false if the limit was reached before.
    pub exhausted: bool,
}

#[derive(Debug, Clone, Copy)]
struct Node {
    /// Index of the state from which this state was reached. An initial state has its own index.
    parent: u32,
    /// Index of the event in the list of events that are possible in the parent state.
    event: u32,
}

struct Search<'a, M> {
    roots: &'a [M],
    nodes: Vec<Node>,
    /// The states on the way from an initial state to the state that was restored last, with their
    /// indexes.
    trail: Vec<(usize, M)>,
}

/// Visits each state that can be reached from the initial states `roots`, and prints their number.
/// Stops after `usually` states, multiplied by the environment variable `BERTH_STATES`.
///
/// # Panics
/// A property is violated; the events that led to the state are printed.
pub fn explore<M: Model>(name: &str, roots: &[M], usually: usize) -> Explored {
    let times = std::env::var("BERTH_STATES")
        .ok()
        .and_then(|times| times.parse().ok())
        .unwrap_or(1);
    let most = usually * times;
    let mut seen: HashSet<u128, BuildHasherDefault<DigestHasher>> = HashSet::default();
    let mut search = Search {
        roots,
        nodes: Vec::new(),
        trail: Vec::new(),
    };
    for (root, at) in roots.iter().zip(0..) {
        seen.insert(digest(root));
        search.nodes.push(Node {
            parent: at,
            event: 0,
        });
    }
    let mut found = Explored {
        states: search.nodes.len(),
        events: 0,
        depth: 0,
        exhausted: true,
    };
    let (mut at, mut level_ends) = (0, search.nodes.len());
    'all: while at < search.nodes.len() {
        if at == level_ends {
            (found.depth, level_ends) = (found.depth + 1, search.nodes.len());
        }
        let state = search.restore_state(at, found.depth);
        for (event, nth) in state.events().into_iter().zip(0..) {
            let mut next = state.clone();
            let states = search.nodes.len();
            let happens = || {
                next.happen(event);
                let is_new = seen.insert(digest(&next));
                if is_new {
                    next.check_state(states);
                }
                is_new
            };
            found.events += 1;
            match catch_unwind(AssertUnwindSafe(happens)) {
                Ok(false) => {}
                Ok(true) => search.nodes.push(Node {
                    parent: u32::try_from(at).unwrap(),
                    event: nth,
                }),
                Err(panic) => {
                    eprintln!(
                        "{name}: after {} states, by:\n{}{event:?},",
                        states,
                        search.format_trace(at, found.depth)
                    );
                    resume_unwind(panic);
                }
            }
            if search.nodes.len() >= most {
                (found.exhausted, found.depth) = (false, found.depth + 1);
                break 'all;
            }
        }
        at += 1;
    }
    found.states = search.nodes.len();
    let Explored {
        states,
        events,
        depth,
        exhausted,
    } = found;
    let all = if exhausted {
        "every state"
    } else {
        "not every state"
    };
    println!("{name}: {states} states, {events} events, {depth} events deep, {all}");
    found
}

impl<M: Model> Search<'_, M> {
    /// Restores a state.
    fn restore_state(&mut self, state: usize, depth: usize) -> M {
        let (mut missing, mut at, mut length) = (Vec::new(), state, depth + 1);
        while length > 0
            && self
                .trail
                .get(length - 1)
                .is_none_or(|(known, _)| *known != at)
        {
            missing.push(at);
            (at, length) = (self.nodes[at].parent as usize, length - 1);
        }
        self.trail.truncate(length);
        for node in missing.into_iter().rev() {
            let next = match self.trail.last() {
                None => self.roots[node].clone(),
                Some((_, last)) => {
                    let mut next = last.clone();
                    next.happen(last.events()[self.nodes[node].event as usize]);
                    next
                }
            };
            self.trail.push((node, next));
        }
        self.trail[depth].1.clone()
    }

    /// Formats the events that lead to a state, one event per line.
    fn format_trace(&mut self, state: usize, depth: usize) -> String {
        self.restore_state(state, depth);
        let root = format!("// root {}\n", self.trail[0].0);
        let event = |pair: &[(usize, M)]| {
            format!(
                "{:?},\n",
                pair[0].1.events()[self.nodes[pair[1].0].event as usize]
            )
        };
        self.trail
            .windows(2)
            .map(event)
            .fold(root, |all, event| all + &event)
    }
}

fn digest(model: &impl Model) -> u128 {
    let mut digest = Digest::default();
    model.digest(&mut digest);
    u128::from(digest.0) << 64 | u128::from(digest.1)
}

/// A 128-bit hash. It does not withstand values that somebody chooses to collide, but nobody does
/// here.
#[derive(Debug, Clone, Copy, Default)]
pub struct Digest(u64, u64);

impl Hasher for Digest {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = fold_product(self.0 ^ value, 0x9e37_79b9_7f4a_7c15) ^ self.1;
        self.1 = fold_product(self.1 ^ value, 0xd6e8_feb8_6659_fd93)
            .wrapping_add(self.0.rotate_left(29));
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.1
    }
}

/// A hasher for a set of digests. It uses a digest as it is, because digests are already well
/// distributed.
#[derive(Debug, Clone, Copy, Default)]
struct DigestHasher(u64);

impl Hasher for DigestHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a digest has 128 bits");
    }

    fn write_u128(&mut self, digest: u128) {
        self.0 = digest as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn fold_product(a: u64, b: u64) -> u64 {
    let product = u128::from(a ^ b.rotate_left(17)) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::Hash;

    /// A model that counts to seven and back to zero. It violates this property: the
    /// count is never five.
    #[derive(Clone)]
    struct Counter(u8, bool);

    impl Model for Counter {
        type Event = u8;

        fn events(&self) -> Vec<u8> {
            vec![1, 2]
        }

        fn happen(&mut self, event: u8) {
            self.0 = (self.0 + event) % 8;
        }

        fn digest(&self, digest: &mut Digest) {
            self.0.hash(digest);
        }

        fn check_state(&self, _: usize) {
            assert!(self.1 || self.0 != 5, "five");
        }
    }

    #[test]
    fn each_state_is_visited_once_and_a_mistake_is_found() {
        let all = explore("counter", &[Counter(0, true)], 100);
        assert_eq!(
            all,
            Explored {
                states: 8,
                events: 16,
                depth: 4,
                exhausted: true
            }
        );
        let some = explore("counter", &[Counter(0, true)], 4);
        assert_eq!((some.states, some.exhausted), (4, false));
        let found = catch_unwind(|| explore("counter", &[Counter(0, false)], 100));
        assert_eq!(found.unwrap_err().downcast_ref(), Some(&"five"));
        let mut search = Search {
            roots: &[Counter(0, true)],
            nodes: Vec::new(),
            trail: Vec::new(),
        };
        search.nodes = [(0, 0), (0, 1), (1, 0)]
            .map(|(parent, event)| Node { parent, event })
            .to_vec();
        assert_eq!(search.format_trace(2, 2), "// root 0\n2,\n1,\n");
        assert_eq!(search.restore_state(2, 2).0, 3);
    }
}
