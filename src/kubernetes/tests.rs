//! The client against a small HTTPS server; in a file of their own for their length.

use super::*;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

pub(crate) struct Server {
    pub(crate) access: Access,
    /// Heads and bodies of requests, with the number of the client's certificates.
    pub(crate) asked: mpsc::UnboundedReceiver<(String, usize)>,
}

/// Answers every request with the same bytes; with none, it is silent.
pub(crate) async fn serve(answer: String) -> Server {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let issue = |name: &str| {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &authority).unwrap().pem(), key.serialize_pem())
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone()).build().unwrap();
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
            let _ = tell.send((String::from_utf8_lossy(&request).into_owned(), certificates));
            if answer.is_empty() {
                silent.push(tls);
                continue;
            }
            let _ = tls.write_all(answer.as_bytes()).await;
            let _ = tls.shutdown().await;
        }
    });
    let (certificate, key) = issue("admin");
    let authority = authority.pem().into_bytes();
    let client = Some((certificate.into_bytes(), key.into_bytes()));
    Server { access: Access { server, authority, client, token: Some("t0ken".into()), server_name: None }, asked }
}

pub(crate) fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn asks_with_certificate_token_and_prefix() {
    let mut server = serve(answer("200 OK", r#"{"kind":"Endpoints"}"#)).await;
    let client = Client::new(&server.access).unwrap();
    assert_eq!(client.get("/api/v1/x").await.unwrap(), json!({"kind": "Endpoints"}));
    let (request, certificates) = server.asked.recv().await.unwrap();
    assert!(request.starts_with("GET /k/api/v1/x HTTP/1.1\r\n"), "{request}");
    assert!(request.to_lowercase().contains("authorization: bearer t0ken\r\n"), "{request}");
    assert_eq!(certificates, 1);
    client.put("/api/v1/x", &json!({"a": 1})).await.unwrap();
    let (request, _) = server.asked.recv().await.unwrap();
    assert!(request.starts_with("PUT ") && request.contains("application/json"), "{request}");
}

/// With several control-plane nodes the server of a kubeconfig says nothing of one of them.
#[tokio::test]
async fn another_address_is_dialled_with_the_same_credentials() {
    let mut server = serve(answer("200 OK", "ok")).await;
    let client = Client::new(&server.access).unwrap();
    assert!(client.ready().await);
    assert!(!client.at("127.0.0.1:1".parse().unwrap()).ready().await);
    let address = server.access.server.strip_prefix("https://").unwrap().strip_suffix("/k").unwrap().parse().unwrap();
    let elsewhere = Access { server: "https://127.0.0.1:1".into(), ..server.access.clone() };
    assert!(Client::new(&elsewhere).unwrap().at(address).ready().await);
    let mut last = server.asked.recv().await.unwrap();
    while let Ok(next) = server.asked.try_recv() {
        last = next;
    }
    assert!(last.0.to_lowercase().contains("authorization: bearer t0ken\r\n") && last.1 == 1, "{last:?}");
}

#[tokio::test]
async fn a_refusal_is_told_in_the_apiservers_words() {
    let server = serve(answer("409 Conflict", r#"{"kind":"Status","message":"the object has been modified"}"#)).await;
    let error = Client::new(&server.access).unwrap().post("/api/v1/x", &json!({})).await.unwrap_err();
    assert_eq!(error.status(), Some(StatusCode::CONFLICT));
    assert!(
        error.to_string().ends_with("says 409 Conflict to POST /api/v1/x: the object has been modified"),
        "{error}"
    );
}

#[tokio::test]
async fn who_is_silent_unknown_or_absent_is_told() {
    let server = serve(String::new()).await;
    let client = Client::new(&server.access).unwrap().with_patience(Duration::from_millis(50));
    assert!(client.get("/").await.unwrap_err().to_string().ends_with("no answer in 50ms"));
    let mut access = server.access.clone();
    access.server_name = Some("other".into());
    let error = Client::new(&access).unwrap().get("/").await.unwrap_err().to_string();
    assert!(error.contains("TLS handshake failed") && error.contains("other"), "{error}");
    access.server = "https://127.0.0.1:1".into();
    assert!(Client::new(&access).unwrap().get("/").await.unwrap_err().to_string().contains("cannot connect"));
    access.authority = b"none".to_vec();
    assert!(Client::new(&access).unwrap_err().to_string().starts_with("certificate-authority: "));
}
