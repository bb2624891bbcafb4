//! The node's etcd, checks that a temporary etcd is possible, and the temporary etcd's arguments.

use super::database::Database;
use super::machine::{self, Opened};
use super::probe;
use super::relay::Members;
use super::rescue::PAGE;
use super::revisions::Revisions;
use crate::cgroup;
use crate::etcd::members::OWN_HINT;
use crate::etcd::{Alone, servers};
use crate::localhost::ETCD;
use crate::pod::{RunningPod, runtime};
use crate::report::Report;
use berth_exec::{address, args};
use berth_manifest::command::split_strings;
use berth_os::namespaces::is_shared_with;
use berth_os::proc_net::{self, NamedProcess};
use berth_os::process::{HeldProcess, ProcessAttributes};
use berth_os::{sock_diag, socket};
use rustix::thread::CapabilitySet;
use rustls::ClientConfig;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV4, TcpListener};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Manifest of etcd's static pod, next to kube-apiserver's.
const MANIFEST: &str = "etcd.yaml";

/// Minor versions that wait for the lock before they read or write any other data, as read in their
/// source and tested.
const VERSIONS: [&str; 2] = ["3.5.", "3.6."];

/// Flags that rule out a temporary etcd: a second process with such a flag would be a different
/// etcd, or would listen on the same port.
const OTHERS: [&str; 4] = [
    "--config-file",
    "--wal-dir",
    "--force-new-cluster",
    "--listen-client-http-urls",
];

/// Flags that make etcd defragment its database at the start: 3.5 knows the second flag, 3.6 both.
/// By default etcd does not defragment.
const DEFRAGMENTS: [&str; 2] = [
    "--bootstrap-defrag-threshold-megabytes",
    "--experimental-bootstrap-defrag-threshold-megabytes",
];

/// Flag for the number of log entries between two raft snapshots; etcd's default for that number;
/// and the number of entries that berth adds for the temporary etcd. With the larger number, no
/// snapshot covers the temporary etcd's first entries, which can therefore be read from the log.
const SNAPSHOT_COUNT: &str = "--snapshot-count";
const SNAPSHOT_COUNT_BY_DEFAULT: u64 = 100_000;
const MORE_ENTRIES: u64 = 5_000;

/// The consequence of leaving an etcd alone.
const ALONE: &str = "the bridge leaves this etcd alone, and requests that need etcd wait or time out while COMMAND restarts etcd";

/// An etcd that gets a temporary etcd.
#[derive(Debug)]
pub struct Plan {
    /// URL of the relay, for the temporary kube-apiserver.
    pub server: OsString,
    pub members: Members,
    /// The database's place on the node.
    pub database: Database,
    /// The data directory as etcd's arguments name it.
    pub data: PathBuf,
    pub argv: Vec<OsString>,
    pub process: HeldProcess,
    pub like: ProcessAttributes,
    pub pod: Option<RunningPod>,
    /// TLS configuration with kube-apiserver's client certificate, but without a check of etcd's
    /// certificate.
    pub tls: Arc<ClientConfig>,
    /// Listener of the relay.
    pub relay: TcpListener,
    pub revisions: Revisions,
}

impl Plan {
    /// A plan for an etcd with a single member that a kube-apiserver uses. `None` with a report if
    /// etcd is given by a name, or a temporary etcd is not possible.
    pub async fn find(
        command: &[OsString],
        Alone {
            gateway,
            urls,
            version,
        }: &Alone,
        manifest: Option<&Path>,
        report: &mut Report,
    ) -> Option<Self> {
        let found = find_etcd_address(urls, *urls == servers::main_servers(command))
            .and_then(|own| Ok((own, find_process_at(own)?)));
        let (own, NamedProcess { pid, name }) = match found {
            Ok(found) => found,
            Err(why) => {
                report.add_note(format!("etcd at {}: {why}: {ALONE}", urls.join(",")));
                return None;
            }
        };
        let what = format!("etcd (process {pid}, which listens on {own}): ");
        if name != ETCD {
            report.add_note(format!("{what}it is {name}: {ALONE}"));
            return None;
        }
        let process = report.value_or_add_error(&what, HeldProcess::of(pid))?;
        let like = report.value_or_add_error(&what, ProcessAttributes::of(pid))?;
        let read =
            |what: &str| fs::read(format!("/proc/{pid}/{what}")).map(|bytes| split_strings(&bytes));
        let (command_line, environment) = (
            report.value_or_add_error(&what, read("cmdline"))?,
            report.value_or_add_error(&what, read("environ"))?,
        );
        let fix = |why: &str| format!("{what}{why}: {OWN_HINT}");
        let is_in_container = || {
            fs::read_to_string(format!("/proc/{pid}/cgroup"))
                .is_ok_and(|all| runtime::parse_container_id(&all).is_some())
        };
        let pod = match (is_shared_with(pid, "mnt"), manifest) {
            (true, _) => None,
            (false, Some(manifest)) if is_in_container() => Some(RunningPod::find(
                pid,
                &manifest.with_file_name(MANIFEST),
                report,
            )?),
            (false, _) => {
                report.add_error(fix(
                    "it has its own mount namespace (a systemd unit with an option such as PrivateTmp or ProtectSystem, or a container \
                     while kube-apiserver runs in no pod), so its data and certificates may differ from the node's files",
                ));
                return None;
            }
        };
        let data = report.value_or_add_error(
            "",
            find_data_directory(&command_line, &environment).map_err(|why| fix(&why)),
        )?;
        let on_node = pod
            .as_ref()
            .map_or(Some(data.clone()), |pod| pod.path_on_node(&data));
        let mut database = Database::from_directory(&report.value_or_add_error(
            "",
            on_node.ok_or_else(|| fix("its data is in no directory of the node")),
        )?);
        if fs::symlink_metadata(database.path()).is_ok_and(|file| file.is_symlink()) {
            report.add_error(fix(
                "its database is a symbolic link, and a mount on the file does not keep an etcd from replacing the link",
            ));
            return None;
        }
        let look = report.value_or_add_error(
            "",
            database
                .observe_database()
                .map_err(|error| fix(&format!("its database: {error}"))),
        )?;
        let locked = match (look.lock_holder(), database.file_opened_by(pid).0) {
            (Some(holder), _) if holder == pid => Ok(()),
            (_, Opened::Other) => {
                report.add_error(format!(
                    "{what}it serves from a database file that was deleted or renamed: do not restart this etcd before you have read {PAGE}"
                ));
                return None;
            }
            (Some(other), _) => Err(format!("process {other} has the lock on its database")),
            (None, _) => Err("its file system does not support file locks (is it NFS?)".to_owned()),
        };
        report.value_or_add_error("", locked.map_err(|why| fix(&why)))?;
        if !may_mount() {
            report.add_error(fix("a temporary etcd needs CAP_SYS_ADMIN, for a mount that keeps the database in place"));
            return None;
        }
        report.add_note(format!(
            "{what}requests that need this etcd wait twice, for about {} s each time: the database has {} MiB",
            machine::expected_pause(look.size).as_secs(),
            look.size >> 20
        ));
        let tls = report
            .value_or_add_error("", gateway.build_tls_config(false).map_err(|why| fix(&why)))?;
        let source = report.value_or_add_error(&what, address::random_address())?;
        // An etcd that the probes can never reach would always count as stopping, so one handshake
        // is tried before anything depends on the probes.
        let answered = probe::probe_once(source.into(), own.into(), tls.clone()).await;
        report.value_or_add_error(
            "",
            answered.map_err(|error| {
                fix(&format!(
                    "it does not answer a TLS handshake from {source}: {error}"
                ))
            }),
        )?;
        if !VERSIONS.iter().any(|known| version.starts_with(known)) {
            report.add_error(fix(&format!(
                "version {version} is not supported: berth knows the locking of {}x only",
                VERSIONS.join("x, ")
            )));
            return None;
        }
        if acknowledges_unlogged_writes(version) {
            report.add_error(fix(&format!(
                "version {version} may lose acknowledged writes when etcd is killed, and a bridge may have to kill etcd (fixed in 3.5.5)"
            )));
            return None;
        }
        let (temporary, argv) =
            report.value_or_add_error(&what, temporary_arguments(command_line))?;
        let relay = report.value_or_add_error(
            &what,
            TcpListener::bind((*own.ip(), 0)).and_then(|relay| {
                relay.set_nonblocking(true)?;
                socket::mark_listener(relay.as_fd())?;
                Ok(relay)
            }),
        )?;
        let members = Members {
            own,
            temporary,
            source,
        };
        let server = format!(
            "https://{}",
            report.value_or_add_error(&what, relay.local_addr())?
        )
        .into();
        let url = |at: SocketAddrV4| format!("https://{at}");
        let gateway = gateway.with_server_name(&own.ip().to_string());
        let revisions = Revisions {
            gateway,
            own: url(own),
            temporary: url(temporary),
        };
        Some(Self {
            server,
            members,
            database,
            data,
            argv,
            process,
            like,
            pod,
            tls,
            relay,
            revisions,
        })
    }

    pub fn cgroup(&self) -> String {
        cgroup::name_container_cgroup(ETCD, *self.members.temporary.ip())
    }
}

/// True if a single member of this version acknowledges a write before the write is in its log
/// (etcd-io/etcd#14370).
fn acknowledges_unlogged_writes(version: &str) -> bool {
    let patch = version
        .strip_prefix("3.5.")
        .and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
    patch.is_some_and(|patch| patch.parse::<u32>().is_ok_and(|patch| patch < 5))
}

/// True if this process may mount.
fn may_mount() -> bool {
    rustix::thread::capabilities(None)
        .is_ok_and(|has| has.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// The address of an etcd that can have a temporary etcd.
fn find_etcd_address(urls: &[String], is_for_all: bool) -> Result<SocketAddrV4, String> {
    if !is_for_all {
        return Err("it is for some resources alone (--etcd-servers-overrides)".into());
    }
    let host = |url: &String| {
        url.strip_prefix("https://")
            .map(|rest| rest.trim_end_matches('/').to_owned())
    };
    let hosts: Vec<_> = urls.iter().filter_map(host).collect();
    let own = hosts.iter().find_map(|host| host.parse().ok());
    own.ok_or_else(|| match hosts.iter().any(|host| host.starts_with('[')) {
        true => {
            "etcd is given by an IPv6 address, and only IPv4 connections can be steered to a temporary etcd".into()
        }
        false => {
            "etcd is given by a name, and the address of a name may change: give --etcd-servers the IPv4 address and port".into()
        }
    })
}

/// The process that listens at an address.
fn find_process_at(at: SocketAddrV4) -> Result<NamedProcess, String> {
    let inode = find_listener(at)
        .ok_or_else(|| format!("nothing in this network namespace listens on {at}"))?;
    proc_net::process_of(inode)
        .ok_or_else(|| format!("the process that listens on {at} cannot be seen from here"))
}

/// Inode of the listener at an address.
pub fn find_listener(at: SocketAddrV4) -> Option<u64> {
    let all = sock_diag::list_listeners(at.port()).ok()?;
    let any = |ip: IpAddr| ip == IpAddr::from(*at.ip()) || ip.is_unspecified();
    all.into_iter()
        .find(|entry| any(entry.local.ip()))
        .map(|entry| entry.inode)
}

/// The data directory, if etcd is configured by flags alone.
fn find_data_directory(command: &[OsString], environment: &[OsString]) -> Result<PathBuf, String> {
    if let Some(flag) = OTHERS
        .into_iter()
        .find(|flag| args::flag_value(command, flag).is_some())
    {
        return Err(format!("it has {flag}"));
    }
    let names = environment
        .iter()
        .filter_map(|variable| variable.to_str()?.split_once('=').map(|(name, _)| name));
    if let Some(name) = names
        .filter(|name| name.starts_with("ETCD_"))
        .find(|name| !is_service_link(name))
    {
        return Err(format!("it has the variable {name}"));
    }
    let data = args::flag_value(command, "--data-dir")
        .map(PathBuf::from)
        .filter(|data| data.is_absolute());
    data.ok_or_else(|| "it has no --data-dir with an absolute path".to_owned())
}

/// True if the kubelet sets a variable of this name for a Service called etcd or etcd-…: none of
/// etcd's flags has such a name.
fn is_service_link(name: &str) -> bool {
    let ends = ["_PORT", "_SERVICE_HOST"]
        .into_iter()
        .any(|end| name.ends_with(end));
    let protocol = ["_TCP", "_UDP", "_SCTP"].into_iter().any(|protocol| {
        let before = name.split_once(protocol).map(|(before, _)| before);
        before
            .and_then(|before| before.rsplit_once("_PORT_"))
            .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
    });
    ends || protocol || name.contains("_SERVICE_PORT_")
}

/// Address and command line of the temporary etcd. All its listeners get new addresses, and the
/// advertised URLs stay as they are.
fn temporary_arguments(mut argv: Vec<OsString>) -> io::Result<(SocketAddrV4, Vec<OsString>)> {
    let ip = address::random_address().map_err(io::Error::other)?;
    let free: Vec<_> = (0..3)
        .map(|_| TcpListener::bind((ip, 0)))
        .collect::<io::Result<_>>()?;
    let [clients, peers, metrics] = [0, 1, 2].map(|at| free[at].local_addr());
    let (clients, peers, metrics) = (clients?, peers?, metrics?);
    let scheme = |argv: &[OsString], flag: &str| {
        let value = args::flag_value(argv, flag)
            .and_then(OsStr::to_str)
            .unwrap_or_default();
        if value.starts_with("https:") {
            "https"
        } else {
            "http"
        }
    };
    for (flag, at) in [
        ("--listen-client-urls", clients),
        ("--listen-peer-urls", peers),
        ("--listen-metrics-urls", metrics),
    ] {
        let url = format!("{}://{at}", scheme(&argv, flag));
        args::set_flag(&mut argv, flag, url.as_ref());
    }
    for flag in DEFRAGMENTS
        .into_iter()
        .filter(|flag| args::flag_value(&argv, flag).is_some())
        .collect::<Vec<_>>()
    {
        args::set_flag(&mut argv, flag, "0".as_ref());
    }
    let count =
        args::flag_value(&argv, SNAPSHOT_COUNT).and_then(|count| count.to_str()?.parse().ok());
    let more = count
        .unwrap_or(SNAPSHOT_COUNT_BY_DEFAULT)
        .saturating_add(MORE_ENTRIES);
    args::set_flag(&mut argv, SNAPSHOT_COUNT, more.to_string().as_ref());
    match clients {
        SocketAddr::V4(clients) => Ok((clients, argv)),
        SocketAddr::V6(_) => Err(io::ErrorKind::Unsupported.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn parse_argv(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn the_temporary_etcd_has_its_own_addresses_and_the_same_data_and_name() {
        let given = "etcd --name=cp-1 --data-dir=/var/lib/etcd --listen-client-urls=https://127.0.0.1:2379,https://10.0.0.5:2379 \
                     --advertise-client-urls=https://10.0.0.5:2379 --listen-peer-urls https://10.0.0.5:2380 \
                     --listen-metrics-urls=http://127.0.0.1:2381 --initial-cluster=cp-1=https://10.0.0.5:2380 --snapshot-count=10000 \
                     --experimental-bootstrap-defrag-threshold-megabytes 100 --bootstrap-defrag-threshold-megabytes=100";
        let (at, own) = temporary_arguments(parse_argv(given)).unwrap();
        assert!(address::is_usable(*at.ip()));
        let value = |flag| {
            args::flag_value(&own, flag)
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(value("--listen-client-urls"), format!("https://{at}"));
        assert!(value("--listen-peer-urls").starts_with(&format!("https://{}:", at.ip())));
        assert!(value("--listen-metrics-urls").starts_with(&format!("http://{}:", at.ip())));
        assert_eq!(
            DEFRAGMENTS.map(value),
            ["0", "0"],
            "it never replaces its database"
        );
        assert_eq!(value(SNAPSHOT_COUNT), "15000");
        let (_, other) = temporary_arguments(parse_argv("etcd --data-dir=/d")).unwrap();
        assert!(
            DEFRAGMENTS
                .iter()
                .all(|flag| args::flag_value(&other, flag).is_none()),
            "it may not know the flag"
        );
        for same in [
            "--name",
            "--data-dir",
            "--advertise-client-urls",
            "--initial-cluster",
        ] {
            assert_eq!(
                args::flag_value(&own, same),
                args::flag_value(&parse_argv(given), same),
                "{same}"
            );
        }
    }

    #[test]
    fn an_etcd_with_other_configuration_is_refused() {
        let data = |command: &str, variable: &str| {
            find_data_directory(&parse_argv(command), &[variable.into()])
        };
        assert_eq!(data("etcd --data-dir=/d", "PATH=/bin"), Ok("/d".into()));
        for link in [
            "SERVICE_HOST",
            "SERVICE_PORT",
            "SERVICE_PORT_CLIENT",
            "PORT",
            "PORT_2379_TCP",
            "PORT_2379_TCP_ADDR",
        ] {
            for service in ["ETCD", "ETCD_CLUSTER"] {
                assert_eq!(
                    data("etcd --data-dir=/d", &format!("{service}_{link}=10.96.0.7")),
                    Ok("/d".into()),
                    "{link}"
                );
            }
        }
        for (command, variable) in [
            ("etcd --data-dir=/d", "ETCD_LISTEN_CLIENT_URLS=x"),
            ("etcd --data-dir=/d", "ETCD_AUTO_COMPACTION_MODE=x"),
            ("etcd --data-dir=/d --wal-dir=/w", ""),
            ("etcd --data-dir=/d --config-file /c", ""),
            ("etcd --data-dir=/d --force-new-cluster=true", ""),
            ("etcd --data-dir=/d", "ETCD_NAME=x"),
            ("etcd --data-dir=d", ""),
            ("etcd", ""),
        ] {
            assert!(data(command, variable).is_err(), "{command} {variable}");
        }
    }

    #[test]
    fn versions_that_acknowledge_before_they_log_are_known() {
        for (version, early) in [
            ("3.5.0", true),
            ("3.5.4-0", true),
            ("3.5.5", false),
            ("3.5.24", false),
            ("3.6.0", false),
            ("3.5.x", false),
        ] {
            assert_eq!(acknowledges_unlogged_writes(version), early, "{version}");
        }
    }

    #[test]
    fn the_reason_to_leave_an_etcd_alone_is_reported() {
        let why = |url: &str, is_for_all| find_etcd_address(&[url.to_owned()], is_for_all);
        assert_eq!(
            why("https://127.0.0.1:2379/", true),
            Ok("127.0.0.1:2379".parse().unwrap())
        );
        let reasons = [
            why("https://127.0.0.1:2379", false),
            why("https://[::1]:2379", true),
            why("https://localhost:2379", true),
        ]
        .map(Result::unwrap_err);
        assert_eq!(BTreeSet::from(reasons).len(), 3, "each has its own text");
        let free = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        assert!(find_process_at(SocketAddrV4::new([127, 0, 0, 1].into(), free)).is_err());
    }
}
