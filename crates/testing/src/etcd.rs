//! A simulated etcd with several members. Each member is a small HTTPS server that answers like
//! etcd's JSON gateway.

use crate::{Server, create_ca, format_answer, serve_at};
use rcgen::{CertifiedIssuer, KeyPair};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

/// The state of all members, from which each member's answers are made. Members are numbered from
/// 1.
#[derive(Debug, Default)]
pub struct Members {
    pub list: Vec<Value>,
    pub leader: u64,
    /// Revisions that member 3 reports, the next one last. Other answers report revision 100.
    pub revisions: Vec<u64>,
    /// Members that answer 503.
    pub stopped: Vec<u64>,
    /// True if the leader keeps its leadership even when it is asked to move it.
    pub is_stubborn: bool,
    /// Members to which a request has moved the leadership, in order.
    pub transfers: Vec<String>,
}

impl Members {
    fn answer(&mut self, member: u64, request: &str) -> String {
        let body = request.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        let body: Value = serde_json::from_str(body).unwrap();
        let revision = if member == 3 {
            self.revisions.pop()
        } else {
            None
        };
        let revision = revision.unwrap_or(100).to_string();
        let header =
            json!({"cluster_id": "77", "member_id": member.to_string(), "revision": revision});
        let failed = |status, why: &str| {
            format_answer(status, &json!({"error": why, "message": why}).to_string())
        };
        if self.stopped.contains(&member) {
            return failed("503 Service Unavailable", "etcdserver: server stopped");
        }
        let text = match request.split(' ').nth(1).unwrap_or_default() {
            "/v3/cluster/member/list" => json!({"header": header, "members": self.list}),
            "/v3/maintenance/status" => {
                json!({"header": header, "leader": self.leader.to_string()})
            }
            "/v3/maintenance/alarm" if body["action"] == "GET" => json!({"header": header}),
            "/v3/maintenance/transfer-leadership" if self.leader != member => {
                return failed("400 Bad Request", "etcdserver: not leader");
            }
            "/v3/maintenance/transfer-leadership" if self.is_stubborn => {
                return failed(
                    "504 Gateway Timeout",
                    "etcdserver: request timed out, waiting for the leader",
                );
            }
            "/v3/maintenance/transfer-leadership" => {
                let to = body["targetID"].as_str().unwrap().to_owned();
                self.leader = to.parse().unwrap();
                self.transfers.push(to);
                json!({"header": header})
            }
            _ => return failed("404 Not Found", "Not Found"),
        };
        format_answer("200 OK", &text.to_string())
    }
}

/// Starts one member at each of the given addresses. Port 0 means a free port. Each member's
/// certificate contains the given name. Member 1 is the leader.
///
/// # Panics
/// Panics if the members cannot be set up, so that the test fails.
pub async fn start_members(members: &[(SocketAddr, &str)]) -> (Arc<Mutex<Members>>, Vec<Server>) {
    let (all, ca): (_, CertifiedIssuer<'static, KeyPair>) =
        (Arc::new(Mutex::new(Members::default())), create_ca());
    let mut servers = Vec::new();
    for (id, (address, name)) in (1..).zip(members) {
        let answers = all.clone();
        let server = serve_at(&ca, *address, name, move |request| {
            answers.lock().unwrap().answer(id, request)
        })
        .await;
        let listed = json!({"ID": id.to_string(), "name": format!("cp-{id}"), "clientURLs": [server.access.server]});
        all.lock().unwrap().list.push(listed);
        servers.push(server);
    }
    all.lock().unwrap().leader = 1;
    (all, servers)
}
