//! berth's options in a manifest, and the errors that berth would report about them.

use super::layout::{Berth, HOST_IP, Layout, ParsedOptions, uid_of};
use berth_cluster::Client;
use berth_cluster::yaml::parse_documents;
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

/// Lists the mistakes that berth would report, except those about files: the files may be on
/// another machine.
pub(super) fn list_mistakes(parsed: &ParsedOptions) -> Vec<String> {
    let command = match parsed {
        ParsedOptions::Options(command) => command,
        ParsedOptions::Wrong(why) => return vec![why.clone()],
        ParsedOptions::Unseen => return Vec::new(),
    };
    // The kubeconfig of `--cluster` is checked separately.
    let checked = match &**command {
        PodCommand::Serve(serve) => {
            let mut serve = serve.clone();
            serve.shim.cluster.cluster = None;
            check::check_serve(&serve).err()
        }
        PodCommand::Run(run) => {
            let mut run = run.clone();
            run.shim.cluster.cluster = None;
            check::check_run(&run).err()
        }
        PodCommand::Exec(exec) => check::check_exec(exec).err(),
        _ => None,
    };
    let all = checked.into_iter().flat_map(|mistakes| mistakes.0);
    all.map(|text| text.replace(HOST_IP, "HOST_IP")).collect()
}

/// The options that name the berth, the instance and the run directory.
pub(super) fn place_args(parsed: &ParsedOptions) -> Option<&PlaceArgs> {
    match parsed.command()? {
        PodCommand::Serve(serve) => Some(&serve.place),
        PodCommand::Run(run) => Some(&run.place),
        PodCommand::Exec(exec) => Some(&exec.place),
        _ => None,
    }
}

fn shim_args(parsed: &ParsedOptions) -> Option<&ShimArgs> {
    match parsed.command()? {
        PodCommand::Serve(serve) => Some(&serve.shim),
        PodCommand::Run(run) => Some(&run.shim),
        _ => None,
    }
}

/// How kube-apiserver gets its clients; the default of `--pass` if the options cannot be seen.
pub(super) fn pass_mode(parsed: &ParsedOptions) -> PassMode {
    match parsed.command() {
        Some(PodCommand::Exec(exec)) => exec.pass,
        _ => shim_args(parsed).map_or(PassMode::Relay, |shim| shim.pass),
    }
}

/// The first address at which a shim listens, which names the berth.
pub(super) fn berth_address(parsed: &ParsedOptions) -> Option<SocketAddr> {
    check::parse_listen(place_args(parsed)?.listen.first()?)
        .ok()
        .map(|first| first.addr)
}

/// The addresses at which a shim listens, except addresses that do not parse.
pub(super) fn listen_addresses(parsed: &ParsedOptions) -> Vec<Listen> {
    let listen = place_args(parsed)
        .map(|place| &place.listen[..])
        .unwrap_or_default();
    listen
        .iter()
        .filter_map(|text| check::parse_listen(text).ok())
        .collect()
}

/// The options of the kube-apiserver probe.
pub(super) fn probe_args(parsed: &ParsedOptions) -> Option<&ProbeArgs> {
    shim_args(parsed).map(|shim| &shim.probe)
}

/// The shim of a manifest, or the shim that inject would add.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShimOf {
    /// The berth. `None` if only the kubelet knows the address.
    pub berth: Option<SocketAddr>,
    /// The uid of the shim, which is kube-apiserver's uid.
    pub uid: u32,
    /// The name that the probe expects in the apiserver's certificate.
    pub server_name: String,
    /// The file on the node with the CA certificates that the probe trusts.
    pub ca: Option<PathBuf>,
}

impl ShimOf {
    /// Returns a client with an administrator's credentials that trusts the kube-apiserver's
    /// certificate as the shim does.
    #[must_use]
    pub fn client(&self, client: &Client) -> Client {
        client
            .clone()
            .trusting(&self.server_name, &self.trusted())
            .unwrap_or_else(|_| client.clone())
    }

    /// The CA certificates that the probe trusts, in PEM form; empty if the file cannot be read.
    #[must_use]
    pub fn trusted(&self) -> Vec<u8> {
        self.ca
            .as_ref()
            .and_then(|ca| read_small(ca).ok())
            .unwrap_or_default()
    }
}

pub fn shim_of(manifest: &Manifest) -> ShimOf {
    let uid = uid_of(manifest.container());
    let Some(layout) = Layout::of(manifest) else {
        let ip = manifest
            .bind_address()
            .or_else(|| manifest.advertise_address());
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
    let berth = berth_address(parsed).filter(|berth| !is_host_ip(berth.ip()));
    let probe = probe_args(parsed);
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

/// True if a shim with these listen addresses accepts connections to `address`.
pub(super) fn is_covered(address: SocketAddr, listen: &[Listen]) -> bool {
    listen
        .iter()
        .map(|listen| listen.addr)
        .filter(|own| own.port() == address.port())
        .any(|own| {
            let same_family = own.is_ipv4() == address.is_ipv4();
            own.ip() == address.ip()
            || (own.ip().is_unspecified() && same_family)
            // Only the kubelet knows the host IP, but the host IP is never a loopback address.
            || (is_host_ip(own.ip()) && same_family && !address.ip().is_loopback())
        })
}

/// True if the address is the placeholder for an address that only the kubelet knows.
pub(super) fn is_host_ip(ip: IpAddr) -> bool {
    HOST_IP.parse() == Ok(ip)
}

/// The value of `--cluster` for a pod's service account.
pub(super) const IN_CLUSTER: &str = "in-cluster";

/// The value of `--cluster` and the node's name in the cluster. `None` without `--cluster`.
pub(super) fn cluster_args(parsed: &ParsedOptions) -> Option<(&str, Option<&str>)> {
    let args = &shim_args(parsed)?.cluster;
    Some((args.cluster.as_deref()?, args.node_name.as_deref()))
}

/// How long connections may take to end.
pub(super) fn drain_timeout(parsed: &ParsedOptions) -> Option<Duration> {
    humantime::parse_duration(&shim_args(parsed)?.drain_timeout).ok()
}

/// Checks that a file of `--authentication-config` allows anonymous requests to the probed paths.
///
/// # Errors
/// The file is no AuthenticationConfiguration.
pub(super) fn allows_anonymous_probes(text: &str) -> Result<bool, String> {
    let documents = parse_documents(text).map_err(|problem| problem.to_string())?;
    let root = documents
        .iter()
        .find(|root| root.text_of("kind") == Some("AuthenticationConfiguration"));
    let root = root.ok_or("it holds no AuthenticationConfiguration")?;
    // Without the field, --anonymous-auth decides, and is checked separately.
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
