//! Checks that a node is ready to run a second kube-apiserver, from [`Facts`] about the node.

pub mod clients;
mod credentials;
mod facts;
mod serving;

use super::checks::*;
use super::layout::{Layout, find_uid};
use super::manifest::run_dir_of;
use super::options::{self, is_host_ip};
use super::{Case, Finding};
use berth_manifest::report::Severity;
use berth_manifest::{Manifest, split_cause_and_fix};
use berth_node::registry;
use berth_os::netdevice;
use berth_os::proc_net::{self, Entry};
use berth_shim::config::{Listen, PassMode};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

pub use clients::{Clients, UncoveredAddress};
pub use credentials::Credentials;
pub(super) use facts::{ENCRYPTION_FLAG, SIGNING_FLAG, list_addresses};
pub use facts::{
    Facts, HeldPort, LiveShim, RunningProcess, find_pass_obstacle, find_unconnected_shims,
};
pub(super) use serving::find_untrusted_certificate;

pub(super) fn examine(case: &Case<'_>, facts: &Facts) -> Vec<Finding> {
    let mut examiner = Examiner {
        facts,
        findings: Vec::new(),
    };
    examiner.check_memory();
    examiner.check_migrate_req();
    for (flag, path) in &facts.missing {
        let cause = format!(
            "{flag} names this file, which does not exist: kube-apiserver would exit at its start"
        );
        examiner.findings.push(FILE_MISSING.make_finding(
            path.clone(),
            cause,
            "put the file there, or correct the flag",
        ));
    }
    if facts.unprivileged {
        let cause = "other users' processes and files cannot be seen, so holders of ports, clients and memory may be missed";
        examiner
            .findings
            .push(NOT_CHECKED.make_finding("this node", cause, "run berth as root"));
    }
    if let Some(layout) = Layout::from_manifest(case.manifest) {
        examiner.check_run_dir(&layout);
        examiner.check_pass_obstacle(options::pass_mode(&layout.apiserver.parsed));
        if let Some(serving) = layout.serving_berth() {
            let listen = list_addresses(&layout);
            examiner.check_addresses(&listen);
            examiner.findings.extend(
                facts
                    .find_uncovered(&listen)
                    .iter()
                    .map(UncoveredAddress::make_finding),
            );
            examiner.check_port_holders(&listen, find_uid(serving.container));
            let credentials = facts.credentials.iter();
            let uid = find_uid(serving.container);
            examiner
                .findings
                .extend(credentials.flat_map(|credentials| credentials.examine(uid)));
        }
    }
    examiner.findings.extend(facts.certificate.clone());
    if let Some(what) = &facts.interrupted {
        examiner.findings.push(UPGRADE_INTERRUPTED.make_finding(
            "this node",
            what.clone(),
            "`berth upgrade` resumes the upgrade or rolls it back",
        ));
    }
    examiner.findings
}

/// Finds how a new manifest would harm clients of this node. It reports addresses that clients dial
/// and on which the shim does not listen, and a certificate that the shim's probe refuses.
/// Addresses are checked only if the manifest is for this node, as far as its listen addresses
/// tell.
pub fn find_harm_to_clients(root: &Path, manifest: &Manifest) -> Vec<Finding> {
    let listen = Layout::from_manifest(manifest)
        .map(|layout| list_addresses(&layout))
        .unwrap_or_default();
    let own = netdevice::local_addresses().unwrap_or_default();
    let clients = match listen
        .iter()
        .map(|listen| listen.addr.ip())
        .any(|ip| is_host_ip(ip) || own.contains(&ip))
    {
        true => Clients::gather(root, &facts::dialled_ports(&listen, manifest)),
        false => Clients::default(),
    };
    clients
        .find_uncovered(&listen, &own)
        .iter()
        .map(UncoveredAddress::make_finding)
        .chain(find_untrusted_certificate(root, manifest))
        .collect()
}

struct Examiner<'a> {
    facts: &'a Facts,
    findings: Vec<Finding>,
}

impl Examiner<'_> {
    fn find_setting(&self, name: &str) -> Option<&str> {
        self.facts.settings.get(name).map(String::as_str)
    }

    /// Checks that kube-apiserver can use the run directory, and that the shims with leases in it
    /// can work together.
    fn check_run_dir(&mut self, layout: &Layout<'_>) {
        let apiserver = layout.apiserver.container;
        let path = options::place_args(&layout.apiserver.parsed)
            .and_then(|place| apiserver.path_on_node(run_dir_of(place)));
        let Some(path) = path else { return };
        let uid = find_uid(apiserver);
        if let Some(error) = &self.facts.run_dir {
            let message = error.to_string();
            let (cause, fix) = match error {
                registry::Error::Owner { owner, .. } => (
                    format!(
                        "the run directory is owned by uid {owner}, and kube-apiserver is uid {uid}"
                    ),
                    format!("chown -R {uid} {path}"),
                ),
                registry::Error::Mode { mode, .. } => (
                    format!("the run directory has mode {mode:04o}, so others may write into it"),
                    format!("chmod 0700 {path}"),
                ),
                _ => {
                    let (cause, fix) = split_cause_and_fix(&message);
                    (cause.to_owned(), fix.to_owned())
                }
            };
            self.findings
                .push(RUN_DIR_OWNER.make_finding(path.clone(), cause, fix));
        }
        for what in &self.facts.unconnected {
            self.findings.push(SHIMS_UNCONNECTED.make_finding(
                path.clone(),
                format!("{what}: an upgrade loses the connections queued at the shim that stops"),
                "see the logs of both shims; both shims need one uid, one run directory, and one SELinux label for the sockets in this \
                 directory",
            ));
        }
        let own = parse_minor(berth_node::VERSION);
        for shim in &self.facts.shims {
            let (Some(own), Some(other)) = (own, parse_minor(&shim.version)) else {
                continue;
            };
            if own.0 != other.0 || own.1.abs_diff(other.1) > 1 {
                self.findings.push(BERTH_VERSION.make_finding(
                    path.clone(),
                    format!(
                        "the shim of {} is berth {}, and this program is berth {}",
                        shim.instance,
                        shim.version,
                        berth_node::VERSION
                    ),
                    "upgrade one minor version at a time",
                ));
            }
        }
    }

    /// Reports what keeps `berth exec` from supervising kube-apiserver, which `--pass` needs.
    fn check_pass_obstacle(&mut self, pass: PassMode) {
        let then = match pass {
            PassMode::Relay => return,
            PassMode::Auto => "clients are relayed",
            PassMode::Inject => "kube-apiserver is not started",
        };
        let scope = self
            .find_setting("kernel.yama.ptrace_scope")
            .map(str::trim)
            .filter(|scope| ["2", "3"].contains(scope));
        let (place, message) = match (scope, &self.facts.obstacle) {
            (Some(scope), _) => (
                "kernel.yama.ptrace_scope",
                format!(
                    "with the value {scope}, `berth exec` may not write into kube-apiserver's memory: sysctl -w \
                     kernel.yama.ptrace_scope=1 (the value 3 can be changed only by a reboot), or `berth inject` without --pass"
                ),
            ),
            (None, Some(obstacle)) => ("this node", obstacle.clone()),
            (None, None) => return,
        };
        let (cause, fix) = split_cause_and_fix(&message);
        let mut finding = PASS_OBSTACLE.make_finding(
            place,
            format!("{cause}, so with --pass {} {then}", pass.as_str()),
            fix,
        );
        if pass == PassMode::Auto {
            finding.severity = Severity::Warning;
        }
        self.findings.push(finding);
    }

    fn check_addresses(&mut self, listen: &[Listen]) {
        let Some(own) = &self.facts.addresses else {
            return;
        };
        let anywhere = self
            .find_setting("net.ipv4.ip_nonlocal_bind")
            .is_some_and(|value| value.trim() == "1");
        for Listen { addr, freebind } in listen {
            let ip = addr.ip();
            let there = match ip {
                IpAddr::V4(ip) => ip.is_loopback() || ip.is_unspecified() || anywhere,
                IpAddr::V6(ip) => ip.is_unspecified(),
            };
            if !(*freebind || there || is_host_ip(ip) || own.contains(&ip)) {
                self.findings.push(ADDRESS_MISSING.make_finding(
                    addr.to_string(),
                    "the shim is to listen on this address, and the node does not have it",
                    format!(
                        "add the address to an interface; or, for a virtual IP that is not always on this node, give --listen \
                         {addr},freebind"
                    ),
                ));
            }
        }
    }

    /// Reports listeners of other processes that keep the shim from listening on its addresses.
    fn check_port_holders(&mut self, listen: &[Listen], uid: u32) {
        for wanted in listen.iter().map(|listen| listen.addr) {
            let host_ip = is_host_ip(wanted.ip());
            for HeldPort { entry, process } in &self.facts.listeners {
                let Entry {
                    local, uid: other, ..
                } = *entry;
                let clashes = if host_ip {
                    local.port() == wanted.port() && !local.ip().is_loopback()
                } else {
                    proc_net::addresses_clash(wanted, local)
                };
                let name = process.as_ref().map(|process| process.name.as_str());
                // A shim of the same uid is a sibling, and no obstacle. A process that cannot be
                // seen may be a sibling.
                if !clashes || (other == uid && matches!(name, Some("berth") | None)) {
                    continue;
                }
                if name == Some("kube-apiserver") {
                    self.findings.push(FIRST_SWITCH.make_finding(
                        local.to_string(),
                        "kube-apiserver holds the port itself: when it stops, clients are refused until kube-apiserver is ready \
                         behind berth",
                        "kube-apiserver has to be restarted once: `berth inject --write --bridge` makes this restart without a loss, \
                         and needs Linux 5.9",
                    ));
                    continue;
                }
                let wanted = if host_ip { local } else { wanted };
                let message = proc_net::explain_in_use_from_entries(wanted, uid, &[*entry], |_| {
                    process.clone()
                });
                let message = message.replace("this process is", "kube-apiserver is");
                let (cause, fix) = if other != uid && !local.ip().is_unspecified() {
                    (
                        message.as_str(),
                        "run both processes with one uid, or stop the other process",
                    )
                } else {
                    split_cause_and_fix(&message)
                };
                self.findings
                    .push(PORT_HELD.make_finding(wanted.to_string(), cause, fix));
            }
        }
        // A single listener can be in the way of several addresses. Report the listener once.
        let mut seen = Vec::new();
        self.findings.retain(|finding| {
            let new = !seen.contains(finding);
            seen.push(finding.clone());
            new
        });
    }

    fn check_memory(&mut self) {
        let Some(available) = self.facts.available else {
            return;
        };
        // If two kube-apiservers run at present, the node has memory for two, and there is nothing
        // to check.
        let [running] = &self.facts.apiservers[..] else {
            return;
        };
        let [available, needed] = [available, running.resident].map(|bytes| bytes >> 20);
        if available < needed {
            self.findings.push(MEMORY.make_finding(
                "MemAvailable",
                format!(
                    "{available} MiB are available, and a second kube-apiserver takes as much as the running one, {needed} MiB: the \
                     kernel may kill one of the two"
                ),
                "free memory on the node, or upgrade at a quieter time; or give --ignore-errors memory, if you know that both \
                 kube-apiservers fit",
            ));
        }
    }

    fn check_migrate_req(&mut self) {
        if self
            .find_setting("net.ipv4.tcp_migrate_req")
            .is_some_and(|value| value.trim() == "1")
        {
            self.findings.push(MIGRATE_REQ.make_finding(
                "net.ipv4.tcp_migrate_req",
                "with this setting, when a listener closes, the kernel moves its queued connections to another listener; a kernel \
                 with CVE-2026-46015 does not wake the process that must accept these connections; berth hands listeners over itself, \
                 and does not need this setting",
                "sysctl -w net.ipv4.tcp_migrate_req=0",
            ));
        }
    }
}

/// Parses the major and the minor number of a version.
fn parse_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Returns the path of the run directory on the node. `None` if no volume of the node contains it.
fn run_dir_on_node(layout: &Layout<'_>) -> Option<PathBuf> {
    let place = options::place_args(&layout.apiserver.parsed)?;
    layout
        .apiserver
        .container
        .path_on_node(run_dir_of(place))
        .map(PathBuf::from)
}
