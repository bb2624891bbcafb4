//! Tests the client against a small HTTPS server.

use berth_cluster::kubeconfig::Token;
use berth_cluster::{Access, Client, Error};
use berth_testing::{create_ca, delay_file_read, format_answer, serve_with, start_server};
use hyper::StatusCode;
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;

fn closed_address() -> SocketAddr {
    "127.0.0.1:1".parse().unwrap()
}

#[tokio::test]
async fn a_request_has_the_certificate_the_token_and_the_prefix() {
    let mut server = start_server(format_answer("200 OK", r#"{"kind":"Endpoints"}"#)).await;
    let client = Client::new(&server.access).unwrap();
    assert_eq!(
        client.get("/api/v1/x").await.unwrap(),
        json!({"kind": "Endpoints"})
    );
    let (request, certificates) = server.asked.recv().await.unwrap();
    assert!(
        request.starts_with("GET /k/api/v1/x HTTP/1.1\r\n"),
        "{request}"
    );
    assert!(
        request
            .to_lowercase()
            .contains("authorization: bearer t0ken\r\n"),
        "{request}"
    );
    assert_eq!(certificates, 1);
    client.put("/api/v1/x", &json!({"a": 1})).await.unwrap();
    let (request, _) = server.asked.recv().await.unwrap();
    assert!(
        request.starts_with("PUT ") && request.contains("application/json"),
        "{request}"
    );
}

/// With several control-plane nodes, a kubeconfig's server may be any of the nodes. The client must
/// reach the given address.
#[tokio::test]
async fn another_address_is_dialled_with_the_same_credentials() {
    let mut server = start_server(format_answer("200 OK", "ok")).await;
    let client = Client::new(&server.access).unwrap();
    assert!(client.is_ready().await);
    assert!(!client.with_addresses([closed_address()]).is_ready().await);
    let address = server
        .access
        .server
        .strip_prefix("https://")
        .unwrap()
        .strip_suffix("/k")
        .unwrap()
        .parse()
        .unwrap();
    let elsewhere = Access {
        server: "https://127.0.0.1:1".into(),
        ..server.access.clone()
    };
    assert!(
        Client::new(&elsewhere)
            .unwrap()
            .with_addresses([address])
            .is_ready()
            .await
    );
    // The client uses the first address that can be reached: an instance may be gone while the
    // berth is not.
    assert!(
        Client::new(&elsewhere)
            .unwrap()
            .with_addresses([closed_address(), address])
            .is_ready()
            .await
    );
    let mut last = server.asked.recv().await.unwrap();
    while let Ok(next) = server.asked.try_recv() {
        last = next;
    }
    assert!(
        last.0
            .to_lowercase()
            .contains("authorization: bearer t0ken\r\n")
            && last.1 == 1,
        "{last:?}"
    );
}

#[tokio::test]
async fn a_response_that_is_no_json_is_read_unchanged() {
    let texts = |request: &str| match request.split(' ').nth(1).unwrap_or_default() {
        "/k/metrics" => format_answer("200 OK", "up 1\n"),
        "/k/readyz" => format_answer("200 OK", "ok"),
        _ => format_answer("410 Gone", "{}"),
    };
    let server = serve_with(texts).await;
    let client = Client::new(&server.access).unwrap();
    assert_eq!(client.get_text("/metrics").await.unwrap(), "up 1\n");
    assert_eq!(
        client.get_text("/gone").await.unwrap_err().status(),
        Some(StatusCode::GONE)
    );
    assert!(
        !client
            .clone()
            .with_trust("kubernetes", &[])
            .unwrap()
            .is_ready()
            .await
            && client.with_trust("a b", &[]).is_err()
    );
    // Here the kubeconfig's server is a load balancer, which has its own certificate.
    let balanced = Access {
        ca: create_ca().pem().into(),
        server_name: Some("lb".into()),
        ..server.access.clone()
    };
    let client = Client::new(&balanced).unwrap();
    assert!(
        !client.is_ready().await
            && client
                .with_trust("127.0.0.1", &server.access.ca)
                .unwrap()
                .is_ready()
                .await
    );
}

#[tokio::test]
async fn a_refusal_contains_the_apiservers_message() {
    let server = start_server(format_answer(
        "409 Conflict",
        r#"{"kind":"Status","message":"the object has been modified"}"#,
    ))
    .await;
    let error = Client::new(&server.access)
        .unwrap()
        .post("/api/v1/x", &json!({}))
        .await
        .unwrap_err();
    assert_eq!(error.status(), Some(StatusCode::CONFLICT));
    assert!(
        error
            .to_string()
            .ends_with("answers 409 Conflict to POST /api/v1/x: the object has been modified"),
        "{error}"
    );
}

#[tokio::test]
async fn an_untrusted_silent_or_absent_server_is_explained() {
    let mut server = start_server(String::new()).await;
    let mut access = server.access.clone();
    access.server_name = Some("other".into());
    let error = Client::new(&access).unwrap().get("/").await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(server.asked.try_recv().is_err(), "it gets no request");
    let client = Client::new(&server.access)
        .unwrap()
        .with_patience(Duration::from_millis(50));
    assert!(
        client
            .get("/")
            .await
            .unwrap_err()
            .to_string()
            .ends_with("no answer in 50ms")
    );
    access.server = "https://127.0.0.1:1".into();
    assert!(matches!(
        Client::new(&access).unwrap().get("/").await,
        Err(Error::Unreachable { .. })
    ));
    access.ca = b"none".to_vec();
    assert!(
        Client::new(&access)
            .unwrap_err()
            .to_string()
            .starts_with("certificate-authority: ")
    );
}

/// A renewal replaces the token's file, and the client must send the new token.
#[tokio::test]
async fn a_tokens_file_is_read_for_each_request() {
    let mut server = start_server(format_answer("200 OK", "{}")).await;
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("token");
    let client = Client::new(&Access {
        token: Some(Token::File(file.clone())),
        ..server.access.clone()
    })
    .unwrap();
    assert!(client.get("/").await.is_err());
    for token in ["one", "two"] {
        std::fs::write(&file, format!("{token}\n")).unwrap();
        client.get("/").await.unwrap();
        let (request, _) = server.asked.recv().await.unwrap();
        assert!(
            request.contains(&format!("authorization: Bearer {token}\r\n")),
            "{request}"
        );
    }
}

#[tokio::test]
async fn apply_and_delete_send_their_conditions() {
    let mut server = start_server(format_answer("200 OK", "{}")).await;
    let client = Client::new(&server.access).unwrap();
    client
        .apply("/api/v1/x", "berth", &json!({"a": 1}))
        .await
        .unwrap();
    let (request, _) = server.asked.recv().await.unwrap();
    assert!(
        request.starts_with("PATCH /k/api/v1/x?fieldManager=berth&force=true "),
        "{request}"
    );
    assert!(
        request.contains("application/apply-patch+yaml") && request.ends_with(r#"{"a":1}"#),
        "{request}"
    );
    client
        .delete_unchanged(
            "/api/v1/x",
            &json!({"metadata": {"uid": "u", "resourceVersion": "7"}}),
        )
        .await
        .unwrap();
    let (request, _) = server.asked.recv().await.unwrap();
    assert!(
        request.starts_with("DELETE ") && request.contains(r#""resourceVersion":"7""#),
        "{request}"
    );
}

/// The request is sent on the thread that also probes, so it must not block that thread.
#[tokio::test]
async fn a_token_is_read_on_another_thread() {
    let mut server = start_server(format_answer("200 OK", "{}")).await;
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("token");
    std::fs::write(&path, "").unwrap();
    let access = Access {
        token: Some(Token::File(path.clone())),
        ..server.access.clone()
    };
    let client = Client::new(&access)
        .unwrap()
        .with_patience(Duration::from_secs(60));
    let (answer, others_ran) = delay_file_read(&path, "n3w", client.get("/x")).await;
    assert!(others_ran && answer.is_ok(), "{answer:?}");
    let (request, _) = server.asked.recv().await.unwrap();
    assert!(
        request
            .to_lowercase()
            .contains("authorization: bearer n3w\r\n"),
        "{request}"
    );
}
