//! Runs `berth ready`, `berth live` and `berth drain`, which are the exec probes and the preStop
//! hook of an apiserver's container.

use super::{Exit, block_on, print, print_stderr, unavailable_error, usage_error};
use berth_node::instance_id::InstanceId;
use berth_node::ipc;
use berth_node::ipc::wire::{Ask, Reply, Status};
use berth_node::registry::lease;
use berth_node::snapshot::{KnownInstance, RunDirSnapshot};
use berth_node::terms::{InstanceHealth, Phase};
use berth_options::ask::{AskArgs, DrainArgs, LiveArgs, ReadyArgs};
use berth_options::check::{Checks, Mistakes, check_probe};
use berth_options::place::RunDirArgs;
use berth_shim::backend::probe::Probe;
use berth_shim::drain::count_unanswered_if_stoppable;
use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Longest wait until a shim has left. A shim on a busy node may take seconds. The wait does not
/// cover a sibling that hangs until its lease expires, which can take a day.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time between two status requests to a shim that leaves.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(super) fn ready(args: &ReadyArgs) -> anyhow::Result<Exit> {
    let Some(known) = find_instance(&args.ask)? else {
        return Ok(Exit::No);
    };
    let patience = args.timeout.timeout.unwrap_or(ipc::PATIENCE);
    let ready = block_on(async {
        match fetch_status(&known, patience).await {
            Ok(status) => {
                for sibling in &status.unconnected {
                    print_stderr(format_args!(
                        "the shims of {} and {sibling} are not connected: an upgrade now would lose the connections in the queue of \
                         the shim that leaves; the log of {} says why",
                        known.id, known.id
                    ));
                }
                status.check_ready()
            }
            // The instance may have no shim of its own: ask the node's shim, which serves every
            // instance.
            Err(why) => ask_node_shim(&args.ask.run_dir, &known, patience)
                .await
                .unwrap_or(Err(why)),
        }
    })?;
    print_answer(ready.map(|()| None))
}

/// Asks the node shim, which serves every instance, whether the instance is ready. Returns `None`
/// if there is no node shim.
async fn ask_node_shim(
    run_dir: &RunDirArgs,
    known: &KnownInstance,
    patience: Duration,
) -> Option<Result<(), String>> {
    for other in other_shims(run_dir, known).ok()? {
        let Ok(shim) = fetch_status(&other, patience).await else {
            continue;
        };
        let Some(instance) = shim
            .instances
            .iter()
            .find(|instance| shim.discover && instance.instance == known.id)
        else {
            continue;
        };
        return Some(match (instance.health, shim.state) {
            _ if shim.blocked => Err(format!(
                "a relaying thread of the node's shim {} does not answer",
                other.id
            )),
            (InstanceHealth::Ready, Phase::Joined) => Ok(()),
            (InstanceHealth::Ready, state) => Err(format!(
                "the node's shim {} is {}",
                other.id,
                state.as_str()
            )),
            (health, _) => Err(format!(
                "instance {} is {}: {}",
                known.id,
                health.as_str(),
                instance.last_probe
            )),
        });
    }
    None
}

pub(super) fn live(args: &LiveArgs) -> anyhow::Result<Exit> {
    let mut checks = Checks::default();
    // Do not check the probe's files: an unreadable file is no reason to restart kube-apiserver.
    let config = check_probe(&args.probe, &args.path, false, &mut checks);
    let patience = args.timeout.timeout;
    let mut config = checks.finish(config).map_err(usage_error)?;
    config.timeout = patience.unwrap_or(config.timeout);
    let Some(known) = find_instance(&args.ask)? else {
        return Ok(Exit::No);
    };
    // Probe the apiserver itself and not its shim: a hung shim must not make the kubelet restart
    // the apiserver.
    let live = block_on(async {
        let address = find_address(&known).await?;
        let lives = Probe::new(config).probe_alive(address).await;
        lives.map_err(|answer| match patience {
            Some(patience) if answer.result == "timeout" => {
                format!(
                    "no answer in {} (--timeout)",
                    humantime::format_duration(patience)
                )
            }
            _ => answer.words,
        })
    })?;
    print_answer(live.map(|why| Some(format!("alive, but the shim's probe would fail: {}", why?))))
}

pub(super) fn drain(args: &DrainArgs) -> anyhow::Result<Exit> {
    let streams = args.wait_streams;
    let Some(known) = find_instance(&args.ask)? else {
        return Ok(Exit::No);
    };
    let drained = block_on(async {
        let path = known
            .berth
            .socket_path(&known.id)
            .map_err(|error| error.to_string())?;
        let drain = if args.if_sibling {
            Ask::DrainIfSibling
        } else {
            Ask::Drain
        };
        match ipc::ask_shim(&path, drain, LEAVE_TIMEOUT).await {
            Ok(Reply::Done) => {}
            Ok(Reply::Alone) => {
                return Ok(Some(format!(
                    "not drained: no sibling of {} is joined",
                    known.id
                )));
            }
            Ok(reply) => {
                return Err(format!(
                    "the shim of instance {} does not drain: {reply:?}",
                    known.id
                ));
            }
            Err(error) => {
                return Err(format!(
                    "the request to the shim of instance {} failed: {error}",
                    known.id
                ));
            }
        }
        if args.wait || streams.is_some() {
            return wait_until_shim_left(&known, streams).await;
        }
        Ok(None)
    })?;
    print_answer(drained)
}

/// Returns the berth's other instances that have a shim's socket. The shim may be dead.
fn other_shims(run_dir: &RunDirArgs, known: &KnownInstance) -> Result<Vec<KnownInstance>, String> {
    let node =
        RunDirSnapshot::read(run_dir.run_dir.as_deref()).map_err(|error| error.to_string())?;
    let is_other = |other: &KnownInstance| {
        other.berth.address() == known.berth.address() && other.id != known.id
    };
    Ok(node
        .instances
        .into_iter()
        .filter(|other| other.socket && is_other(other))
        .collect())
}

/// Waits until a shim has left its group and its instance can be stopped
/// ([`count_unanswered_if_stoppable`]). With `streams`, waits until the shim's connections have
/// ended instead. Returns a remark if some connections are still unanswered.
async fn wait_until_shim_left(
    known: &KnownInstance,
    streams: Option<Duration>,
) -> Result<Option<String>, String> {
    let began = Instant::now();
    let (mut left, mut ending) = (None, None);
    let path = known
        .berth
        .socket_path(&known.id)
        .map_err(|error| error.to_string())?;
    loop {
        let status = match ipc::ask_shim(&path, Ask::Status, LEAVE_TIMEOUT).await {
            Ok(Reply::Status(status)) => status,
            Ok(reply) => {
                return Err(format!(
                    "the shim of instance {} does not send its status: {reply:?}",
                    known.id
                ));
            }
            Err(error) => match error.kind() {
                // The shim has ended, so none of its connections is left.
                io::ErrorKind::ConnectionRefused => return Ok(None),
                io::ErrorKind::NotFound => {
                    return match lease::read(&known.berth, &known.id) {
                        Ok(None) => Ok(None),
                        _ => Err(format!(
                            "{} was removed: the shim cannot be asked",
                            path.display()
                        )),
                    };
                }
                io::ErrorKind::TimedOut => {
                    return Err(format!("the shim of instance {} does not answer", known.id));
                }
                // The shim is about to end. The next request will be refused.
                io::ErrorKind::ConnectionReset
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::UnexpectedEof
                    if ending.get_or_insert_with(Instant::now).elapsed() < LEAVE_TIMEOUT =>
                {
                    tokio::time::sleep(POLL_INTERVAL).await;
                    continue;
                }
                _ => {
                    return Err(format!(
                        "the request to the shim of instance {} failed: {error}",
                        known.id
                    ));
                }
            },
        };
        if status.state == Phase::Left {
            let left = left.get_or_insert_with(Instant::now).elapsed();
            let open = status.connections_open + status.connections_injected;
            match streams {
                // The caller does not wait for connections to end and stops the apiserver next, so
                // only unanswered connections matter.
                None => match count_unanswered_if_stoppable(
                    left,
                    status.connections_pending,
                    status.connections_open,
                ) {
                    None => {}
                    Some(0) => return Ok(None),
                    Some(connections) => {
                        return Ok(Some(format!(
                            "{connections} connections are not answered yet"
                        )));
                    }
                },
                Some(_) if open == 0 => return Ok(None),
                Some(wait) if began.elapsed() >= wait => {
                    return Err(format!("{open} connections are left"));
                }
                Some(_) => {}
            }
        } else if began.elapsed() >= LEAVE_TIMEOUT {
            return Err(format!(
                "the shim of instance {} is still {}",
                known.id,
                status.state.as_str()
            ));
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Prints the reason of a failure, or the remark if there is one.
fn print_answer(result: Result<Option<String>, String>) -> anyhow::Result<Exit> {
    let (exit, words) = match result {
        Ok(words) => (Exit::Ok, words),
        Err(why) => (Exit::No, Some(why)),
    };
    if let Some(words) = words {
        print(&format!("{words}\n"))?;
    }
    Ok(exit)
}

/// Finds the instance with the given name, or else the only instance. If there is none, prints the
/// reason.
fn find_instance(args: &AskArgs) -> anyhow::Result<Option<KnownInstance>> {
    let mistake = |why: String| usage_error(Mistakes(vec![why]));
    let id = args.instance.as_deref().map(InstanceId::parse).transpose();
    let id = id.map_err(|error| mistake(format!("--instance: {error}")))?;
    let node = RunDirSnapshot::read(args.run_dir.run_dir.as_deref()).map_err(unavailable_error)?;
    let asked = |known: &KnownInstance| id.as_ref().is_none_or(|id| known.id == *id);
    let mut known: Vec<_> = node.instances.into_iter().filter(asked).collect();
    // If an instance runs, ignore what earlier instances have left.
    let runs = |known: &KnownInstance| {
        known.socket || known.record.as_ref().is_some_and(|listed| listed.alive)
    };
    if known.iter().any(runs) {
        known.retain(runs);
    }
    match (known.pop(), known.is_empty()) {
        (Some(known), true) => Ok(Some(known)),
        (Some(last), false) => {
            known.push(last);
            let names: Vec<_> = known
                .iter()
                .map(|known| format!("{} at {}", known.id, known.berth.address()))
                .collect();
            let fix = if id.is_some() {
                "give each berth its own --run-dir"
            } else {
                "name an instance with --instance"
            };
            Err(mistake(format!(
                "there are several instances ({}): {fix}",
                names.join(", ")
            )))
        }
        (None, _) => {
            let what = id.map_or_else(
                || "there is no instance".to_owned(),
                |id| format!("there is no instance {id}"),
            );
            print_answer(Err(format!(
                "{what}: no record and no shim in {}",
                node.path.display()
            )))
            .map(|_| None)
        }
    }
}

async fn fetch_status(known: &KnownInstance, patience: Duration) -> Result<Status, String> {
    let path = known
        .berth
        .socket_path(&known.id)
        .map_err(|error| error.to_string())?;
    let status = ipc::request_status(&path, patience).await;
    status
        .map(|status| *status)
        .map_err(|why| format!("the shim of instance {}: {why}", known.id))
}

async fn find_address(known: &KnownInstance) -> Result<SocketAddr, String> {
    match &known.record {
        Some(listed) if listed.alive => Ok(listed.record.address),
        Some(_) => Err(format!(
            "instance {} is not running: its process ended",
            known.id
        )),
        // Without a record, only the shim knows the address (`berth serve --backend`).
        None => {
            let own = fetch_status(known, ipc::PATIENCE)
                .await?
                .instances
                .into_iter()
                .find(|instance| instance.own);
            own.map(|own| own.address)
                .ok_or_else(|| format!("instance {} is not running", known.id))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_node::ipc::{IncomingRequest, Server};
    use berth_node::registry::RunDir;
    use berth_os::seqpacket;
    use std::path::PathBuf;

    fn known_instance(directory: &tempfile::TempDir) -> (KnownInstance, PathBuf) {
        let run_dir = RunDir::open(&directory.path().join("run")).unwrap();
        let berth = run_dir.berth("10.0.0.5:6443".parse().unwrap()).unwrap();
        let id = InstanceId::parse("a").unwrap();
        let path = berth.socket_path(&id).unwrap();
        (
            KnownInstance {
                berth,
                id,
                record: None,
                socket: true,
            },
            path,
        )
    }

    #[tokio::test]
    async fn a_shim_that_refuses_to_give_its_status_has_not_ended() {
        let directory = tempfile::tempdir().unwrap();
        let (known, path) = known_instance(&directory);
        let server = Server::bind(&path).unwrap();
        let serving = server.serve(async |request: IncomingRequest| {
            drop(request.reply(&Reply::Refused("no".into())).await);
        });
        tokio::select! {
            waited = wait_until_shim_left(&known, None) => assert!(waited.is_err(), "{waited:?}"),
            () = serving => {}
        }
    }

    #[tokio::test]
    async fn a_shim_whose_socket_cannot_be_used_has_not_ended() {
        let directory = tempfile::tempdir().unwrap();
        let (known, path) = known_instance(&directory);
        std::os::unix::fs::symlink(&path, &path).unwrap();
        let waited = wait_until_shim_left(&known, None).await;
        assert!(waited.is_err(), "{waited:?}");
    }

    #[tokio::test]
    async fn a_shim_whose_socket_is_missing_or_refuses_has_ended() {
        let directory = tempfile::tempdir().unwrap();
        let (known, path) = known_instance(&directory);
        assert_eq!(wait_until_shim_left(&known, None).await, Ok(None));
        drop(seqpacket::bind_listener(&path).unwrap());
        assert_eq!(wait_until_shim_left(&known, None).await, Ok(None));
    }
}
