//! Bytes through the relay: complete, in order, once, at any pace.

use super::{connect_answered, connect_pair, expect_answer};
use crate::support::net::{Backend, Pattern, client_hello, echo, expect_end, ping, read};
use crate::support::shim::{Shim, THREADS};
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::Duration;

const MB: u64 = 1_000_000;

#[test]
fn one_byte_writes_both_ways() {
    for threads in THREADS {
        let shim = Shim::start(Backend::new().serve(echo), threads, &[]);
        for first in [client_hello(2000), b"G".repeat(2000)] {
            let mut client = shim.client();
            let mut writer = client.try_clone().unwrap();
            let sent = first.clone();
            let writing = thread::spawn(move || {
                for byte in sent {
                    writer.write_all(&[byte]).unwrap();
                }
                writer.shutdown(Shutdown::Write).unwrap();
            });
            assert!(read(&mut client, first.len()) == first);
            expect_end(&mut client);
            writing.join().unwrap();
        }
    }
}

/// Sends and receives at the same time, then closes.
fn send_and_receive(mut stream: TcpStream, mine: u64, theirs: u64) {
    let mut writer = stream.try_clone().unwrap();
    let writing = thread::spawn(move || {
        Pattern(1).send(&mut writer, mine);
        writer.shutdown(Shutdown::Write).unwrap();
    });
    Pattern(1).receive(&mut stream, theirs);
    expect_end(&mut stream);
    writing.join().unwrap();
}

#[test]
fn ten_megabytes_each_way_at_once() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        let both = thread::spawn(move || {
            let stream = backend.accept();
            send_and_receive(stream, 10 * MB, 10 * MB);
        });
        send_and_receive(shim.client(), 10 * MB, 10 * MB);
        both.join().unwrap();
        shim.until(
            "both directions are counted and the connection has ended",
            |s| s.connections_open == 0,
        );
    }
}

#[test]
fn the_client_ends_first() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        for request in [client_hello(300), b"GET".to_vec(), Vec::new()] {
            let mut client = shim.client_with(&request);
            client.shutdown(Shutdown::Write).unwrap();
            let mut instance = backend.accept();
            assert_eq!(read(&mut instance, request.len()), request);
            expect_end(&mut instance);
            // The instance goes on sending after the client's FIN, and sends more bytes than fit
            // into the buffers.
            let sending = thread::spawn(move || Pattern(2).send(&mut instance, 10 * MB));
            Pattern(2).receive(&mut client, 10 * MB);
            expect_end(&mut client);
            sending.join().unwrap();
        }
        shim.until("no connection is left", |status| {
            status.connections_open == 0
        });
    }
}

#[test]
fn the_instance_ends_first() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        for request in [client_hello(300), b"GET".to_vec()] {
            let (mut client, mut instance) = connect_answered(&shim, &backend, &request);
            instance.shutdown(Shutdown::Write).unwrap();
            expect_end(&mut client);
            let sending = thread::spawn(move || Pattern(3).send(&mut client, 10 * MB));
            Pattern(3).receive(&mut instance, 10 * MB);
            expect_end(&mut instance);
            sending.join().unwrap();
        }
        shim.until("no connection is left", |status| {
            status.connections_open == 0
        });
    }
}

/// Both ends close before the shim notices either close. The shim must not turn a close into a
/// reset.
#[test]
fn an_answer_and_both_ends_at_once() {
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        for request in [client_hello(300), b"GET".to_vec()]
            .iter()
            .cycle()
            .take(100)
        {
            let (mut client, mut instance) = connect_pair(&shim, &backend, request);
            client.shutdown(Shutdown::Write).unwrap();
            instance.write_all(b"answer").unwrap();
            expect_end(&mut instance);
            drop(instance);
            expect_answer(&mut client);
            expect_end(&mut client);
        }
    }
}

/// There are more slow readers of large answers than a thread has pipes, and each connection also
/// carries small messages between the large ones.
#[test]
fn large_and_small_messages_take_turns() {
    const STREAMS: usize = 40;
    for threads in THREADS {
        let backend = Backend::new();
        let shim = Shim::start(backend.address(), threads, &[]);
        // All instances send, and most block, since clients read one by one.
        let talks = (0..STREAMS).map(|_| {
            let (client, mut instance) = (shim.client(), backend.accept());
            let sending = thread::spawn(move || {
                for round in 0..2 {
                    Pattern(round).send(&mut instance, 8 * MB);
                    for _ in 0..10 {
                        let said = read(&mut instance, 5);
                        instance.write_all(&said).unwrap();
                    }
                }
                instance
            });
            (client, sending)
        });
        for (mut client, sending) in talks.collect::<Vec<_>>() {
            for round in 0..2 {
                Pattern(round).receive(&mut client, 8 * MB);
                for _ in 0..10 {
                    ping(&mut client, b"small");
                }
            }
            drop(client);
            expect_end(&mut sending.join().unwrap());
        }
        shim.until("no connection is left", |status| {
            status.connections_open == 0
        });
    }
}

/// A relay without a limit for unread bytes would let the writers finish.
#[test]
fn a_reader_that_pauses_gets_every_byte() {
    const PAUSE: Duration = Duration::from_secs(1);
    let backend = Backend::new();
    let shim = Shim::start(backend.address(), "1", &[]);
    let mut readers = Vec::new();
    let mut writers = Vec::new();
    // A client that pauses before a download, a client that pauses before an upload, and an idle
    // client.
    for upload in [false, true] {
        let (client, instance) = connect_answered(&shim, &backend, &client_hello(10));
        let (mut from, to) = if upload {
            (client, instance)
        } else {
            (instance, client)
        };
        writers.push(thread::spawn(move || {
            Pattern(4).send(&mut from, 100 * MB);
            from.shutdown(Shutdown::Write).unwrap();
            from
        }));
        readers.push(to);
    }
    let mut idle = shim.client_with(b"idle");
    let idle_instance = backend.accept();

    thread::sleep(PAUSE);
    assert!(
        writers.iter().all(|writer| !writer.is_finished()),
        "nothing is behind the readers"
    );
    for mut reader in readers {
        Pattern(4).receive(&mut reader, 100 * MB);
        expect_end(&mut reader);
    }
    for writer in writers {
        writer.join().unwrap();
    }
    thread::spawn(move || echo(idle_instance));
    assert_eq!(read(&mut idle, 4), b"idle");
    ping(&mut idle, b"still there");
}
