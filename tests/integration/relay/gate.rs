//! Clients with and without a queue at the gate.

use super::expect_answer;
use crate::support::net::{
    Backend, client_hello, connect_from, echo, expect_silence, fresh_ip, ping, read, reset_stream,
};
use crate::support::shim::{Shim, THREADS, with_threads};
use crate::support::{PATIENCE, eventually};
use berth_shim::state::Stop;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

/// Connects a client from a fresh address, and sends its ClientHello.
fn connect_client(shim: &Shim) -> TcpStream {
    shim.client_with(&client_hello(300))
}

fn until_waiting(shim: &Shim, clients: u64) {
    shim.until(&format!("{clients} wait"), |status| {
        status.gate.as_ref().unwrap().waiting == clients
    });
}

/// Reads the ClientHello, answers, and returns the open connection.
fn answer_client(mut instance: TcpStream) -> TcpStream {
    read(&mut instance, 300);
    instance.write_all(b"answer").unwrap();
    instance
}

#[test]
fn openings_are_bounded_and_other_clients_have_their_turn() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &["--max-openings", "2"]);
        let clients: Vec<_> = (0..6).map(|_| connect_client(&shim)).collect();
        until_waiting(&shim, 4);
        let mut opened = vec![backend.accept(), backend.accept()];
        assert_eq!(
            backend.waiting().len(),
            0,
            "two are being opened, the others wait"
        );
        let mut kept = Vec::new();
        for waiting in [3, 2, 1, 0] {
            kept.push(answer_client(opened.remove(0)));
            opened.push(backend.accept());
            until_waiting(&shim, waiting);
        }
        kept.extend(opened.into_iter().map(answer_client));
        for mut client in clients {
            expect_answer(&mut client);
        }
        assert_eq!(shim.status().gate.unwrap().openings, 0);
    }
}

#[test]
fn one_source_leaves_a_slot_for_another() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &["--max-openings", "2"]);
        let greedy = fresh_ip().into();
        let _clients: Vec<_> = (0..5)
            .map(|_| {
                let mut client = connect_from(greedy, shim.address);
                client.write_all(&client_hello(300)).unwrap();
                client
            })
            .collect();
        until_waiting(&shim, 4);
        let _greedy = backend.accept();
        let mut other = connect_client(&shim);
        let _other = answer_client(backend.accept());
        expect_answer(&mut other);
        let status = shim.status().gate.unwrap();
        assert_eq!(
            (
                status.openings,
                status.waiting,
                status.longest.unwrap().clients
            ),
            (1, 4, 4)
        );
    }
}

#[test]
fn a_client_that_has_left_costs_the_instance_nothing() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &["--max-openings", "1"]);
        let mut first = connect_client(&shim);
        let opened = backend.accept();
        let (closed, was_reset, mut stays) = (
            connect_client(&shim),
            connect_client(&shim),
            connect_client(&shim),
        );
        until_waiting(&shim, 3);
        drop(closed);
        reset_stream(was_reset);
        until_waiting(&shim, 1);
        let _first = answer_client(opened);
        expect_answer(&mut first);
        let _stays = answer_client(backend.accept());
        expect_answer(&mut stays);
        assert_eq!(backend.waiting().len(), 0, "no attempt for those that left");
    }
}

/// Silent or slow clients do not count as handshakes in flight. A ClientHello that comes late is
/// queued like any other.
#[test]
fn a_client_that_sends_little_holds_no_slot() {
    with_threads(|threads| {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &["--max-openings", "1"]);
        let hello = client_hello(300);
        let (_silent, mut slow) = (shim.client(), shim.client());
        slow.write_all(&hello[..200]).unwrap();
        let mut other = connect_client(&shim);
        let _other = answer_client(backend.accept());
        expect_answer(&mut other);

        // After 5 s the clients have backend connections, and hold no slot.
        let attempts = [backend.accept(), backend.accept()];
        let mut of_the_slow = eventually("what the slow one said", || {
            let speaks = attempts.iter().find(|attempt| {
                attempt
                    .set_read_timeout(Some(Duration::from_millis(1)))
                    .unwrap();
                attempt.peek(&mut [0]).is_ok()
            });
            speaks.map(|attempt| attempt.try_clone().unwrap())
        });
        of_the_slow.set_read_timeout(Some(PATIENCE)).unwrap();
        read(&mut of_the_slow, 200);
        let _next = connect_client(&shim);
        let next = backend.accept();
        slow.write_all(&hello[200..]).unwrap();
        until_waiting(&shim, 1);
        expect_silence(&mut of_the_slow);
        let _next = answer_client(next);
        assert_eq!(read(&mut of_the_slow, 100), hello[200..]);
    });
}

#[test]
fn a_hello_in_pieces_is_one_handshake() {
    for threads in THREADS {
        let shim = Shim::start(
            Backend::new().serve(echo),
            threads,
            &["--max-openings", "1"],
        );
        let hello = client_hello(300);
        let mut client = shim.client();
        for piece in hello.chunks(50) {
            client.write_all(piece).unwrap();
        }
        assert_eq!(read(&mut client, 300), hello);
        ping(&mut client, b"goes on");
        assert_eq!(shim.status().gate.unwrap().openings, 0);
    }
}

/// At the limit of connections, clients of the first class (such as clients on loopback) stay, and
/// further clients wait in the backlog.
#[test]
fn the_first_class_makes_no_room_within_its_share() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(
            backend.address(),
            threads,
            &["--max-openings", "1", "--max-connections", "3"],
        );
        let mut clients: Vec<_> = (0..3).map(|_| connect_client(&shim)).collect();
        until_waiting(&shim, 2);
        let mut in_the_backlog = connect_client(&shim);
        let attempts = [(); 3].map(|()| answer_client(backend.accept()));
        for client in &mut clients {
            expect_answer(client);
        }
        drop((clients, attempts));
        let _leg = answer_client(backend.accept());
        expect_answer(&mut in_the_backlog);
        assert_eq!(
            shim.metric("berth_gate_dropped_total"),
            0,
            "none for want of room"
        );
    }
}

/// A client that waits for an instance that leaves is served by the next one.
#[test]
fn a_queued_client_moves_to_the_next_instance() {
    for threads in THREADS {
        let (old, new) = (Backend::new(), Backend::new());
        let (shim, _record) = Shim::start_of_two([&old, &new], threads, &["--max-openings", "1"]);
        let (mut opened, mut waits) = (connect_client(&shim), connect_client(&shim));
        until_waiting(&shim, 1);
        let attempt = old.accept();
        drop(old);
        reset_stream(attempt);
        let _legs = [answer_client(new.accept()), answer_client(new.accept())];
        for client in [&mut opened, &mut waits] {
            expect_answer(client);
        }
    }
}

/// Clients that the shim held come to an instance through the gate.
#[test]
fn a_client_that_was_held_has_its_turn() {
    for threads in THREADS {
        let backend = Backend::new();
        let address = backend.address();
        let options = [
            "--max-openings",
            "2",
            "--hold",
            "60s",
            "--probe-interval",
            "20ms",
        ];
        let shim = Shim::start(address, threads, &options);
        drop(backend);
        let mut clients: Vec<_> = (0..5).map(|_| connect_client(&shim)).collect();
        shim.until("all are held", |status| status.held == 5);
        shim.until_health(address, "unready");
        let backend = Backend::at(address);
        let mut opened = vec![backend.accept(), backend.accept()];
        until_waiting(&shim, 3);
        assert_eq!(backend.waiting().len(), 0);
        let mut kept: Vec<_> = opened.drain(..).map(answer_client).collect();
        kept.extend((0..3).map(|_| answer_client(backend.accept())));
        for client in &mut clients {
            expect_answer(client);
        }
    }
}

/// A client is queued for an instance. When the instance's shim leaves, the client goes to a
/// sibling's instance.
#[test]
fn a_queued_client_does_not_stay_with_an_instance_that_leaves() {
    for threads in THREADS {
        let (own, other) = (Backend::new(), Backend::new());
        let (shim, _record) = Shim::start_of_two(
            [&own, &other],
            threads,
            &["--max-openings", "1", "--drain-timeout", "60s"],
        );
        let (mut opened, mut waits) = (connect_client(&shim), connect_client(&shim));
        let attempt = own.accept();
        until_waiting(&shim, 1);
        shim.request(Stop::Drain);
        let _other = answer_client(other.accept());
        let _own = answer_client(attempt);
        for client in [&mut opened, &mut waits] {
            expect_answer(client);
        }
    }
}

/// An instance does not answer an incomplete ClientHello. The tests of `client_hello.rs` show which
/// bytes count as incomplete.
#[test]
fn a_client_that_sends_a_part_of_a_hello_holds_no_slot() {
    for threads in THREADS {
        let backend = Backend::new();
        // The shim waits for the rest of the ClientHello before it dials the backend. With this
        // option, the wait is short.
        let shim = Shim::start(
            backend.address(),
            threads,
            &["--max-openings", "1", "--speedup", "20"],
        );
        // This ClientHello fills the replay buffer.
        let _large = shim.client_with(&client_hello(60_000)[..16 * 1024]);
        let _leg = backend.accept();
        let mut other = connect_client(&shim);
        let _other = answer_client(backend.accept());
        expect_answer(&mut other);
        assert_eq!(shim.status().gate.unwrap().openings, 0);
    }
}

/// An instance computes a handshake for the ClientHello, whatever bytes follow.
#[test]
fn a_client_that_fills_the_replay_buffer_holds_a_slot_until_the_answer() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &["--max-openings", "1"]);
        let mut talker = connect_client(&shim);
        talker.write_all(&[7; 20_000]).unwrap();
        let mut attempt = backend.accept();
        read(&mut attempt, 16 * 1024);
        let _next = connect_client(&shim);
        until_waiting(&shim, 1);
        attempt.write_all(b"answer").unwrap();
        expect_answer(&mut talker);
        let _answered = answer_client(backend.accept());
    }
}

/// An instance that needs the whole ClientHello gets the rest when the handshake no longer counts
/// as in flight.
#[test]
fn a_client_that_fills_the_replay_buffer_is_read_further_after_a_while() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(
            backend.address(),
            threads,
            &["--max-openings", "1", "--speedup", "20"],
        );
        let mut talker = connect_client(&shim);
        talker.write_all(&[7; 20_000]).unwrap();
        read(&mut backend.accept(), 20_300);
    }
}

/// A limit that is reached rejects no client until another client wants a slot.
#[test]
fn a_limit_that_is_just_reached_rejects_no_client() {
    for threads in THREADS {
        let shim = Shim::start(
            Backend::new().serve(echo),
            threads,
            &["--max-connections", "2"],
        );
        let troubles = || shim.metric("berth_accept_errors_total");
        let mut clients = [connect_client(&shim), connect_client(&shim)];
        for client in &mut clients {
            read(client, 300);
            ping(client, b"ping");
        }
        assert_eq!(troubles(), 0);
        let _third = connect_client(&shim);
        eventually("the third is seen", || (troubles() > 0).then_some(()));
    }
}
