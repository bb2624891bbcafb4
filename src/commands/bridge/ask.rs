//! Sends requests to a running bridge, and removes what a killed bridge or upgrade has left in the
//! cluster.

use super::{Exit, format_json, print, print_stderr, to_exit, unavailable_error};
use crate::cli::{BridgeDirArgs, BridgeEndArgs, BridgeRestoreArgs};
use berth_bridge::caller::wait_for_end;
use berth_bridge::cgroup;
use berth_bridge::claim::{describe_last_bridge, find_other_bridge};
use berth_bridge::watch::{TIMEOUT, describe_end, describe_hang, describe_wait, display_address};
use berth_cluster::kubeconfig::choose_kubeconfig;
use berth_doctor::service::sweep_slices;
use berth_manifest::file::suggest_fix;
use berth_node::ipc::bridge::{Ask, BridgeStatus, Connection, Difference, Reply};
use berth_options::cluster::host_name;
use std::io::{self, ErrorKind};
use std::path::Path;
use tokio::time::timeout;

pub(super) async fn end_bridge(args: &BridgeEndArgs) -> anyhow::Result<Exit> {
    let directory = &args.dir.state_dir;
    let client = match Connection::ask(directory, &Ask::End { now: args.now }).await {
        Ok(client) => client,
        Err(error) if !means_no_bridge(&error) => return Err(request_error(directory, &error)),
        Err(_) => match find_other_bridge() {
            Some(why) => {
                return Err(unavailable_error(format!(
                    "there is no bridge in {}: {why}",
                    directory.display()
                )));
            }
            None => {
                cgroup::sweep_cgroups();
                return remove_leftover_slice(args, directory).await;
            }
        },
    };
    to_exit(wait_for_end(directory, args.dir.json, &client, args.now).await?)
}

pub(super) async fn restore_changes(args: &BridgeRestoreArgs) -> anyhow::Result<Exit> {
    let directory = &args.dir.state_dir;
    let client = Connection::ask(
        directory,
        &Ask::Restore {
            dry_run: args.dry_run,
        },
    )
    .await;
    let client = client.map_err(|error| request_error(directory, &error))?;
    if !args.dry_run {
        return to_exit(wait_for_end(directory, args.dir.json, &client, false).await?);
    }
    let Ok(reply) = timeout(TIMEOUT, client.receive_message()).await else {
        return Err(unavailable_error(describe_hang(&client)));
    };
    match reply {
        Some(Reply::Differences(all)) if args.dir.json => print(&format_json(&all)?),
        Some(Reply::Differences(all)) => print_differences(&all),
        Some(Reply::Refused(why)) => {
            print_stderr(why);
            Ok(Exit::Again)
        }
        Some(Reply::Status(_)) | None => Err(no_bridge_error(directory)),
    }
}

/// Prints the changes that a restore would make.
fn print_differences(all: &[Difference]) -> anyhow::Result<Exit> {
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
        print_stderr("the manifest and its files have not changed");
    }
    all.iter()
        .filter_map(|difference| difference.refused.as_ref())
        .for_each(print_stderr);
    print_stderr(
        "etcd's manifest, the kubelet's configuration and objects in the cluster are never restored",
    );
    Ok(Exit::Ok)
}

/// Removes the EndpointSlice that a killed bridge or upgrade may have left in the cluster. Must be
/// called only if no bridge runs on this node.
async fn remove_leftover_slice(args: &BridgeEndArgs, directory: &Path) -> anyhow::Result<Exit> {
    let Some(kubeconfig) = choose_kubeconfig(args.kubeconfig.as_deref()) else {
        return Err(no_bridge_error(directory));
    };
    let left = match berth_cluster::Client::from_kubeconfig(kubeconfig) {
        Ok(client) => sweep_slices(&client, Some(&host_name()))
            .await
            .map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match left {
        Ok(left) if left.is_empty() => Err(no_bridge_error(directory)),
        Ok(left) => {
            let left = left.join(", ");
            print(&format!(
                "removed leftovers of a killed bridge or upgrade from the Service kubernetes: {left}\n"
            ))
        }
        Err(why) => {
            print_stderr(format_args!(
                "cannot check the Service kubernetes for leftovers of a killed bridge or upgrade: {why}"
            ));
            Err(no_bridge_error(directory))
        }
    }
}

pub(super) async fn print_status(args: &BridgeDirArgs) -> anyhow::Result<Exit> {
    let directory = &args.state_dir;
    let client = Connection::ask(directory, &Ask::Status)
        .await
        .map_err(|error| request_error(directory, &error))?;
    let status = match timeout(TIMEOUT, client.receive_message()).await {
        Ok(Some(Reply::Status(status))) if status.outcome.is_none() => status,
        Ok(Some(Reply::Status(status))) => return Err(unavailable_error(describe_end(&status))),
        Ok(_) => return Err(no_bridge_error(directory)),
        Err(_) => return Err(unavailable_error(describe_hang(&client))),
    };
    if args.json {
        return print(&format_json(&status)?);
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
        (true, true) => "through the bridge to the node's kube-apiserver",
        (false, _) => "to the node's kube-apiserver",
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
        line("steering", format!("fails, and is retried: {why}"));
    }
    line(
        "connections",
        format!("{connections_open} open through the bridge, {connections_steered} were steered"),
    );
    line(
        "temporary",
        format!(
            "{}, {}",
            display_address(temporary.address),
            ready(temporary.ready, &temporary.probe)
        ),
    );
    line(
        "own",
        format!(
            "{}, {}",
            display_address(own.address),
            ready(own.ready, &own.probe)
        ),
    );
    own.log
        .iter()
        .for_each(|text| line("own log", text.clone()));
    if let Some(trouble) = &status.trouble {
        line("trouble", trouble.clone());
    }
    if let Some(etcd) = &status.etcd {
        line("etcd", format!("{}; {}", etcd.step, describe_wait(etcd)));
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

/// True if the error of a connect means that no bridge runs.
fn means_no_bridge(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::ConnectionRefused
    )
}

fn request_error(directory: &Path, error: &io::Error) -> anyhow::Error {
    if means_no_bridge(error) {
        return no_bridge_error(directory);
    }
    let (at, fix) = (directory.display(), suggest_fix("ask", error));
    unavailable_error(format!("the bridge in {at} cannot be asked: {error}{fix}"))
}

fn no_bridge_error(directory: &Path) -> anyhow::Error {
    unavailable_error(format!(
        "no bridge is on: {}",
        describe_last_bridge(directory)
    ))
}
