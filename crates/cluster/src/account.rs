//! A node's service account: its name and its token.
//!
//! A token cannot be revoked, and only its owner renews it, so the token contains an expiry. A
//! token ends earlier only if the service account is deleted.

use crate::lease::NAMESPACE;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use humantime::parse_rfc3339;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The requested life of a token. kube-apiserver may give less
/// (`--service-account-max-token-expiration`).
pub const LIFE: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Name of a token's file, in the directory of the kubeconfig that names the file.
pub const FILE: &str = "token";

/// Returns the name of a node's service account in [`NAMESPACE`].
pub fn account_name(node: &str) -> String {
    format!("berth-{node}")
}

/// Returns the API path at which a service account of [`NAMESPACE`] gets tokens.
pub fn token_path(account: &str) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token")
}

pub fn token_request() -> Value {
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": LIFE.as_secs()},
    })
}

/// Returns the token in the response to a [`token_request`], and the expiry that kube-apiserver
/// granted.
pub fn granted_token(answer: &Value) -> Option<(&str, SystemTime)> {
    let status = &answer["status"];
    let until = parse_rfc3339(status["expirationTimestamp"].as_str()?).ok()?;
    Some((status["token"].as_str()?, until))
}

/// The claims of a token. They are not verified: only an apiserver can verify them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// Name of the token's service account, if the account belongs to [`NAMESPACE`].
    pub account: Option<String>,
    pub from: SystemTime,
    /// The token's expiry. `None` for the token of a Secret, which does not expire.
    pub until: Option<SystemTime>,
}

impl Claims {
    pub fn parse(token: &str) -> Option<Self> {
        let claims = URL_SAFE_NO_PAD
            .decode(token.trim().split('.').nth(1)?)
            .ok()?;
        let claims: Value = serde_json::from_slice(&claims).ok()?;
        let time = |name: &str| UNIX_EPOCH.checked_add(Duration::from_secs(claims[name].as_u64()?));
        let account = claims["sub"].as_str().and_then(|subject| {
            let account = subject
                .strip_prefix("system:serviceaccount:")?
                .strip_prefix(NAMESPACE)?
                .strip_prefix(':')?;
            Some(account.to_owned())
        });
        Some(Self {
            account,
            from: time("iat")?,
            until: time("exp"),
        })
    }

    /// Returns the time of the token's renewal, if the token expires: after a third of its life, so
    /// that failed attempts can be repeated.
    pub fn renewal(&self) -> Option<SystemTime> {
        Some(self.from + self.until?.duration_since(self.from).unwrap_or_default() / 3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expiry_is_read_from_the_response() {
        let answer = json!({"spec": {"expirationSeconds": 2_592_000}, "status": {"token": "a.b.c",
            "expirationTimestamp": "1970-01-01T01:00:00Z"}});
        assert_eq!(
            granted_token(&answer),
            Some(("a.b.c", UNIX_EPOCH + Duration::from_secs(3600)))
        );
        assert_eq!(granted_token(&json!({"status": {"token": "a"}})), None);
        assert_eq!(token_request()["spec"]["expirationSeconds"], 2_592_000);
        assert_eq!(
            token_path(&account_name("cp-1")),
            "/api/v1/namespaces/berth-system/serviceaccounts/berth-cp-1/token"
        );
    }

    #[test]
    fn a_tokens_account_and_expiry_are_parsed() {
        let token = |claims: &str| format!("head.{}.signature\n", URL_SAFE_NO_PAD.encode(claims));
        let of = |claims: &str| Claims::parse(&token(claims));
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let own =
            of(r#"{"exp":3900,"iat":300,"sub":"system:serviceaccount:berth-system:berth-cp-1"}"#)
                .unwrap();
        assert_eq!(
            (own.account.as_deref(), own.from, own.until),
            (Some("berth-cp-1"), at(300), Some(at(3900)))
        );
        assert_eq!(own.renewal(), Some(at(1500)));
        let other =
            of(r#"{"iat":300,"sub":"system:serviceaccount:kube-system:berth-cp-1"}"#).unwrap();
        assert_eq!(
            (other.account.as_deref(), other.until, other.renewal()),
            (None, None, None)
        );
        assert_eq!(of(r#"{"iat":300,"sub":"admin"}"#).unwrap().account, None);
        // Times beyond the range of a clock.
        for (from, until) in [(0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
            assert_eq!(
                of(&format!(r#"{{"iat":{from},"exp":{until}}}"#))
                    .and_then(|claims| claims.renewal()),
                None
            );
        }
        for none in ["", "t0ken", "a.b.c", "a.e30.c"] {
            assert_eq!(Claims::parse(none), None, "{none}");
        }
    }
}
