//! The client against a small HTTPS server.

use berth_cluster::{Access, Client};
use berth_testing::{answer, serve};
use hyper::StatusCode;
use serde_json::json;
use std::time::Duration;

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
