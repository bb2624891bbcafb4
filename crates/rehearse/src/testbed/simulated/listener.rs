//! Listener, TLS and connections of a simulated apiserver.
//!
//! A shutdown closes connections like Go's `http.Server.Shutdown`: idle ones at once, others after
//! their requests in flight, HTTP/2 with GOAWAY. A connection without a request gets
//! [`UNUSED_TIMEOUT`] to send one.

use super::api;
use super::connection::Connection;
use super::flags::Flags;
use super::life::{Life, SERVE_DELAY};
use super::server::Server;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

/// Time that a connection without a request outlives the listener (5 s in Go).
const UNUSED_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for a TLS handshake: kube-apiserver's ReadHeaderTimeout, which limits the handshake
/// in net/http.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(32);

/// Pause after an accept error that may persist.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Accepts connections until the instance closes, at first after a pause of at most `SERVE_DELAY`.
/// Then the listener is closed, and the kernel resets the connections in its queue, as with
/// kube-apiserver.
pub(super) async fn accept_connections(
    server: Arc<Server>,
    listener: TcpListener,
    tls: TlsAcceptor,
) {
    let queued = tokio::time::sleep(SERVE_DELAY.min(server.flags.start_delay));
    let _ = server.life.closing.run_until_cancelled(queued).await;
    let mut id = 0;
    loop {
        let accepted = tokio::select! {
            biased;
            () = server.life.closing.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((tcp, peer)) => {
                id += 1;
                server.tasks.spawn(serve_connection(
                    Arc::clone(&server),
                    id,
                    tcp,
                    peer,
                    tls.clone(),
                ));
            }
            Err(error) => {
                tracing::warn!(%error, "accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_connection(
    server: Arc<Server>,
    id: u64,
    tcp: TcpStream,
    peer: SocketAddr,
    tls: TlsAcceptor,
) {
    let accepted = Instant::now();
    let _ = tcp.set_nodelay(true);
    let tls = match tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(tcp)).await {
        Ok(Ok(tls)) => tls,
        Ok(Err(error)) => return tracing::debug!(%peer, %error, "TLS handshake error"),
        Err(_) => return tracing::debug!(%peer, "TLS handshake took too long"),
    };
    let http2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
    let known = tls.get_ref().1.peer_certificates().is_some();
    let connection = Arc::new(Connection::new(peer, known));
    server.add_connection(id, &connection);

    let service = service_fn(|request| {
        let (server, connection) = (Arc::clone(&server), Arc::clone(&connection));
        async move { Ok::<_, Infallible>(api::handle_request(&server, connection, request).await) }
    });
    let close = wait_until_close_due(&server.life, &connection, accepted, http2);
    let io = TokioIo::new(tls);
    let result = if http2 {
        let served = pin!(http2::Builder::new(TokioExecutor::new()).serve_connection(io, service));
        serve_until_closed(served, close, |served| {
            connection.record_closing();
            served.graceful_shutdown();
        })
        .await
    } else {
        let served = pin!(http1::Builder::new().serve_connection(io, service));
        serve_until_closed(served, close, |served| {
            connection.record_closing();
            served.graceful_shutdown();
        })
        .await
    };
    if let Err(error) = result {
        tracing::debug!(%peer, %error, "connection");
    }
    server.remove_connection(id, &connection).await;
}

/// Waits until the instance should begin to close the connection. Requests in flight are still
/// answered then.
async fn wait_until_close_due(
    life: &Life,
    connection: &Connection,
    accepted: Instant,
    http2: bool,
) {
    tokio::select! {
        () = life.closing.cancelled() => {}
        () = connection.close.cancelled() => return,
    }
    if !http2 {
        let _ =
            tokio::time::timeout_at(accepted + UNUSED_TIMEOUT, connection.used.cancelled()).await;
    }
}

/// Serves a connection to its end. Begins to close the connection when `close` is ready.
async fn serve_until_closed<C: Future>(
    mut served: Pin<&mut C>,
    close: impl Future<Output = ()>,
    ask: impl FnOnce(Pin<&mut C>),
) -> C::Output {
    tokio::select! {
        result = served.as_mut() => return result,
        () = close => {}
    }
    ask(served.as_mut());
    served.await
}

/// TLS server configuration with the serving certificate and its key, HTTP/2 preferred. A client
/// certificate is optional. A certificate from an unknown CA fails the handshake, where
/// kube-apiserver answers 401.
pub(super) fn load_tls(flags: &Flags) -> io::Result<TlsAcceptor> {
    let named = |path: &std::path::Path, error: &dyn std::fmt::Display| {
        io::Error::other(format!("failed to load {}: {error}", path.display()))
    };
    let cert = &flags.tls_cert_file;
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .map_err(|e| named(cert, &e))?;
    let key = &flags.tls_private_key_file;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|e| named(key, &e))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients = match &flags.client_ca_file {
        Some(file) => {
            let mut roots = rustls::RootCertStore::empty();
            let read = CertificateDer::pem_file_iter(file)
                .and_then(Iterator::collect::<Result<Vec<_>, _>>);
            for ca in read.map_err(|e| named(file, &e))? {
                roots.add(ca).map_err(|e| named(file, &e))?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
            verifier
                .allow_unauthenticated()
                .build()
                .map_err(|e| named(file, &e))?
        }
        None => WebPkiClientVerifier::no_client_auth(),
    };
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            builder
                .with_client_cert_verifier(clients)
                .with_single_cert(chain, key)
        })
        .map_err(|e| named(cert, &e))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::log::Recorder;
    use crate::testbed::certs;
    use crate::testbed::simulated::{cache::Cache, store_client::StoreClient};
    use crate::testbed::store::{self, Store};
    use tokio::io::AsyncReadExt;

    #[tokio::test]
    async fn queued_connections_are_reset_when_the_listener_closes() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("store");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let hub = tokio::spawn(store::serve(
            listener,
            Arc::new(Store::default()),
            Arc::new(Recorder::default()),
        ));
        let certs = certs::make_certs(dir.path(), &[]).unwrap();
        certs.issue_certificate("it").unwrap();
        let flags = Flags::parse(&[
            format!("--etcd-servers=unix://{}", socket.display()),
            format!("--tls-cert-file={}", certs.cert_file("it").display()),
            format!("--tls-private-key-file={}", certs.key_file("it").display()),
        ]);
        let flags = flags.unwrap();
        let tls = load_tls(&flags).unwrap();
        let store = StoreClient::connect(&socket, "it").await.unwrap();
        let cache = Cache::start(&store, 1).await.unwrap();
        let server = Arc::new(Server::new(flags, store, cache, Life::default()));

        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut waiting = Vec::new();
        for _ in 0..3 {
            waiting.push(
                TcpStream::connect(listener.local_addr().unwrap())
                    .await
                    .unwrap(),
            );
        }
        server.life.closing.cancel();
        accept_connections(Arc::clone(&server), listener, tls).await;
        for mut client in waiting {
            let error = client.read_u8().await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
        hub.abort();
    }
}
