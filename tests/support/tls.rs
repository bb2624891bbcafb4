//! A small HTTPS server in place of an apiserver, its CA, and a client.

use super::net::{Backend, PROBES, fresh_ip};
use berth_testing::{create_ca, issue_certificate};
use rcgen::{CertifiedIssuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, mpsc};

/// A CA that signs the certificates of apiservers.
pub(crate) struct Ca(pub(crate) CertifiedIssuer<'static, KeyPair>);

impl Ca {
    pub(crate) fn new() -> Self {
        Self(create_ca())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    fn server_config(&self) -> Arc<ServerConfig> {
        let (certificate, key) = issue_certificate(&self.0, &["kubernetes"]);
        server_config(&certificate, &key)
    }

    /// Sends a GET request for a path and returns the whole answer.
    #[track_caller]
    pub(crate) fn get(&self, stream: TcpStream, path: &str) -> String {
        request_page(self.0.der(), stream, path)
    }
}

/// Returns the configuration of an apiserver with the given certificate and key.
pub(crate) fn server_config(certificate: &str, key: &str) -> Arc<ServerConfig> {
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    Arc::new(
        builder
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap(),
    )
}

/// Sends a GET request to an apiserver with a certificate of the CA, and returns the whole answer.
#[track_caller]
pub(crate) fn request_page(ca: &CertificateDer<'static>, stream: TcpStream, path: &str) -> String {
    let mut roots = RootCertStore::empty();
    roots.add(ca.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let config = Arc::new(builder.with_root_certificates(roots).with_no_client_auth());
    let name = ServerName::try_from("kubernetes").unwrap();
    let mut tls = StreamOwned::new(ClientConnection::new(config, name).unwrap(), stream);
    tls.write_all(
        format!("GET {path} HTTP/1.1\r\nHost: kubernetes\r\nConnection: close\r\n\r\n").as_bytes(),
    )
    .unwrap();
    let mut answer = String::new();
    tls.read_to_string(&mut answer)
        .unwrap_or_else(|error| panic!("no answer: {error}"));
    answer
}

/// Default body of an answer.
const VERSION: &str = r#"{"gitVersion":"v1.2.3"}"#;

/// An apiserver that answers every request with a fixed status and body.
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    status: Arc<Mutex<&'static str>>,
}

impl Api {
    pub(crate) fn start(ca: &Ca) -> Self {
        Self::start_at(ca, (fresh_ip(), 0).into())
    }

    pub(crate) fn start_at(ca: &Ca, address: SocketAddr) -> Self {
        Self::serve(ca, address, VERSION)
    }

    pub(crate) fn start_with(ca: &Ca, body: &'static str) -> Self {
        Self::serve(ca, (fresh_ip(), 0).into(), body)
    }

    fn serve(ca: &Ca, address: SocketAddr, body: &'static str) -> Self {
        let config = ca.server_config();
        let status = Arc::new(Mutex::new("200 OK"));
        let now = status.clone();
        let address = Backend::at(address).serve(move |stream| {
            let status = *now.lock().unwrap();
            // A client that disconnects early does not matter to the test.
            let _ = answer_request(&config, stream, |_| (status, body.to_owned()));
        });
        Self { address, status }
    }

    /// Starts an API that answers only probes, and passes the connections of clients to the test.
    pub(crate) fn start_silent(ca: &Ca) -> (Self, mpsc::Receiver<TcpStream>) {
        let (config, status) = (ca.server_config(), Arc::new(Mutex::new("200 OK")));
        let (give, attempts) = mpsc::channel();
        let now = status.clone();
        let address = Backend::new().serve(move |stream| {
            if stream.peer_addr().is_ok_and(|peer| peer.ip() == PROBES) {
                let status = *now.lock().unwrap();
                let _ = answer_request(&config, stream, |_| (status, VERSION.to_owned()));
            } else {
                let _ = give.send(stream);
            }
        });
        (Self { address, status }, attempts)
    }

    /// Sets the status of all later answers.
    pub(crate) fn answer(&self, status: &'static str) {
        *self.status.lock().unwrap() = status;
    }

    /// Delays all answers until the returned guard is dropped.
    pub(crate) fn hold(&self) -> impl Drop + '_ {
        self.status.lock().unwrap()
    }
}

/// Answers one request. `of` maps its path to a status and a body.
pub(crate) fn answer_request(
    config: &Arc<ServerConfig>,
    stream: TcpStream,
    of: impl FnOnce(&str) -> (&'static str, String),
) -> std::io::Result<()> {
    let mut tls = StreamOwned::new(ServerConnection::new(config.clone()).unwrap(), stream);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        tls.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head);
    let (status, body) = of(head.split([' ', '?']).nth(1).unwrap_or_default());
    let length = body.len();
    tls.write_all(
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
            .as_bytes(),
    )?;
    tls.conn.send_close_notify();
    tls.flush()?;
    // Wait for the client to close first: else the client's last bytes could meet a closed socket,
    // and a reset would destroy the answer.
    let _ = tls.sock.shutdown(std::net::Shutdown::Write);
    let _ = std::io::copy(&mut tls.sock, &mut std::io::sink());
    Ok(())
}
