//! The number of connections, and the cost of a connection.

use crate::support::net::{Backend, client_hello, echo, expect_silence, ping, read};
use crate::support::shim::{Shim, THREADS};
use berth_shim::backend::TableWriter;
use berth_shim::metrics::Metrics;
use berth_shim::relay::source::Sources;
use berth_shim::relay::{Context, OpenConnection, relay_client};
use berth_shim::state::{ShimState, Stop};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};

#[test]
fn beyond_max_connections_clients_wait_in_the_backlog() {
    for threads in THREADS {
        let shim = Shim::start(
            Backend::new().serve(echo),
            threads,
            &["--max-connections", "2"],
        );
        let mut served: Vec<_> = (0..2).map(|_| shim.client()).collect();
        for client in &mut served {
            ping(client, &client_hello(100));
        }
        let mut waiting: Vec<_> = (0..4).map(|_| shim.client()).collect();
        for client in &mut waiting {
            client.write_all(&client_hello(100)).unwrap();
            expect_silence(client);
        }
        assert_eq!(shim.status().connections_open, 2);
        // Whenever a connection ends, the client that has waited longest is served.
        for mut client in waiting {
            drop(served.remove(0));
            assert!(read(&mut client, 100) == client_hello(100));
            served.push(client);
        }
    }
}

/// A leaving shim closes its listener, and the close resets connections in the backlog. So the shim
/// must first accept them.
#[test]
fn a_client_in_the_backlog_of_a_leaving_shim_is_served() {
    for threads in THREADS {
        let shim = Shim::start(
            Backend::new().serve(echo),
            threads,
            &["--max-connections", "1"],
        );
        let mut served = shim.client();
        ping(&mut served, &client_hello(100));
        let mut waiting: Vec<_> = (0..20).map(|_| shim.client()).collect();
        for client in &mut waiting {
            client.write_all(&client_hello(100)).unwrap();
        }
        shim.request(Stop::Drain);
        for client in &mut waiting {
            assert!(read(client, 100) == client_hello(100));
        }
        ping(&mut served, b"still");
        drop((served, waiting));
        assert_eq!(shim.ended().cut, 0);
    }
}

/// Cost of an idle connection, without kernel buffers and two registrations of tokio.
#[test]
fn a_connection_is_small() {
    // The size was 792 when the test was written.
    const LIMIT: usize = 832;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    let writer = TableWriter::new(1, 1);
    let metrics = Metrics::new(
        &"a".parse().unwrap(),
        1,
        1,
        writer.subscribe(),
        watch::channel(ShimState::default()).1,
        Vec::new(),
    );
    let (refusals, _) = mpsc::unbounded_channel();
    let context = Arc::new(Context {
        table: writer.subscribe(),
        hold: Duration::from_secs(1),
        gate: berth_shim::gate::Gate::new(berth_shim::config::MaxOpenings::Auto, Vec::new()),
        share: Arc::default(),
        sources: Arc::new(Sources::new("")),
        from_loopback: false,
        peeks: false,
        held: metrics.held.clone(),
        refusals,
        stats: metrics.workers()[0].clone(),
        connect_seconds: metrics.connect_seconds.clone(),
        first_byte_seconds: metrics.first_byte_seconds.clone(),
        ended: Arc::new(Notify::new()),
        state: watch::channel(ShimState::default()).1,
        stays: true,
        passes: mpsc::unbounded_channel().0,
        log_connections: false,
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = client.local_addr().unwrap();
    let open = OpenConnection::new(&context);
    let size = size_of_val(&relay_client(open, client, peer, None));
    println!("{size} bytes");
    assert!(size <= LIMIT, "a connection's future grew to {size} bytes");
}
