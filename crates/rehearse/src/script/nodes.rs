//! The script of several nodes: start all, load by the Service `kubernetes` and by their addresses, upgrade one after
//! the other, then lose one.

use super::{LOOK, Play, SETTLE, instance, start_load};
use crate::apiserver::{flag, this};
use crate::fault::Fault;
use crate::instance::Instance;
use crate::load::{admit, grant};
use crate::monitor::{Monitor, RECONCILED, names};
use crate::network::Node;
use crate::plan::{Nodes, Plan, Via};
use crate::progress::Progress;
use crate::record::{Named, Recorder, Stamp};
use crate::setting::Setting;
use crate::stage::{Error, Stage, Stages};
use crate::topology::{Part, Role};
use berth_cluster::lease::lease_name;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::{sleep, timeout};

/// Name of kube-proxy where an instance's is expected.
const KUBE_PROXY: &str = "kube-proxy";

/// How long the Service may need to be as it should: kube-apiserver looks every 10 s who is there and forgets who was not
/// for 15 s, and a slice of berth's goes 30 s after another node came.
const SERVICE_WITHIN: Duration = Duration::from_secs(60);

/// Plays it.
pub(super) async fn play(
    plan: &Plan,
    nodes: &Nodes,
    stages: &mut Stages,
    recorder: &Arc<Recorder>,
    progress: &Progress,
) -> Result<(), Error> {
    let monitor = Monitor::new(&stages.front().setting);
    let addresses: Vec<SocketAddr> = stages.nodes.iter().map(|stage| stage.setting.address).collect();
    // Aborted with this future when it is dropped.
    let mut background = tokio::task::JoinSet::new();
    let service = background.spawn(monitor.clone().watch_service(addresses.clone(), Arc::clone(recorder)));
    let via = stages.front().layout.via;
    let mut cluster =
        Cluster { plan, via, recorder, progress, monitor, addresses, running: Vec::new(), leases: Vec::new() };

    cluster.start(stages).await?;
    cluster.start_proxy(&nodes.kube_proxy, stages).await?;
    cluster.settle().await?;

    let dialled: Vec<_> = stages.nodes.iter().map(|stage| (name(stage), stage.setting.address)).collect();
    let load = start_load(plan, stages.front(), &dialled, recorder, progress).await?;
    for fault in plan.faults.iter().filter(|fault| fault.fails_the_upgrade()) {
        let old = cluster.running[0].clone();
        cluster.at(&mut stages.nodes[0]).failing_upgrade(&old, *fault).await?;
    }
    for upgrade in 1..=plan.upgrades {
        for number in 0..stages.nodes.len() {
            cluster.upgrade(number, upgrade, &mut stages.nodes[number]).await?;
        }
        sleep(plan.timing.phase).await;
    }
    let last = stages.nodes.len() - 1;
    for fault in plan.faults.iter().filter(|fault| fault.is_of_a_node()) {
        cluster.lose(*fault, last, &mut stages.nodes[last]).await?;
        sleep(plan.timing.phase).await;
    }
    service.abort();
    super::finish(load, recorder).await;
    progress.say("load is over, stop all nodes");
    for (stage, running) in stages.nodes.iter_mut().zip(cluster.running.clone()) {
        cluster.at(stage).stop(&running).await;
    }
    Ok(())
}

struct Cluster<'a> {
    plan: &'a Plan,
    via: Via,
    recorder: &'a Recorder,
    progress: &'a Progress,
    monitor: Monitor,
    addresses: Vec<SocketAddr>,
    /// One a node.
    running: Vec<Instance>,
    /// What the shims of these have.
    leases: Vec<String>,
}

impl Cluster<'_> {
    /// One node's part.
    fn at<'b>(&'b self, stage: &'b mut Stage) -> Play<'b> {
        let monitor = self.monitor.at(stage.setting.address);
        Play { plan: self.plan, stage, recorder: self.recorder, progress: self.progress, monitor }
    }

    /// Starts all nodes at once, and gives the shims of each what they may do.
    async fn start(&mut self, stages: &mut Stages) -> Result<(), Error> {
        self.running = stages.nodes.iter().map(|stage| instance(self.plan, Some(&name(stage)), 0)).collect();
        for (stage, first) in stages.nodes.iter_mut().zip(&self.running) {
            // A rehearsal before this one may have ended while it was away.
            stage.node().map_or(Ok(()), Node::join).map_err(|e| Error::Unavailable(format!("no network: {e}")))?;
            stage.open()?;
            self.at(stage).start(first).await?;
        }
        for (stage, first) in stages.nodes.iter_mut().zip(&self.running) {
            self.at(stage).joined(first).await?;
            self.at(stage).first(first).await?;
        }
        let setting = &stages.nodes[0].setting;
        grant(setting.address, &setting.certs).await.map_err(Error::Unavailable)?;
        let worker = stages.front().setting.clone();
        for setting in stages.nodes.iter().map(|stage| &stage.setting).chain([&worker]) {
            let Some(node) = &setting.node else { continue };
            admit(self.addresses[0], &setting.certs, &node.name, setting.address.ip())
                .await
                .map_err(Error::Unavailable)?;
        }
        if self.via == Via::Berth {
            for (stage, first) in stages.nodes.iter().zip(&self.running) {
                allow(&stage.setting).await?;
                self.leases.push(lease_name(&name(stage), &first.name));
            }
        }
        Ok(())
    }

    /// Starts kube-proxy, and waits until clients come to an instance by it. It watches through the first node, which
    /// stays.
    async fn start_proxy(&self, program: &Path, stages: &mut Stages) -> Result<(), Error> {
        let stage = stages.front();
        let kubeconfig = admin(&stage.setting, self.addresses[0])?;
        let argv = vec![
            program.into(),
            "--proxy-mode=nftables".into(),
            flag("kubeconfig", kubeconfig),
            format!("--hostname-override={}", name(stage)).into(),
            "--healthz-bind-address=127.0.0.1:10256".into(),
            // The machine's own limits of conntrack are not the rehearsal's to set.
            "--conntrack-max-per-core=0".into(),
            "--conntrack-tcp-timeout-established=0s".into(),
            "--conntrack-tcp-timeout-close-wait=0s".into(),
        ];
        stage.spawn(KUBE_PROXY, &Part { role: Role::Service, argv, awaits: None })?;
        let why = tokio::select! {
            () = self.monitor.ready() => {
                self.progress.say(&format!("kube-proxy sends who dials {} to them", stage.setting.address));
                return Ok(());
            }
            status = stage.over(KUBE_PROXY) => format!("ended before it was of use ({status})"),
            () = sleep(SERVICE_WITHIN) => format!("sent nobody to an apiserver within {SERVICE_WITHIN:?}"),
        };
        Err(stage.failed(KUBE_PROXY, why).await)
    }

    /// Waits until the Service is as it is on any day, and each shim has its Lease.
    async fn settle(&self) -> Result<(), Error> {
        let one = self.addresses.len() == 1;
        if self.via == Via::Berth {
            let alone = if one { "" } else { ", and the Service no slice but kube-apiserver's own" };
            self.progress.say(&format!("wait until each shim has its Lease{alone}"));
        }
        let alone = |named: &Named| one || named.iter().all(|(slice, all)| slice == RECONCILED || all.is_empty());
        let settled = async {
            self.monitor.at(self.addresses[0]).leases(&self.leases).await;
            self.monitor.service_is(|named| self.all_named(named) && alone(named)).await;
        };
        timeout(SERVICE_WITHIN, settled).await.map_err(|_| {
            let named = self.recorder.look(|r| r.named.last().map(|(_, named)| format!("{named:?}")));
            Error::Unavailable(format!(
                "after {SERVICE_WITHIN:?} there is not a Lease for each of {}, or the Service kubernetes names {}, not each node once",
                self.leases.join(", "),
                named.unwrap_or_else(|| "nobody".into())
            ))
        })
    }

    fn all_named(&self, named: &Named) -> bool {
        self.addresses.iter().all(|address| names(named, address.ip()))
    }

    async fn all_back(&self) {
        if timeout(SERVICE_WITHIN, self.monitor.service_is(|named| self.all_named(named))).await.is_err() {
            let trouble = format!("the Service kubernetes did not name all nodes for {SERVICE_WITHIN:?} and more");
            self.recorder.note(|r| r.troubles.push(trouble));
        }
    }

    /// One node goes to the other version.
    async fn upgrade(&mut self, number: usize, upgrade: u32, stage: &mut Stage) -> Result<(), Error> {
        let mut new = instance(self.plan, Some(&name(stage)), upgrade);
        let faults =
            self.plan.faults.iter().copied().filter(|fault| !fault.fails_the_upgrade() && !fault.is_of_a_node());
        let faults: Vec<Fault> = faults.filter(|_| upgrade == 1 && number == 0).collect();
        new.fault = faults.iter().copied().find(|fault| *fault == Fault::SlowStart);
        self.at(stage).upgrade(&self.running[number], &new, &faults).await?;
        self.running[number] = new;
        // An operator goes on when all is as before, too.
        self.all_back().await;
        Ok(())
    }

    /// A node goes away, and comes back when the Service has forgotten it.
    async fn lose(&self, fault: Fault, number: usize, stage: &mut Stage) -> Result<(), Error> {
        let (running, ip) = (&self.running[number], self.addresses[number].ip());
        let Some(node) = stage.node().cloned() else { return Ok(()) };
        let failed = |error| Error::Unavailable(format!("cannot change the link of {}: {error}", node.name));
        self.progress.say(&format!("fault {fault} at {}", node.name));
        let mut play = self.at(stage);
        let place = play.inject(fault, &running.name, false);
        node.part().map_err(failed)?;
        if fault == Fault::NodeGone {
            play.stage.kill_all().await;
        }
        let forgotten = self.monitor.service_is(|named| !names(named, ip));
        if timeout(SERVICE_WITHIN, forgotten).await.is_ok() {
            play.note(place, |i| i.noticed = Some(Stamp::now()));
            self.progress.say(&format!("the Service does not name {ip} any more"));
        }
        // What the others lose from here on, nothing excuses.
        sleep(SETTLE + LOOK).await;
        node.join().map_err(failed)?;
        if fault == Fault::NodeGone {
            play.stage.open()?;
            play.start(running).await?;
        }
        play.joined(running).await?;
        self.all_back().await;
        play.over(place);
        self.recorder.note(|r| {
            let gone = r.injected.get(place).and_then(|injected| injected.noticed);
            let again = r.named.iter().find(|(at, named)| gone.is_some_and(|gone| *at > gone) && names(named, ip));
            let again = again.map(|(at, _)| *at);
            r.injected.get_mut(place).map(|injected| injected.named_again = again).unwrap_or_default();
        });
        Ok(())
    }
}

fn name(stage: &Stage) -> String {
    stage.node().map(|node| node.name.clone()).unwrap_or_default()
}

/// An admin's kubeconfig for another program; its file.
fn admin(setting: &Setting, server: SocketAddr) -> Result<PathBuf, Error> {
    let path = setting.dir.join(format!("admin-{}.conf", server.ip()));
    let write = std::fs::write(&path, setting.certs.kubeconfig(server));
    write.map_err(|error| Error::Unavailable(format!("cannot write {}: {error}", path.display())))?;
    Ok(path)
}

/// `berth grant` for the shims of a node.
async fn allow(setting: &Setting) -> Result<(), Error> {
    let Some(node) = &setting.node else { return Ok(()) };
    let mut command = Command::new(this());
    command.arg("grant").arg(flag("kubeconfig", admin(setting, setting.address)?));
    command.arg(flag("write", setting.kubeconfig(node))).arg(format!("--node={}", node.name));
    command.args([format!("--listen={}", setting.address), format!("--uid={}", nix::unistd::geteuid())]);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let failed = |why: String| Error::Unavailable(format!("berth grant --node {}: {}", node.name, why.trim()));
    let output = output.map_err(|error| failed(error.to_string()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failed(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}
