//! Checks if this node can be bridged. All errors are reported at once, and nothing is changed.

use super::etcd::{self, EtcdMode, EtcdPlan, temporary};
use super::localhost::Localhost;
use super::plan::{BridgeOptions, BridgePlan, RunningInstance};
use super::pod::{self, RunningPod};
use super::{LOCK_FILE, claim, temporary_instance};
use crate::report::Report;
use berth_cluster::Client;
use berth_cluster::kubeconfig::ADMIN_PATH;
use berth_doctor::node;
use berth_doctor::service::{LOST, Purpose, ServiceKeeper};
use berth_exec::{address, args};
use berth_manifest::command::{WATCH_GRACE, WATCH_GRACE_FLAG, audit_log, split_strings};
use berth_manifest::report::Refusal;
use berth_node::instance_id::InstanceId;
use berth_node::ipc::bridge::SOCKET_NAME;
use berth_os::file::none_if_missing;
use berth_os::namespaces::is_shared_with;
use berth_os::proc_net::{self, ESTABLISHED_STATE, Entry, Owner};
use berth_os::process::{HeldProcess, ProcessAttributes, raise_hard_file_limit};
use berth_os::{netdevice, seqpacket, sock_diag, socket};
use berth_shim::backend::health::Observation;
use berth_shim::backend::probe::{Probe, ProbeConfig, ProbeKind};
use berth_shim::limits;
use berth_upgrade::state;
use nix::unistd::geteuid;
use procfs::{Current as _, Meminfo};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

const DEFAULT_SECURE_PORT: u16 = 6443;

/// Name of the temporary instance.
const INSTANCE_NAME: &str = "bridge";

/// Longest time to connect to the running kube-apiserver.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Attempts to find a port that is free on three addresses.
const MAX_TRIES: usize = 16;

/// Space required for logs, in bytes: kube-apiserver writes some 10 MB in an hour at the default
/// verbosity, more with an audit log.
const MIN_LOG_SPACE: u64 = 64 << 20;

/// Path for probes of kube-apiserver.
const READY_PATH: &str = "/readyz";

/// kube-apiserver's flag for the CA of requests between kube-apiservers.
const PEER_CA_FLAG: &str = "--peer-ca-file";

/// Process name of a shim.
const SHIM_NAME: &str = "berth";

/// Checks this node, and plans the bridge.
///
/// # Errors
/// All problems.
pub async fn preflight(options: BridgeOptions) -> Result<BridgePlan, Refusal> {
    let mut report = Report::default();
    let user = geteuid();
    if matches!(options.running, RunningInstance::Pod { .. }) && !user.is_root() {
        report.add_error(format!(
            "berth runs as uid {user}, and only root can run a static pod's container: run berth as root"
        ));
        return Err(Refusal::Unavailable(report.errors));
    }
    let port = match &options.running {
        RunningInstance::Process { command } => {
            Some(check_command(command).map_err(Refusal::usage)?)
        }
        RunningInstance::Pod { manifest } => pod::find_port(manifest, &mut report),
    };
    if seqpacket::dial_path(&options.directory.join(SOCKET_NAME)).is_ok() {
        report.add_error(format!(
            "another bridge is on ({}): see `berth bridge status`, and end it with `berth bridge end`",
            options.directory.display()
        ));
    }
    report.value_or_add_error("", check_directory(&options.directory));
    report.value_or_add_error("", check_log_space(&options.directory));
    if let RunningInstance::Pod { .. } = options.running {
        let upgrade = report
            .value_or_add_error(
                "",
                state::describe_interrupted(Path::new(state::DEFAULT_DIRECTORY)),
            )
            .flatten();
        upgrade.into_iter().for_each(|it| {
            report.add_error(format!(
                "{it}: finish that upgrade with `berth upgrade` first"
            ));
        });
    }
    check_steering(&mut report).await;
    let Some(port) = port else {
        return Err(Refusal::Unavailable(report.errors));
    };
    check_file_limit(port, &mut report);
    let listening = PortListeners::find_on_port(port, &mut report);
    let running = listening
        .apiserver_listener()
        .and_then(|entry| find_running_apiserver(entry, &options, &mut report));
    let addresses: Vec<_> = listening
        .node
        .iter()
        .map(|entry| entry.local.ip())
        .collect();
    let addresses = find_answered_addresses(port, &addresses);
    let place =
        report.value_or_add_error("", choose_addresses(addresses.iter().any(IpAddr::is_ipv6)));
    let instance = report.value_or_add_error("", InstanceId::parse(INSTANCE_NAME));
    let Some(FoundInstance {
        process,
        name,
        like,
        command,
        pod,
    }) = running
    else {
        return Err(Refusal::Unavailable(report.errors));
    };
    // kube-apiserver treats an unspecified address as unset, too.
    let advertised = args::advertise_address(&command).filter(|ip| !ip.is_unspecified());
    let of_node = netdevice::local_addresses().unwrap_or_default();
    let own = find_own_address(&addresses, advertised, binds_ipv6(&command), &of_node);
    let named = SocketAddr::new(advertised.unwrap_or(own), port);
    let own = SocketAddr::new(own, port);
    let localhost =
        Localhost::new(&name, own.ip(), &listening.localhost_addresses(&addresses)).await;
    if localhost.is_err() {
        report_local_clients(port, &mut report);
    }
    let own_probe =
        report.value_or_add_error("", make_probe_config(&options, &command, pod.as_ref()));
    if let Some(probe) = &own_probe {
        report.value_or_add_error("", check_ready(probe, own).await);
    }
    peer_proxy_note(&command)
        .into_iter()
        .for_each(|note| report.add_note(note));
    let client = own_probe
        .as_ref()
        .and_then(|probe| options.make_client(probe));
    let service = find_service(&options, client.clone(), own, named, &mut report).await;
    let mut etcd = plan_etcd(&options, &command, &of_node, pod.as_ref(), &mut report).await;
    etcd.lock = client.and_then(Result::ok);
    let apiserver = (&like, pod.as_ref());
    match &etcd.temporary {
        Some(etcd) => {
            check_memory(
                "a second kube-apiserver and etcd",
                &[apiserver, (&etcd.like, etcd.pod.as_ref())],
                &mut report,
            );
        }
        None => check_memory("a second kube-apiserver", &[apiserver], &mut report),
    }
    let (Some((temporary, listen)), Some(instance), Some(own_probe), []) =
        (place, instance, own_probe, &report.errors[..])
    else {
        return Err(Refusal::Unavailable(report.errors));
    };
    let (notes, steered, in_container) = (report.notes, addresses, pod.is_some());
    let like_it = Some(&like).filter(|_| !in_container);
    let argv = temporary_instance::temporary_arguments(
        &command,
        like_it,
        temporary,
        own.ip(),
        &instance,
        &options.directory,
    );
    let mut argv = argv.map_err(|error| Refusal::usage(vec![format!("--command: {error}")]))?;
    etcd.replace_etcd_urls(&mut argv);
    if args::flag_value(&argv, WATCH_GRACE_FLAG).is_none() {
        let grace = humantime::format_duration(WATCH_GRACE).to_string();
        args::set_flag(&mut argv, WATCH_GRACE_FLAG, grace.as_ref());
    }
    let audit = match &pod {
        Some(pod) => pod.keep_audit_log(&mut argv, &options.directory),
        None => audit_log(&argv),
    };
    let probe = match &pod {
        Some(pod) => own_probe
            .clone()
            .with_files(|file| pod.path_of_copy(file, &options.directory)),
        None => own_probe.clone(),
    };
    let plan = BridgePlan {
        options,
        instance,
        port,
        steered,
        localhost,
        own,
        listen,
        temporary,
        own_probe,
        probe,
        argv,
        audit,
        process,
        like,
        command,
        pod,
        service,
        etcd,
        notes,
    };
    Ok(plan)
}

/// Returns a note about the cost of a bridge if `--peer-ca-file` lets kube-apiservers forward
/// requests to one another. The check `peer-proxy` of `berth doctor` reports the same.
fn peer_proxy_note(command: &[OsString]) -> Option<String> {
    args::flag_value(command, PEER_CA_FLAG).filter(|file| !file.is_empty())?;
    Some(format!(
        "{PEER_CA_FLAG}: the mixed version proxy takes the two kube-apiservers of this node for one: neither forwards requests to the \
         other, and the kube-apiserver that ends removes their common entry, so for up to 10 s other nodes answer 503 or 404 to \
         requests that only this node serves"
    ))
}

/// Checks a kube-apiserver's command line that the operator gave, and returns its secure port.
fn check_command(command: &[OsString]) -> Result<u16, Vec<String>> {
    let mut wrong: Vec<_> = args::check_command(command)
        .iter()
        .map(|error| format!("--command: {error}"))
        .collect();
    let port =
        args::flag_value(command, "--secure-port").map_or(Ok(DEFAULT_SECURE_PORT), |value| {
            let parsed = value
                .to_str()
                .and_then(|text| text.trim().parse().ok())
                .filter(|port| *port > 0);
            parsed.ok_or_else(|| format!("--command: --secure-port {} is no port", value.display()))
        });
    let port = port.map_err(|error| wrong.push(error)).unwrap_or_default();
    if wrong.is_empty() {
        Ok(port)
    } else {
        Err(wrong)
    }
}

/// Accepts only a bridge's directory or an empty directory, since the bridge makes the directory
/// private and clears it.
fn check_directory(directory: &Path) -> Result<(), String> {
    let wrong = |why: &str| {
        Err(format!(
            "{}: {why}: remove the directory, or its files",
            directory.display()
        ))
    };
    if let Some(open) = directory
        .ancestors()
        .skip(1)
        .find(|above| !only_this_user_may_rename_in(above))
    {
        return wrong(&format!(
            "other users may write into {}, and replace the bridge's directory: chmod go-w {0}",
            open.display()
        ));
    }
    match none_if_missing(fs::read_dir(directory)).map(|files| files.map_or(0, Iterator::count)) {
        Err(error) => wrong(&error.to_string()),
        Ok(files) if files > 0 && !directory.join(LOCK_FILE).is_file() => {
            wrong("this directory has files that no bridge wrote")
        }
        Ok(_) => Ok(()),
    }
}

/// True if only root and this user may rename entries of the directory. A missing directory will be
/// created by this user.
fn only_this_user_may_rename_in(directory: &Path) -> bool {
    let Ok(meta) = fs::metadata(directory) else {
        return true;
    };
    let sticky = meta.mode() & 0o1000 != 0;
    (meta.uid() == 0 || meta.uid() == geteuid().as_raw()) && (meta.mode() & 0o022 == 0 || sticky)
}

/// Checks that there is space for the logs of the bridge and the temporary instance.
fn check_log_space(directory: &Path) -> Result<(), String> {
    let Some(there) = directory.ancestors().find(|path| path.is_dir()) else {
        return Ok(());
    };
    let free =
        rustix::fs::statvfs(there).map_err(|error| format!("{}: {error}", there.display()))?;
    let free = free.f_bavail * free.f_frsize;
    if free >= MIN_LOG_SPACE {
        return Ok(());
    }
    let [has, needs] = [free, MIN_LOG_SPACE].map(|bytes| bytes >> 20);
    Err(format!(
        "{} has {has} MiB free: logs need {needs} MiB",
        there.display()
    ))
}

/// Tests the steering, and reports programs that already steer in this network namespace. The
/// bridge's program takes precedence over the programs that steer already.
async fn check_steering(report: &mut Report) {
    report.value_or_add_error("", claim::find_other_bridge().map_or(Ok(()), Err));
    for other in claim::list_programs()
        .iter()
        .filter(|other| !claim::is_of_a_bridge(other))
    {
        report.add_note(format!(
            "{other} already steers connections in this network namespace: the bridge's program takes precedence while the bridge is on"
        ));
    }
    let tried = report
        .value_or_add_error("steering: ", berth_steering::self_test().await)
        .into_iter()
        .flatten();
    for (family, tried) in ["IPv4", "IPv6"].into_iter().zip(tried) {
        if let berth_steering::Tried::Skipped(why) = tried {
            report.add_note(format!("steering of {family} was not tried: {why}"));
        }
    }
}

/// Reports clients on this node that dial localhost, if the bridge cannot steer connections to
/// localhost.
fn report_local_clients(port: u16, report: &mut Report) {
    let all = node::Clients::gather(Path::new("/"), &[port]).find_uncovered(&[], &[]);
    for client in all
        .into_iter()
        .filter(|client| client.address.ip().is_loopback())
    {
        report.add_note(format!(
            "{} reaches kube-apiserver at {}: let the client dial an address of the node instead; a virtual IP may move or vanish while \
             the bridge is on if kube-vip or keepalived checks kube-apiserver at this address",
            client.clients, client.address
        ));
    }
}

/// Checks that the file limit allows as many connections as the node's kube-apiserver has.
fn check_file_limit(port: u16, report: &mut Report) {
    let Some(files) = report.value_or_add_error(
        "the limit of open files cannot be raised: ",
        raise_hard_file_limit(),
    ) else {
        return;
    };
    let is_open = |entry: &&Entry| entry.local.port() == port && entry.state == ESTABLISHED_STATE;
    let sockets = proc_net::read_sockets().unwrap_or_default();
    let open = sockets
        .iter()
        .filter(is_open)
        .filter(|entry| !entry.local.ip().is_loopback())
        .count() as u64;
    let room = limits::default_connection_limit(files);
    if room > open && room >= limits::FEW_CONNECTIONS {
        return;
    }
    let few = format!(
        "a limit of {files} open files leaves room for {room} connections through the bridge, and {open} connections are open on port \
         {port} now: raise the hard limit (ulimit -Hn, LimitNOFILE=), or run berth with CAP_SYS_RESOURCE"
    );
    if room > open {
        report.add_note(few);
    } else {
        report.add_error(few);
    }
}

/// The listeners on kube-apiserver's port, by their purpose.
#[derive(Debug, Default)]
struct PortListeners {
    /// Listeners on the addresses that clients dial: of the kube-apiserver itself, or of shims in
    /// front.
    node: Vec<Entry>,
    /// The listener of a kube-apiserver behind shims, on a loopback address.
    behind: Vec<Entry>,
    /// Listeners on only 127.0.0.1 or ::1.
    localhost: Vec<IpAddr>,
}

impl PortListeners {
    fn find_on_port(port: u16, report: &mut Report) -> Self {
        let Some(mut node) = report.value_or_add_error(
            "the listening sockets (sock_diag): ",
            sock_diag::list_listeners(port),
        ) else {
            return Self::default();
        };
        let all = [
            Ipv4Addr::LOCALHOST.into(),
            IpAddr::from(Ipv6Addr::LOCALHOST),
        ]
        .into_iter();
        let localhost: Vec<_> = all
            .filter(|ip| node.iter().any(|entry| entry.local.ip() == *ip))
            .collect();
        node.retain(|entry| !localhost.contains(&entry.local.ip()));
        let (behind, node): (Vec<_>, Vec<_>) = node
            .into_iter()
            .partition(|entry| entry.local.ip().is_loopback());
        let listening = Self {
            node,
            behind,
            localhost,
        };
        listening
            .find_conflict(port)
            .into_iter()
            .for_each(|why| report.add_error(why));
        listening
    }

    /// The reason why no bridge is possible with these listeners.
    fn find_conflict(&self, port: u16) -> Option<String> {
        if self.node.is_empty() {
            return Some(format!(
                "nothing listens on port {port}: start the kube-apiserver first; for a kube-apiserver that is no \
                 pod, give its command line with --command"
            ));
        }
        match &self.behind[..] {
            [] => self.node.iter().find(|entry| !entry.local.ip().is_unspecified()).map(|single| {
                format!(
                    "{} is listened on by {} at this address only: when the kube-apiserver dials its own address, it would reach the \
                     temporary kube-apiserver, and refuse the certificate of the temporary kube-apiserver; bind kube-apiserver to \
                     0.0.0.0 (--bind-address)",
                    single.local,
                    Owner::of(single)
                )
            }),
            [_] => {
                let is_shim = |entry: &&Entry| proc_net::process_of(entry.inode).is_none_or(|owner| owner.name == SHIM_NAME);
                self.node.iter().find(|entry| !is_shim(entry)).map(|other| {
                    format!(
                        "{} is listened on by {}, and {} by {}, which is no shim of a kube-apiserver: end one of the two processes",
                        self.behind[0].local,
                        Owner::of(&self.behind[0]),
                        other.local,
                        Owner::of(other)
                    )
                })
            }
            [first, second, ..] => Some(format!(
                "{} and {} are listened on, so two kube-apiservers run behind berth on this node: an upgrade is under \
                 way, or was interrupted; finish the upgrade first",
                first.local, second.local
            )),
        }
    }

    /// The addresses that answer clients at localhost. Behind shims, only the shims' listeners on
    /// localhost count.
    fn localhost_addresses(&self, answered: &[IpAddr]) -> Vec<IpAddr> {
        let answered = if self.behind.is_empty() {
            answered
        } else {
            &[]
        };
        [&self.localhost, answered].concat()
    }

    /// The kube-apiserver's own listener, and not that of a shim in front of it.
    fn apiserver_listener(&self) -> Option<&Entry> {
        self.behind.first().or_else(|| self.node.first())
    }
}

struct FoundInstance {
    process: HeldProcess,
    name: String,
    like: ProcessAttributes,
    command: Vec<OsString>,
    pod: Option<RunningPod>,
}

/// Finds the listening process, and reads its attributes.
fn find_running_apiserver(
    entry: &Entry,
    options: &BridgeOptions,
    report: &mut Report,
) -> Option<FoundInstance> {
    let Some(process) = proc_net::process_of(entry.inode) else {
        report.add_error(format!(
            "the process that listens on {} cannot be seen from here ({}): run berth as root, in the host's process namespace",
            entry.local,
            Owner::of(entry)
        ));
        return None;
    };
    let (pid, name, user) = (process.pid, process.name, geteuid());
    let what = format!("process {pid} ({name}), which listens on {}: ", entry.local);
    let process = report.value_or_add_error(&what, HeldProcess::of(pid))?;
    let still = process.read_while_alive(|pid| Ok(proc_net::process_listens(pid, entry.local)));
    if !report.value_or_add_error(&what, still)? {
        report.add_error(format!(
            "{what}it no longer listens: try again when the kube-apiserver runs without restarts"
        ));
        return None;
    }
    let like = report.value_or_add_error(&what, ProcessAttributes::of(pid))?;
    let cmdline = report.value_or_add_error(&what, fs::read(format!("/proc/{pid}/cmdline")))?;
    Some(match &options.running {
        RunningInstance::Process { command } => {
            if !user.is_root() && user.as_raw() != like.uid {
                let wants = format!(
                    "it runs as uid {}, and berth runs as uid {user}: run berth as root",
                    like.uid
                );
                report.add_error(format!("{what}{wants}"));
            }
            check_process(pid, &what, command, &cmdline, report)?;
            FoundInstance {
                process,
                name,
                like,
                command: command.clone(),
                pod: None,
            }
        }
        RunningInstance::Pod { manifest } => {
            let pod = RunningPod::find(pid, manifest, report)?.with_manifest();
            let command = split_strings(&cmdline);
            let wrong = args::check_command(&command)
                .into_iter()
                .map(|error| format!("{what}{error}"));
            wrong.for_each(|why| report.add_error(why));
            FoundInstance {
                process,
                name,
                like,
                command,
                pod: Some(pod),
            }
        }
    })
}

/// Checks that the process is in the node's namespaces and has the given command line.
fn check_process(
    pid: i32,
    what: &str,
    command: &[OsString],
    cmdline: &[u8],
    report: &mut Report,
) -> Option<()> {
    if !is_shared_with(pid, "mnt") {
        report.add_error(format!(
            "{what}it has a mount namespace of its own (a container, or a unit with such as PrivateTmp or ProtectSystem), and \
             --command is for a kube-apiserver in the host's mount namespace; for a kube-apiserver in a static pod, give --manifest and no --command"
        ));
        return None;
    }
    if !is_run_with(cmdline, command) {
        report.add_error(format!(
            "{what}it runs with other arguments than --command: take its arguments from /proc/{pid}/cmdline"
        ));
    }
    Some(())
}

/// True if a process with these NUL-terminated arguments was started by the command line. The
/// program's name may differ.
fn is_run_with(cmdline: &[u8], command: &[OsString]) -> bool {
    split_strings(cmdline)
        .iter()
        .skip(1)
        .eq(command.iter().skip(1))
}

/// Checks that the node has memory for a second copy of each process.
fn check_memory(
    what: &str,
    started: &[(&ProcessAttributes, Option<&RunningPod>)],
    report: &mut Report,
) {
    let memory = report.value_or_add_error("/proc/meminfo: ", Meminfo::current());
    let Some(available) = memory.and_then(|memory| memory.mem_available) else {
        return;
    };
    let needed: u64 = started
        .iter()
        .map(|(like, pod)| like.anonymous + pod.map_or(0, |pod| pod.bytes))
        .sum();
    if available < needed {
        let [available, needed] = [available, needed].map(|bytes| bytes / (1024 * 1024));
        report.add_error(format!(
            "{available} MiB of memory are available, and {what} take some {needed} MiB: free memory, or add memory"
        ));
    }
}

/// The addresses that answer clients. A wildcard stands for all addresses of its family, and a
/// listener on `::` may answer IPv4, too.
fn find_answered_addresses(port: u16, listened: &[IpAddr]) -> Vec<IpAddr> {
    let (any4, any6) = (
        IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::from(Ipv6Addr::UNSPECIFIED),
    );
    let ipv6 = listened.contains(&any6);
    let dual =
        || TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), PROBE_TIMEOUT).is_ok();
    let ipv4 = listened.contains(&any4) || (ipv6 && dual());
    let wildcards = [(ipv4, any4), (ipv6, any6)]
        .into_iter()
        .filter_map(|(answers, any)| answers.then_some(any));
    // A set removes duplicates, because several shims share an address.
    let single: BTreeSet<_> = listened
        .iter()
        .copied()
        .filter(|ip| if ip.is_ipv4() { !ipv4 } else { !ipv6 })
        .collect();
    wildcards.chain(single).collect()
}

/// The address for probes of the node's kube-apiserver: the advertised address, if it is one of the
/// node's.
fn find_own_address(
    answered: &[IpAddr],
    advertised: Option<IpAddr>,
    ipv6_first: bool,
    of_node: &[IpAddr],
) -> IpAddr {
    let (any4, any6) = (
        IpAddr::from(Ipv4Addr::UNSPECIFIED),
        IpAddr::from(Ipv6Addr::UNSPECIFIED),
    );
    let fits = |ip: &IpAddr| {
        let is_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let any = if ip.is_ipv4() { any4 } else { any6 };
        (answered.contains(ip) || answered.contains(&any))
            && !ip.is_loopback()
            && !ip.is_unspecified()
            && !is_local
    };
    let mut of_node = of_node.to_vec();
    of_node.sort_by_key(|ip| ip.is_ipv6() != ipv6_first);
    let advertised = advertised.filter(|ip| of_node.contains(ip));
    let all = advertised
        .into_iter()
        .chain(answered.iter().copied())
        .chain(of_node);
    let ipv6_alone = !answered.is_empty() && answered.iter().all(IpAddr::is_ipv6);
    let loopback = if ipv6_alone {
        Ipv6Addr::LOCALHOST.into()
    } else {
        Ipv4Addr::LOCALHOST.into()
    };
    all.into_iter().find(fits).unwrap_or(loopback)
}

/// True if kube-apiserver prefers an IPv6 address without --advertise-address: it prefers the
/// family of its bind address.
fn binds_ipv6(command: &[OsString]) -> bool {
    let bind = args::flag_value(command, "--bind-address")
        .and_then(|text| text.to_str()?.trim().parse().ok());
    bind.is_some_and(|ip: IpAddr| ip.is_ipv6())
}

/// Settings for probes of the node's kube-apiserver. kubeadm puts the CA next to the certificate.
fn make_probe_config(
    options: &BridgeOptions,
    command: &[OsString],
    pod: Option<&RunningPod>,
) -> Result<ProbeConfig, String> {
    let beside = || {
        let ca = find_ca_beside_certificate(command)?;
        pod.map_or_else(|| Some(ca.to_owned()), |pod| pod.path_on_node(ca))
    };
    let unseen =
        "cannot tell which CA issued the kube-apiserver's certificate: give --probe-ca FILE";
    Ok(ProbeConfig {
        kind: ProbeKind::Https,
        path: READY_PATH.to_owned(),
        ca: Some(options.probe_ca.clone().or_else(beside).ok_or(unseen)?),
        client: options.probe_client.clone(),
        token: None,
        server_name: options.probe_server_name.clone(),
        timeout: options.probe_timeout,
    })
}

fn find_ca_beside_certificate(command: &[OsString]) -> Option<&Path> {
    let path = |flag| args::flag_value(command, flag).map(Path::new);
    let (ca, certificate) = (path("--client-ca-file")?, path("--tls-cert-file")?);
    Some(ca).filter(|ca| ca.parent() == certificate.parent())
}

/// Probes the running kube-apiserver as the bridge will.
async fn check_ready(probe: &ProbeConfig, own: SocketAddr) -> Result<(), String> {
    let probe = Probe::new(probe.clone()).with_loopback_source(own.ip());
    probe.check_files().await?;
    let answer = probe.probe_ready(own).await;
    if answer.seen == Observation::Pass {
        return Ok(());
    }
    Err(format!(
        "the running kube-apiserver is not ready at {own}: {}",
        answer.words
    ))
}

/// Prepares to keep the node's address in the Service `kubernetes`. `None`, with a report, if there
/// is no kubeconfig or the cluster refuses its credentials.
async fn find_service(
    options: &BridgeOptions,
    client: Option<Result<Client, String>>,
    own: SocketAddr,
    named: SocketAddr,
    report: &mut Report,
) -> Option<ServiceKeeper> {
    let Some(client) = client else {
        report.add_note(format!("no --kubeconfig, and no {ADMIN_PATH}: {LOST}"));
        return None;
    };
    let why = match client.and_then(|client| ServiceKeeper::new(&client, Purpose::Bridge, named)) {
        Ok(service) => {
            let service = service.with_addresses([own]);
            match service.check_access().await {
                Ok(()) => return Some(service),
                Err(why) => why,
            }
        }
        Err(why) => why,
    };
    match options.kubeconfig {
        Some(_) => report.add_error(format!("--kubeconfig: {why}")),
        None => report.add_note(format!("{why}; {LOST}")),
    }
    None
}

/// Plans how to keep each etcd available.
async fn plan_etcd(
    options: &BridgeOptions,
    command: &[OsString],
    of_node: &[IpAddr],
    pod: Option<&RunningPod>,
    report: &mut Report,
) -> EtcdPlan {
    if options.etcd == EtcdMode::Own {
        return EtcdPlan::default();
    }
    let on_node = |path: &Path| {
        pod.and_then(|pod| pod.path_on_node(path))
            .unwrap_or_else(|| path.to_owned())
    };
    let (clusters, alone) = etcd::examine_etcds(command, of_node, on_node, report).await;
    let mut temporary = None;
    for etcd in &alone {
        let manifest = pod.map(RunningPod::manifest);
        temporary = temporary::Plan::find(command, etcd, manifest, report)
            .await
            .or(temporary);
    }
    EtcdPlan {
        clusters,
        temporary,
        lock: None,
        needs_lock: options.kubeconfig.is_some(),
    }
}

/// Loopback addresses for the temporary instance and for the bridge's listeners, on the same port.
fn choose_addresses(ipv6: bool) -> Result<(SocketAddrV4, Vec<SocketAddr>), String> {
    let mut place = try_addresses(ipv6);
    for _ in 1..MAX_TRIES {
        place = place.or_else(|_| try_addresses(ipv6));
    }
    place.map_err(|why| format!("no port is free on loopback: {why}"))
}

fn try_addresses(ipv6: bool) -> Result<(SocketAddrV4, Vec<SocketAddr>), String> {
    let text = |error: &dyn Display| error.to_string();
    let shim = address::random_address().map_err(|error| text(&error))?;
    let reserved = TcpListener::bind((shim, 0)).map_err(|error| text(&error))?;
    let port = reserved.local_addr().map_err(|error| text(&error))?.port();
    let mut listen = vec![SocketAddr::from((shim, port))];
    if ipv6 && TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
        let other = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        if socket::is_listened_on(other).map_err(|error| text(&error))? {
            return Err(proc_net::explain_in_use(other));
        }
        listen.push(other);
    }
    match address::choose_address(port, None, &listen).map_err(|error| text(&error))? {
        SocketAddr::V4(temporary) => Ok((temporary, listen)),
        SocketAddr::V6(other) => Err(format!("{other} is no IPv4 address")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_running_arguments_must_equal_the_given_ones() {
        let command = ["kube-apiserver", "--v=2", ""].map(OsString::from);
        assert!(is_run_with(b"/usr/bin/kube-apiserver\0--v=2\0\0", &command));
        for other in [
            &b"kube-apiserver\0--v=2\0"[..],
            b"kube-apiserver\0--v=3\0\0",
            b"k\0--v=2\0\0--x\0",
            b"",
        ] {
            assert!(!is_run_with(other, &command), "{other:?}");
        }
        assert!(is_run_with(b"k\0", &["kube-apiserver".into()]));
    }

    #[test]
    fn the_nodes_kube_apiserver_is_probed_at_its_advertised_address() {
        let parse = |all: &[&str]| {
            all.iter()
                .map(|ip| ip.parse().unwrap())
                .collect::<Vec<IpAddr>>()
        };
        let node = &["127.0.0.1", "::1", "fe80::5", "10.0.0.5", "fd00::5"][..];
        let both = &["0.0.0.0", "::"][..];
        for (answered, advertised, ipv6_first, of_node, own) in [
            (both, "10.0.0.5", false, node, "10.0.0.5"),
            (both, "fd00::5", false, node, "fd00::5"),
            // kube-apiserver advertises no address, a router's, or an address that does not answer.
            (both, "", false, node, "10.0.0.5"),
            (both, "192.0.2.1", false, node, "10.0.0.5"),
            (&["0.0.0.0"], "fd00::5", false, node, "10.0.0.5"),
            (&["::"], "10.0.0.5", false, node, "fd00::5"),
            (
                both,
                "",
                false,
                &["127.0.0.1", "::1", "fe80::5", "fd00::5"],
                "fd00::5",
            ),
            (both, "", true, node, "fd00::5"),
            (&["0.0.0.0"], "", true, node, "10.0.0.5"),
            // Shims, each at a single address.
            (&["10.0.0.6", "fd00::5"], "", false, node, "10.0.0.6"),
            (&["10.0.0.6", "fd00::5"], "fd00::5", false, node, "fd00::5"),
            (both, "", false, &[], "127.0.0.1"),
            (&["::"], "", false, &[], "::1"),
        ] {
            let found = find_own_address(
                &parse(answered),
                advertised.parse().ok(),
                ipv6_first,
                &parse(of_node),
            );
            assert_eq!(found.to_string(), own, "{answered:?} {advertised}");
        }
        let binds =
            |flags: &[&str]| binds_ipv6(&flags.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(
            binds(&["k", "--bind-address=::"])
                && !binds(&["k", "--bind-address", "0.0.0.0"])
                && !binds(&["k"])
        );
    }

    #[test]
    fn the_cost_of_the_mixed_version_proxy_is_noted() {
        let note =
            |flags: &[&str]| peer_proxy_note(&flags.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(note(&["k", "--peer-ca-file=/ca.crt"]).is_some());
        assert_eq!(
            (note(&["k"]), note(&["k", "--peer-ca-file="])),
            (None, None)
        );
    }

    #[test]
    fn the_ca_is_the_one_beside_the_certificate() {
        let ca = |flags: &str| {
            let command: Vec<_> = flags.split(' ').map(OsString::from).collect();
            find_ca_beside_certificate(&command).map(Path::to_owned)
        };
        assert_eq!(
            ca("k --client-ca-file=/pki/ca.crt --tls-cert-file=/pki/a.crt"),
            Some("/pki/ca.crt".into())
        );
        assert_eq!(
            ca("k --client-ca-file=/pki/ca.crt --tls-cert-file=/pki/x/a.crt"),
            None
        );
        assert_eq!(ca("k --client-ca-file=/pki/ca.crt"), None);
    }

    #[test]
    fn a_directory_without_room_for_logs_is_refused() {
        let few = check_log_space(Path::new("/proc/nonexistent")).unwrap_err();
        assert!(few.contains("/proc has 0 MiB free"), "{few}");
    }

    #[test]
    fn a_foreign_directory_is_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        assert_eq!(check_directory(&temp.path().join("new")), Ok(()));
        assert_eq!(check_directory(temp.path()), Ok(()));
        fs::write(temp.path().join("lock"), "").unwrap();
        assert!(check_directory(temp.path()).is_err());
        assert!(
            check_directory(&temp.path().join("lock")).is_err(),
            "a file"
        );
        fs::write(temp.path().join(LOCK_FILE), "").unwrap();
        assert_eq!(check_directory(temp.path()), Ok(()));
    }
}
