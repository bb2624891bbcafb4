//! The processes of an instance, in the order of their start, and the order of their stop signals.

use super::haproxy;
use super::instance_spec::InstanceSpec;
use super::settings::StageSetting;
use crate::config::{Topology, Via, apiserver::flag};
use crate::testbed::certs::PROBE;
use berth_node::terms::Speedup;
use berth_shim::config::PassMode;
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Name of the only shim of [`Topology::Node`] where an instance's name is expected.
pub(crate) const NODE: &str = "node";

/// Role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The apiserver. `berth exec` turns into the apiserver.
    Apiserver,
    /// The relay: `berth serve` or HAProxy.
    Proxy,
    /// `berth run`: a shim with its apiserver as a child.
    Unit,
    /// `berth bridge`, under which an instance is replaced in place.
    Bridge,
    /// etcd, which stores the objects of all instances.
    Store,
}

/// A process to start.
#[derive(Debug, Clone)]
pub(crate) struct ProcessSpec {
    pub(crate) role: Role,
    pub(crate) argv: Vec<OsString>,
    /// Address that must accept connections before the start.
    pub(crate) awaits: Option<SocketAddr>,
}

/// Time limits of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Time limit for an instance to get ready.
    pub(crate) ready: Duration,
    /// Time that an instance must then stay ready.
    pub(crate) settle: Duration,
}

/// The way in which instances share an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// The way from clients to instances.
    pub(crate) via: Via,
    /// Topology of berth's or HAProxy's processes.
    pub(crate) topology: Topology,
}

impl Layout {
    /// True if an instance is replaced in place, under a bridge.
    pub(crate) fn bridges(&self) -> bool {
        self.via == Via::Berth && self.topology == Topology::Bridge
    }

    /// Returns the listen address of an instance that has the port alone. With a bridge, and in a
    /// bridge's control, the instance listens on all addresses, as under kubeadm.
    pub(crate) fn bind(&self, address: SocketAddr) -> SocketAddr {
        let all = self.topology == Topology::Bridge && matches!(self.via, Via::Berth | Via::None);
        if all {
            (Ipv4Addr::UNSPECIFIED, address.port()).into()
        } else {
            address
        }
    }

    /// Returns the process that all instances share. It starts before the instances and ends after
    /// them. `None` if there is no shared process.
    pub(crate) fn shared(&self, setting: &StageSetting) -> Option<ProcessSpec> {
        let node = self.via == Via::Berth && self.topology == Topology::Node;
        node.then(|| discover(setting, NODE))
    }

    /// Returns the processes of an instance, in the order of their start. `own` is an address for
    /// the instance alone, for ways in which berth does not choose one.
    pub(crate) fn parts(
        &self,
        setting: &StageSetting,
        instance: &InstanceSpec,
        own: SocketAddr,
    ) -> Vec<ProcessSpec> {
        let apiserver = |argv| ProcessSpec {
            role: Role::Apiserver,
            argv,
            awaits: None,
        };
        let proxy = |argv, awaits| ProcessSpec {
            role: Role::Proxy,
            argv,
            awaits,
        };
        let name = &instance.name;
        let mut command = instance.command(setting);
        match self.via {
            Via::Berth => match self.topology {
                Topology::Bridge => {
                    if instance.apiserver.is_simulated() {
                        command.push(flag("stand-in-bridge-name", instance.temporary().name));
                    }
                    command.extend(listen(self.bind(setting.address), setting.address));
                    vec![apiserver(command)]
                }
                Topology::Run => {
                    let mut argv = berth("run", setting, name);
                    argv.extend(shim(setting));
                    argv.push("--".into());
                    argv.append(&mut command);
                    vec![ProcessSpec {
                        role: Role::Unit,
                        argv,
                        awaits: None,
                    }]
                }
                topology => {
                    let mut exec = berth("exec", setting, name);
                    exec.push("--log-format=json".into());
                    exec.extend(pass(setting));
                    exec.push("--".into());
                    exec.append(&mut command);
                    if topology == Topology::Node {
                        return vec![apiserver(exec)];
                    }
                    let mut serve = berth("serve", setting, name);
                    serve.extend(shim(setting));
                    // The kubelet starts an init container first, and the containers of a pod in
                    // any order.
                    vec![proxy(serve, None), apiserver(exec)]
                }
            },
            Via::Haproxy => {
                command.extend(listen(own, setting.address));
                let file = setting.dir.join(haproxy::file(name));
                vec![
                    apiserver(command),
                    proxy(
                        vec!["haproxy".into(), "-db".into(), "-f".into(), file.into()],
                        Some(own),
                    ),
                ]
            }
            Via::PortSharing => {
                command.extend(listen(setting.address, setting.address));
                command.push("--permit-port-sharing=true".into());
                vec![apiserver(command)]
            }
            Via::None => {
                command.extend(listen(self.bind(setting.address), setting.address));
                vec![apiserver(command)]
            }
        }
    }

    /// Returns `berth bridge` over a running instance, which the command `run` replaces.
    pub(crate) fn bridge(
        &self,
        setting: &StageSetting,
        running: &InstanceSpec,
        own: SocketAddr,
        limits: Limits,
        run: Vec<OsString>,
    ) -> ProcessSpec {
        let parts = self.parts(setting, running, own);
        let command: Vec<_> = parts
            .iter()
            .take(1)
            .flat_map(|part| &part.argv)
            .map(|word| word.to_string_lossy())
            .collect();
        let mut argv: Vec<OsString> = vec![
            setting.berth.clone().into(),
            "bridge".into(),
            flag("state-dir", setting.bridge()),
            format!("--command={}", shell_words::join(command)).into(),
            format!("--settle={}ms", limits.settle.as_millis()).into(),
            format!("--ready-timeout={}ms", limits.ready.as_millis()).into(),
        ];
        argv.extend(probe(setting));
        argv.extend(speedup(setting));
        // A simulated apiserver has no Service `kubernetes`.
        if !running.apiserver.is_simulated() {
            argv.push(flag("kubeconfig", setting.certs.kubeconfig_file()));
        }
        argv.push("--".into());
        argv.extend(run);
        ProcessSpec {
            role: Role::Bridge,
            argv,
            awaits: None,
        }
    }

    /// Returns the process that ends a bridge.
    pub(crate) fn end_bridge(&self, setting: &StageSetting) -> ProcessSpec {
        let argv = vec![
            setting.berth.clone().into(),
            "bridge".into(),
            "end".into(),
            flag("state-dir", setting.bridge()),
        ];
        ProcessSpec {
            role: Role::Bridge,
            argv,
            awaits: None,
        }
    }

    /// Returns the roles to stop in groups, each with its signal. A group gets its signal after the
    /// group before has ended. Processes left after the grace period are killed.
    pub(crate) fn stop(&self) -> Vec<Vec<(Role, Signal)>> {
        let apiserver = (Role::Apiserver, Signal::SIGTERM);
        let proxy = match self.via {
            Via::Haproxy => (Role::Proxy, haproxy::STOP),
            _ => (Role::Proxy, Signal::SIGTERM),
        };
        match (self.via, self.topology) {
            (Via::PortSharing | Via::None, _) | (Via::Berth, Topology::Node | Topology::Bridge) => {
                vec![vec![apiserver]]
            }
            (Via::Berth, Topology::Run) => vec![vec![(Role::Unit, Signal::SIGTERM)]],
            // A kubelet stops a restartable init container after the other containers have ended.
            (_, Topology::NativeSidecar) => vec![vec![apiserver], vec![proxy]],
            _ => vec![vec![apiserver, proxy]],
        }
    }

    /// Returns the role of the relay to an instance. `None` if there is no relay.
    pub(crate) fn relays(&self) -> Option<Role> {
        match (self.via, self.topology) {
            (Via::PortSharing | Via::None, _) | (Via::Berth, Topology::Bridge) => None,
            (Via::Berth, Topology::Run) => Some(Role::Unit),
            _ => Some(Role::Proxy),
        }
    }
}

/// Returns the shim of all instances.
fn discover(setting: &StageSetting, name: &str) -> ProcessSpec {
    let mut argv = berth("serve", setting, name);
    argv.push("--discover".into());
    argv.extend(shim(setting));
    ProcessSpec {
        role: Role::Proxy,
        argv,
        awaits: None,
    }
}

/// Returns a subcommand of berth with its listen address, run directory and instance.
fn berth(command: &str, setting: &StageSetting, instance: &str) -> Vec<OsString> {
    vec![
        setting.berth.clone().into(),
        command.into(),
        format!("--listen={}", setting.address).into(),
        flag("run-dir", setting.run_dir()),
        format!("--instance={instance}").into(),
    ]
}

/// Returns the options of probes.
fn probe(setting: &StageSetting) -> Vec<OsString> {
    let certs = &setting.certs;
    let mut options = vec![flag("probe-ca", &certs.ca_file)];
    if setting.probe_with_certificate {
        options.push(flag("probe-cert", certs.cert_file(PROBE)));
        options.push(flag("probe-key", certs.key_file(PROBE)));
    }
    options
}

/// Returns `--pass` if it differs from the default, because another berth may not know the option.
fn pass(setting: &StageSetting) -> Option<OsString> {
    (setting.pass != PassMode::Relay).then(|| format!("--pass={}", setting.pass.as_str()).into())
}

/// Returns `--speedup` if tests set it, because another berth may not know the option.
fn speedup(setting: &StageSetting) -> Option<OsString> {
    (setting.speedup != Speedup::NONE).then(|| format!("--speedup={}", setting.speedup).into())
}

/// Returns the options of a shim.
fn shim(setting: &StageSetting) -> Vec<OsString> {
    let mut options = probe(setting);
    options.push("--log-format=json".into());
    options.extend(pass(setting));
    options.extend(speedup(setting));
    options
}

/// Returns the listen flags of an apiserver that berth does not start.
pub(crate) fn listen(address: SocketAddr, advertised: SocketAddr) -> Vec<OsString> {
    vec![
        format!("--bind-address={}", address.ip()).into(),
        format!("--secure-port={}", address.port()).into(),
        format!("--advertise-address={}", advertised.ip()).into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_topology_stops_its_processes_in_order() {
        use Role::{Apiserver, Proxy, Unit};
        let stopped = |via, topology| {
            let groups = Layout { via, topology }.stop();
            groups
                .into_iter()
                .map(|group| group.into_iter().map(|(role, _)| role).collect())
                .collect::<Vec<Vec<_>>>()
        };
        for via in [Via::Berth, Via::Haproxy] {
            assert_eq!(stopped(via, Topology::Sidecar), [[Apiserver, Proxy]]);
            assert_eq!(
                stopped(via, Topology::NativeSidecar),
                [[Apiserver], [Proxy]]
            );
        }
        assert_eq!(stopped(Via::Berth, Topology::Run), [[Unit]]);
        assert_eq!(stopped(Via::Haproxy, Topology::Run), [[Apiserver, Proxy]]);
        // The shim goes on. Without a shim, only the apiserver is stopped.
        assert_eq!(stopped(Via::Berth, Topology::Node), [[Apiserver]]);
        assert_eq!(stopped(Via::PortSharing, Topology::Sidecar), [[Apiserver]]);
        assert_eq!(stopped(Via::Berth, Topology::Bridge), [[Apiserver]]);
        assert_eq!(
            stopped(Via::Haproxy, Topology::Bridge),
            [[Apiserver, Proxy]]
        );
    }
}
