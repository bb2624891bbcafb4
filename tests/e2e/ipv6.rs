//! `berth bridge` on nodes with IPv6, with a real kube-apiserver that accepts both families on
//! 0.0.0.0.

use crate::grant::{Cluster, on_a_node};
use crate::support::process::{berth_command, expect_status, output_of};
use berth_cluster::service::{SLICES_PATH, slice_addresses};
use berth_cluster::{Access, Client};
use libtest_mimic::Failed;
use serde_json::Value;
use std::net::IpAddr;
use std::path::Path;

/// Address that the kube-apiserver advertises.
const OWN: &str = "fd77::1";

/// Runs bridges on a node with IPv6 alone, and on a dual-stack node that prefers IPv6.
pub(crate) fn run_bridges(apiserver: &str, etcd: &str) -> Result<(), Failed> {
    let ipv6 = "-6 addr add fd77::1/128 dev lo nodad";
    bridges_of(&[ipv6], apiserver, etcd, "fd99::/112")?;
    bridges_of(
        &[ipv6, "addr add 10.77.0.1/32 dev lo"],
        apiserver,
        etcd,
        "fd99::/112,10.99.0.0/24",
    )
}

fn bridges_of(
    addresses: &[&str],
    apiserver: &str,
    etcd: &str,
    services: &str,
) -> Result<(), Failed> {
    let bridged = on_a_node(addresses, || run_bridge(apiserver, etcd, services));
    bridged.map_err(|failed| format!("{services}: {failed:?}").into())
}

/// On drop, ends the processes that a failed test left.
struct Ends<'a>(&'a Path);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        output_of(berth_command(["bridge", "end", "--now", "--state-dir"]).arg(self.0));
    }
}

fn run_bridge(apiserver: &str, etcd: &str, services: &str) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let flags = [
        format!("--advertise-address={OWN}"),
        format!("--service-cluster-ip-range={services}"),
    ];
    let mut cluster =
        Cluster::start_on(temp.path(), apiserver, etcd, [127, 0, 0, 1].into(), &flags)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(cluster.ready())?;
    let directory = temp.path().join("bridge");
    let _ends = Ends(&directory);
    let mut start = berth_command(["bridge", "start", "--settle=1s", "--state-dir"]);
    start
        .arg(&directory)
        .args(["--command", &cluster.command])
        .arg("--kubeconfig")
        .arg(&cluster.admin);
    expect_status(
        start.arg("--probe-ca").arg(temp.path().join("ca.crt")),
        0,
        &[],
    );
    let (_, status, _) =
        output_of(berth_command(["bridge", "status", "--json", "--state-dir"]).arg(&directory));
    let status: Value = serde_json::from_str(&status)?;
    assert_eq!(status["own"]["address"], format!("[{OWN}]:6443"));
    assert!(
        !status["notes"]
            .to_string()
            .contains("the Service kubernetes"),
        "{status}"
    );

    // The address of the node's clients, also while the node's kube-apiserver is away.
    let access = Access {
        server: format!("https://[{OWN}]:6443"),
        ..Access::read(&cluster.admin)?
    };
    let client = Client::new(&access).map_err(|error| error.to_string())?;
    let slices = || -> Result<Vec<Value>, Failed> {
        let list = runtime.block_on(client.get(SLICES_PATH))?;
        let is_bridges = |slice: &&Value| {
            slice["metadata"]["name"]
                .as_str()
                .is_some_and(|name| name.starts_with("berth-bridge-"))
        };
        Ok(list["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(is_bridges)
            .cloned()
            .collect())
    };
    cluster.stop_apiserver();
    let [slice] = &slices()?[..] else {
        return Err("the Service is not kept by one slice".into());
    };
    assert_eq!(slice["addressType"], "IPv6", "{slice}");
    assert!(
        slice_addresses(slice).eq([OWN.parse::<IpAddr>().unwrap()]),
        "{slice}"
    );
    cluster.start_apiserver();
    expect_status(
        berth_command(["bridge", "end", "--state-dir"]).arg(&directory),
        0,
        &[],
    );
    assert_eq!(slices()?.len(), 0);
    Ok(())
}
