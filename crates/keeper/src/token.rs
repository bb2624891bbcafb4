//! The token of the shim's service account, renewed by itself: nothing expires a year later.
//!
//! `berth grant` writes the first one, and the right to make the next, for this account alone. Siblings share the file:
//! who comes first renews, and the others read what is there.

use super::api::Api;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use berth_cluster::lease::NAMESPACE;
use berth_node::instance::InstanceId;
use berth_os::file::replace;
use humantime::parse_rfc3339;
use serde::Deserialize;
use serde_json::json;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What is asked for; the apiserver may give less (`--service-account-max-token-expiration`).
const LIFE: Duration = Duration::from_secs(30 * 24 * 3600);

/// What a service account's token says of itself. It is not checked here: the apiserver does that.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Claims {
    sub: String,
    /// Seconds since 1970.
    iat: u64,
    /// Seconds since 1970; a token of a Secret has none.
    exp: Option<u64>,
}

impl Claims {
    pub(super) fn parse(token: &str) -> Option<Self> {
        let payload = URL_SAFE_NO_PAD.decode(token.trim().split('.').nth(1)?).ok()?;
        serde_json::from_slice(&payload).ok()
    }

    /// The service account's name, if it is one of berth's namespace.
    fn account(&self) -> Option<&str> {
        self.sub.strip_prefix("system:serviceaccount:")?.strip_prefix(NAMESPACE)?.strip_prefix(':')
    }

    pub(super) fn expires(&self) -> Option<SystemTime> {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(self.exp?))
    }

    /// A third of its life is over.
    fn is_due(&self, now: SystemTime) -> bool {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        self.exp.is_some_and(|exp| now >= self.iat.saturating_add(exp.saturating_sub(self.iat) / 3))
    }
}

/// The file of the token.
#[derive(Debug)]
pub(super) struct TokenFile {
    path: PathBuf,
    /// Of this shim alone: siblings write into the same directory.
    temporary: PathBuf,
}

impl TokenFile {
    pub(super) fn new(path: &Path, instance: &InstanceId) -> Self {
        Self { path: path.to_owned(), temporary: path.with_extension(format!("{instance}.tmp")) }
    }

    /// Renews the token if that is due. When it expires, if that is known.
    pub(super) async fn look(&self, api: &Api) -> Option<SystemTime> {
        let claims = Claims::parse(&fs::read_to_string(&self.path).ok()?)?;
        if claims.is_due(SystemTime::now())
            && let Some(account) = claims.account()
            && let Some(expires) = self.renew(api, account).await
        {
            return Some(expires);
        }
        claims.expires()
    }

    async fn renew(&self, api: &Api, account: &str) -> Option<SystemTime> {
        let path = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token");
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": LIFE.as_secs()},
        });
        let answer = api.note("renew_token", api.client().post(&path, &request).await)?;
        let status = &answer["status"];
        let expires = parse_rfc3339(status["expirationTimestamp"].as_str()?).ok()?;
        match self.write(status["token"].as_str()?) {
            Ok(()) => {
                tracing::info!(expires = %humantime::format_rfc3339_seconds(expires), "renewed the service account's token");
            }
            Err(error) => {
                tracing::warn!(
                    path = %self.path.display(),
                    "cannot write the renewed token: {error}; help: the directory is mounted as a directory and belongs to \
                     the shim's uid, as `berth grant` leaves it"
                );
                return None;
            }
        }
        Some(expires)
    }

    fn write(&self, token: &str) -> std::io::Result<()> {
        replace(&self.path, &self.temporary, |mut file| {
            file.write_all(token.as_bytes())?;
            file.sync_all()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(payload: &str) -> String {
        format!("e30.{}.sig", URL_SAFE_NO_PAD.encode(payload))
    }

    #[test]
    fn a_token_is_due_after_a_third_of_its_life() {
        let claims =
            Claims::parse(&token(r#"{"sub":"system:serviceaccount:berth-system:berth-cp-1","iat":1000,"exp":4000}"#));
        let claims = claims.unwrap();
        assert_eq!(claims.account(), Some("berth-cp-1"));
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(!claims.is_due(at(1999)) && claims.is_due(at(2000)) && claims.is_due(at(9000)));
        assert_eq!(claims.expires(), Some(at(4000)));
    }

    #[test]
    fn another_namespaces_token_and_one_without_an_end_are_left_alone() {
        let other = Claims::parse(&token(r#"{"sub":"system:serviceaccount:kube-system:x","iat":1,"exp":2}"#)).unwrap();
        assert_eq!(other.account(), None);
        let endless = Claims::parse(&token(r#"{"sub":"x","iat":1}"#)).unwrap();
        assert!(!endless.is_due(SystemTime::now()) && endless.expires().is_none());
    }

    proptest::proptest! {
        #[test]
        fn nothing_panics(text in "\\PC{0,60}", payload in "\\PC{0,60}", iat: u64, exp: u64) {
            let _ = (Claims::parse(&text), Claims::parse(&token(&payload)));
            let claims = Claims { sub: text, iat, exp: Some(exp) };
            let _ = (claims.account(), claims.is_due(SystemTime::now()), claims.expires());
        }
    }
}
