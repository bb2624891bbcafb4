//! A real kube-apiserver with its etcd, and clients that speak TLS 1.3 to it.
//!
//! What costs an instance most is its key: RSA with 2,048 bits, as kubeadm makes it. Clients check its certificate, show one of their own
//! and resume no session, as those of client-go do.

use super::clients::Service;
use super::storms::reconnect;
use super::{Cpus, NODE, NODE_ADDRESS, PORT, Round, StormOptions, WASTED, directory, show_warnings, start_berth};
use crate::clients::TIMEOUT;
use crate::process::ChildProcess;
use anyhow::{Context, Result, anyhow};
use berth_rehearse::certs::{self, Certs};
use berth_rehearse::event::Failure;
use berth_rehearse::load::{Visit, Visitor, grant};
use clap::Args;
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::timeout;

/// Where kube-apiserver listens, and its etcd.
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 2, 1)), PORT);
const ETCD: &str = "http://127.0.0.1:2379";

/// Time until kube-apiserver is ready, on a CPU that etcd uses too; and until it ends: that of a static pod.
const READY_WITHIN: Duration = Duration::from_secs(90);
const GRACE: Duration = Duration::from_secs(30);

/// Its name in certificates and files.
const NAME: &str = "kube-apiserver";

/// How kube-apiserver reports a failed handshake, nearly always of a client that had left: in its log, or only in a counter if the
/// connection ended without an error.
const FAILED_HANDSHAKE: &str = "http: TLS handshake error";
const ENDED_HANDSHAKES: &str = "apiserver_tls_handshake_errors_total ";

/// A client's first request, which needs no rights.
const FIRST: &str = "/version";

/// The programs of `real` and `ramp`
#[derive(Debug, Args)]
pub(super) struct Programs {
    /// The kube-apiserver
    #[arg(long, required = false)]
    kube_apiserver: PathBuf,
    /// Its etcd
    #[arg(long, required = false)]
    etcd: PathBuf,
    /// PEM file with the key that kube-apiserver serves with
    #[arg(long, required = false)]
    server_key: PathBuf,
}

/// What outlives a kube-apiserver.
pub(super) struct ControlPlane {
    program: PathBuf,
    certs: Certs,
    _etcd: ChildProcess,
    directory: TempDir,
}

impl ControlPlane {
    pub(super) fn start(programs: &Programs, cpus: &Cpus) -> Result<Self> {
        let directory = directory()?;
        let certs = certs::make(directory.path(), &[NODE.into(), ADDRESS.ip()])?;
        let key = fs::read_to_string(&programs.server_key).context("cannot read the server's key")?;
        certs.issue_with(NAME, &key)?;
        let mut command = Command::new(&programs.etcd);
        command.arg("--data-dir").arg(directory.path().join("etcd"));
        command.args(["--listen-client-urls", ETCD, "--advertise-client-urls", ETCD]);
        command.args(["--listen-peer-urls", "http://127.0.0.1:0", "--unsafe-no-fsync", "--log-level", "warn"]);
        let etcd = cpus.start(|| ChildProcess::start(command, directory.path().join("etcd.log")))?;
        Ok(Self { program: programs.kube_apiserver.clone(), certs, _etcd: etcd, directory })
    }

    /// Starts a kube-apiserver and waits until it is ready and grants clients their rights.
    pub(super) async fn ready_apiserver(&self, cpus: &Cpus) -> Result<Apiserver> {
        let mut apiserver = self.apiserver(cpus)?;
        let admin = Visitor::admin(ADDRESS, &self.certs)?;
        let ready = async || {
            let asked = async { Ok::<_, Failure>(admin.connect(ADDRESS.ip()).await?.get("/readyz").await?.status) };
            (asked.await == Ok(200)).then_some(())
        };
        apiserver.0.until("kube-apiserver to be ready", READY_WITHIN, ready).await?;
        grant(ADDRESS, &self.certs).await.map_err(|why| anyhow!(why))?;
        Ok(apiserver)
    }

    /// Starts a kube-apiserver.
    pub(super) fn apiserver(&self, cpus: &Cpus) -> Result<Apiserver> {
        let certs = &self.certs;
        let mut command = Command::new(&self.program);
        command.arg(format!("--etcd-servers={ETCD}")).arg(format!("--bind-address={}", ADDRESS.ip()));
        command.arg(format!("--secure-port={}", ADDRESS.port())).arg(format!("--advertise-address={NODE}"));
        command.args(["--endpoint-reconciler-type=none", "--authorization-mode=RBAC"]);
        command.args(["--service-cluster-ip-range=10.96.0.0/24"]);
        command.arg("--service-account-issuer=https://kubernetes.default.svc");
        for (name, path) in [
            ("service-account-key-file", &certs.account_public_key_file),
            ("service-account-signing-key-file", &certs.account_key_file),
            ("client-ca-file", &certs.ca_file),
            ("tls-cert-file", &certs.cert_file(NAME)),
            ("tls-private-key-file", &certs.key_file(NAME)),
        ] {
            let mut flag = OsString::from(format!("--{name}="));
            flag.push(path);
            command.arg(flag);
        }
        let log = self.directory.path().join("kube-apiserver.log");
        // Failed handshakes are counted in it.
        let _ = fs::remove_file(&log);
        cpus.start(|| ChildProcess::start(command, log)).map(Apiserver)
    }

    /// Starts berth before it.
    pub(super) async fn berth(&self, options: &StormOptions, gate: &str, directory: &Path) -> Result<ChildProcess> {
        let probe = ["--probe-ca".into(), self.certs.ca_file.clone().into()];
        start_berth(options, gate, ADDRESS, &probe, directory).await
    }

    /// Clients that connect through berth.
    pub(super) fn service(&self) -> Result<Real> {
        Ok(Real { visitor: Visitor::new(NODE_ADDRESS, &self.certs)?, handshakes: Arc::default() })
    }

    /// An admin's connection to the instance itself.
    pub(super) async fn admin(&self) -> Result<Visit> {
        Ok(Visitor::admin(ADDRESS, &self.certs)?.connect(ADDRESS.ip()).await?)
    }
}

/// A kube-apiserver that runs.
pub(super) struct Apiserver(ChildProcess);

impl Apiserver {
    /// Its largest resident memory so far, in MiB.
    pub(super) fn peak(&self) -> Result<f64> {
        let peak = procfs::process::Process::new(self.0.pid())?.status()?.vmhwm.context("no VmHWM in /proc")?;
        Ok(peak as f64 / 1024.0)
    }

    pub(super) async fn failed_handshakes(&self, admin: &mut Visit) -> Result<f64> {
        let (mut answer, mut text) = (admin.get("/metrics").await?, Vec::new());
        while let Some(piece) = answer.next().await? {
            text.extend_from_slice(&piece);
        }
        let metrics = String::from_utf8_lossy(&text);
        let ended = metrics.lines().find_map(|line| line.strip_prefix(ENDED_HANDSHAKES)?.parse().ok());
        let ended: f64 = ended.context("kube-apiserver does not count failed handshakes")?;
        Ok(ended + self.0.log().matches(FAILED_HANDSHAKE).count() as f64)
    }

    /// Ends it by SIGTERM, and by SIGKILL after the grace period: with open watches it needs that.
    pub(super) async fn end(mut self) {
        self.0.signal(Signal::SIGTERM);
        let _ = self.0.ended(GRACE).await;
    }
}

/// A kube-apiserver behind berth.
#[derive(Clone)]
pub(super) struct Real {
    visitor: Visitor,
    /// TLS handshakes that clients completed.
    handshakes: Arc<AtomicU64>,
}

impl Real {
    pub(super) async fn connect(&self, from: Ipv4Addr) -> Result<Visit, Failure> {
        self.visitor.connect(from.into()).await
    }
}

impl Service for Real {
    type Connection = Visit;

    async fn open(&self, from: Ipv4Addr) -> io::Result<Visit> {
        let mut visit = self.connect(from).await.map_err(io::Error::other)?;
        self.handshakes.fetch_add(1, Relaxed);
        self.ask(&mut visit).await?;
        Ok(visit)
    }

    async fn ask(&self, visit: &mut Visit) -> io::Result<()> {
        let answer = visit.get(FIRST).await.map_err(io::Error::other)?;
        let status = answer.status;
        answer.rest().await.map_err(io::Error::other)?;
        match status {
            200 => Ok(()),
            status => Err(io::Error::other(format!("status {status}"))),
        }
    }
}

/// [`reconnect`] to a real kube-apiserver.
pub(super) async fn storm(options: &StormOptions, gate: &str, cpus: &Cpus, plane: &ControlPlane) -> Result<Round> {
    let apiserver = plane.ready_apiserver(cpus).await?;
    let directory = directory()?;
    let berth = plane.berth(options, gate, directory.path()).await?;
    let service = plane.service()?;
    timeout(TIMEOUT, service.open(NODE)).await.context("berth does not serve")??;
    let mut round = reconnect(options, &service).await?;
    show_warnings(&berth);
    drop(berth);
    let failed = apiserver.failed_handshakes(&mut plane.admin().await?).await?;
    drop(apiserver);
    let handshakes = service.handshakes.load(Relaxed);
    // One was there before.
    let wasted = handshakes.saturating_sub(round.answered + 1);
    let rate = handshakes as f64 / round.lasted.as_secs_f64();
    round.figures.extend([
        ("handshakes that a client completed, a second", rate),
        ("handshakes that failed at kube-apiserver", failed),
        (WASTED, wasted as f64),
    ]);
    Ok(round)
}
