//! Requests to a running bridge, and removal of what a killed bridge or upgrade left in the cluster.

use super::{Exit, exit, json, print, print_stderr, unavailable};
use crate::cli::{BridgeDirArgs, BridgeEndArgs, BridgeRestoreArgs};
use berth_bridge::caller::ended;
use berth_bridge::cgroup;
use berth_bridge::claim::elsewhere;
use berth_bridge::watch::{PATIENCE, hangs, over, shown, waited};
use berth_cluster::kubeconfig::given_or_admin;
use berth_doctor::service::sweep;
use berth_manifest::file::fix;
use berth_node::ipc::bridge::{Ask, BridgeStatus, Connection, Difference, Reply};
use berth_options::cluster::host_name;
use std::io::{self, ErrorKind};
use std::path::Path;
use tokio::time::timeout;

pub(super) async fn end(args: &BridgeEndArgs) -> anyhow::Result<Exit> {
    let directory = &args.dir.state_dir;
    let client = match Connection::ask(directory, &Ask::End { now: args.now }).await {
        Ok(client) => client,
        Err(error) if !is_none(&error) => return Err(not_asked(directory, &error)),
        Err(_) => match elsewhere() {
            Some(why) => {
                return Err(unavailable(format!(
                    "there is no bridge in {}: {why}",
                    directory.display()
                )));
            }
            None => {
                cgroup::sweep();
                return swept(args, directory).await;
            }
        },
    };
    exit(ended(directory, args.dir.json, &client, args.now).await?)
}

pub(super) async fn restore(args: &BridgeRestoreArgs) -> anyhow::Result<Exit> {
    let directory = &args.dir.state_dir;
    let client = Connection::ask(
        directory,
        &Ask::Restore {
            dry_run: args.dry_run,
        },
    )
    .await;
    let client = client.map_err(|error| not_asked(directory, &error))?;
    if !args.dry_run {
        return exit(ended(directory, args.dir.json, &client, false).await?);
    }
    let Ok(reply) = timeout(PATIENCE, client.next()).await else {
        return Err(unavailable(hangs(&client)));
    };
    match reply {
        Some(Reply::Differences(all)) if args.dir.json => print(&json(&all)?),
        Some(Reply::Differences(all)) => differences(&all),
        Some(Reply::Refused(why)) => {
            print_stderr(why);
            Ok(Exit::Again)
        }
        Some(Reply::Status(_)) | None => Err(none(directory)),
    }
}

/// Prints what a restore would put back.
fn differences(all: &[Difference]) -> anyhow::Result<Exit> {
    let lines = all.iter().map(
        |Difference {
             path,
             missing,
             diff,
             ..
         }| match diff {
            Some(diff) => diff.clone(),
            None => format!(
                "{} {}\n",
                path.display(),
                if *missing { "is gone" } else { "has changed" }
            ),
        },
    );
    print(&lines.collect::<String>())?;
    if all.is_empty() {
        print_stderr("the manifest, and the files that it names, are as they were");
    }
    all.iter()
        .filter_map(|difference| difference.refused.as_ref())
        .for_each(print_stderr);
    print_stderr(
        "etcd's manifest, the kubelet's configuration and what is in the cluster are never put back",
    );
    Ok(Exit::Ok)
}

/// Without a bridge here: removes the slice that a killed bridge or upgrade may have left in the cluster.
async fn swept(args: &BridgeEndArgs, directory: &Path) -> anyhow::Result<Exit> {
    let Some(kubeconfig) = given_or_admin(args.kubeconfig.as_deref()) else {
        return Err(none(directory));
    };
    let left = match berth_cluster::Client::from_kubeconfig(kubeconfig) {
        Ok(client) => sweep(&client, Some(&host_name()))
            .await
            .map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match left {
        Ok(left) if left.is_empty() => Err(none(directory)),
        Ok(left) => {
            let left = left.join(", ");
            print(&format!(
                "removed from the Service kubernetes what a bridge or an upgrade that was killed left there: {left}\n"
            ))
        }
        Err(why) => {
            print_stderr(format_args!(
                "cannot check the Service kubernetes for what a bridge or an upgrade that was killed left there: {why}"
            ));
            Err(none(directory))
        }
    }
}

pub(super) async fn status(args: &BridgeDirArgs) -> anyhow::Result<Exit> {
    let directory = &args.state_dir;
    let client = Connection::ask(directory, &Ask::Status)
        .await
        .map_err(|error| not_asked(directory, &error))?;
    let status = match timeout(PATIENCE, client.next()).await {
        Ok(Some(Reply::Status(status))) if status.outcome.is_none() => status,
        Ok(Some(Reply::Status(status))) => return Err(unavailable(over(&status))),
        Ok(_) => return Err(none(directory)),
        Err(_) => return Err(unavailable(hangs(&client))),
    };
    if args.json {
        return print(&json(&status)?);
    }
    let mut text = String::new();
    let BridgeStatus {
        step,
        steering,
        temporary,
        own,
        connections_open,
        connections_steered,
        ..
    } = &*status;
    let ready = |ready: bool, probe: &str| {
        if ready {
            "ready".to_owned()
        } else {
            format!("not ready: {probe}")
        }
    };
    let to = match (steering, own.preferred) {
        (true, false) => "to the bridge",
        (true, true) => "through the bridge to the node's own kube-apiserver",
        (false, _) => "to the node's own kube-apiserver",
    };
    let mut line = |name: &str, what: String| text += &format!("{name:<16}{what}\n");
    line(
        "step",
        format!(
            "{step}{}",
            if status.command { ", COMMAND runs" } else { "" }
        ),
    );
    line("new connections", format!("go {to}"));
    if let Some(why) = &status.steering_error {
        line("steering", format!("fails, and is tried again: {why}"));
    }
    line(
        "connections",
        format!("{connections_open} open through the bridge, {connections_steered} were steered"),
    );
    line(
        "temporary",
        format!(
            "{}, {}",
            shown(temporary.address),
            ready(temporary.ready, &temporary.probe)
        ),
    );
    line(
        "own",
        format!("{}, {}", shown(own.address), ready(own.ready, &own.probe)),
    );
    own.log
        .iter()
        .for_each(|text| line("own log", text.clone()));
    if let Some(trouble) = &status.trouble {
        line("trouble", trouble.clone());
    }
    if let Some(etcd) = &status.etcd {
        line("etcd", format!("{}; {}", etcd.step, waited(etcd)));
        etcd.trouble
            .iter()
            .for_each(|trouble| line("trouble", trouble.clone()));
    }
    status
        .notes
        .iter()
        .for_each(|note| line("note", note.clone()));
    status
        .logs
        .iter()
        .for_each(|log| line("log", log.display().to_string()));
    print(&text)
}

/// Whether no bridge is in the directory, as far as can be seen.
fn is_none(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused
    )
}

fn not_asked(directory: &Path, error: &io::Error) -> anyhow::Error {
    if is_none(error) {
        return none(directory);
    }
    let (at, fix) = (directory.display(), fix("ask", error));
    unavailable(format!("the bridge in {at} cannot be asked: {error}{fix}"))
}

fn none(directory: &Path) -> anyhow::Error {
    unavailable(format!(
        "no bridge is on in {}: one that ended leaves its logs there; `berth bridge start` begins one",
        directory.display()
    ))
}
