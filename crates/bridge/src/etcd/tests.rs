//! Tests against three small servers that answer like members.

use super::keeping::Keeping;
use super::*;
use berth_testing::etcd::Members;
use berth_testing::{Objects, Server, etcd, serve_with};
use berth_upgrade::lock::{self, Claim, Holder, Lock};
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::timeout;

/// A test that takes longer than this hangs.
const HANG: Duration = Duration::from_secs(30);

/// A simulated node: it has the first of several members of an etcd, and a kube-apiserver with this
/// command line.
struct Node {
    etcd: Arc<Mutex<Members>>,
    servers: Vec<Server>,
    dir: tempfile::TempDir,
    command: Vec<OsString>,
}

impl Node {
    async fn new(members: usize) -> Self {
        Self::start_with_certificate(members, "127.0.0.1").await
    }

    /// Starts the members of an etcd, and returns a node. The last member's certificate is for the
    /// name `last`.
    async fn start_with_certificate(members: usize, last: &str) -> Self {
        let mut all = vec![(([127, 0, 0, 1], 0).into(), "127.0.0.1"); members];
        all[members - 1].1 = last;
        let (etcd, servers) = etcd::start_members(&all).await;
        let dir = tempfile::tempdir().unwrap();
        let (certificate, key) = servers[0].access.client.clone().unwrap();
        for (name, text) in [
            ("ca", servers[0].access.ca.clone()),
            ("crt", certificate),
            ("key", key),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        let mut node = Self {
            etcd,
            servers,
            dir,
            command: Vec::new(),
        };
        let file = |name: &str| node.dir.path().join(name).display().to_string();
        node.command = vec![
            "kube-apiserver".into(),
            format!("--etcd-servers={}", node.url(1)).into(),
            format!("--etcd-cafile={}", file("ca")).into(),
            format!("--etcd-certfile={}", file("crt")).into(),
            format!("--etcd-keyfile={}", file("key")).into(),
        ];
        node
    }

    fn url(&self, member: usize) -> String {
        self.servers[member - 1].access.server.clone()
    }

    fn change_members(&self, change: impl FnOnce(&mut Members)) {
        change(&mut self.etcd.lock().unwrap());
    }

    async fn examine_node(&self) -> (Vec<Cluster>, Report) {
        let mut report = Report::default();
        let (clusters, _) = examine_etcds(&self.command, &[], Path::to_owned, &mut report).await;
        (clusters, report)
    }

    /// Plans a bridge on this node. The test fails if the plan has errors.
    async fn plan(&self) -> EtcdPlan {
        let (clusters, report) = self.examine_node().await;
        assert_eq!(report.errors, Vec::<String>::new());
        EtcdPlan {
            clusters,
            ..EtcdPlan::default()
        }
    }
}

/// An address without a listener.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);

fn start_keeping(plan: &EtcdPlan) -> Keeping {
    plan.start([NOWHERE; 2]).unwrap()
}

/// Starts the task, and waits until etcd is prepared for COMMAND, or COMMAND is refused.
async fn prepare_etcds(plan: &EtcdPlan) -> (Keeping, EtcdState) {
    prepare_etcds_at(plan, NOWHERE).await
}

/// Like [`prepare_etcds`], with kube-apiservers at the given address.
async fn prepare_etcds_at(plan: &EtcdPlan, at: SocketAddr) -> (Keeping, EtcdState) {
    let keeping = plan.start([at; 2]).unwrap();
    keeping.request_preparation();
    let state = wait_for_state(&keeping, |state| state.prepared || state.refused.is_some()).await;
    assert_ne!(state.prepared, state.refused.is_some());
    (keeping, state)
}

/// Waits until `wanted` accepts the state, and returns the state.
async fn wait_for_state(keeping: &Keeping, wanted: impl Fn(&EtcdState) -> bool) -> EtcdState {
    let come = async {
        loop {
            let state = keeping.state();
            if wanted(&state) {
                return state;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(HANG, come)
        .await
        .unwrap_or_else(|_| panic!("{:?}", keeping.state()))
}

#[tokio::test]
async fn the_two_other_members_of_three_are_used() {
    let mut node = Node::new(3).await;
    // The last member lags behind for a moment.
    node.change_members(|etcd| etcd.revisions = vec![100, 90, 90]);
    let plan = node.plan().await;
    let mut argv = node.command.clone();
    argv.push(format!("--etcd-servers-overrides=/events#{}", node.url(1)).into());
    plan.replace_etcd_urls(&mut argv);
    let text = argv.join(" ".as_ref()).into_string().unwrap();
    let (second, third) = (node.url(2), node.url(3));
    assert!(
        text.contains(&format!("--etcd-servers={second},{third} ")),
        "{text}"
    );
    assert!(
        text.ends_with(&format!(
            "--etcd-servers-overrides=/events#{second};{third}"
        )),
        "{text}"
    );
    while let Ok((_, certificates)) = node.servers[1].asked.try_recv() {
        assert_eq!(certificates, 1, "kube-apiserver's own is shown");
    }
}

#[tokio::test]
async fn one_member_or_an_external_etcd_needs_nothing() {
    let mut node = Node::new(1).await;
    let (clusters, report) = node.examine_node().await;
    assert!(clusters.is_empty() && report.errors.is_empty() && report.notes.is_empty());
    for (servers, notes) in [
        ("https://192.0.2.1:2379,https://192.0.2.2:2379", 0),
        (&node.url(1).replacen("https", "http", 1), 1),
        ("https://127.0.0.1:1", 1),
        ("unix:///run/kine.sock", 0),
    ] {
        node.command[1] = format!("--etcd-servers={servers}").into();
        let (clusters, report) = node.examine_node().await;
        assert!(clusters.is_empty() && report.errors.is_empty());
        assert_eq!(report.notes.len(), notes, "{servers}: {:?}", report.notes);
    }
    node.command[1] = format!("--etcd-servers={}", node.url(1)).into();
    node.command.remove(2);
    assert_eq!(node.examine_node().await.1.notes.len(), 1);
}

#[tokio::test]
async fn too_few_others_are_refused_and_each_is_named() {
    let node = Node::new(3).await;
    node.change_members(|etcd| etcd.stopped.push(2));
    let (clusters, report) = node.examine_node().await;
    let errors = report.errors;
    assert!(
        clusters.is_empty() && errors.len() == 2 && errors[0].contains("cp-2 (2)"),
        "{errors:?}"
    );
    // Two mistakes: this node's member answers at another member's URL, and a certificate is for an
    // address that is not the member's.
    let node = Node::new(3).await;
    let own = node.url(1);
    node.change_members(|etcd| etcd.list[2]["clientURLs"] = json!([own]));
    assert_eq!(node.examine_node().await.1.errors.len(), 2);
    let node = Node::start_with_certificate(3, "127.0.0.9").await;
    assert_eq!(node.examine_node().await.1.errors.len(), 2);
}

#[tokio::test]
async fn the_leadership_is_moved_before_command() {
    let node = Node::new(3).await;
    let keeping = start_keeping(&node.plan().await);
    let unlocked = wait_for_state(&keeping, |state| !state.notes.is_empty()).await;
    assert!(!unlocked.prepared && unlocked.notes.len() == 1);
    keeping.request_preparation();
    let prepared = wait_for_state(&keeping, |state| state.prepared).await;
    assert_eq!(node.etcd.lock().unwrap().transfers, ["2"]);
    assert_eq!(prepared.notes, unlocked.notes);
}

#[tokio::test]
async fn the_other_members_are_checked_again_before_command() {
    // With five members, the loss of one more member is refused although a majority remains,
    // because kube-apiserver was started with the URLs of all four other members.
    for (members, stops) in [(3, 3), (5, 4)] {
        let node = Node::new(members).await;
        let plan = node.plan().await;
        node.change_members(|etcd| etcd.stopped.push(stops));
        assert!(prepare_etcds(&plan).await.1.refused.is_some());
        assert!(
            node.etcd.lock().unwrap().transfers.is_empty(),
            "nothing is moved in vain"
        );
    }
}

#[tokio::test]
async fn a_leadership_that_stays_is_a_note_and_no_failure() {
    let node = Node::new(3).await;
    let plan = node.plan().await;
    node.change_members(|etcd| etcd.is_stubborn = true);
    let prepared = prepare_etcds(&plan).await.1;
    assert!(
        prepared.prepared && prepared.notes.len() == 2,
        "{prepared:?}"
    );
    // Another member leads already, so no move of the leadership is requested.
    node.change_members(|etcd| (etcd.is_stubborn, etcd.leader) = (false, 3));
    assert_eq!(prepare_etcds(&plan).await.1.notes.len(), 1);
    assert!(node.etcd.lock().unwrap().transfers.is_empty());
    let refused = plan.clusters[0]
        .gateway
        .transfer_leadership(&node.url(2), 3)
        .await;
    assert!(refused.unwrap_err().contains("etcdserver: not leader"));
}

#[tokio::test]
async fn the_clusters_lock_is_held_until_the_end() {
    let node = Node::new(3).await;
    let cluster = Objects::default();
    let objects = cluster.clone();
    let api = serve_with(move |request| objects.answer(request)).await;
    let client = Client::new(&api.access).unwrap();
    let at = api
        .access
        .server
        .trim_start_matches("https://")
        .trim_end_matches("/k")
        .parse()
        .unwrap();
    let plan = EtcdPlan {
        lock: Some(client.clone()),
        ..node.plan().await
    };
    let (keeping, held) = prepare_etcds_at(&plan, at).await;
    assert_eq!((held.prepared, held.notes), (true, Vec::new()));
    let lease = Holder::parse(&cluster.get(lock::LOCK_PATH).unwrap());
    assert!(
        !lease.changed,
        "it expires where a bridge is killed: {lease:?}"
    );
    drop(keeping);
    timeout(HANG, async {
        while cluster.get(lock::LOCK_PATH).is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    // Another node is being upgraded.
    let other = Holder {
        upgrade: "u".into(),
        node: "cp-2".into(),
        changed: true,
        ..lease
    };
    Lock::new(&client, Claim::new(other, false))
        .acquire(&Default::default())
        .await
        .unwrap();
    assert!(prepare_etcds_at(&plan, at).await.1.refused.is_some());
    // If no API answers, the bridge refuses COMMAND only if the lock was requested explicitly.
    let mut plan = plan;
    let unlocked = prepare_etcds(&plan).await.1;
    assert!(
        unlocked.prepared && unlocked.notes.len() == 1,
        "{unlocked:?}"
    );
    plan.needs_lock = true;
    let refused = prepare_etcds(&plan).await.1.refused.unwrap();
    assert!(refused.starts_with("--kubeconfig: "), "{refused}");
}

#[tokio::test]
async fn this_nodes_member_is_probed_past_the_steering() {
    let mut node = Node::new(3).await;
    // The arguments no longer name a client certificate: not every etcd asks for one.
    node.command.truncate(3);
    let mut cluster = node.plan().await.clusters.remove(0);
    cluster.dials = None;
    let mut tasks = JoinSet::new();
    let answers = cluster.follow_own_member(&mut tasks);
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(*answers.borrow());
    // A stopping etcd keeps its listener, and completes no handshake.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for own in [silent.local_addr().unwrap(), NOWHERE] {
        cluster.own = format!("https://{own}");
        let mut answers = cluster.follow_own_member(&mut tasks);
        let stopped = timeout(HANG, answers.wait_for(|answers| !answers)).await;
        assert!(stopped.is_ok_and(|stopped| stopped.is_ok()), "{own}");
    }
}
