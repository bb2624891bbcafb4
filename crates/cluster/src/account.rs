//! Names a node's service account, and handles its token.
//!
//! Nobody can revoke a token, so each token contains an expiry, and its owner requests a new one in
//! time. To end a token earlier, the service account has to be deleted.

use crate::lease::NAMESPACE;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use humantime::parse_rfc3339;
use serde_json::{Value, json};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Life of a token that berth requests. kube-apiserver may grant less
/// (`--service-account-max-token-expiration`).
pub const TOKEN_LIFETIME: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Name of the file with a node's token. The file is in the directory of the kubeconfig that names
/// it.
pub const TOKEN_FILE: &str = "token";

/// Returns the name of a node's service account in [`NAMESPACE`].
pub fn account_name(node: &str) -> String {
    format!("berth-{node}")
}

/// Returns the API path at which the account gets its tokens (TokenRequest).
pub fn token_path(account: &str) -> String {
    format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token")
}

pub fn token_request() -> Value {
    json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": TOKEN_LIFETIME.as_secs()},
    })
}

/// Returns the token in the response to a [`token_request`], and the expiry that kube-apiserver
/// granted.
pub fn parse_granted_token(answer: &Value) -> Option<(&str, SystemTime)> {
    let status = &answer["status"];
    let until = parse_rfc3339(status["expirationTimestamp"].as_str()?).ok()?;
    Some((status["token"].as_str()?, until))
}

/// The claims of a token. Their signature is not verified: only an apiserver can verify it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// Name of the service account to which the token belongs. `None` if the account is in another
    /// namespace than [`NAMESPACE`].
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

    /// Returns the time at which to renew the token: after a third of its life, so that a failed
    /// renewal can be repeated. `None` if the token does not expire.
    pub fn renewal_time(&self) -> Option<SystemTime> {
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
            parse_granted_token(&answer),
            Some(("a.b.c", UNIX_EPOCH + Duration::from_secs(3600)))
        );
        assert_eq!(
            parse_granted_token(&json!({"status": {"token": "a"}})),
            None
        );
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
        assert_eq!(own.renewal_time(), Some(at(1500)));
        let other =
            of(r#"{"iat":300,"sub":"system:serviceaccount:kube-system:berth-cp-1"}"#).unwrap();
        assert_eq!(
            (other.account.as_deref(), other.until, other.renewal_time()),
            (None, None, None)
        );
        assert_eq!(of(r#"{"iat":300,"sub":"admin"}"#).unwrap().account, None);
        // These times are beyond the range of a clock.
        for (from, until) in [(0, u64::MAX), (u64::MAX, 0), (u64::MAX, u64::MAX)] {
            assert_eq!(
                of(&format!(r#"{{"iat":{from},"exp":{until}}}"#))
                    .and_then(|claims| claims.renewal_time()),
                None
            );
        }
        for none in ["", "t0ken", "a.b.c", "a.e30.c"] {
            assert_eq!(Claims::parse(none), None, "{none}");
        }
    }
}
