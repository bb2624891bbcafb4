//! `--audit-log-path`: one line a request in the form of `audit.k8s.io/v1`, level Metadata, as far as
//! a stand-in knows it. There is no rotation.

use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// The audit log.
#[derive(Debug)]
pub(super) struct Audit(Mutex<File>);

/// What is logged about a request.
#[derive(Debug)]
pub(super) struct Line<'a> {
    pub(super) peer: SocketAddr,
    pub(super) user_agent: &'a str,
    pub(super) verb: &'a str,
    pub(super) uri: &'a str,
    pub(super) status: u16,
    pub(super) received: SystemTime,
    /// The answer goes on: a watch.
    pub(super) started_only: bool,
}

impl Audit {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        Ok(Self(Mutex::new(file)))
    }

    /// Appends a line, in one write.
    pub(super) fn log(&self, line: &Line<'_>) {
        let mut text = line.to_json().to_string();
        text.push('\n');
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(text.as_bytes()) {
            tracing::warn!(%error, "cannot write the audit log");
        }
    }
}

impl Line<'_> {
    fn to_json(&self) -> Value {
        let time = |t| humantime::format_rfc3339_micros(t).to_string();
        json!({
            "kind": "Event",
            "apiVersion": "audit.k8s.io/v1",
            "level": "Metadata",
            "stage": if self.started_only { "ResponseStarted" } else { "ResponseComplete" },
            "requestURI": self.uri,
            "verb": self.verb,
            "user": {"username": "system:anonymous", "groups": ["system:unauthenticated"]},
            "sourceIPs": [self.peer.ip()],
            "userAgent": self.user_agent,
            "responseStatus": {"code": self.status},
            "requestReceivedTimestamp": time(self.received),
            "stageTimestamp": time(SystemTime::now()),
        })
    }
}
