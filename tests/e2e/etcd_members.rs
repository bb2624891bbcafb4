//! Three real members of etcd: the members that a bridge uses, the leader, and the members that the
//! node's kube-apiserver dials.

use crate::grant::on_a_node;
use crate::support::eventually;
use berth_bridge::etcd::gateway::Gateway;
use berth_bridge::etcd::{EtcdPlan, examine_etcds};
use berth_bridge::report::Report;
use berth_testing::{create_ca, issue_certificate};
use libtest_mimic::Failed;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Addresses of the members, each with etcd's usual ports. The first member runs on the tested
/// node, in a network namespace.
const MEMBERS: [&str; 3] = ["127.0.0.1", "127.79.0.2", "127.79.0.3"];

struct Member(Child);

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_member(etcd: &str, dir: &Path, ip: &str) -> Result<Member, Failed> {
    let (clients, peers) = (format!("https://{ip}:2379"), format!("http://{ip}:2380"));
    let all: Vec<_> = MEMBERS
        .iter()
        .map(|ip| format!("{ip}=http://{ip}:2380"))
        .collect();
    let file = |name: &str| dir.join(name).display().to_string();
    let mut command = Command::new(etcd);
    // kubeadm's flags, except that members talk to each other without TLS: their certificates would
    // not hold for loopback addresses.
    for (flag, value) in [
        ("name", ip),
        ("data-dir", &file(&format!("data-{ip}"))),
        ("listen-client-urls", &clients),
        ("advertise-client-urls", &clients),
        ("listen-peer-urls", &peers),
        ("initial-advertise-peer-urls", &peers),
        ("initial-cluster", &all.join(",")),
        ("client-cert-auth", "true"),
        ("trusted-ca-file", &file("ca.crt")),
        ("cert-file", &file(&format!("{ip}.crt"))),
        ("key-file", &file(&format!("{ip}.key"))),
    ] {
        command.arg(format!("--{flag}={value}"));
    }
    let log = File::options()
        .create(true)
        .append(true)
        .open(dir.join(format!("{ip}.log")))?;
    command
        .arg("--unsafe-no-fsync")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    Ok(Member(command.spawn()?))
}

pub(crate) fn members_of_a_real_etcd(etcd: &str) -> Result<(), Failed> {
    on_a_node(&[], || on_the_node(etcd))
}

fn on_the_node(etcd: &str) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let ca = create_ca();
    let file = |name: &str| -> PathBuf { temp.path().join(name) };
    fs::write(file("ca.crt"), ca.pem())?;
    for name in MEMBERS.iter().copied().chain(["client"]) {
        // Like kubeadm's certificates, these are valid for 127.0.0.1, too.
        let (certificate, key) = issue_certificate(&ca, &[name, MEMBERS[0]]);
        fs::write(file(&format!("{name}.crt")), certificate)?;
        fs::write(file(&format!("{name}.key")), key)?;
    }
    let mut members = MEMBERS.map(|ip| start_member(etcd, temp.path(), ip).map(Some));
    let url = |at: usize| format!("https://{}:2379", MEMBERS[at]);
    let read = |name: &str| fs::read(file(name));
    let gateway = Gateway::new(
        read("ca.crt")?,
        Some((read("client.crt")?, read("client.key")?)),
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let leads = |at: usize| {
        let status = runtime.block_on(gateway.fetch_status(&url(at))).ok()?;
        Some((status.leader, status.leader == status.member)).filter(|(leader, _)| *leader != 0)
    };
    for at in 0..3 {
        eventually("a leader", || leads(at));
    }
    // The node's member has to lead.
    let own = 0;
    let id = runtime.block_on(gateway.fetch_status(&url(own)))?.member;
    let leader = (0..3)
        .find(|at| leads(*at).is_some_and(|(_, leads)| leads))
        .ok_or("nobody leads")?;
    if leader != own {
        runtime.block_on(gateway.transfer_leadership(&url(leader), id))?;
    }
    let flag = |name: &str, value: String| OsString::from(format!("--{name}={value}"));
    let path = |name: &str| file(name).display().to_string();
    let mut command = vec![
        "kube-apiserver".into(),
        flag("etcd-servers", url(own)),
        flag("etcd-cafile", path("ca.crt")),
        flag("etcd-certfile", path("client.crt")),
        flag("etcd-keyfile", path("client.key")),
    ];
    let examined = || {
        let mut report = Report::default();
        let (clusters, _) =
            runtime.block_on(examine_etcds(&command, &[], Path::to_owned, &mut report));
        (
            EtcdPlan {
                clusters,
                ..EtcdPlan::default()
            },
            report.errors,
        )
    };
    let (plan, errors) = examined();
    assert_eq!(errors, Vec::<String>::new());
    let _runs = runtime.enter();
    let keeping = plan
        .start(["127.0.0.1:1".parse()?; 2])
        .ok_or("it has no others")?;
    keeping.request_preparation();
    let state = eventually("the leadership elsewhere", || {
        runtime.block_on(tokio::time::sleep(std::time::Duration::from_millis(20)));
        Some(keeping.state()).filter(|state| state.prepared)
    });
    assert_eq!(
        (state.refused, state.notes.len()),
        (None, 1),
        "only that there is no lock: {:?}",
        state.notes
    );
    assert_eq!(leads(own).map(|(_, leads)| leads), Some(false));
    // With two members stopped, there is no majority without the node's member.
    let other = (own + 1) % 3;
    drop(members[other].as_mut().map(Option::take));
    let (_, errors) = examined();
    // Until the next election, there may be no leader either.
    for part in [
        format!("member {} (", MEMBERS[other]),
        "2 of 3 voters must serve while this node's member is away".into(),
    ] {
        assert!(
            errors.iter().any(|error| error.contains(&part)),
            "{part} is not in {errors:?}"
        );
    }
    members[other] = start_member(etcd, temp.path(), MEMBERS[other]).map(Some);
    let (mut plan, _) = eventually("its return", || {
        Some(examined()).filter(|(_, errors)| errors.is_empty())
    });
    // A bridge is possible while the node's member is away: the node's kube-apiserver dials another
    // member meanwhile.
    let cluster = plan.clusters[0].clone();
    cluster
        .dials
        .as_ref()
        .ok_or("no certificate is good for 127.0.0.1")?;
    let (_until, dropped) = tokio::sync::oneshot::channel::<()>();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let mut tasks = tokio::task::JoinSet::new();
            let _answers = cluster.follow_own_member(&mut tasks);
            tokio::select! {
                ended = tasks.join_next() => panic!("{ended:?}"),
                _ = dropped => {}
            }
        });
    });
    drop(members[own].as_mut().map(Option::take));
    let answers = || {
        runtime
            .block_on(gateway.fetch_status(&url(own)))
            .ok()
            .map(|status| status.member)
    };
    eventually("an answer of another member", || {
        answers().filter(|member| *member != id)
    });
    std::mem::take(&mut plan).replace_etcd_urls(&mut command);
    let servers: Vec<_> = (0..3).filter(|at| *at != own).map(url).collect();
    let orders = [[0, 1], [1, 0]].map(|order| {
        flag(
            "etcd-servers",
            order.map(|at: usize| servers[at].clone()).join(","),
        )
    });
    assert!(
        orders.contains(command.last().ok_or("no command")?),
        "{command:?}"
    );
    for at in [1, 2] {
        eventually("another leader", || {
            leads((own + at) % 3).filter(|(leader, _)| *leader != id)
        });
    }
    members[own] = start_member(etcd, temp.path(), MEMBERS[own]).map(Some);
    // The gRPC gateway of the node's member may still be connected to another member, and stays
    // connected as long as requests come. So the test pauses before each request.
    eventually("its own answer", || {
        std::thread::sleep(std::time::Duration::from_secs(1));
        answers().filter(|member| *member == id)
    });
    Ok(())
}
