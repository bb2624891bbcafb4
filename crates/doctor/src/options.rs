//! berth's options in a manifest, and the errors that berth would report about them.

use super::layout::{Berth, HOST_IP, Layout, ParsedOptions, uid};
use berth_cluster::Client;
use berth_cluster::yaml::parse;
use berth_manifest::Manifest;
use berth_options::PodCommand;
use berth_options::check;
use berth_options::place::PlaceArgs;
use berth_options::probe::{DEFAULT_NAME, ProbeArgs};
use berth_options::shim::ShimArgs;
use berth_os::file::read_small;
use berth_shim::config::{Listen, PassMode};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// All that berth would refuse, but for files, which are another machine's.
pub(super) fn mistakes(parsed: &ParsedOptions) -> Vec<String> {
    let command = match parsed {
        ParsedOptions::Options(command) => command,
        ParsedOptions::Wrong(why) => return vec![why.clone()],
        ParsedOptions::Unseen => return Vec::new(),
    };
    // What `--cluster` names is checked apart.
    let checked = match &**command {
        PodCommand::Serve(serve) => {
            let mut serve = serve.clone();
            serve.shim.cluster.cluster = None;
            check::serve(&serve).err()
        }
        PodCommand::Run(run) => {
            let mut run = run.clone();
            run.shim.cluster.cluster = None;
            check::run(&run).err()
        }
        PodCommand::Exec(exec) => check::exec(exec).err(),
        _ => None,
    };
    let all = checked.into_iter().flat_map(|mistakes| mistakes.0);
    all.map(|text| text.replace(HOST_IP, "HOST_IP")).collect()
}

/// Which berth, which instance and where.
pub(super) fn place(parsed: &ParsedOptions) -> Option<&PlaceArgs> {
    match parsed.command()? {
        PodCommand::Serve(serve) => Some(&serve.place),
        PodCommand::Run(run) => Some(&run.place),
        PodCommand::Exec(exec) => Some(&exec.place),
        _ => None,
    }
}

fn shim(parsed: &ParsedOptions) -> Option<&ShimArgs> {
    match parsed.command()? {
        PodCommand::Serve(serve) => Some(&serve.shim),
        PodCommand::Run(run) => Some(&run.shim),
        _ => None,
    }
}

/// How kube-apiserver gets its clients; as without the option, where the options cannot be seen.
pub(super) fn pass(parsed: &ParsedOptions) -> PassMode {
    match parsed.command() {
        Some(PodCommand::Exec(exec)) => exec.pass,
        _ => shim(parsed).map_or(PassMode::Relay, |shim| shim.pass),
    }
}

/// The first address at which a shim listens, which names the berth.
pub(super) fn berth(parsed: &ParsedOptions) -> Option<SocketAddr> {
    check::listen(place(parsed)?.listen.first()?)
        .ok()
        .map(|first| first.addr)
}

/// Where a shim listens, as far as that is understood.
pub(super) fn listen(parsed: &ParsedOptions) -> Vec<Listen> {
    let listen = place(parsed)
        .map(|place| &place.listen[..])
        .unwrap_or_default();
    listen
        .iter()
        .filter_map(|text| check::listen(text).ok())
        .collect()
}

/// How the apiserver is probed.
pub(super) fn probe(parsed: &ParsedOptions) -> Option<&ProbeArgs> {
    shim(parsed).map(|shim| &shim.probe)
}

/// The shim of a manifest, or the one that inject would give it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShimOf {
    /// The berth. None: only the kubelet knows the address.
    pub berth: Option<SocketAddr>,
    /// Its uid, which is kube-apiserver's.
    pub uid: u32,
    /// What its probe wants the apiserver's certificate to carry.
    pub server_name: String,
    /// The file of the node with what its probe trusts.
    pub ca: Option<PathBuf>,
}

impl ShimOf {
    /// A client of the kube-apiserver itself, which trusts it as the shim does; with an administrator's credentials.
    #[must_use]
    pub fn client(&self, client: &Client) -> Client {
        client
            .clone()
            .trusting(&self.server_name, &self.trusted())
            .unwrap_or_else(|_| client.clone())
    }

    /// What its probe trusts, in PEM form; empty where the file cannot be read.
    #[must_use]
    pub fn trusted(&self) -> Vec<u8> {
        self.ca
            .as_ref()
            .and_then(|ca| read_small(ca).ok())
            .unwrap_or_default()
    }
}

pub fn shim_of(manifest: &Manifest) -> ShimOf {
    let uid = uid(manifest.container());
    let Some(layout) = Layout::of(manifest) else {
        let ip = manifest.bound().or_else(|| manifest.advertised());
        let berth = ip.zip(manifest.secure_port().ok()).map(SocketAddr::from);
        return ShimOf {
            berth,
            uid,
            server_name: DEFAULT_NAME.to_owned(),
            ca: None,
        };
    };
    let Berth {
        container, parsed, ..
    } = layout.serving().unwrap_or(&layout.apiserver);
    let berth = berth(parsed).filter(|berth| !is_host_ip(berth.ip()));
    let probe = probe(parsed);
    let server_name = probe
        .map_or(DEFAULT_NAME, |probe| &probe.probe_server_name)
        .to_owned();
    let ca = probe
        .and_then(|probe| container.on_node(probe.probe_ca.as_ref()?.to_str()?))
        .map(PathBuf::from);
    ShimOf {
        berth,
        uid,
        server_name,
        ca,
    }
}

/// Whether a shim with these addresses gets what is sent to this one.
pub(super) fn covered(address: SocketAddr, listen: &[Listen]) -> bool {
    listen
        .iter()
        .map(|listen| listen.addr)
        .filter(|own| own.port() == address.port())
        .any(|own| {
            let same_family = own.is_ipv4() == address.is_ipv4();
            own.ip() == address.ip()
            || (own.ip().is_unspecified() && same_family)
            // Which one that is only the kubelet knows, but no loopback address.
            || (is_host_ip(own.ip()) && same_family && !address.ip().is_loopback())
        })
}

/// Whether an address stands for one that the kubelet alone knows.
pub(super) fn is_host_ip(ip: IpAddr) -> bool {
    HOST_IP.parse() == Ok(ip)
}

/// The value of `--cluster` for a pod's service account.
pub(super) const IN_CLUSTER: &str = "in-cluster";

/// The credentials for the cluster's API, if it is used, and the node's name there.
pub(super) fn cluster(parsed: &ParsedOptions) -> Option<(&str, Option<&str>)> {
    let args = &shim(parsed)?.cluster;
    Some((args.cluster.as_deref()?, args.node_name.as_deref()))
}

/// How long connections may take to end.
pub(super) fn drain(parsed: &ParsedOptions) -> Option<Duration> {
    humantime::parse_duration(&shim(parsed)?.drain_timeout).ok()
}

/// Whether a file of `--authentication-config` allows anonymous requests to the probe's path.
///
/// # Errors
/// It is no such file.
pub(super) fn lets_probes_in(text: &str) -> Result<bool, String> {
    let documents = parse(text).map_err(|problem| problem.to_string())?;
    let root = documents
        .iter()
        .find(|root| root.text_of("kind") == Some("AuthenticationConfiguration"));
    let root = root.ok_or("it holds no AuthenticationConfiguration")?;
    // Without the field, --anonymous-auth decides, which is judged apart.
    let Some(anonymous) = root.get("anonymous") else {
        return Ok(true);
    };
    if !anonymous.is_true("enabled") {
        return Ok(false);
    }
    let conditions = anonymous.list("conditions");
    let allowed = |path: &str| {
        conditions
            .iter()
            .any(|rule| rule.text_of("path") == Some(path))
    };
    Ok(conditions.is_empty() || (allowed("/readyz") && allowed("/livez")))
}
