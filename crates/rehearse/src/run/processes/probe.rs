//! Observes instances from outside: in a shim's log, through a shim's status, and in /proc.

use super::layout::{Layout, NODE_SHIM};
use super::process::Listener;
use super::settings::Settings;
use crate::config::Via;
use crate::record::{
    data::MarkKind,
    event::{Event, EventKind},
    gate_metrics::GateMetrics,
    log::{Recorder, last_mark},
    stamp::Stamp,
};
use berth_node::instance_id::InstanceId;
use berth_node::ipc;
use berth_node::ipc::wire::{Ask, InstanceStatus, Reply, Status};
use berth_node::registry::instance::{self, ListedInstance};
use berth_node::registry::{BerthDir, RunDir};
use berth_node::snapshot::RunDirSnapshot;
use berth_node::terms::{InstanceHealth, Phase};
use berth_os::proc_net;
use berth_shim::config::PassMode;
use nix::unistd::Pid;
use serde::Deserialize;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// Time limit for a shim's answer when all shims are asked. A shim that hangs does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Time between two polls of the gates' metrics: as long as the shortest step of a timeline.
const GATE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Prefix of the errors of Go's crypto/x509.
const X509_PREFIX: &str = "x509: ";

/// The relevant fields of a line in a shim's log.
#[derive(Debug, Deserialize)]
struct LogLine {
    message: String,
    #[serde(default)]
    instance: String,
}

/// Returns a callback for log lines. From a shim's lines, the callback logs when an instance joins
/// and leaves. From a real apiserver's lines, the callback logs that the apiserver did not trust a
/// certificate, because it had reached another instance instead of itself.
pub(super) fn line_listener(owner: &str, layout: Layout, recorder: &Arc<Recorder>) -> Listener {
    let (owner, recorder) = (owner.to_owned(), Arc::clone(recorder));
    Arc::new(move |line| {
        let at = Stamp::now();
        if line.contains(X509_PREFIX) {
            recorder.add(&owner, EventKind::UntrustedCertificate);
        }
        if layout.via != Via::Berth {
            return;
        }
        if let Some((instance, mark)) = serde_json::from_str(line)
            .ok()
            .and_then(|line| parse_mark(&owner, &line))
        {
            recorder.with_events(|log| {
                // If the instance has already reported that it is ready, the shim's line is
                // ignored, since the report is more exact.
                let known =
                    last_mark(log, &instance, mark) > last_mark(log, &instance, MarkKind::Started);
                if mark != MarkKind::Ready || !known {
                    log.push(Event {
                        at,
                        subject: instance,
                        what: EventKind::Mark {
                            mark,
                            text: String::new(),
                        },
                    });
                }
            });
        }
    })
}

/// Returns the instance of a log line, and the event that the line reports. A node shim joins only
/// once, before its first instance. So an instance behind a node shim counts as joined when it is
/// ready.
fn parse_mark(owner: &str, line: &LogLine) -> Option<(String, MarkKind)> {
    let (message, instance) = (line.message.as_str(), &line.instance);
    if owner == NODE_SHIM {
        return match message {
            "ready" => Some((instance.clone(), MarkKind::Joined)),
            _ if message.contains("not ready any more") => Some((instance.clone(), MarkKind::Left)),
            _ => None,
        };
    }
    match message {
        "ready" if instance == owner => Some((owner.to_owned(), MarkKind::Ready)),
        "joined" => Some((owner.to_owned(), MarkKind::Joined)),
        "left" => Some((owner.to_owned(), MarkKind::Left)),
        _ => None,
    }
}

/// Checks that a shim listens and that an instance is ready. Returns in words how clients get to
/// the instance, if the pass mode left a choice. The error says what is missing.
pub(super) fn check_joined(
    status: &Status,
    name: &str,
    pass: PassMode,
) -> Result<Option<String>, String> {
    let own =
        find_instance(status, name).ok_or("the instance's shim does not know the instance yet")?;
    if own.health != InstanceHealth::Ready {
        return Err(own.last_probe.clone());
    }
    if status.state != Phase::Joined {
        return Err(format!(
            "the instance's shim has not joined: {}",
            status.state.as_str()
        ));
    }
    match (pass, &own.relayed) {
        (PassMode::Relay, _) => Ok(None),
        (PassMode::Auto, Some(why)) => Ok(Some(format!("clients are relayed: {why}"))),
        _ if own.injected => Ok(Some("the apiservers take over the clients' sockets".into())),
        _ => Err("the instance's clients are relayed".into()),
    }
}

/// True if a shim reports that an instance is not ready, or does not know the instance.
pub(super) fn is_unreachable(status: &Status, name: &str) -> bool {
    find_instance(status, name).is_none_or(|own| own.health != InstanceHealth::Ready)
}

fn find_instance<'a>(status: &'a Status, name: &str) -> Option<&'a InstanceStatus> {
    status
        .instances
        .iter()
        .find(|own| own.instance.as_str() == name)
}

/// Asks a shim for its status. The error says why there is no status.
pub(super) async fn ask_status(settings: &Settings, shim: &str) -> Result<Box<Status>, String> {
    let berth = find_berth_dir(settings).ok_or("the run directory is still empty")?;
    let shim = InstanceId::parse(shim).map_err(|error| error.to_string())?;
    let path = berth
        .socket_path(&shim)
        .map_err(|error| error.to_string())?;
    ipc::request_status(&path, ipc::PATIENCE)
        .await
        .map_err(|why| format!("the instance's shim does not answer: {why}"))
}

/// Asks all shims of a run directory. Returns their answers by socket.
pub(crate) async fn ask_shims<T: Send + 'static>(
    run_dir: &Path,
    ask: Ask,
    take: fn(Reply) -> Option<T>,
) -> Vec<(PathBuf, T)> {
    let Ok(seen) = RunDirSnapshot::read(Some(run_dir)) else {
        return Vec::new();
    };
    let mut asked = JoinSet::new();
    for shim in seen.instances.into_iter().filter(|known| known.socket) {
        let (Ok(path), ask) = (shim.berth.socket_path(&shim.id), ask.clone()) else {
            continue;
        };
        asked.spawn(async move {
            let reply = ipc::ask_shim(&path, ask, ANSWER_TIMEOUT).await.ok()?;
            Some((path, take(reply)?))
        });
    }
    asked.join_all().await.into_iter().flatten().collect()
}

/// Logs the metrics of the gates until dropped.
pub(crate) async fn watch_gates(settings: Settings, recorder: Arc<Recorder>) {
    let mut ticks = tokio::time::interval(GATE_POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let take = |reply| match reply {
        Reply::Metrics(metrics) => GateMetrics::parse(&metrics),
        _ => None,
    };
    let directories = [settings.run_dir(), settings.bridge_run_dir()];
    loop {
        ticks.tick().await;
        let mut shims = Vec::new();
        for directory in &directories {
            shims.extend(ask_shims(directory, Ask::Metrics, take).await);
        }
        recorder.add("", EventKind::Gates(shims));
    }
}

/// True if a process listens on an address. Go takes 0.0.0.0 for all addresses of both families and
/// listens on `::`.
pub(super) fn is_listening(pid: Pid, address: SocketAddr) -> bool {
    let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port()));
    let listens = |address| proc_net::process_listens(pid.as_raw(), address);
    listens(address) || (address.ip().is_unspecified() && listens(both))
}

/// Returns `berth exec`'s record of a running instance.
pub(super) fn running_instance(settings: &Settings, name: &str) -> Option<ListedInstance> {
    listed_instance(settings, name).filter(|listed| listed.alive)
}

/// Returns `berth exec`'s record of an instance, running or ended.
pub(super) fn listed_instance(settings: &Settings, name: &str) -> Option<ListedInstance> {
    let listing = instance::list(&find_berth_dir(settings)?).ok()?;
    listing
        .found
        .into_iter()
        .find(|listed| listed.record.instance.as_str() == name)
}

fn find_berth_dir(settings: &Settings) -> Option<BerthDir> {
    RunDir::find(&settings.run_dir())
        .ok()??
        .berth(settings.address)
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_on_all_addresses_of_both_families_is_seen() {
        let own = Pid::this();
        for (bound, asked, is_there) in [
            ("[::]:0", "0.0.0.0", true),
            ("0.0.0.0:0", "0.0.0.0", true),
            ("127.0.0.1:0", "127.0.0.1", true),
            ("127.0.0.1:0", "0.0.0.0", false),
            ("[::]:0", "127.0.0.1", false),
        ] {
            let Ok(listener) = std::net::TcpListener::bind(bound) else {
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            assert_eq!(
                is_listening(own, SocketAddr::new(asked.parse().unwrap(), port)),
                is_there,
                "{bound} {asked}"
            );
        }
    }

    #[test]
    fn shims_report_themselves_and_a_node_shim_reports_all() {
        let line = |message: &str, instance: &str| LogLine {
            message: message.into(),
            instance: instance.into(),
        };
        let marked = |owner, message, instance| {
            parse_mark(owner, &line(message, instance)).map(|(_, mark)| mark)
        };
        assert_eq!(marked("a", "joined", ""), Some(MarkKind::Joined));
        assert_eq!(marked("a", "ready", "a"), Some(MarkKind::Ready));
        assert_eq!(marked("a", "ready", "b"), None);
        assert_eq!(marked("a", "left", ""), Some(MarkKind::Left));
        assert_eq!(marked(NODE_SHIM, "joined", ""), None);
        assert_eq!(marked(NODE_SHIM, "ready", "b"), Some(MarkKind::Joined));
        assert_eq!(
            marked(
                NODE_SHIM,
                "a sibling's instance is not ready any more: refused",
                "b"
            ),
            Some(MarkKind::Left)
        );
    }
}
