//! Tests against a small HTTPS server.

use super::*;
use berth_testing::{Server, format_answer, serve_with};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const TOKEN: &str = "/berth-cp-1/token ";

fn options(server: &Server, directory: &std::path::Path) -> GrantOptions {
    let address = server
        .access
        .server
        .strip_prefix("https://")
        .unwrap()
        .strip_suffix("/k")
        .unwrap();
    GrantOptions {
        node: "cp-1".into(),
        server: address.parse().unwrap(),
        server_name: "127.0.0.1".into(),
        ca: Vec::new(),
        uid: nix::unistd::geteuid().as_raw(),
        file: directory.join("cluster/kubeconfig"),
    }
}

/// Starts a server that answers an administrator's requests as an apiserver does. `change` may
/// answer a request instead.
async fn serve_apiserver(
    mut change: impl FnMut(&str) -> Option<String> + Send + 'static,
) -> Server {
    serve_with(move |request| {
        change(request).unwrap_or_else(|| {
            let line = request.lines().next().unwrap_or_default();
            let body = match () {
                () if line.contains(TOKEN) => {
                    json!({"status": {"token": "n3w", "expirationTimestamp": "2100-01-01T00:00:00Z"}})
                }
                () if line.contains(REVIEWS_PATH) => json!({"status": {"allowed": true}}),
                () if line.starts_with("GET ") => objects::shared_role(["cp-2"]),
                () => json!({}),
            };
            format_answer("200 OK", &body.to_string())
        })
    })
    .await
}

async fn run_grant(server: &Server, directory: &std::path::Path) -> Result<Granted, GrantError> {
    grant(
        &server.access,
        &Client::new(&server.access).unwrap(),
        &options(server, directory),
    )
    .await
}

fn received_requests(server: &mut Server) -> Vec<String> {
    std::iter::from_fn(|| server.asked.try_recv().ok())
        .map(|(request, _)| request)
        .collect()
}

#[tokio::test]
async fn objects_then_the_token_then_each_request_with_the_token() {
    let temp = tempfile::tempdir().unwrap();
    let mut server = serve_apiserver(|_| None).await;
    let granted = run_grant(&server, temp.path()).await.unwrap();
    assert_eq!(
        (granted.service_account.as_str(), granted.expires.as_str()),
        ("berth-system/berth-cp-1", "2100-01-01T00:00:00Z")
    );
    assert_eq!(granted.may.len(), 13);
    assert_eq!(
        std::fs::read_to_string(temp.path().join("cluster/token")).unwrap(),
        "n3w"
    );
    let asked = received_requests(&mut server);
    let lines: Vec<_> = asked
        .iter()
        .map(|request| request.lines().next().unwrap().replace(" HTTP/1.1", ""))
        .collect();
    let applied = |path: &str| format!("PATCH /k{path}?fieldManager=berth&force=true");
    let shared = "/k/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles/berth";
    assert_eq!(lines[0], applied("/api/v1/namespaces/berth-system"));
    assert_eq!(
        lines[1],
        applied("/api/v1/namespaces/berth-system/serviceaccounts/berth-cp-1")
    );
    assert_eq!(
        lines[5..8],
        [
            format!("GET {shared}"),
            format!("PUT {shared}"),
            format!(
                "POST /k/api/v1/namespaces/berth-system/serviceaccounts{}",
                TOKEN.trim_end()
            )
        ]
    );
    for slice in ["berth-cp-1-ipv4", "berth-cp-2-ipv6"] {
        assert!(asked[6].contains(slice), "{}", asked[6]);
    }
    assert!(asked[7].contains("2592000"), "{}", asked[7]);
    // The requests that try the new token go to the shims' server, without the administrator's
    // credentials.
    assert_eq!(lines.len(), 8 + 13);
    for review in &asked[8..] {
        assert!(
            review.starts_with(&format!("POST {REVIEWS_PATH}"))
                && review.contains("Bearer n3w\r\n"),
            "{review}"
        );
    }
}

/// Several nodes write at once.
#[tokio::test]
async fn the_shared_role_is_read_again_after_a_conflict() {
    let temp = tempfile::tempdir().unwrap();
    let mut puts = 0;
    let mut server = serve_apiserver(move |request| {
        puts += i32::from(request.starts_with("PUT "));
        (request.starts_with("PUT ") && puts < 4).then(|| {
            format_answer(
                "409 Conflict",
                r#"{"message":"the object has been modified"}"#,
            )
        })
    })
    .await;
    run_grant(&server, temp.path()).await.unwrap();
    let asked = received_requests(&mut server);
    let count = |method: &str| {
        asked
            .iter()
            .filter(|request| request.starts_with(method))
            .count()
    };
    assert_eq!((count("GET "), count("PUT ")), (4, 4));
}

#[tokio::test]
async fn the_first_node_creates_the_shared_role_and_a_known_node_changes_nothing() {
    for there in [None, Some(objects::shared_role(["cp-1"]))] {
        let temp = tempfile::tempdir().unwrap();
        let read = there.clone().map_or_else(
            || format_answer("404 Not Found", "{}"),
            |role: Value| format_answer("200 OK", &role.to_string()),
        );
        let mut server =
            serve_apiserver(move |request| request.starts_with("GET ").then(|| read.clone())).await;
        run_grant(&server, temp.path()).await.unwrap();
        let asked = received_requests(&mut server);
        let made = asked
            .iter()
            .filter(|request| request.starts_with("POST ") && request.contains("/roles "))
            .count();
        assert_eq!(made, usize::from(there.is_none()));
        assert!(!asked.iter().any(|request| request.starts_with("PUT ")));
    }
}

#[tokio::test]
async fn a_refused_administrator_gets_a_fix() {
    for (status, fix) in [
        ("403 Forbidden", "who may make Roles"),
        ("401 Unauthorized", "kubeadm certs renew admin.conf"),
        ("500 Internal Server Error", "run `berth grant` again"),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let server =
            serve_apiserver(move |_| Some(format_answer(status, r#"{"message":"no"}"#))).await;
        let error = run_grant(&server, temp.path())
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("--kubeconfig: https://") && error.contains(fix),
            "{error}"
        );
        assert!(!error.contains('\n') && !temp.path().join("cluster").exists());
    }
}

/// An apiserver may not know yet what was written through another apiserver a moment ago.
#[tokio::test]
async fn unknown_credentials_are_tried_again_and_refused_requests_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(0));
    let count = seen.clone();
    let server = serve_apiserver(move |request| {
        let mut seen = count.lock().unwrap();
        *seen += i32::from(request.contains(REVIEWS_PATH));
        let review = request.contains(REVIEWS_PATH);
        match *seen {
            1 if review => Some(format_answer("401 Unauthorized", "{}")),
            2 if review => Some(format_answer("200 OK", r#"{"status":{"allowed":false}}"#)),
            _ => None,
        }
    })
    .await;
    run_grant(&server, temp.path()).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), 13 + 2);
    let server = serve_apiserver(|request| {
        let denied = request.contains(REVIEWS_PATH)
            && request.contains("leases")
            && request.contains("delete");
        denied.then(|| {
            format_answer(
                "200 OK",
                r#"{"status":{"allowed":false,"reason":"webhook"}}"#,
            )
        })
    })
    .await;
    let client = Client::new(&server.access).unwrap();
    let tried = try_allowed_requests(&client, "cp-1", RETRY_PAUSE).await;
    let Err(TryError::Refused(requests)) = tried else {
        panic!("not refused")
    };
    assert_eq!(
        requests,
        ["delete leases.coordination.k8s.io in berth-system (webhook)"]
    );
}

#[tokio::test]
async fn a_silent_berth_is_reported_and_the_files_stay() {
    let temp = tempfile::tempdir().unwrap();
    let server = serve_apiserver(|_| None).await;
    let options = GrantOptions {
        server: "127.0.0.1:1".parse().unwrap(),
        ..options(&server, temp.path())
    };
    let error = grant(
        &server.access,
        &Client::new(&server.access).unwrap(),
        &options,
    )
    .await
    .unwrap_err();
    assert!(matches!(error, GrantError::Untried { .. }), "{error}");
    assert!(temp.path().join("cluster/kubeconfig").exists());
}

#[tokio::test]
async fn revoke_deletes_the_nodes_objects_and_the_account_first() {
    let mut server = serve_apiserver(|request| {
        request
            .contains("rolebindings")
            .then(|| format_answer("404 Not Found", "{}"))
    })
    .await;
    let deleted = revoke(&Client::new(&server.access).unwrap(), "cp-1")
        .await
        .unwrap();
    assert_eq!(
        deleted,
        [
            "ServiceAccount berth-system/berth-cp-1",
            "Role berth-system/berth-cp-1"
        ]
    );
    let asked = received_requests(&mut server);
    assert!(
        asked.len() == 4 && asked.iter().all(|request| request.starts_with("DELETE ")),
        "{asked:?}"
    );
    assert!(
        asked[0].contains("/serviceaccounts/berth-cp-1 "),
        "{}",
        asked[0]
    );
}
