//! `berth upgrade --judge`, with apiservers that count their requests.

use super::*;
use crate::support::net::connect_from;
use crate::support::tls;

mod kills;

const OLD: &str = "v1.35.4-judged";

/// A node and its cluster. The node's apiserver has an API.
struct Judged {
    /// Declared first, so that the kubelet ends before the directories of the node are removed.
    kubelet: Option<Kubelet>,
    node: Node,
    cluster: Cluster,
}

impl Judged {
    fn new() -> Self {
        let node = Node::new(OLD);
        let cluster = Cluster::of(&[node.listen.ip()]);
        fs::create_dir(node.path("api")).unwrap();
        let (certificate, key) = &cluster.instance;
        fs::write(node.path("api/kube.crt"), certificate).unwrap();
        fs::write(node.path("api/kube.key"), key).unwrap();
        let kubelet = Kubelet::start(&node);
        node.until_joined();
        Self {
            node,
            cluster,
            kubelet: Some(kubelet),
        }
    }

    fn load(&self) -> Load {
        self.load_each(Duration::from_millis(2))
    }

    /// Starts a client that lists pods in each period.
    fn load_each(&self, period: Duration) -> Load {
        let (ca, to) = (self.cluster.ca(), self.node.listen);
        Load::start(1, Some(period), move |source| {
            let ca = ca.clone();
            let get =
                move || tls::request_page(&ca, connect_from(source.into(), to), "/api/v1/pods");
            async move {
                let answer = tokio::task::spawn_blocking(get)
                    .await
                    .map_err(|panic| panic.to_string())?;
                if answer.ends_with("items\": []}") {
                    Ok(())
                } else {
                    Err(answer)
                }
            }
        })
    }

    /// Returns a command that upgrades to the tag and judges it for some seconds once clients use
    /// it.
    fn upgrade(&self, tag: &str, options: &[&str]) -> Command {
        let manifest = self.node.new_manifest(tag);
        let mut upgrade = self.resume(options);
        upgrade.arg(manifest);
        upgrade
    }

    /// Returns a command that resumes an upgrade.
    fn resume(&self, options: &[&str]) -> Command {
        // The clients of this test are on the node.
        let mut upgrade = self
            .node
            .upgrade_in(&self.cluster, &["--judge", "--canary-local"]);
        upgrade.args(options);
        upgrade
    }
}

const SHORT: [&str; 6] = [
    "--speedup",
    "40",
    "--canary",
    "20%,50%",
    "--canary-time",
    "1s",
];

/// Options with steps that end only by a verdict.
const LONG: [&str; 6] = ["--speedup", "40", "--canary", "50%", "--canary-time", "1h"];

#[test]
fn a_good_version_goes_through_step_by_step() {
    let judged = Judged::new();
    let load = judged.load();
    let (_, log) = expect_status(&mut judged.upgrade("v1.36.3-judged", &SHORT), 0, &[]);
    let told = [
        "judged beside the old one",
        "kube-apiserver 1.36.3 behaves as 1.35",
        "20 % of new connections are for the new instance",
        "50 % of new connections are for the new instance",
        "all new connections are for the new instance",
        "judge the new instance beside the temporary instance",
        "kube-apiserver 1.36.3 behaves as 1.36",
    ];
    let mut rest = log.as_str();
    for part in told {
        (_, rest) = rest
            .split_once(part)
            .unwrap_or_else(|| panic!("{part} in {log}"));
    }
    judged.node.is_whole("v1.36.3-judged");
    load.end_without_loss();
}

#[test]
fn a_bad_version_is_sent_back_and_nothing_is_lost() {
    let judged = Judged::new();
    let load = judged.load();
    expect_status(
        &mut judged.upgrade("v1.36.3-judged-bad", &LONG),
        75,
        &[
            "the verdict is bad",
            "signal ",
            "errors ",
            "why: the verdict is bad: errors (",
            "rolled back: the old manifest serves",
        ],
    );
    judged.node.is_whole(OLD);
    // The upgrade to the bad version succeeds if its errors are accepted.
    let accepted = ["--accept", "errors", "--no-emulate"];
    expect_status(
        judged.upgrade("v1.36.3-judged-bad", &SHORT).args(accepted),
        0,
        &[],
    );
    judged.node.is_whole("v1.36.3-judged-bad");
    load.end_without_loss();
}

/// A version that fails only without emulation goes back to the emulating instance.
#[test]
fn a_version_that_is_bad_without_emulation_keeps_emulating() {
    let judged = Judged::new();
    let load = judged.load();
    let tag = "v1.36.3-judged-late";
    let mut upgrade = Running::start(&mut judged.upgrade(tag, &SHORT));
    upgrade.logs("judge the new instance beside the temporary instance");
    upgrade.kill();
    expect_status(
        &mut judged.resume(&LONG),
        75,
        &[
            "(step judge-canonical)",
            "the verdict is bad",
            "not done: ",
            "behaves as 1.35 (--emulated-version)",
        ],
    );
    let left = fs::read_to_string(judged.node.canonical()).unwrap();
    assert_eq!(
        left.replace("    - --emulated-version=1.35\n", ""),
        judged.node.manifest(tag)
    );
    assert_ne!(left, judged.node.manifest(tag));
    assert!(!judged.node.path("kept/upgrade.json").exists());
    load.end_without_loss();
}

#[test]
fn an_upgrade_killed_while_judging_can_be_resumed() {
    let judged = Judged::new();
    let load = judged.load();
    let mut upgrade = Running::start(&mut judged.upgrade("v1.36.3-judged", &LONG));
    upgrade.logs("50 % of new connections");
    upgrade.kill();
    expect_status(
        &mut judged.resume(&SHORT),
        0,
        &["is under way (step judge-temporary)"],
    );
    judged.node.is_whole("v1.36.3-judged");
    load.end_without_loss();
}

#[test]
fn an_upgrade_that_cannot_be_judged_is_refused_before_any_change() {
    let judged = Judged::new();
    let node = &judged.node;
    let v2 = node.new_manifest("v1.36.3-judged");
    let v2 = ["--judge", v2.to_str().unwrap()];
    expect_status(
        node.upgrade(&v2).env("BERTH_KUBECONFIG", "/nonexistent"),
        64,
        &[],
    );
    for wrong in [
        ["--canary", "5%,200%"],
        ["--canary-time", "500ms"],
        ["--settle", "soon"],
        ["--accept", "error"],
        ["--undecided", "perhaps"],
    ] {
        expect_status(node.upgrade(&v2).args(wrong), 64, &[wrong[1]]);
    }
    // The other cluster has another CA, so the instances' metrics cannot be read.
    let other = Cluster::of(&[node.listen.ip()]);
    expect_status(
        &mut node.upgrade_in(&other, &v2),
        69,
        &[
            "--judge: the serving instance at 127.",
            "does not give its metrics",
        ],
    );
    node.is_whole(OLD);
}
