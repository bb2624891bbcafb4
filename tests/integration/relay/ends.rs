//! Ends of connections: each end sees a FIN for a FIN and an RST for an RST.

use super::{connect_answered, connect_pair};
use crate::support::MOMENT;
use crate::support::net::{
    Backend, Pattern, client_hello, expect_end, expect_error, expect_reset, expect_silence,
    fill_buffers, read, reset_stream,
};
use crate::support::shim::{Shim, THREADS};
use berth_shim::state::Stop;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::thread;

/// First bytes of a client: a request that may be replayed, and a request that may not.
fn first_requests() -> [Vec<u8>; 2] {
    [client_hello(300), b"GET /".to_vec()]
}

/// Runs a test for each number of threads and each request. The tests run at the same time, because
/// they mostly wait, and each has a shim of its own.
fn test_each(test: impl Fn(&Shim, &Backend, &[u8]) + Sync) {
    let test = &test;
    thread::scope(|scope| {
        for (threads, request) in THREADS
            .into_iter()
            .flat_map(|threads| first_requests().map(|request| (threads, request)))
        {
            scope.spawn(move || {
                let backend = Backend::new();
                // If the shim does not read from one end, it checks that end after a second without
                // any byte. With this option, the second is shorter.
                let shim = Shim::start(backend.address(), threads, &["--speedup", "10"]);
                test(&shim, &backend, &request);
                shim.until("no connection is left", |status| {
                    status.connections_open == 0
                });
            });
        }
    });
}

#[test]
fn the_client_resets_before_or_after_the_answer() {
    test_each(|shim, backend, request| {
        for begin in [connect_pair, connect_answered] {
            let (client, mut instance) = begin(shim, backend, request);
            reset_stream(client);
            expect_reset(&mut instance);
        }
    });
}

/// The shim makes a second attempt, because the first process may just have been ending. A request
/// without TLS gets a second attempt only if the reset came before a byte was sent.
#[test]
fn the_instance_resets_at_accept() {
    test_each(|shim, backend, request| {
        let mut client = shim.client_with(request);
        reset_stream(backend.accept());
        let mut attempts = 1;
        client.set_read_timeout(Some(MOMENT)).unwrap();
        loop {
            match client.read(&mut [0]) {
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    for next in backend.waiting() {
                        attempts += 1;
                        reset_stream(next);
                    }
                }
                other => panic!("no reset but {other:?}"),
            }
        }
        assert!(
            attempts <= 2 && (attempts == 2 || request[0] != 0x16),
            "{attempts} attempts"
        );
    });
}

#[test]
fn the_instance_resets_after_the_hello() {
    test_each(|shim, backend, request| {
        let (mut client, instance) = connect_pair(shim, backend, request);
        reset_stream(instance);
        if request[0] == 0x16 {
            let mut instance = backend.accept();
            assert_eq!(read(&mut instance, request.len()), request, "replayed once");
            expect_silence(&mut instance);
            reset_stream(instance);
        }
        expect_reset(&mut client);
        assert_eq!(backend.waiting().len(), 0, "no third attempt");
    });
}

/// An instance that ends two attempts by FIN does so on purpose, so the client gets a FIN.
#[test]
fn the_instance_ends_without_a_byte() {
    test_each(|shim, backend, request| {
        let (mut client, instance) = connect_pair(shim, backend, request);
        drop(instance);
        if request[0] == 0x16 {
            let mut instance = backend.accept();
            read(&mut instance, request.len());
        }
        expect_end(&mut client);
    });
}

/// A shim that ends resets its connections, so that no client regards a part of an answer as the
/// whole answer.
#[test]
fn a_shim_that_ends_resets_both_ends() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        let mut ends = Vec::new();
        for request in first_requests() {
            ends.extend([
                connect_pair(&shim, &backend, &request),
                connect_answered(&shim, &backend, &request),
            ]);
            let (client, mut instance) = connect_answered(&shim, &backend, &request);
            client.shutdown(Shutdown::Write).unwrap();
            expect_end(&mut instance);
            ends.push((client, instance));
        }
        shim.request(Stop::Now);
        assert_eq!(shim.ended().cut, 6);
        for (mut client, instance) in ends {
            expect_reset(&mut client);
            // After a FIN, a read shows no reset.
            expect_error(&instance);
        }
    }
}

#[test]
fn the_instance_resets_in_the_middle() {
    test_each(|shim, backend, request| {
        let (mut client, mut instance) = connect_answered(shim, backend, request);
        Pattern(0).send(&mut instance, 100_000);
        Pattern(0).receive(&mut client, 100_000);
        reset_stream(instance);
        expect_reset(&mut client);
    });
}

#[test]
fn a_half_closed_client_resets() {
    test_each(|shim, backend, request| {
        for with_answer in [false, true] {
            let begin = if with_answer {
                connect_answered
            } else {
                connect_pair
            };
            let (client, mut instance) = begin(shim, backend, request);
            client.shutdown(Shutdown::Write).unwrap();
            expect_end(&mut instance);
            reset_stream(client);
            // After a FIN, a read shows no reset.
            expect_error(&instance);
        }
    });
}

/// The client resets before the first byte of an answer.
#[test]
fn a_client_that_filled_the_replay_buffer_resets() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        for length in [16 * 1024, 40_000] {
            let mut client = shim.client();
            client.write_all(&client_hello(length)).unwrap();
            let mut instance = backend.accept();
            read(&mut instance, length);
            reset_stream(client);
            expect_reset(&mut instance);
        }
    }
}

#[test]
fn a_half_closed_instance_resets() {
    test_each(|shim, backend, request| {
        let (mut client, instance) = connect_answered(shim, backend, request);
        instance.shutdown(Shutdown::Write).unwrap();
        expect_end(&mut client);
        reset_stream(instance);
        expect_error(&client);
    });
}

/// Closing with an unread request resets the connection. The answer was sent before.
#[test]
fn an_answer_before_a_reset_arrives() {
    test_each(|shim, backend, request| {
        for answer in [10, 100_000] {
            let mut client = shim.client();
            client.write_all(request).unwrap();
            client.write_all(&[0; 5000]).unwrap();
            let mut instance = backend.accept();
            read(&mut instance, request.len());
            // Wait until the instance has bytes that it has not read.
            instance.peek(&mut [0]).unwrap();
            Pattern(0).send(&mut instance, answer);
            drop(instance);
            Pattern(0).receive(&mut client, answer);
            expect_reset(&mut client);
        }
    });
}

/// The answer also arrives if the client's request fills all buffers. Then the shim notices the
/// reset by a failing write.
#[test]
fn an_answer_before_a_reset_arrives_behind_full_buffers() {
    test_each(|shim, backend, request| {
        let (mut client, mut instance) = connect_answered(shim, backend, request);
        fill_buffers(&mut client);
        Pattern(0).send(&mut instance, 10_000);
        drop(instance);
        Pattern(0).receive(&mut client, 10_000);
        expect_reset(&mut client);
    });
}

#[test]
fn last_bytes_before_a_clients_reset_arrive_behind_full_buffers() {
    test_each(|shim, backend, request| {
        let (mut client, mut instance) = connect_answered(shim, backend, request);
        fill_buffers(&mut instance);
        Pattern(0).send(&mut client, 10_000);
        drop(client);
        Pattern(0).receive(&mut instance, 10_000);
        expect_reset(&mut instance);
    });
}

/// A client resets while its instance reads nothing of its upload. The reset must not wait for the
/// instance.
#[test]
fn a_clients_reset_passes_full_buffers() {
    test_each(|shim, backend, request| {
        let (mut client, instance) = connect_answered(shim, backend, request);
        fill_buffers(&mut client);
        reset_stream(client);
        expect_error(&instance);
        shim.until("no connection is left", |status| {
            status.connections_open == 0
        });
    });
}

/// An instance that reads on after the client's reset gets as many bytes as without a shim.
#[test]
fn an_upload_before_a_reset_arrives() {
    test_each(|shim, backend, request| {
        let (mut client, mut instance) = connect_answered(shim, backend, request);
        fill_buffers(&mut client);
        reset_stream(client);
        // The number of bytes that had reached the shim depends on the machine. No byte is changed,
        // or missing before the end.
        assert!(Pattern(0).receive_until_reset(&mut instance) > 0);
    });
}

/// The end of a client reaches an instance that reads no more. An answer in transit to a client
/// that pauses is not cut short.
#[test]
fn a_reset_passes_full_buffers_in_both_directions() {
    test_each(|shim, backend, request| {
        for client_resets in [false, true] {
            let (client, instance) = connect_answered(shim, backend, request);
            let ends = [client, instance].map(|mut end| {
                thread::spawn(move || {
                    fill_buffers(&mut end);
                    end
                })
            });
            let [mut client, instance] = ends.map(|end| end.join().unwrap());
            if client_resets {
                reset_stream(client);
                expect_error(&instance);
            } else {
                reset_stream(instance);
                // The reset discards bytes that the instance's kernel had not sent yet, as without
                // a shim.
                let got = Pattern(0).receive_until_reset(&mut client);
                assert!(got > 100_000, "only {got} bytes");
            }
        }
    });
}
