//! Reads berth's options in a manifest, and finds the errors that berth would report about them.

use super::layout::{BerthContainer, HOST_IP, Layout, ParsedOptions, find_uid};
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

/// Lists the mistakes in berth's options, as berth would report them. Leaves out mistakes about
/// files, which may be on another machine.
pub(super) fn list_mistakes(parsed: &ParsedOptions) -> Vec<String> {
    let command = match parsed {
        ParsedOptions::Options(command) => command,
        ParsedOptions::Wrong(why) => return vec![why.clone()],
        ParsedOptions::Unseen => return Vec::new(),
    };
    // Leave out `--cluster`: another check reads that option's kubeconfig.
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

/// Returns the options for the berth, the instance and the run directory.
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

/// Returns how kube-apiserver gets its clients. If the options cannot be seen, returns the default
/// of `--pass`.
pub(super) fn pass_mode(parsed: &ParsedOptions) -> PassMode {
    match parsed.command() {
        Some(PodCommand::Exec(exec)) => exec.pass,
        _ => shim_args(parsed).map_or(PassMode::Relay, |shim| shim.pass),
    }
}

/// Returns the first address on which a shim listens. This address names the berth.
pub(super) fn berth_address(parsed: &ParsedOptions) -> Option<SocketAddr> {
    check::parse_listen(place_args(parsed)?.listen.first()?)
        .ok()
        .map(|first| first.addr)
}

/// Returns the addresses on which a shim listens. Leaves out addresses that cannot be parsed.
pub(super) fn listen_addresses(parsed: &ParsedOptions) -> Vec<Listen> {
    let listen = place_args(parsed)
        .map(|place| &place.listen[..])
        .unwrap_or_default();
    listen
        .iter()
        .filter_map(|text| check::parse_listen(text).ok())
        .collect()
}

/// Returns the options for the shim's probe of kube-apiserver.
pub(super) fn probe_args(parsed: &ParsedOptions) -> Option<&ProbeArgs> {
    shim_args(parsed).map(|shim| &shim.probe)
}

/// Facts about the shim of a manifest, or about the shim that `berth inject` would add. Other
/// commands use them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShimOf {
    /// The address that names the berth. `None` if only the kubelet knows the address.
    pub berth: Option<SocketAddr>,
    /// The uid with which the shim runs; kube-apiserver has the same.
    pub uid: u32,
    /// The name that the shim's probe expects in kube-apiserver's certificate.
    pub server_name: String,
    /// Path on the node of the file with the CAs that the shim's probe trusts.
    pub ca: Option<PathBuf>,
}

impl ShimOf {
    /// Returns a client that has an administrator's credentials, and trusts kube-apiserver's
    /// certificate as the shim does.
    #[must_use]
    pub fn trusting_client(&self, client: &Client) -> Client {
        client
            .clone()
            .with_trust(&self.server_name, &self.trusted_cas())
            .unwrap_or_else(|_| client.clone())
    }

    /// Returns the CA certificates that the shim's probe trusts, in PEM form. The text is empty if
    /// the CA file cannot be read.
    #[must_use]
    pub fn trusted_cas(&self) -> Vec<u8> {
        self.ca
            .as_ref()
            .and_then(|ca| read_small(ca).ok())
            .unwrap_or_default()
    }
}

pub fn find_shim(manifest: &Manifest) -> ShimOf {
    let uid = find_uid(manifest.container());
    let Some(layout) = Layout::from_manifest(manifest) else {
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
    let BerthContainer {
        container, parsed, ..
    } = layout.serving_berth().unwrap_or(&layout.apiserver);
    let berth = berth_address(parsed).filter(|berth| !is_host_ip(berth.ip()));
    let probe = probe_args(parsed);
    let server_name = probe
        .map_or(DEFAULT_NAME, |probe| &probe.probe_server_name)
        .to_owned();
    let ca = probe
        .and_then(|probe| container.path_on_node(probe.probe_ca.as_ref()?.to_str()?))
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
            // The address that only the kubelet knows stands for any address, but it is never a
            // loopback address.
            || (is_host_ip(own.ip()) && same_family && !address.ip().is_loopback())
        })
}

/// True if the address is [`HOST_IP`], which stands for an address that only the kubelet knows.
pub(super) fn is_host_ip(ip: IpAddr) -> bool {
    HOST_IP.parse() == Ok(ip)
}

/// The value of `--cluster` that means the service account of the pod.
pub(super) const IN_CLUSTER: &str = "in-cluster";

/// Returns the value of `--cluster`, and the node's name in the cluster. `None` if the shim has no
/// `--cluster`.
pub(super) fn cluster_args(parsed: &ParsedOptions) -> Option<(&str, Option<&str>)> {
    let args = &shim_args(parsed)?.cluster;
    Some((args.cluster.as_deref()?, args.node_name.as_deref()))
}

/// Returns how long connections may continue after SIGTERM (`--drain-timeout`).
pub(super) fn drain_timeout(parsed: &ParsedOptions) -> Option<Duration> {
    humantime::parse_duration(&shim_args(parsed)?.drain_timeout).ok()
}

/// True if the file of `--authentication-config` allows anonymous requests to the paths that are
/// probed.
///
/// # Errors
/// The file is no AuthenticationConfiguration.
pub(super) fn allows_anonymous_probes(text: &str) -> Result<bool, String> {
    let documents = parse_documents(text).map_err(|problem| problem.to_string())?;
    let root = documents
        .iter()
        .find(|root| root.get_text("kind") == Some("AuthenticationConfiguration"));
    let root = root.ok_or("the file holds no AuthenticationConfiguration")?;
    // If the file has no such field, --anonymous-auth decides, which another check reads.
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
            .any(|rule| rule.get_text("path") == Some(path))
    };
    Ok(conditions.is_empty() || (allowed("/readyz") && allowed("/livez")))
}
