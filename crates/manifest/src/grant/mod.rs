//! Least-privilege credentials for the shims of a node, so that a running shim never has an
//! administrator's credentials: a service account with the necessary rights, and a kubeconfig with
//! its token.
//!
//! [`objects`] defines the rights, and [`files`] writes the kubeconfig and the token. This module
//! requests the token and tries it. The token expires; shims renew it as long as one shim of the
//! node runs.

pub mod files;
pub mod objects;

use crate::file::FileError;
use crate::report;
use crate::wait::ask_until;
use berth_cluster::account::{
    TOKEN_FILE, account_name, parse_granted_token, token_path, token_request,
};
use berth_cluster::client::none_if_missing;
use berth_cluster::lease::NAMESPACE;
use berth_cluster::service::FIELD_MANAGER;
use berth_cluster::{Access, Client, Error};
use hyper::StatusCode;
use objects::Request;
use serde::Serialize;
use serde_json::Value;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::Instant;

const REVIEWS_PATH: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// Maximum number of attempts to write the shared Role when other nodes write at the same time. Of
/// concurrent writes, one always succeeds.
const MAX_TRIES: u32 = 50;

/// How long an apiserver may take to notice objects that were just written through another
/// apiserver.
const NOTICE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two tries of a request that was refused.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantOptions {
    /// The node's name in the cluster.
    pub node: String,
    /// The address that the shims dial for the cluster's API. The shims themselves listen there.
    pub server: SocketAddr,
    /// The name in the apiserver's certificate.
    pub server_name: String,
    /// CA certificates that the shim's probe trusts, in PEM form, in addition to the CA of the
    /// administrator's kubeconfig.
    pub ca: Vec<u8>,
    /// The uid that will own the files.
    pub uid: u32,
    /// Path of the kubeconfig. The token is in the same directory.
    pub file: PathBuf,
}

#[derive(Debug, Clone, Serialize)]
pub struct Granted {
    pub service_account: String,
    /// Requests that the new credentials allow. Each was tried at the server.
    pub may: Vec<Request>,
    /// The server that was asked, and that the shims will use.
    pub server: String,
    pub kubeconfig: PathBuf,
    pub token: PathBuf,
    /// The uid that owns the files.
    pub uid: u32,
    pub expires: String,
    /// Lifetime of the token granted by the apiserver, in seconds, rounded to minutes.
    pub seconds: u64,
}

/// Why the grant failed, or is incomplete.
#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    /// The administrator's credentials are not sufficient.
    #[error("--kubeconfig: {0}")]
    Admin(String),
    /// The files cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The new credentials cannot be tried.
    #[error("{} is written, but the new credentials cannot be tried: {why}", kubeconfig.display())]
    Untried {
        kubeconfig: PathBuf,
        /// Cause and fix.
        why: String,
    },
    /// The new credentials lack necessary rights.
    #[error("{account} may not {}", requests.join(", nor "))]
    Refused {
        account: String,
        requests: Vec<String>,
    },
}

/// Creates the objects and a token, writes the files for the shim and tries the credentials. Each
/// call creates a new token.
///
/// # Errors
/// See [`GrantError`]. Objects created until then stay, and a second call continues.
pub async fn grant(
    access: &Access,
    client: &Client,
    options: &GrantOptions,
) -> Result<Granted, GrantError> {
    let GrantOptions {
        node,
        server,
        server_name,
        ca,
        uid,
        file,
    } = options;
    let account = account_name(node);
    create_objects(client, node)
        .await
        .map_err(|error| GrantError::Admin(explain(&error)))?;
    let asked = std::time::SystemTime::now();
    let answer = client.post(&token_path(&account), &token_request()).await;
    let answer = answer.map_err(|error| GrantError::Admin(explain(&error)))?;
    let (token, until) = parse_granted_token(&answer).ok_or_else(|| {
        GrantError::Admin(format!(
            "{} gives a token without an expiration time: give the address of a kube-apiserver",
            client.server()
        ))
    })?;
    let server = format!("https://{server}");
    let kubeconfig = files::render_kubeconfig(
        &account,
        &server,
        server_name,
        &[&access.ca[..], ca].join(&b'\n'),
    );
    files::write_credentials(file, *uid, &kubeconfig, token)?;
    let untried = |why| GrantError::Untried {
        kubeconfig: file.clone(),
        why,
    };
    let shim = Client::from_kubeconfig(file).map_err(|error| untried(error.to_string()))?;
    let may = try_allowed_requests(&shim, node, NOTICE_TIMEOUT).await.map_err(|error| match error {
        TryError::Failed(error) => untried(format!(
            "{error}: check that the apiserver answers at --listen and that its certificate is for {server_name}, and run `berth grant` \
             again; if the certificate has another name, run `berth inject --probe-server-name NAME` first, and give `berth grant` the new manifest"
        )),
        TryError::Refused(requests) => {
            GrantError::Refused { account: format!("{NAMESPACE}/{account}"), requests }
        }
    })?;
    Ok(Granted {
        service_account: format!("{NAMESPACE}/{account}"),
        may,
        server,
        kubeconfig: file.clone(),
        token: file.with_file_name(TOKEN_FILE),
        uid: *uid,
        expires: humantime::format_rfc3339_seconds(until).to_string(),
        seconds: (until.duration_since(asked).unwrap_or_default().as_secs() + 30) / 60 * 60,
    })
}

async fn create_objects(client: &Client, node: &str) -> Result<(), Error> {
    for object in [objects::namespace_object(NAMESPACE)]
        .iter()
        .chain(&objects::single_node_objects(node))
    {
        client
            .apply(&objects::object_path(object), FIELD_MANAGER, object)
            .await?;
    }
    add_to_shared_role(client, node).await
}

/// Adds a node to the shared Role. The names of other nodes stay, even if they are added at the
/// same time.
async fn add_to_shared_role(client: &Client, node: &str) -> Result<(), Error> {
    let role = objects::shared_role([node]);
    let path = objects::object_path(&role);
    let all = path.rsplit_once('/').map_or("", |(all, _)| all);
    let mut tries = 1;
    loop {
        let written = match none_if_missing(client.get(&path).await)? {
            None => client.post(all, &role).await,
            Some(read) => match objects::add_node(&read, node) {
                None => return Ok(()),
                Some(role) => client.put(&path, &role).await,
            },
        };
        match written {
            Err(error) if error.status() == Some(StatusCode::CONFLICT) && tries < MAX_TRIES => {
                tries += 1;
            }
            written => return written.map(drop),
        }
    }
}

enum TryError {
    Failed(Error),
    Refused(Vec<String>),
}

/// Checks that these credentials allow all requests of a node's shims. Refused requests are
/// repeated until `patience` is over.
async fn try_allowed_requests(
    client: &Client,
    node: &str,
    patience: Duration,
) -> Result<Vec<Request>, TryError> {
    let end = Instant::now() + patience;
    let requests = objects::allowed_requests(node);
    let mut refused = Vec::new();
    for request in &requests {
        let ask = async || client.post(REVIEWS_PATH, &request.access_review()).await;
        let counts = |answer: &Result<Value, Error>| match answer {
            Ok(review) => review["status"]["allowed"] == true,
            Err(error) => error.status() != Some(StatusCode::UNAUTHORIZED),
        };
        let answer = ask_until(
            end.saturating_duration_since(Instant::now()),
            RETRY_PAUSE,
            ask,
            counts,
        )
        .await;
        let answer = answer.map_err(TryError::Failed)?;
        if answer["status"]["allowed"] != true {
            let reason = answer["status"]["reason"]
                .as_str()
                .filter(|reason| !reason.is_empty());
            refused.push(reason.map_or_else(
                || request.to_string(),
                |reason| format!("{request} ({reason})"),
            ));
        }
    }
    if refused.is_empty() {
        Ok(requests)
    } else {
        Err(TryError::Refused(refused))
    }
}

/// Deletes the objects of a single node, the service account first: the tokens end only
/// with the account. Returns the names of the deleted objects.
///
/// # Errors
/// See [`GrantError`].
pub async fn revoke(client: &Client, node: &str) -> Result<Vec<String>, GrantError> {
    let mut deleted = Vec::new();
    for object in objects::single_node_objects(node) {
        let answer = none_if_missing(client.delete(&objects::object_path(&object)).await);
        if answer
            .map_err(|error| GrantError::Admin(explain(&error)))?
            .is_some()
        {
            let of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let metadata = &object["metadata"];
            deleted.push(format!(
                "{} {}/{}",
                of(&object["kind"]),
                of(&metadata["namespace"]),
                of(&metadata["name"])
            ));
        }
    }
    Ok(deleted)
}

/// Explains why a request with the administrator's credentials failed, and suggests a fix.
fn explain(error: &Error) -> String {
    report::explain_cluster_error(
        error,
        [
            "the server does not accept the kubeconfig's credentials, or the credentials have expired: give another kubeconfig, such as kubeadm's /etc/kubernetes/admin.conf (kubeadm \
             certs renew admin.conf)",
            "give the kubeconfig of an administrator who may make Roles, such as kubeadm's /etc/kubernetes/admin.conf or super-admin.conf; or let an administrator create the objects that --print shows",
            "run `berth grant` again",
        ],
    )
}

#[cfg(test)]
mod tests;
