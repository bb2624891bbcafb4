//! Other conditions on the node that prevent a bridge, or that the operator should know.

use berth_doctor::node;
use berth_manifest::report::Report;
use berth_os::bpf::{self, Attached, Purpose};
use berth_upgrade::state;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

/// The error for a bridge in another directory.
const ELSEWHERE: &str = "another bridge is on, in another --state-dir: end that one";

/// Name of the socket that a bridge holds, in this network namespace alone.
const ALONE: &str = "berth-bridge";

/// Least that is to be free for logs, in bytes: kube-apiserver writes some 10 MB in an hour at its default verbosity, more where it
/// audits.
const LOGS: u64 = 64 << 20;

/// Reports programs that steer in this network namespace already: a bridge's program is attached before them.
pub(super) fn steering(report: &mut Report) {
    for other in attached() {
        if is_bridges(&other) {
            report.error(format!("{other} steers here, so {ELSEWHERE}"));
        } else {
            report.info(format!("{other} steers here already: while the bridge is on, the bridge's goes before"));
        }
    }
}

/// Whether another directory's bridge is on.
pub fn elsewhere() -> Option<&'static str> {
    attached().iter().any(is_bridges).then_some(ELSEWHERE)
}

/// Takes this network namespace for a bridge until what is returned is dropped: two that begin at once do not see each other's program
/// yet. The kernel frees the name, which a namespace has once, when the process ends.
///
/// # Errors
/// Another has it.
pub fn alone() -> Result<UnixDatagram, String> {
    let name = SocketAddr::from_abstract_name(ALONE).and_then(|name| UnixDatagram::bind_addr(&name));
    name.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => format!("{ELSEWHERE} (`ss -xp | grep @{ALONE}` shows its process)"),
        _ => format!("cannot bind the socket @{ALONE}: {error}"),
    })
}

/// Without the right to list programs, the steering's own test reports that.
fn attached() -> Vec<Attached> {
    let own = File::open("/proc/thread-self/ns/net");
    own.ok().and_then(|own| bpf::attached(own.as_fd()).ok()).unwrap_or_default()
}

fn is_bridges(program: &Attached) -> bool {
    program.known.as_ref().is_some_and(|(name, _)| name == Purpose::Bridge.name())
}

/// Checks that there is space for the logs of the bridge and its instance.
pub(super) fn logs(directory: &Path, report: &mut Report) {
    let Some(there) = directory.ancestors().find(|path| path.is_dir()) else { return };
    let Some(free) = report.ok(&format!("{}: ", there.display()), rustix::fs::statvfs(there)) else { return };
    let free = free.f_bavail * free.f_frsize;
    if free < LOGS {
        report.error(format!(
            "{} has {} MiB free, and logs are to go there: free {}, or give another directory with --state-dir",
            there.display(),
            free >> 20,
            LOGS >> 20
        ));
    }
}

/// Reports clients that dial localhost, where that is not covered.
pub(super) fn clients(port: u16, report: &mut Report) {
    let all = node::Clients::gather(Path::new("/"), &[port]).uncovered(&[], &[]);
    for client in all.into_iter().filter(|client| client.address.ip().is_loopback()) {
        report.info(format!(
            "{} reaches kube-apiserver at {}: let it dial an address of the \
             node instead; a virtual IP whose holder (kube-vip, keepalived) asks there may move or vanish meanwhile",
            client.by, client.address
        ));
    }
}

/// Reports an upgrade that is under way.
pub(super) fn upgrade(report: &mut Report) {
    let directory = Path::new(state::DIRECTORY);
    if let Some(upgrade) = state::interrupted(directory) {
        report.error(format!("{upgrade}: bring it to its end with `berth upgrade` first"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_need_room() {
        let mut report = Report::default();
        logs(Path::new("/proc/nonexistent"), &mut report);
        let errors = report.errors();
        assert!(errors.len() == 1 && errors[0].contains("/proc has 0 MiB free"), "{errors:?}");
    }
}
