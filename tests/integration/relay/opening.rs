//! Connections before the backend's first byte: no connection is lost, and the relay fails open.

use super::expect_answer;
use crate::support::net::{
    Backend, client_hello, connect_from, count_queued, count_unread, echo, expect_end,
    expect_no_service, expect_reset, expect_silence, fresh_ip, ping, read, reset_stream,
};
use crate::support::shim::{Shim, THREADS, with_threads};
use crate::support::tls::{Api, Ca};
use crate::support::{MOMENT, PATIENCE, eventually};
use berth_node::terms::Phase;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Option for tests that wait for probes: the shim probes often.
const OFTEN: [&str; 2] = ["--probe-interval", "20ms"];

/// Reads a ClientHello of at least `length` bytes, answers, and returns the hello with all later
/// bytes.
fn answer_hello(mut stream: TcpStream, length: usize) -> Vec<u8> {
    let mut said = read(&mut stream, length);
    stream.write_all(b"answer").unwrap();
    stream.read_to_end(&mut said).unwrap();
    said
}

/// A backend that closes its listener resets the connections in its queue.
#[test]
fn clients_queued_at_a_closing_backend_are_served_by_the_next() {
    const CLIENTS: usize = 20;
    for threads in THREADS {
        let (old, new) = (Backend::new(), Backend::new());
        let (shim, _record) = Shim::start_of_two([&old, &new], threads, &[]);

        let client_hellos: Vec<_> = (0..CLIENTS).map(|n| client_hello(200 + n)).collect();
        let mut clients: Vec<_> = client_hellos
            .iter()
            .map(|client_hello| shim.client_with(client_hello))
            .collect();
        let sent: usize = client_hellos.iter().map(Vec::len).sum();
        eventually("every ClientHello is in the old backend's queue", || {
            (count_queued(old.address()) >= CLIENTS as u64
                && count_unread(old.address()) == sent as u64)
                .then_some(())
        });
        drop(old);

        let served: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let stream = new.accept();
                thread::spawn(move || answer_hello(stream, 200))
            })
            .collect();
        for client in &mut clients {
            expect_answer(client);
        }
        drop(clients);
        let mut said: Vec<_> = served
            .into_iter()
            .map(|served| served.join().unwrap())
            .collect();
        said.sort_by_key(Vec::len);
        assert!(
            said == client_hellos,
            "each ClientHello once and nothing else"
        );
        assert_eq!(new.waiting().len(), 0, "no attempt too many");
    }
}

/// A request without TLS may have had an effect, so it is not replayed.
#[test]
fn a_request_without_tls_is_not_replayed() {
    for threads in THREADS {
        let (old, new) = (Backend::new(), Backend::new());
        let (shim, _record) = Shim::start_of_two([&old, &new], threads, &[]);
        let mut clients: Vec<_> = (0..5).map(|_| shim.client()).collect();
        for client in &mut clients {
            client.write_all(b"POST /once").unwrap();
        }
        eventually("every request is at the old backend", || {
            (count_unread(old.address()) == 50).then_some(())
        });
        drop(old);
        for client in &mut clients {
            expect_reset(client);
        }
        assert_eq!(new.waiting().len(), 0);
        // A request that was never sent may go to the next instance.
        let _client = shim.client_with(b"POST /once");
        assert_eq!(read(&mut new.accept(), 10), b"POST /once");
    }
}

/// A client is silent while its instance ends. The next instance serves the client when it speaks,
/// however late.
#[test]
fn a_silent_client_is_served_when_it_speaks() {
    for threads in THREADS {
        let (old, new) = (Backend::new(), Backend::new());
        let (shim, _record) = Shim::start_of_two([&old, &new], threads, &[]);
        let mut clients = [shim.client(), shim.client()];
        let attempts = clients.each_ref().map(|_| old.accept());
        drop(old);
        let [ended, was_reset] = attempts;
        drop(ended);
        reset_stream(was_reset);
        for client in &mut clients {
            expect_silence(client);
            assert_eq!(new.waiting().len(), 0, "no attempt before");
            client.write_all(b"what is not TLS").unwrap();
            let mut attempt = new.accept();
            assert_eq!(read(&mut attempt, 15), b"what is not TLS");
            attempt.write_all(b"answer").unwrap();
            expect_answer(client);
        }
    }
}

/// A port check connects and closes. It sends nothing, so a second attempt would have nothing to
/// replay.
#[test]
fn connect_and_close_makes_one_attempt() {
    for threads in THREADS {
        let (own, other) = (Backend::new(), Backend::new());
        let shim = Shim::start(own.address(), threads, &[]);
        let mut checks = 0;
        let mut check = |by_reset: bool| {
            drop(shim.client());
            let mut attempt = own.accept();
            expect_end(&mut attempt);
            if by_reset {
                reset_stream(attempt);
            } else {
                drop(attempt);
            }
            checks += 1;
            shim.until("the check has ended", |status| {
                status.connections_open == 0 && status.connections_total == checks
            });
            assert_eq!(
                (own.waiting().len(), other.waiting().len()),
                (0, 0),
                "no further attempt"
            );
        };
        check(false);
        check(true);
        let _record = shim.sibling("other", other.address());
        shim.until_health(other.address(), "ready");
        check(false);
        check(true);
        assert_eq!(shim.metric("berth_replays_total"), 0);
    }
}

/// An apiserver ends a silent connection after half a minute. There is no second attempt, because
/// another apiserver would wait for half a minute, too.
#[test]
fn an_attempt_without_an_answer_is_the_last() {
    for threads in THREADS {
        let (own, other) = (Backend::new(), Backend::new());
        let (shim, _record) = Shim::start_of_two([&own, &other], threads, &["--hold", "1s"]);
        let mut silent = shim.client();
        drop(own.accept());
        expect_end(&mut silent);
        assert_eq!(
            (own.waiting().len(), other.waiting().len()),
            (0, 0),
            "no further attempt"
        );
    }
}

#[test]
fn a_hello_in_pieces() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        let client_hello = client_hello(1000);
        let mut client = shim.client();
        let mut instance = backend.accept();
        for piece in client_hello.chunks(77) {
            client.write_all(piece).unwrap();
            assert_eq!(
                read(&mut instance, piece.len()),
                piece,
                "each piece goes on at once"
            );
        }
        reset_stream(instance);
        let next = backend.accept();
        let served = thread::spawn(move || answer_hello(next, 1000));
        expect_answer(&mut client);
        client.write_all(b"more").unwrap();
        drop(client);
        assert!(
            served.join().unwrap() == [&client_hello[..], b"more"].concat(),
            "all again, once, then what follows"
        );
    }
}

/// A ClientHello within the buffer can be replayed. A longer one goes on to the instance, which may
/// answer when it likes.
#[test]
fn a_hello_larger_than_the_replay_buffer() {
    const KEPT: usize = 16 * 1024;
    const LARGE: usize = 100_000;
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        for large in [20_000, LARGE] {
            let client_hello = client_hello(large);
            let mut client = shim.client_with(&client_hello);
            let mut instance = backend.accept();
            assert!(
                read(&mut instance, large) == client_hello,
                "the instance has the whole of it before it sends a byte"
            );
            instance.write_all(b"answer").unwrap();
            expect_answer(&mut client);
        }
        let client_hello = client_hello(LARGE);
        let mut client = shim.client_with(&client_hello[..KEPT]);
        let mut instance = backend.accept();
        assert!(read(&mut instance, KEPT) == client_hello[..KEPT]);
        expect_silence(&mut instance);
        reset_stream(instance);
        let mut instance = backend.accept();
        assert!(
            read(&mut instance, KEPT) == client_hello[..KEPT],
            "replayed once"
        );
        client.write_all(&client_hello[KEPT..]).unwrap();
        assert!(read(&mut instance, LARGE - KEPT) == client_hello[KEPT..]);
        reset_stream(instance);
        expect_reset(&mut client);
        assert_eq!(
            backend.waiting().len(),
            0,
            "it could not be replayed completely"
        );
    }
}

#[test]
fn a_refused_client_is_held_until_its_instance_is_back() {
    for threads in THREADS {
        let backend = Backend::new();
        let address = backend.address();
        let shim = Shim::start(address, threads, &[&OFTEN[..], &["--hold", "60s"]].concat());
        drop(backend);
        let requests = [client_hello(300), b"GET /".to_vec(), Vec::new()];
        let mut clients: Vec<_> = requests
            .iter()
            .map(|request| shim.client_with(request))
            .collect();
        shim.until("three clients are held", |status| status.held == 3);
        shim.until_health(address, "unready");
        Backend::at(address).serve(echo);
        for (client, request) in clients.iter_mut().zip(&requests) {
            assert!(read(client, request.len()) == *request);
            ping(client, b"and on");
        }
        assert_eq!(shim.status().held, 0);
    }
}

/// An instance counts as unhealthy from the first refused connection on, whatever the result of the
/// last probe was.
#[test]
fn an_instance_that_refuses_must_rise_again() {
    for threads in THREADS {
        let backend = Backend::new();
        let address = backend.address();
        let shim = Shim::start(address, threads, &[]);
        assert_eq!(shim.status().instances[0].health.as_str(), "ready");
        drop(backend);
        let _client = shim.client();
        shim.until_health(address, "unready");
        let _back = Backend::at(address);
        shim.until(
            "it is held: it listens, but no probe has said so",
            |status| status.held == 1,
        );
    }
}

#[test]
fn beyond_hold_a_client_is_reset_and_the_next_is_refused() {
    with_threads(|threads| {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &["--hold", "2s"]);
        drop(backend);
        let began = Instant::now();
        let mut clients = [client_hello(300), b"GET /".to_vec(), Vec::new()]
            .map(|request| shim.client_with(&request));
        for client in &mut clients {
            expect_reset(client);
        }
        assert!(
            began.elapsed() >= Duration::from_secs(2),
            "held for {:?} only",
            began.elapsed()
        );
        shim.until("none is held", |status| {
            status.held == 0 && status.connections_open == 0
        });
        shim.until("it is refusing", |status| status.state == Phase::Refusing);
        let refused = TcpStream::connect(shim.address).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    });
}

#[test]
fn a_held_client_that_gives_up_frees_its_place() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &["--hold", "1h"]);
        drop(backend);
        for request in [
            client_hello(300),
            b"GET /".to_vec(),
            Vec::new(),
            client_hello(40_000),
        ] {
            for by_reset in [false, true] {
                let client = shim.client_with(&request);
                shim.until("a client is held", |status| status.held == 1);
                let unread = request.len() > 16 * 1024;
                if by_reset || request.starts_with(b"G") || unread {
                    // A client that only ends its sending direction may still wait for an answer.
                    reset_stream(client);
                } else {
                    drop(client);
                }
                shim.until("its place is free", |status| {
                    status.held == 0 && status.connections_open == 0
                });
            }
        }
    }
}

#[test]
fn more_than_1024_are_not_held() {
    const PLACES: u64 = 1024;
    for threads in THREADS {
        let backend = Backend::new();
        let address = backend.address();
        let shim = Shim::start(address, threads, &[&OFTEN[..], &["--hold", "1h"]].concat());
        drop(backend);
        let source = IpAddr::from(fresh_ip());
        let mut held: Vec<_> = (0..PLACES)
            .map(|_| connect_from(source, shim.address))
            .collect();
        shim.until("every place is taken", |status| status.held == PLACES);
        // The client is refused at once. It must not be held for an hour and then reset.
        expect_no_service(shim.address);
        reset_stream(held.pop().unwrap());
        shim.until("a place is free", |status| status.held == PLACES - 1);
        let mut next = shim.client();
        shim.until("it is taken", |status| status.held == PLACES);
        Backend::at(address).serve(echo);
        ping(&mut next, b"served");
        for client in held.iter_mut().step_by(100) {
            ping(client, b"served");
        }
    }
}

/// A probe that fails under load must not make the API unreachable.
#[test]
fn an_instance_that_fails_its_probe_and_does_not_refuse_is_used() {
    let ca = Ca::new();
    for threads in THREADS {
        let api = Api::start(&ca);
        let directory = tempfile::tempdir().unwrap();
        let ca_file = directory.path().join("ca.crt");
        std::fs::write(&ca_file, ca.pem()).unwrap();
        let https = [
            "--probe",
            "https",
            "--probe-ca",
            ca_file.to_str().unwrap(),
            "--probe-timeout",
            "10s",
        ];
        let shim = Shim::start(api.address, threads, &[&OFTEN[..], &https].concat());
        let get = |path: &str| ca.get(shim.client(), path);
        assert!(get("/readyz").starts_with("HTTP/1.1 200"));
        api.answer("500 Internal Server Error");
        shim.until_health(api.address, "failing");
        assert!(shim.status().fail_open);
        assert!(
            get("/readyz").starts_with("HTTP/1.1 500"),
            "connections still come to it"
        );
        // A ready instance is preferred.
        let sibling = Api::start(&ca);
        let record = shim.sibling("other", sibling.address);
        shim.until_health(sibling.address, "ready");
        assert!(get("/readyz").starts_with("HTTP/1.1 200"));
        drop(record);
        shim.until("the sibling is gone", |status| status.instances.len() == 1);
        assert!(get("/readyz").starts_with("HTTP/1.1 500"));
        api.answer("200 OK");
        shim.until_health(api.address, "ready");
        assert!(!shim.status().fail_open);
    }
}

/// An instance has got the ClientHello and sends nothing. As soon as the probe of this instance
/// fails, the shim sends the ClientHello to a ready instance.
#[test]
fn a_hello_at_an_instance_that_hangs_goes_to_a_ready_one() {
    let ca = Ca::new();
    // On a busy machine, one late probe is no failure.
    let https = [
        "--probe",
        "https",
        "--probe-insecure",
        "--probe-timeout",
        "1s",
        "--fall",
        "3",
    ];
    for threads in THREADS {
        for ready_before in [true, false] {
            let (own, attempts) = Api::start_silent(&ca);
            let sibling = Api::start(&ca);
            let shim = Shim::start(own.address, threads, &[&OFTEN[..], &https].concat());
            let mut record = ready_before.then(|| shim.sibling("other", sibling.address));
            if ready_before {
                shim.until_health(sibling.address, "ready");
            }
            thread::scope(|scope| {
                let client = shim.client();
                let served = scope.spawn(|| ca.get(client, "/readyz"));
                let mut attempt = attempts
                    .recv_timeout(PATIENCE)
                    .expect("an attempt to the own instance");
                assert_eq!(read(&mut attempt, 1), [0x16]);
                own.answer("500 Internal Server Error");
                if !ready_before {
                    shim.until_health(own.address, "failing");
                    attempt.set_read_timeout(Some(MOMENT)).unwrap();
                    let held = std::iter::repeat_with(|| attempt.read(&mut [0; 4096]))
                        .find(|read| !matches!(read, Ok(1..)));
                    assert_eq!(
                        held.unwrap().unwrap_err().kind(),
                        ErrorKind::WouldBlock,
                        "there is no better one"
                    );
                    record = Some(shim.sibling("other", sibling.address));
                }
                assert!(served.join().unwrap().starts_with("HTTP/1.1 200"));
                attempt.set_read_timeout(Some(PATIENCE)).unwrap();
                let end = std::iter::repeat_with(|| attempt.read(&mut [0; 4096]))
                    .find(|read| !matches!(read, Ok(1..)));
                assert_eq!(end.unwrap().unwrap_err().kind(), ErrorKind::ConnectionReset);
            });
            assert_eq!(shim.metric("berth_replays_total"), 1);
            assert_eq!(shim.metric("berth_empty_attempts_total"), 1);
            assert_eq!(
                shim.metric("berth_first_byte_seconds_count"),
                0,
                "the sibling's instance answered"
            );
            drop(record);
        }
    }
}

#[test]
fn the_source_address_names_the_client() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        let client = Ipv4Addr::new(127, 5, 6, 7);
        let _client = connect_from(client.into(), shim.address);
        assert_eq!(backend.accept().peer_addr().unwrap().ip(), client);
    }
}

#[test]
fn ipv6_clients_reach_an_ipv4_instance() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        return eprintln!("left out: this machine has no [::1]: {error}");
    }
    for threads in THREADS {
        let address = Backend::new().serve(echo);
        let shim = Shim::launch("[::1]:0", address, threads, &[]);
        shim.until_phase(Phase::Joined);
        for _ in 0..20 {
            ping(&mut shim.client(), &client_hello(500));
        }
    }
}
