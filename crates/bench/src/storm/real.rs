//! A real kube-apiserver with its etcd, and clients that speak TLS 1.3 to it.
//!
//! What costs an instance most is its key: of RSA with 2,048 bits, as kubeadm makes it. Clients check its certificate, show one of their own
//! and resume no session, all as those of client-go.

use crate::clients::{PATIENCE, Service};
use crate::process::{Berth, Processors};
use crate::storms::reconnect;
use crate::{Cli, NODE, PORT, Round, WASTED};
use anyhow::{Context, Result, anyhow, bail};
use berth_bench::memory::kilobytes;
use berth_rehearse::certs::{self, Certs};
use berth_rehearse::load::{Visit, Visitor, grant};
use berth_rehearse::record::Failure;
use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

/// Where kube-apiserver is, and its etcd.
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(127, 0, 2, 1)), PORT);
const ETCD: &str = "http://127.0.0.1:2379";

/// How long one may take to be ready, on a processor that etcd needs, too; and to end, which is a static pod's time.
const READY_WITHIN: Duration = Duration::from_secs(90);
const GRACE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(50);

/// Its name in certificates and files.
const NAME: &str = "kube-apiserver";

/// How it tells of a handshake that came to nothing, nearly always because the client had left: in its log, and where that was said by
/// the end of the stream, in a counter alone.
const FAILED_HANDSHAKE: &str = "http: TLS handshake error";
const ENDED_HANDSHAKES: &str = "apiserver_tls_handshake_errors_total ";

/// Lines of berth's log that are shown.
const TOLD: usize = 10;

/// What a client asks for first, which everybody may.
const FIRST: &str = "/version";

/// What is real, for `real` and `ramp`
#[derive(Args)]
pub(crate) struct Programs {
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

/// All that outlives a kube-apiserver.
pub(crate) struct ControlPlane {
    program: PathBuf,
    directory: TempDir,
    certs: Certs,
    etcd: Child,
}

impl ControlPlane {
    pub(crate) fn start(programs: &Programs, processors: &Processors) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("berth-storm-plane-").tempdir()?;
        let certs = certs::make(directory.path(), &[NODE.into(), ADDRESS.ip()])?;
        let key = fs::read_to_string(&programs.server_key).context("cannot read the server's key")?;
        certs.issue_with(NAME, &key)?;
        let mut command = Command::new(&programs.etcd);
        command.arg("--data-dir").arg(directory.path().join("etcd"));
        command.args(["--listen-client-urls", ETCD, "--advertise-client-urls", ETCD]);
        command.args(["--listen-peer-urls", "http://127.0.0.1:0", "--unsafe-no-fsync", "--log-level", "warn"]);
        let etcd = spawn(command, &directory.path().join("etcd.log"), processors)?;
        Ok(Self { program: programs.kube_apiserver.clone(), directory, certs, etcd })
    }

    /// Starts a kube-apiserver and waits until it is ready and knows what clients may do.
    pub(crate) async fn apiserver(&self, processors: &Processors) -> Result<Apiserver> {
        let mut apiserver = self.begin(processors)?;
        let admin = Visitor::admin(ADDRESS, &self.certs)?;
        let ready = async {
            loop {
                let asked = async { Ok::<_, Failure>(admin.connect(ADDRESS.ip()).await?.get("/readyz").await?.status) };
                if asked.await == Ok(200) {
                    return Ok(());
                }
                if let Some(status) = apiserver.child.try_wait()? {
                    bail!("kube-apiserver ended, {status}: {}", apiserver.said().lines().last().unwrap_or_default());
                }
                sleep(PAUSE).await;
            }
        };
        timeout(READY_WITHIN, ready).await.context("kube-apiserver does not get ready")??;
        grant(ADDRESS, &self.certs).await.map_err(|why| anyhow!(why))?;
        Ok(apiserver)
    }

    /// Starts a kube-apiserver.
    pub(crate) fn begin(&self, processors: &Processors) -> Result<Apiserver> {
        let flag = |name: &str, path: &Path| {
            let mut flag = OsString::from(format!("--{name}="));
            flag.push(path);
            flag
        };
        let certs = &self.certs;
        let mut command = Command::new(&self.program);
        command.arg(format!("--etcd-servers={ETCD}")).arg(format!("--bind-address={}", ADDRESS.ip()));
        command.arg(format!("--secure-port={}", ADDRESS.port())).arg(format!("--advertise-address={NODE}"));
        command.args(["--endpoint-reconciler-type=none", "--authorization-mode=RBAC"]);
        command.args(["--service-cluster-ip-range=10.96.0.0/24"]);
        command.arg("--service-account-issuer=https://kubernetes.default.svc");
        command.arg(flag("service-account-key-file", &certs.account_public_key_file));
        command.arg(flag("service-account-signing-key-file", &certs.account_key_file));
        command.arg(flag("client-ca-file", &certs.ca_file)).arg(flag("tls-cert-file", &certs.cert_file(NAME)));
        command.arg(flag("tls-private-key-file", &certs.key_file(NAME)));
        let log = self.directory.path().join("kube-apiserver.log");
        Ok(Apiserver { child: spawn(command, &log, processors)?, log })
    }

    /// berth before it.
    pub(crate) fn berth(&self, cli: &Cli, gate: &str, directory: &Path) -> Result<Berth> {
        let mut probe = vec![OsString::from("--probe-ca")];
        probe.push(self.certs.ca_file.clone().into());
        Berth::start(cli, gate, ADDRESS, &probe, directory)
    }

    /// Clients that come by way of berth.
    pub(crate) fn service(&self) -> Result<Real> {
        let visitor = Visitor::new((NODE, PORT).into(), &self.certs)?;
        Ok(Real { visitor, handshakes: Arc::default() })
    }

    /// An admin of the instance itself.
    pub(crate) async fn admin(&self) -> Result<Visit> {
        Visitor::admin(ADDRESS, &self.certs)?.connect(ADDRESS.ip()).await.map_err(|failure| anyhow!("{failure}"))
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let _ = self.etcd.kill();
        let _ = self.etcd.wait();
    }
}

fn spawn(mut command: Command, log: &Path, processors: &Processors) -> Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(log)?);
    berth_os::process::die_with_parent(&mut command);
    let program = command.get_program().to_owned();
    processors.spawn(|| command.spawn()).with_context(|| format!("cannot start {}", program.display()))
}

/// A kube-apiserver that runs.
pub(crate) struct Apiserver {
    child: Child,
    log: PathBuf,
}

impl Apiserver {
    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Its largest resident memory so far, in MiB.
    pub(crate) fn peak(&self) -> Result<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let peak = kilobytes(&status, "VmHWM:").context("the kernel does not tell its memory")?;
        Ok(peak / f64::from(1 << 20))
    }

    /// Handshakes that came to nothing.
    pub(crate) async fn failed_handshakes(&self, admin: &mut Visit) -> Result<f64> {
        let metrics = async {
            let (mut answer, mut text) = (admin.get("/metrics").await?, Vec::new());
            while let Some(piece) = answer.next().await? {
                text.extend_from_slice(&piece);
            }
            Ok(String::from_utf8_lossy(&text).into_owned())
        };
        let metrics = metrics.await.map_err(|failure: Failure| anyhow!("no metrics of kube-apiserver: {failure}"))?;
        let ended = metrics.lines().find_map(|line| line.strip_prefix(ENDED_HANDSHAKES)?.parse().ok());
        let ended: f64 = ended.context("kube-apiserver does not count failed handshakes")?;
        Ok(ended + self.said().matches(FAILED_HANDSHAKE).count() as f64)
    }

    /// Ends it by SIGTERM, and by SIGKILL if it is there when its time is over: with open watches, it is.
    pub(crate) async fn end(mut self) -> Result<()> {
        kill(Pid::from_raw(self.child.id().try_into()?), Signal::SIGTERM)?;
        let ended = async {
            while self.child.try_wait()?.is_none() {
                sleep(PAUSE).await;
            }
            Ok(())
        };
        // What is left is killed as it is dropped.
        timeout(GRACE, ended).await.unwrap_or(Ok(()))
    }
}

impl Drop for Apiserver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A kube-apiserver, as clients know it.
#[derive(Clone)]
pub(crate) struct Real {
    visitor: Visitor,
    /// TLS handshakes that a client saw completed.
    handshakes: Arc<AtomicU64>,
}

impl Real {
    pub(crate) async fn connect(&self, from: Ipv4Addr) -> Result<Visit, Failure> {
        self.visitor.connect(from.into()).await
    }
}

impl Service for Real {
    type Open = Visit;

    async fn open(&self, from: Ipv4Addr) -> io::Result<Visit> {
        let mut open = self.connect(from).await.map_err(failed)?;
        self.handshakes.fetch_add(1, Relaxed);
        self.ask(&mut open).await?;
        Ok(open)
    }

    async fn ask(&self, open: &mut Visit) -> io::Result<()> {
        let answer = open.get(FIRST).await.map_err(failed)?;
        let status = answer.status;
        answer.rest().await.map_err(failed)?;
        match status {
            200 => Ok(()),
            status => Err(io::Error::other(format!("status {status}"))),
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is what map_err gives")]
fn failed(failure: Failure) -> io::Error {
    io::Error::other(failure.to_string())
}

/// All come at once and insist.
pub(crate) async fn storm(cli: &Cli, gate: &str, processors: &Processors, plane: &ControlPlane) -> Result<Round> {
    let apiserver = plane.apiserver(processors).await?;
    let directory = tempfile::Builder::new().prefix("berth-storm-").tempdir()?;
    let berth = plane.berth(cli, gate, directory.path())?;
    let service = plane.service()?;
    timeout(PATIENCE, service.open(NODE)).await.context("berth does not serve")??;
    let mut round = reconnect(cli, &service).await?;
    tell(&berth);
    drop(berth);
    let failed = apiserver.failed_handshakes(&mut plane.admin().await?).await?;
    drop(apiserver);
    let handshakes = service.handshakes.load(Relaxed);
    // One was there before.
    let wasted = handshakes.saturating_sub(round.answered + 1);
    round
        .figures
        .push(("handshakes that a client completed, a second", handshakes as f64 / round.lasted.as_secs_f64()));
    round.figures.push(("handshakes that failed at kube-apiserver", failed));
    round.figures.push((WASTED, wasted as f64));
    Ok(round)
}

/// What berth says of a storm is no figure, and explains some.
pub(crate) fn tell(berth: &Berth) {
    let said = berth.said();
    let warnings = || said.lines().filter(|line| line.contains("WARN"));
    for line in warnings().take(TOLD) {
        eprintln!("berth: {line}");
    }
    let more = warnings().count().saturating_sub(TOLD);
    if more > 0 {
        eprintln!("berth: {more} warnings more");
    }
}
