//! The rights to read and write, for clients of real apiservers.
//!
//! Clients are no admins, because kube-apiserver lets admins do everything even while it does not
//! know its own roles yet. An instance that gets connections before it is ready rejects the
//! clients' requests with 403, as it would reject a kubelet's requests.

use super::dial::Target;
use super::objects::{self, Request, WRITE_NAMESPACE};
use crate::record::event::{Failure, Protocol};
use crate::testbed::certs::{CLIENT_GROUP, Certs};
use hyper::{Method, StatusCode};
use serde_json::json;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::{sleep, timeout};

const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

/// Statuses that show that the binding exists: this try or an earlier try created the binding.
const CREATED: [StatusCode; 2] = [StatusCode::CREATED, StatusCode::CONFLICT];

/// Longest time until the rights are granted and known.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Time between two requests.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Grants the rights, and waits until the apiserver knows them.
pub async fn grant_client_rights(address: SocketAddr, certs: &Certs) -> Result<(), String> {
    let (admin, client) = make_targets(address, certs)?;
    let read = objects::get_request(objects::configmaps_path(WRITE_NAMESPACE));
    let granted = async {
        repeat_until_good_status(&admin, &binding_request(), &CREATED).await?;
        repeat_until_good_status(&client, &read, &[StatusCode::OK]).await
    };
    let forbidden = |why| {
        format!("the clients of the rehearsal, group {CLIENT_GROUP}, may not read and write: {why}")
    };
    granted.await.map_err(forbidden)
}

/// Returns two targets at the address: one with an admin's certificate, and one with a client's.
fn make_targets(address: SocketAddr, certs: &Certs) -> Result<(Target, Target), String> {
    let unusable = |e| format!("cannot use the certificates just made: {e}");
    Ok((
        Target::new_admin(address, certs).map_err(unusable)?,
        Target::new(address, certs).map_err(unusable)?,
    ))
}

/// Repeats a request until its status is in `good`, for [`TIMEOUT`] at most.
async fn repeat_until_good_status(
    target: &Target,
    request: &Request,
    good: &[StatusCode],
) -> Result<(), String> {
    let mut why = "no answer".to_owned();
    let asked = async {
        loop {
            match ask_once(target, request).await {
                Ok(status) if good.contains(&status) => break,
                Ok(status) => why = format!("{} {}: {status}", request.method, request.path),
                Err(failure) => why = format!("{} {}: {failure}", request.method, request.path),
            }
            sleep(RETRY_PAUSE).await;
        }
    };
    timeout(TIMEOUT, asked).await.map_err(|_| why)
}

fn binding_request() -> Request {
    let group = "rbac.authorization.k8s.io";
    let binding = json!({
        "kind": "ClusterRoleBinding", "apiVersion": format!("{group}/v1"),
        "metadata": {"name": CLIENT_GROUP},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"apiGroup": group, "kind": "Group", "name": CLIENT_GROUP}],
    });
    Request {
        method: Method::POST,
        path: BINDINGS.into(),
        body: binding.to_string(),
    }
}

async fn ask_once(target: &Target, request: &Request) -> Result<StatusCode, Failure> {
    let mut link = target.dial(Protocol::Http1, "grant".into()).await?;
    Ok(link.ask(request.clone()).await?.0)
}
