//! Gathers facts about the node: from its files, which tests have below another root, and from the
//! sockets and addresses of this network namespace.

use super::super::layout::{Layout, find_uid};
use super::super::options;
use super::{Clients, Credentials, UncoveredAddress, find_untrusted_certificate, run_dir_on_node};
use berth_cluster::yaml::YamlNode;
use berth_manifest::Manifest;
use berth_manifest::report::Finding;
use berth_node::ipc;
use berth_node::registry::lease::{self, Lease};
use berth_node::registry::{self, BerthDir, RunDir};
use berth_os::file::{decode_text, none_if_missing, read_small};
use berth_os::proc_net::{self, Entry, process_of};
use berth_os::sock_diag::list_listeners;
use berth_os::{clock, netdevice};
use berth_shim::config::{Listen, PassMode};
use berth_supervisor::self_test;
use nix::unistd::{Uid, geteuid};
use procfs::process::{Process, all_processes_with_root};
use procfs::{FromRead as _, FromReadSI as _, KernelStats, Meminfo, current_system_info};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Two flags of kube-apiserver, which name its encryption keys and its signing key. During an
/// upgrade, both instances need the same keys.
pub(in super::super) const ENCRYPTION_FLAG: &str = "encryption-provider-config";
pub(in super::super) const SIGNING_FLAG: &str = "service-account-signing-key-file";

/// Endings of the names of flags that give the path of a file. kube-apiserver reads such a file
/// when it starts.
const READ_FLAG_ENDINGS: [&str; 4] = ["file", "-config", "-client-certificate", "-client-key"];

/// Names of the kernel settings (sysctl) that doctor reads.
const KERNEL_SETTINGS: [&str; 3] = [
    "kernel.yama.ptrace_scope",
    "net.ipv4.ip_nonlocal_bind",
    "net.ipv4.tcp_migrate_req",
];

/// Facts about a node. A fact that could not be read is missing here, and no check judges it.
#[derive(Debug, Default)]
pub struct Facts {
    /// The text of the file that `--authentication-config` names.
    pub authentication: Option<String>,
    /// Reason why kube-apiserver cannot use the run directory. `None` if it can.
    pub run_dir: Option<registry::Error>,
    pub shims: Vec<LiveShim>,
    /// Pairs of shims that are not connected to each other, a sentence each; see
    /// [`find_unconnected_shims`].
    pub unconnected: Vec<String>,
    pub addresses: Option<Vec<IpAddr>>,
    /// Listeners of all processes on the ports on which the shim is to listen.
    pub listeners: Vec<HeldPort>,
    /// Clients of kube-apiserver, by the address that they dial.
    pub clients: Clients,
    /// A finding if the shim's probe would refuse kube-apiserver's certificate.
    pub certificate: Option<Finding>,
    /// The files with the shim's credentials for the cluster's API.
    pub credentials: Option<Credentials>,
    /// Flags and paths of key files that were changed after the running kube-apiserver started.
    pub newer_keys: Vec<(&'static str, String)>,
    /// Flags and paths of files that kube-apiserver reads and that do not exist.
    pub missing: Vec<(String, String)>,
    /// True if this process does not run as root.
    pub unprivileged: bool,
    pub apiservers: Vec<RunningProcess>,
    /// MemAvailable, in bytes.
    pub available: Option<u64>,
    /// Values of kernel settings (sysctl), by name.
    pub settings: BTreeMap<&'static str, String>,
    /// Reason why clients' sockets cannot be passed on this node; see [`find_pass_obstacle`].
    pub obstacle: Option<String>,
    /// Description of an upgrade of this node that was interrupted.
    pub interrupted: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveShim {
    pub instance: String,
    /// The version of berth that the shim runs.
    pub version: String,
}

impl From<Lease> for LiveShim {
    fn from(lease: Lease) -> Self {
        Self {
            instance: lease.instance.to_string(),
            version: lease.berth_version,
        }
    }
}

/// A listener on one of the shim's ports, and the process that has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldPort {
    pub entry: Entry,
    /// The process that has the listener. `None` if this process may not see it.
    pub process: Option<proc_net::NamedProcess>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningProcess {
    /// Memory that the process has in RAM, in bytes.
    pub resident: u64,
    pub started: Option<SystemTime>,
}

impl Facts {
    /// Gathers the facts about this node. The node's files are below `root`.
    pub fn gather(root: &Path, manifest: &Manifest) -> Self {
        let at = |path: &str| root.join(path.trim_start_matches('/'));
        let container = manifest.container();
        let file = manifest
            .flag("authentication-config")
            .and_then(|flag| container.path_on_node(flag.value));
        let settings = KERNEL_SETTINGS.into_iter().filter_map(|name| {
            let path = root.join("proc/sys").join(name.replace('.', "/"));
            Some((name, fs::read_to_string(path).ok()?))
        });
        let apiservers = find_apiservers(&root.join("proc"));
        let started = apiservers
            .iter()
            .filter_map(|process| process.started)
            .min();
        let newer = |flag: &'static str| {
            let path = container.path_on_node(manifest.flag(flag)?.value)?;
            let changed = fs::metadata(at(&path)).ok()?.modified().ok()?;
            (changed > started?).then_some((flag, path))
        };
        let newer_keys = [ENCRYPTION_FLAG, SIGNING_FLAG]
            .into_iter()
            .filter_map(newer)
            .collect();
        let mut facts = Self {
            newer_keys,
            missing: missing_files(root, manifest),
            unprivileged: !geteuid().is_root(),
            authentication: file.and_then(|file| read_small(&at(&file)).and_then(decode_text).ok()),
            addresses: netdevice::local_addresses().ok(),
            apiservers,
            available: Meminfo::from_file(root.join("proc/meminfo"))
                .ok()
                .and_then(|memory| memory.mem_available),
            settings: settings.collect(),
            ..Self::default()
        };
        if let Some(layout) = Layout::from_manifest(manifest) {
            facts.gather_layout_facts(&layout, manifest, root);
        }
        facts
    }

    /// Returns the addresses that clients dial and that are not among the listen addresses.
    pub(super) fn find_uncovered(&self, listen: &[Listen]) -> Vec<UncoveredAddress> {
        self.clients
            .find_uncovered(listen, self.addresses.as_deref().unwrap_or_default())
    }

    fn gather_layout_facts(&mut self, layout: &Layout<'_>, manifest: &Manifest, root: &Path) {
        if let Some(path) = run_dir_on_node(layout) {
            let path = root.join(path.strip_prefix("/").unwrap_or(&path));
            match RunDir::is_usable_by(&path, Uid::from_raw(find_uid(layout.apiserver.container))) {
                Ok(_) => {
                    self.shims = read_leases(&path)
                        .into_iter()
                        .map(|(_, lease)| LiveShim::from(lease))
                        .collect();
                }
                Err(error) => self.run_dir = Some(error),
            }
        }
        self.certificate = find_untrusted_certificate(root, manifest);
        self.credentials = Credentials::gather(root, layout);
        let listen = list_addresses(layout);
        let ports: BTreeSet<_> = listen.iter().map(|listen| listen.addr.port()).collect();
        self.clients = Clients::gather(root, &dialled_ports(&listen, manifest));
        for entry in ports
            .into_iter()
            .filter_map(|port| list_listeners(port).ok())
            .flatten()
        {
            self.listeners.push(HeldPort {
                entry,
                process: process_of(entry.inode),
            });
        }
    }
}

/// Returns the flags and paths of files that kube-apiserver reads and that the node does not have.
fn missing_files(root: &Path, manifest: &Manifest) -> Vec<(String, String)> {
    let is_missing = |path: &String| {
        matches!(
            none_if_missing(fs::metadata(root.join(path.trim_start_matches('/')))),
            Ok(None)
        )
    };
    let flag = |argument: &YamlNode| {
        let (flag, path) = argument.text()?.split_once('=')?;
        let is_read = READ_FLAG_ENDINGS.iter().any(|end| flag.ends_with(end));
        let path = manifest
            .container()
            .path_on_node(path)
            .filter(|_| is_read)
            .filter(is_missing)?;
        Some((flag.to_owned(), path))
    };
    manifest.arguments().into_iter().filter_map(flag).collect()
}

/// Runs the self-test of `berth exec --pass`, and returns its failure. Makes no test if the
/// manifest has no `--pass`.
///
/// The calling process must have one thread and no child.
pub fn find_pass_obstacle(manifest: &Manifest) -> Option<String> {
    let layout = Layout::from_manifest(manifest)?;
    let passes = options::pass_mode(&layout.apiserver.parsed) != PassMode::Relay;
    passes
        .then(self_test)?
        .err()
        .map(|obstacle| obstacle.to_string())
}

/// Asks each live shim with a lease in the node's run directory to which siblings it has no
/// connection. The node's files are below `root`.
pub async fn find_unconnected_shims(root: &Path, manifest: &Manifest) -> Vec<String> {
    let path = Layout::from_manifest(manifest).and_then(|layout| run_dir_on_node(&layout));
    let Some(path) = path.map(|path| root.join(path.strip_prefix("/").unwrap_or(&path))) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for (berth, lease) in read_leases(&path) {
        let Ok(socket) = berth.socket_path(&lease.instance) else {
            continue;
        };
        // Skip a shim that does not answer: its siblings report that they have no connection to it.
        let Ok(status) = ipc::request_status(&socket, ipc::PATIENCE).await else {
            continue;
        };
        let pair = |other| {
            format!(
                "the shims of {} and {other} have no connection",
                lease.instance
            )
        };
        found.extend(status.unconnected.iter().map(pair));
    }
    found
}

/// Returns the leases of live shims in a run directory, each with its berth.
fn read_leases(path: &Path) -> Vec<(BerthDir, Lease)> {
    let (Ok(boot), Ok(now)) = (clock::boot_id(), clock::read_boottime()) else {
        return Vec::new();
    };
    let berths = RunDir::find(path)
        .ok()
        .flatten()
        .and_then(|run_dir| run_dir.berths().ok())
        .unwrap_or_default();
    let of = |berth: BerthDir| {
        let found = lease::list(&berth)
            .map(|listing| listing.found)
            .unwrap_or_default();
        found.into_iter().map(move |lease| (berth.clone(), lease))
    };
    berths
        .into_iter()
        .flat_map(of)
        .filter(|(_, lease)| lease.is_live(&boot, now))
        .collect()
}

/// Returns the addresses on which the manifest's shim listens.
pub(in super::super) fn list_addresses(layout: &Layout<'_>) -> Vec<Listen> {
    layout
        .serving_berth()
        .map(|serving| options::listen_addresses(&serving.parsed))
        .unwrap_or_default()
}

/// Returns the ports at which clients reach kube-apiserver: those of the shim, and the one on which
/// kube-apiserver listened without berth.
pub(super) fn dialled_ports(listen: &[Listen], manifest: &Manifest) -> Vec<u16> {
    let own = manifest.secure_port().ok().filter(|_| !listen.is_empty());
    let ports: BTreeSet<_> = listen
        .iter()
        .map(|listen| listen.addr.port())
        .chain(own)
        .collect();
    ports.into_iter().collect()
}

/// Returns the processes with the name kube-apiserver that this process can see.
fn find_apiservers(proc: &Path) -> Vec<RunningProcess> {
    let system = current_system_info();
    let ticks = u32::try_from(system.ticks_per_second()).unwrap_or(u32::MAX);
    let stats = KernelStats::from_file(proc.join("stat"), system).ok();
    let booted = stats
        .and_then(|stats| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(stats.btime)));
    let read = |process: Process| {
        let stat = process
            .stat()
            .ok()
            .filter(|stat| stat.comm == "kube-apiserver")?;
        Some(RunningProcess {
            resident: process.status().ok()?.vmrss?.checked_mul(1024)?,
            started: booted
                .and_then(|booted| booted.checked_add(Duration::from_secs(stat.starttime) / ticks)),
        })
    };
    all_processes_with_root(proc)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(read)
        .collect()
}
