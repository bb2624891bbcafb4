//! What the tests of several crates share.

#![forbid(unsafe_code)]

use berth_cluster::Access;
use berth_cluster::kubeconfig::Token;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

/// A small HTTPS server, as an apiserver with client certificates.
#[derive(Debug)]
pub struct Server {
    /// What a kubeconfig would say of it.
    pub access: Access,
    /// Heads and bodies of requests, with the number of the client's certificates.
    pub asked: mpsc::UnboundedReceiver<(String, usize)>,
}

/// Answers every request with the same bytes; with none, it is silent.
///
/// # Panics
/// Where it cannot be set up: a test fails then.
pub async fn serve(answer: String) -> Server {
    serve_with(move |_| answer.clone()).await
}

/// Answers each request, given as text, with bytes; with none, it is silent.
///
/// # Panics
/// Where it cannot be set up: a test fails then.
pub async fn serve_with(mut answer: impl FnMut(&str) -> String + Send + 'static) -> Server {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let issue = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &ca).unwrap().pem(), key.serialize_pem())
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(ca.der().clone()).unwrap();
    let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone());
    let clients = clients.allow_unauthenticated().build().unwrap();
    let (certificate, key) = issue("127.0.0.1");
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = builder.with_client_cert_verifier(clients).with_single_cert(chain, key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("https://{}/k", listener.local_addr().unwrap());
    let (tell, asked) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut silent = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut tls) = acceptor.accept(stream).await else { continue };
            let mut request = vec![0; 4096];
            let length = tls.read(&mut request).await.unwrap_or(0);
            request.truncate(length);
            let certificates = tls.get_ref().1.peer_certificates().map_or(0, <[_]>::len);
            let request = String::from_utf8_lossy(&request).into_owned();
            let answer = answer(&request);
            let _ = tell.send((request, certificates));
            if answer.is_empty() {
                silent.push(tls);
                continue;
            }
            let _ = tls.write_all(answer.as_bytes()).await;
            let _ = tls.shutdown().await;
        }
    });
    let (certificate, key) = issue("admin");
    let ca = ca.pem().into_bytes();
    let client = Some((certificate.into_bytes(), key.into_bytes()));
    Server { access: Access { server, ca, client, token: Some(Token::Text("t0ken".into())), server_name: None }, asked }
}

/// The bytes of an answer.
#[must_use]
pub fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}
