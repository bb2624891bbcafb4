//! A simulated kube-apiserver: flags, phases, and the part of the API that a rehearsal needs.
//!
//! `berth run` can start, load and stop it like a real kube-apiserver, on a machine without one. So
//! flags (`flags`), phases after SIGTERM (`life`, `listener`), the start (`loopback`) and the API
//! (`api`) behave like kube-apiserver's. Objects come from the rehearsal's store (`store_client`),
//! like kube-apiserver's from etcd, and changes since the start are kept for watches (`cache`). In
//! addition, a simulated apiserver reports which connections it closed itself (`connection`),
//! because nobody else knows. `server` has the state of all connections.
//!
//! Missing: authentication other than by certificate, authorization, kinds other than ConfigMap,
//! updates, and selectors.

mod api;
mod body;
mod cache;
mod connection;
mod flags;
mod life;
mod listener;
mod loopback;
mod objects;
mod request;
mod server;
mod store_client;
mod watch;

use crate::record::{data::MarkKind, stamp::Stamp};
use cache::Cache;
use flags::Flags;
use life::{DRAIN_TIMEOUT, LINGER_TIMEOUT, Life};
pub(crate) use listener::HANDSHAKE_TIMEOUT;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use server::Server;
use std::fs::OpenOptions;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use store_client::StoreClient;
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Length of the accept queue, as in Go. The kernel limits the length to net.core.somaxconn.
const BACKLOG: u32 = 65_535;

/// Runs a simulated apiserver with kube-apiserver's flags until stopped. Returns the exit status: 0
/// after a drain, 1 for a wrong flag or a failed start (the reason is on standard error). A second
/// SIGTERM ends the process at once with 1.
pub fn run(args: &[String]) -> u8 {
    let ended = Flags::parse(args).and_then(|flags| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime
            .and_then(|runtime| runtime.block_on(run_server(flags)))
            .map_err(|error| error.to_string())
    });
    match ended {
        Ok(()) => 0,
        Err(error) => {
            crate::record::progress::print(&format!("Error: {error}"));
            1
        }
    }
}

async fn run_server(flags: Flags) -> io::Result<()> {
    let mut stop = Stop::new()?;
    let tls = listener::load_tls(&flags)?;
    let own = CertificateDer::from_pem_file(&flags.tls_cert_file).map_err(io::Error::other)?;
    if let Some(path) = &flags.audit_log_path {
        let open = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path);
        open.map_err(|e| io::Error::other(format!("failed to open {}: {e}", path.display())))?;
    }
    let store = StoreClient::connect(&flags.store, &flags.name).await?;
    let cache = Cache::start(&store, flags.watch_cache_size).await?;
    let address = SocketAddr::new(flags.bind_address, flags.secure_port);
    let listener = open_listener(address, flags.permit_port_sharing).map_err(|e| {
        io::Error::other(format!(
            "failed to create listener: failed to listen on {address}: {e}"
        ))
    })?;

    let life = Life::default();
    let server = Arc::new(Server::new(flags, store, cache, life.clone()));
    tracing::info!(%address, name = server.flags.name, version = server.flags.version, "serving securely");
    server.tasks.spawn(listener::accept_connections(
        Arc::clone(&server),
        listener,
        tls,
    ));
    server
        .store
        .report_mark(MarkKind::Listening, Stamp::now())
        .await;

    let ready = async {
        let hooks = async {
            tokio::join!(
                tokio::time::sleep(server.flags.start_delay),
                loopback::wait_until_reaching_itself(address, &own)
            );
        };
        // The report comes before readiness: no client may find the instance ready before the
        // report.
        life.start(hooks, || {
            server.store.report_mark(MarkKind::Ready, Stamp::now())
        })
        .await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = stop.wait_for_stop_signal() => {}
        () = ready => {}
    }
    shut_down(&server, stop).await;
    Ok(())
}

fn open_listener(address: SocketAddr, share: bool) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() {
        TcpSocket::new_v4()
    } else {
        TcpSocket::new_v6()
    }?;
    socket.set_reuseaddr(true)?;
    socket.set_reuseport(share)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Shuts down like kube-apiserver, phase by phase (see `life`).
async fn shut_down(server: &Server, mut stop: Stop) {
    let (flags, life) = (&server.flags, &server.life);
    life.terminating.cancel();
    let received = Stamp::now();
    tokio::spawn(async move {
        stop.wait_for_stop_signal().await;
        tracing::warn!("stopped for the second time");
        std::process::exit(1);
    });
    tracing::info!(delay = ?flags.shutdown_delay_duration, "terminating: readyz fails from here on");
    server
        .store
        .report_mark(MarkKind::Terminating, received)
        .await;
    tokio::time::sleep(flags.shutdown_delay_duration).await;

    tracing::info!("draining");
    let began = Stamp::now();
    life.drain(flags.shutdown_send_retry_after).await;
    server.store.report_mark(MarkKind::Draining, began).await;
    server.tasks.close();
    let patience = if flags.shutdown_send_retry_after {
        LINGER_TIMEOUT
    } else {
        DRAIN_TIMEOUT
    };
    let patience = patience.max(flags.shutdown_watch_termination_grace_period);
    if tokio::time::timeout(patience, server.tasks.wait())
        .await
        .is_err()
    {
        tracing::warn!("connections are left after the drain");
    }
    server.report_open_connections().await;
    server
        .store
        .report_mark(MarkKind::Drained, Stamp::now())
        .await;
}

struct Stop {
    term: Signal,
    int: Signal,
}

impl Stop {
    fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    async fn wait_for_stop_signal(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}
