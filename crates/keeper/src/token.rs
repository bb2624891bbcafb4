//! Renews the token of the shim's service account, so that the shim's credentials do not expire.
//!
//! `berth grant` writes the first token, with the right to request further tokens, for this account
//! alone. Siblings share the file. The first one that finds the token due renews it, and the others
//! read it.

use crate::api::Api;
use berth_cluster::account::{Claims, parse_granted_token, token_path, token_request};
use berth_node::instance_id::InstanceId;
use berth_os::explained;
use berth_os::file::{decode_text, read_open_small, replace_file};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The file with the token of the shim's service account.
#[derive(Debug, Clone)]
pub(crate) struct TokenFile {
    path: PathBuf,
    /// The path of the temporary file, which only this shim uses. Siblings write into the same
    /// directory.
    temporary: PathBuf,
}

impl TokenFile {
    /// Names the token's file. A kubeconfig contains the file's path.
    pub(crate) fn new(path: &Path, instance: &InstanceId) -> Self {
        Self {
            path: path.to_owned(),
            temporary: path.with_extension(format!("{instance}.tmp")),
        }
    }

    /// Renews the token if it is due. Returns the token's expiry, if known.
    pub(crate) async fn renew_if_due(&self, api: &Api) -> Option<SystemTime> {
        const REQUEST: &str = "renew_token";
        let path = self.path.clone();
        let claims = Claims::parse(
            &api.run_file_access(move || decode_text(read_open_small(fs::File::open(path)?)?))
                .await
                .flatten()
                .ok()?,
        )?;
        let account = claims.account.as_deref();
        let Some(account) = account.filter(|_| {
            claims
                .renewal_time()
                .is_some_and(|due| due <= SystemTime::now())
        }) else {
            account.inspect(|account| api.forget_failure(REQUEST, account));
            return claims.until;
        };
        let path = token_path(account);
        let answer = api
            .make_request(REQUEST, account, async |client| {
                client.post(&path, &token_request()).await
            })
            .await;
        let Some((token, until)) = answer.as_ref().and_then(parse_granted_token) else {
            return claims.until;
        };
        let (file, text) = (self.clone(), token.to_owned());
        match api
            .run_file_access(move || file.write_token(&text))
            .await
            .flatten()
        {
            Ok(()) => tracing::info!(account, "renewed the service account's token"),
            Err(error) => {
                tracing::warn!(
                    code = %explained::TOKEN_NOT_WRITTEN,
                    path = %self.path.display(),
                    "cannot write the renewed token: {error}; help: mount the token's directory, not single files, and make the shim's uid the directory's owner, as `berth grant` does"
                );
                return claims.until;
            }
        }
        Some(until)
    }

    /// Writes the new token. The file keeps its owner, because a sibling may run with another uid
    /// than this shim.
    fn write_token(&self, token: &str) -> io::Result<()> {
        let owner = fs::metadata(&self.path)?;
        replace_file(&self.path, &self.temporary, |mut file| {
            if file.metadata()?.uid() != owner.uid() {
                fchown(&file, Some(owner.uid()), Some(owner.gid()))?;
            }
            file.write_all(token.as_bytes())?;
            file.sync_all()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Credentials, Facts};
    use base64::Engine;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
    use berth_testing::{format_answer, serve_with};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::Arc;
    use tokio::sync::watch;

    /// Makes a token of a service account. The token was issued `before` seconds ago and expires in
    /// `after` seconds.
    fn make_token(account: &str, before: u64, after: u64) -> String {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .as_secs();
        let (iat, exp) = (now - before, now + after);
        let claims =
            format!(r#"{{"sub":"system:serviceaccount:{account}","iat":{iat},"exp":{exp}}}"#);
        format!("e30.{}.sig", URL_SAFE_NO_PAD.encode(claims))
    }

    /// The service account renews its own token after a third of the token's life. The new token
    /// replaces the file atomically.
    #[tokio::test]
    async fn a_due_token_is_renewed_and_stays_if_the_renewal_fails() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("token");
        let mut refused = true;
        let mut server = serve_with(move |_| {
            if std::mem::take(&mut refused) {
                return format_answer("403 Forbidden", "{}");
            }
            format_answer(
                "201 Created",
                r#"{"status":{"token":"n3w","expirationTimestamp":"2100-01-01T00:00:00Z"}}"#,
            )
        })
        .await;
        let berth = server
            .access
            .server
            .strip_prefix("https://")
            .unwrap()
            .strip_suffix("/k")
            .unwrap()
            .parse()
            .unwrap();
        let kubeconfig = temp.path().join("kubeconfig");
        let text = format!(
            "current-context: a\nclusters: [{{name: c, cluster: {{server: '{}', certificate-authority-data: {}}}}}]\nusers: \
             [{{name: u, user: {{tokenFile: token}}}}]\ncontexts: [{{name: a, context: {{cluster: c, user: u}}}}]\n",
            server.access.server,
            STANDARD.encode(&server.access.ca)
        );
        fs::write(&kubeconfig, text).unwrap();
        let (_sender, facts) = watch::channel(Facts::default());
        let credentials = Credentials::Kubeconfig(kubeconfig);
        let api = Api::new(
            credentials,
            berth,
            facts,
            watch::channel(None).0,
            Arc::new(|_, _| {}),
        );
        let file = TokenFile::new(&path, &"a".parse().unwrap());
        let left_alone = [
            make_token("berth-system:berth-cp-1", 90, 210),
            // This account is in another namespace. It may have no Role that allows it to request
            // tokens.
            make_token("kube-system:berth-cp-1", 200, 100),
            "none".into(),
        ];
        for other in left_alone {
            fs::write(&path, &other).unwrap();
            file.renew_if_due(&api).await;
            assert_eq!(fs::read_to_string(&path).unwrap(), other);
        }
        assert!(server.asked.try_recv().is_err());
        let due = make_token("berth-system:berth-cp-1", 101, 199);
        fs::write(&path, &due).unwrap();
        assert_eq!(
            file.renew_if_due(&api).await,
            Claims::parse(&due).unwrap().until
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), due);
        let until = file.renew_if_due(&api).await.unwrap();
        assert_eq!(
            humantime::format_rfc3339_seconds(until).to_string(),
            "2100-01-01T00:00:00Z"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "n3w");
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 2);
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let (request, _) = server.asked.recv().await.unwrap();
        assert!(
            request.starts_with("POST ")
                && request.contains("/berth-cp-1/token ")
                && request.contains(&due),
            "{request}"
        );
    }
}
