//! `berth status --cluster`: the apiservers of all nodes.

use super::{again, align, short};
use crate::cli::StatusArgs;
use crate::commands::{Exit, block_on, json, print_stderr, unavailable};
use berth_cluster::Client;
use berth_operate::cluster_status::{ClusterInstance, ClusterStatus, Observer, UpgradeLock, explain};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant, SystemTime};

pub(super) fn run(args: &StatusArgs) -> anyhow::Result<Exit> {
    let client = Client::from_kubeconfig(&args.admin.kubeconfig);
    let client = client.map_err(|error| unavailable(format!("{error}: give another with --kubeconfig")))?;
    block_on(async {
        let (mut observer, began) = (Observer::default(), Instant::now());
        loop {
            let text = match observer.sample(&client, SystemTime::now(), began.elapsed()).await {
                Ok(status) if args.json => json(&status)?,
                Ok(status) => table(&status),
                Err(error) if !args.watch => return Err(unavailable(explain(&error))),
                Err(error) if args.json => {
                    print_stderr(explain(&error));
                    String::new()
                }
                // In the table's place.
                Err(error) => format!("berth: {}\n", explain(&error)),
            };
            if !again(args, &text).await? {
                return Ok(Exit::Ok);
            }
        }
    })?
}

fn table(status: &ClusterStatus) -> String {
    const HEAD: [&str; 7] = ["NODE", "INSTANCE", "SHIM", "VERSION", "ADDRESS", "RENEWED", "SERVICE"];
    let mut text = match &status.instances[..] {
        [] => "no instance has a Lease: shims renew one with --cluster (docs/service.md)\n".into(),
        instances => align(HEAD, instances.iter().map(cells)),
    };
    for other in &status.others {
        let _ = writeln!(
            text,
            "the Service kubernetes names {} too, for which there is no Lease ({})",
            other.address,
            other.service.join(", ")
        );
    }
    if let Some(UpgradeLock { holder, expired }) = &status.upgrade {
        let end = format!(
            "; it is not renewed: `berth upgrade` on {0} brings it to its end; if {0} is gone for good, `berth upgrade --break-lock` \
             on another node",
            holder.node
        );
        let _ = writeln!(
            text,
            "the cluster's lock is held by {}{}",
            holder.describe(),
            if *expired && holder.changed { &end } else { "" }
        );
    }
    // While one is upgraded, that is as it should be.
    let versions = versions(status);
    if status.upgrade.is_none() && versions.len() > 1 {
        let nodes = versions.iter().map(|(version, nodes)| format!("{version} on {}", nodes.join(", ")));
        let nodes = nodes.collect::<Vec<_>>().join("; ");
        let _ = writeln!(text, "versions differ: {nodes}: upgrade the others, or repeat the upgrade that failed");
    }
    text
}

/// The nodes of each version, of instances that live.
fn versions(status: &ClusterStatus) -> BTreeMap<&str, Vec<&str>> {
    let mut versions = BTreeMap::<_, Vec<_>>::new();
    for instance in status.instances.iter().filter(|instance| !instance.expired) {
        if let Some(version) = &instance.version {
            versions.entry(version.as_str()).or_default().push(instance.node.as_str());
        }
    }
    versions
}

fn cells(instance: &ClusterInstance) -> [String; 7] {
    let age = short(Duration::from_secs(instance.age_seconds));
    [
        instance.node.clone(),
        instance.instance.clone(),
        instance.state.clone(),
        instance.version.clone().unwrap_or_else(|| "-".into()),
        instance.address.to_string(),
        if instance.expired { format!("{age} ago, expired") } else { format!("{age} ago") },
        match instance.service.as_deref() {
            None => "-".into(),
            Some([]) => "no".into(),
            Some(slices) => slices.join(", "),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_operate::cluster_status::OtherAddress;
    use berth_operate::upgrade::lock::Holder;

    #[test]
    fn a_table_says_who_is_there_and_who_is_named() {
        let instance = ClusterInstance {
            node: "cp-1".into(),
            instance: "3f2a".into(),
            state: "joined".into(),
            version: Some("v1.36.3".into()),
            address: "10.0.0.5:6443".parse().unwrap(),
            renewed: "2026-11-22T11:20:00Z".into(),
            age_seconds: 4,
            expired: false,
            service: Some(vec!["berth-cp-1-ipv4".into(), "kubernetes".into()]),
        };
        let gone = ClusterInstance {
            node: "cp-2".into(),
            version: None,
            age_seconds: 130,
            expired: true,
            service: Some(vec![]),
            ..instance.clone()
        };
        let other = OtherAddress { address: "10.0.0.9".parse().unwrap(), service: vec!["kubernetes".into()] };
        let holder = Holder {
            upgrade: "u".into(),
            node: "cp-2".into(),
            process: "7".into(),
            command: "berth upgrade".into(),
            changed: true,
            since: "2026-11-22T11:20:00.000000Z".into(),
        };
        let upgrade = Some(UpgradeLock { holder, expired: true });
        let mut status = ClusterStatus { version: 1, instances: vec![instance, gone], others: vec![other], upgrade };
        assert_eq!(
            table(&status),
            "NODE  INSTANCE  SHIM    VERSION  ADDRESS        RENEWED          SERVICE\n\
             cp-1  3f2a      joined  v1.36.3  10.0.0.5:6443  4s ago           berth-cp-1-ipv4, kubernetes\n\
             cp-2  3f2a      joined  -        10.0.0.5:6443  2m ago, expired  no\n\
             the Service kubernetes names 10.0.0.9 too, for which there is no Lease (kubernetes)\n\
             the cluster's lock is held by node cp-2 since 2026-11-22T11:20:00Z (process 7 there: berth upgrade); it is not renewed: \
             `berth upgrade` on cp-2 brings it to its end; if cp-2 is gone for good, `berth upgrade --break-lock` on another node\n"
        );
        status.upgrade = None;
        assert!(!table(&status).contains("differ"), "no version of an instance that is gone");
        status.instances.push(ClusterInstance {
            node: "cp-3".into(),
            version: Some("v1.35.4".into()),
            ..status.instances[0].clone()
        });
        let differ = "versions differ: v1.35.4 on cp-3; v1.36.3 on cp-1: upgrade the others, or repeat the upgrade that failed\n";
        assert!(table(&status).ends_with(differ), "{}", table(&status));
        status.instances.clear();
        assert!(table(&status).starts_with("no instance has a Lease"));
    }
}
