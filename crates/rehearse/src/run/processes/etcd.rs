//! The etcd of real apiservers: one for each run, on unused addresses of this machine, with its
//! data in the rehearsal's directory.

use super::layout::{ProcessSpec, Role};
use crate::config::apiserver::format_flag;
use crate::testbed::address::free_address;
use http_body_util::Empty;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tokio::net::TcpStream;

/// Name of etcd, used in places where other processes have the name of an instance.
pub(crate) const NAME: &str = "etcd";

/// Time limit for etcd to get healthy.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(30);

/// Name of the flag for the interval of progress notifications, which was experimental before etcd
/// 3.6.
fn progress_notify_flag(program: &Path) -> &'static str {
    let version = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output();
    let version = version
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    let before = ["etcd Version: 3.4.", "etcd Version: 3.5."]
        .iter()
        .any(|prefix| version.starts_with(prefix));
    if before {
        "experimental-watch-progress-notify-interval"
    } else {
        "watch-progress-notify-interval"
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Etcd {
    clients: SocketAddr,
    peers: SocketAddr,
}

impl Etcd {
    /// Finds unused addresses for etcd.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            clients: free_address()?,
            peers: free_address()?,
        })
    }

    /// Returns the value of `--etcd-servers`.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.clients)
    }

    pub(crate) fn process_spec(&self, program: &Path, dir: &Path) -> ProcessSpec {
        let (clients, peers) = (self.url(), format!("http://{}", self.peers));
        let argv = vec![
            program.into(),
            "--name=rehearsal".into(),
            format_flag("data-dir", dir.join("etcd")),
            format_flag("listen-client-urls", &clients),
            format_flag("advertise-client-urls", &clients),
            format_flag("listen-peer-urls", &peers),
            format_flag("initial-advertise-peer-urls", &peers),
            format_flag("initial-cluster", format!("rehearsal={peers}")),
            // kubeadm's value. At this interval, a watch without events gets the store's revision.
            format_flag(progress_notify_flag(program), "5s"),
            // The data need not survive a crash of the machine.
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
        ];
        ProcessSpec {
            role: Role::Store,
            argv,
            awaits: None,
        }
    }

    /// Checks that etcd is healthy. The error says why not.
    pub(crate) async fn check_health(&self) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("GET {}/health: {error}", self.url());
        let io = TcpStream::connect(self.clients)
            .await
            .map_err(|e| failed(&e))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(io))
            .await
            .map_err(|e| failed(&e))?;
        let request = Request::get("/health")
            .header(header::HOST, self.clients.to_string())
            .body(Empty::<Bytes>::new())
            .map_err(|e| failed(&e))?;
        let answer = async move { sender.send_request(request).await };
        let (answer, _) = tokio::join!(answer, connection);
        match answer.map_err(|e| failed(&e))?.status() {
            status if status.is_success() => Ok(()),
            status => Err(failed(&status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_etcd_gets_the_flag_of_its_version() {
        let dir = tempfile::tempdir().unwrap();
        let named = |version: &str| {
            let program = dir.path().join(version);
            fs::write(
                &program,
                format!("#!/bin/sh\necho 'etcd Version: {version}'\n"),
            )
            .unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            progress_notify_flag(&program)
        };
        assert_eq!(
            named("3.5.24"),
            "experimental-watch-progress-notify-interval"
        );
        assert_eq!(named("3.6.16"), "watch-progress-notify-interval");
        assert_eq!(
            progress_notify_flag(Path::new("/nonexistent")),
            "watch-progress-notify-interval"
        );
    }
}
