//! The script of several nodes: start all, load by the Service `kubernetes` and by their addresses, upgrade one after
//! the other, then lose one.
//!
//! kube-proxy, and what is seen of the Service, come from one more kube-apiserver, the *observer*. It stays, and writes no
//! address: an instance that stops would not show what it does then.

use super::{POLL, Play, SETTLE, instance, next, start_load, storm, watch_gates};
use crate::apiserver::{flag, this};
use crate::context::Context;
use crate::event::{EventKind, FaultStep, Named, RECONCILED, names};
use crate::fault::{Fault, Standby};
use crate::instance::InstanceSpec;
use crate::load::{create_node, grant};
use crate::monitor::Monitor;
use crate::netns::Namespace;
use crate::network::WORKER;
use crate::plan::{Nodes, Via};
use crate::setting::StageSetting;
use crate::stage::{Error, Stage, Stages, command};
use crate::stamp::Stamp;
use crate::topology::{ProcessSpec, Role, listen};
use berth_cluster::lease::lease_name;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Names where an instance's is expected.
const KUBE_PROXY: &str = "kube-proxy";
const OBSERVER: &str = "observer";

/// Where the observer is.
const OBSERVER_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(WORKER), 6443);

/// How long the Service may need to be as it should: kube-apiserver lists its peers every 10 s and forgets those that were away
/// for 15 s, and a slice of berth's goes 30 s after another node came.
const SERVICE_WITHIN: Duration = Duration::from_secs(60);

pub(super) async fn play(context: &Context<'_>, nodes: &Nodes, stages: &mut Stages) -> Result<(), Error> {
    let plan = context.plan;
    let monitor = Monitor::new(&stages.front().setting).at(OBSERVER_ADDRESS);
    let addresses: Vec<SocketAddr> = stages.nodes.iter().map(|stage| stage.setting.address).collect();
    let Some(worker) = stages.front().node().map(|node| node.namespace.clone()) else { return Ok(()) };
    let (running, leases) = (Vec::new(), Vec::new());
    let mut cluster = Cluster { context, monitor, worker, addresses, running, leases };
    cluster.observe(stages.front()).await?;
    // Aborted with this future when it is dropped.
    let mut background = tokio::task::JoinSet::new();
    let service = background.spawn(cluster.monitor.clone().watch_service(Arc::clone(&context.recorder)));

    cluster.start(stages).await?;
    cluster.start_proxy(&nodes.kube_proxy, stages.front()).await?;
    cluster.settle().await?;

    let dialed: Vec<_> = stages.nodes.iter().map(|stage| (name(stage), stage.setting.address)).collect();
    watch_gates(context, &stages.front().setting, &mut background);
    let load = start_load(context, stages.front(), &dialed).await?;
    for fault in plan.faults.iter().filter(|fault| fault.fails_the_upgrade()) {
        let old = cluster.running[0].clone();
        cluster.at(&mut stages.nodes[0]).failing_upgrade(&old, *fault).await?;
    }
    for upgrade in 1..=plan.upgrades {
        for number in 0..stages.nodes.len() {
            cluster.upgrade(number, upgrade, &mut stages.nodes[number]).await?;
        }
        storm(context, &stages.front().setting).await?;
        sleep(plan.timing.phase).await;
    }
    let last = stages.nodes.len() - 1;
    for fault in plan.faults.iter().filter(|fault| fault.is_of_a_node()) {
        cluster.lose(*fault, last, &mut stages.nodes[last]).await?;
        sleep(plan.timing.phase).await;
    }
    service.abort();
    super::finish(load, context).await;
    context.print("load ended, stop all nodes");
    for (stage, running) in stages.nodes.iter_mut().zip(cluster.running.clone()) {
        cluster.at(stage).stop(&running).await;
    }
    Ok(())
}

struct Cluster<'a> {
    context: &'a Context<'a>,
    monitor: Monitor,
    /// Where kube-proxy is.
    worker: Namespace,
    addresses: Vec<SocketAddr>,
    /// One a node.
    running: Vec<InstanceSpec>,
    /// What the shims of these have.
    leases: Vec<String>,
}

impl Cluster<'_> {
    /// One node's part.
    fn at<'b>(&'b self, stage: &'b mut Stage) -> Play<'b> {
        let monitor = self.monitor.at(stage.setting.address);
        Play { context: self.context, stage, monitor }
    }

    /// Starts the observer, and waits until it is ready.
    async fn observe(&self, stage: &mut Stage) -> Result<(), Error> {
        let observer = InstanceSpec { name: OBSERVER.into(), ..instance(self.context.plan, None, 1) };
        stage.setting.certs.issue(OBSERVER)?;
        let mut argv = observer.command(&stage.setting);
        argv.extend(listen(OBSERVER_ADDRESS, OBSERVER_ADDRESS));
        argv.push("--endpoint-reconciler-type=none".into());
        stage.spawn(OBSERVER, &ProcessSpec { role: Role::Helper, argv, awaits: None })?;
        let within = self.context.plan.timing.ready_within;
        let ready = stage.until(OBSERVER, "ready", within, async |_| self.monitor.is_ready().await).await;
        ready.map(drop).map_err(Error::into_unavailable)
    }

    /// Starts all nodes at once, and gives the shims of each what they may do.
    async fn start(&mut self, stages: &mut Stages) -> Result<(), Error> {
        self.running = stages.nodes.iter().map(|stage| instance(self.context.plan, Some(&name(stage)), 0)).collect();
        for (stage, first) in stages.nodes.iter_mut().zip(&self.running) {
            stage.open()?;
            self.at(stage).start(first).await?;
        }
        for (stage, first) in stages.nodes.iter_mut().zip(&self.running) {
            self.at(stage).joined(first).await?;
            self.at(stage).first(first).await?;
        }
        let certs = Arc::clone(&stages.front().setting.certs);
        grant(OBSERVER_ADDRESS, &certs).await.map_err(Error::Unavailable)?;
        let node = |stage: &Stage| (name(stage), stage.setting.address.ip());
        let worker = (name(stages.front()), IpAddr::V4(WORKER));
        for (name, ip) in stages.nodes.iter().map(node).chain([worker]) {
            create_node(OBSERVER_ADDRESS, &certs, &name, ip).await.map_err(Error::Unavailable)?;
        }
        if self.context.via == Via::Berth {
            for (stage, first) in stages.nodes.iter().zip(&self.running) {
                grant_shims(&stage.setting).await?;
                self.leases.push(lease_name(&name(stage), &first.name));
            }
        }
        Ok(())
    }

    /// Starts kube-proxy, and waits until clients come to an instance by it.
    async fn start_proxy(&self, program: &Path, stage: &mut Stage) -> Result<(), Error> {
        let kubeconfig = stage.setting.certs.write_kubeconfig(OBSERVER_ADDRESS)?;
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
        stage.spawn(KUBE_PROXY, &ProcessSpec { role: Role::Helper, argv, awaits: None })?;
        let service = stage.setting.address;
        let by_service = self.monitor.at(service);
        let sends = async |_: &Stage| by_service.is_ready().await;
        let sends = stage.until(KUBE_PROXY, "sending clients to an apiserver", SERVICE_WITHIN, sends).await;
        sends.map_err(Error::into_unavailable)?;
        self.context.print(&format!("kube-proxy sends clients of {service} to them"));
        Ok(())
    }

    /// Waits until each shim has its Lease, and the Service is as it is on any day.
    async fn settle(&self) -> Result<(), Error> {
        if self.context.via == Via::Berth {
            self.context.print("wait until each shim has its Lease");
        }
        timeout(SERVICE_WITHIN, self.monitor.leases(&self.leases)).await.map_err(|_| {
            let leases = self.leases.join(", ");
            Error::Unavailable(format!(
                "after {SERVICE_WITHIN:?} there are not all of the Leases {leases} in berth-system: the shims' logs say why (--berth may be \
                 of a version without --cluster)"
            ))
        })?;
        self.usual().await
    }

    /// Waits until the Service has each node's address, where there are several in kube-apiserver's own slice alone.
    async fn usual(&self) -> Result<(), Error> {
        let one = self.addresses.len() == 1;
        let alone = |named: &Named| one || named.iter().all(|(slice, all)| slice == RECONCILED || all.is_empty());
        let usual = self.monitor.service_is(|named| self.all_named(named) && alone(named));
        timeout(SERVICE_WITHIN, usual).await.map_err(|_| {
            let seen = self.monitor.named();
            let slice = |(name, all): (&String, &BTreeSet<IpAddr>)| format!("{name}: {}", Vec::from_iter(all).len());
            Error::Unavailable(format!(
                "after {SERVICE_WITHIN:?} the Service kubernetes does not name each node, by kube-apiserver's own slice alone; addresses \
                 by slice: {}",
                seen.iter().map(slice).collect::<Vec<_>>().join(", ")
            ))
        })
    }

    fn all_named(&self, named: &Named) -> bool {
        self.addresses.iter().all(|address| names(named, address.ip()))
    }

    /// Waits until the Service names each node; whether it does.
    async fn all_back(&self) -> bool {
        let back = timeout(SERVICE_WITHIN, self.monitor.service_is(|named| self.all_named(named))).await.is_ok();
        if !back {
            let trouble = format!("the Service kubernetes did not name all nodes for {SERVICE_WITHIN:?} and more");
            self.context.trouble(trouble);
        }
        back
    }

    /// One node goes to the other version.
    async fn upgrade(&mut self, number: usize, upgrade: u32, stage: &mut Stage) -> Result<(), Error> {
        let (new, faults) = next(self.context.plan, Some(&name(stage)), upgrade, upgrade == 1 && number == 0);
        self.at(stage).upgrade(&self.running[number], &new, &faults).await?;
        self.running[number] = new;
        // An operator goes on when all is as before, too.
        self.all_back().await;
        Ok(())
    }

    /// Waits until the rules that kube-proxy has in the kernel do not name an address.
    async fn unproxied(&self, ip: IpAddr) {
        loop {
            let mut nft = command("nft".as_ref(), Some(&self.worker));
            let rules = nft.args(["-nn", "list", "table", "ip", "kube-proxy"]).output().await;
            let rules = rules.ok().filter(|rules| rules.status.success());
            if rules.is_some_and(|rules| !String::from_utf8_lossy(&rules.stdout).contains(&format!(" {ip} . "))) {
                return;
            }
            sleep(POLL).await;
        }
    }

    /// A node goes away, and comes back when the Service has forgotten it.
    async fn lose(&self, fault: Fault, number: usize, stage: &mut Stage) -> Result<(), Error> {
        let (running, ip) = (&self.running[number], self.addresses[number].ip());
        let Some(node) = stage.node().cloned() else { return Ok(()) };
        // Of two nodes, the one that is not upgraded is there alone, and its own slice stays for a while.
        self.usual().await?;
        let failed = |error| Error::Unavailable(format!("cannot change the link of {}: {error}", node.name));
        self.context.print(&format!("fault {fault} at {}", node.name));
        let mut play = self.at(stage);
        let place = play.inject(fault, &running.name, Standby::Sibling);
        node.link_down().map_err(failed)?;
        if fault == Fault::NodeGone {
            play.stage.kill_all().await;
        }
        let mut gone = None;
        let forgotten = self.monitor.service_is(|named| !names(named, ip));
        if timeout(SERVICE_WITHIN, forgotten).await.is_ok() {
            gone = Some(Stamp::now());
            self.context.step(place, FaultStep::Noticed);
            self.context.print(&format!("the Service does not name {ip} any more"));
        }
        if timeout(SERVICE_WITHIN, self.unproxied(ip)).await.is_ok() {
            self.context.step(place, FaultStep::Unproxied);
        }
        // What is lost by the Service from here on, nothing excuses.
        sleep(SETTLE).await;
        node.link_up().map_err(failed)?;
        self.context.step(place, FaultStep::Linked);
        if fault == Fault::NodeGone {
            play.stage.open()?;
            play.start(running).await?;
        }
        play.joined(running).await?;
        self.context.step(place, FaultStep::Listened);
        if self.all_back().await {
            let again = gone.and_then(|gone| {
                self.context.recorder.read(|log| {
                    log.iter().find_map(|event| match &event.what {
                        EventKind::Service { after, named } if event.at > gone && names(named, ip) => Some(*after),
                        _ => None,
                    })
                })
            });
            if let Some(again) = again {
                self.context.step(place, FaultStep::Named(again));
            }
            play.log_fault_end(place);
        }
        Ok(())
    }
}

fn name(stage: &Stage) -> String {
    stage.node().map(|node| node.name.clone()).unwrap_or_default()
}

/// `berth grant` for the shims of a node.
async fn grant_shims(setting: &StageSetting) -> Result<(), Error> {
    let Some(node) = &setting.node else { return Ok(()) };
    let mut command = command(&this(), None);
    let admin = setting.certs.write_kubeconfig(OBSERVER_ADDRESS)?;
    command.arg("grant").arg(flag("kubeconfig", admin)).arg(flag("write", setting.kubeconfig(node)));
    command.arg(format!("--node={}", node.name)).arg(format!("--listen={}", setting.address));
    command.arg(format!("--uid={}", nix::unistd::geteuid()));
    let failed = |why: String| Error::Unavailable(format!("berth grant --node {}: {}", node.name, why.trim()));
    let output = command.output().await.map_err(|error| failed(error.to_string()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failed(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}
