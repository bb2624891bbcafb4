//! The processes of an instance, in the order of their start, and the order of their stop signals.

use super::haproxy;
use super::instance_spec::InstanceSpec;
use super::settings::Settings;
use crate::config::{Topology, Via, apiserver::format_flag};
use crate::testbed::certs::PROBE;
use berth_node::terms::Speedup;
use berth_shim::config::PassMode;
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Name of the only shim of [`Topology::Node`], used in places where other topologies have the name
/// of an instance.
pub(crate) const NODE_SHIM: &str = "node";

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
    /// Address that must accept connections before this process is started.
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
    pub(crate) fn is_bridged(&self) -> bool {
        self.via == Via::Berth && self.topology == Topology::Bridge
    }

    /// Returns the listen address of an instance that has the port alone. With a bridge, and in the
    /// run without berth that the bridge is compared with, the instance listens on all addresses,
    /// as under kubeadm.
    pub(crate) fn listen_address(&self, address: SocketAddr) -> SocketAddr {
        let all = self.topology == Topology::Bridge && matches!(self.via, Via::Berth | Via::None);
        if all {
            (Ipv4Addr::UNSPECIFIED, address.port()).into()
        } else {
            address
        }
    }

    /// Returns the process shared by all instances, which outlives them. `None` if there is no
    /// shared process.
    pub(crate) fn shared_process(&self, settings: &Settings) -> Option<ProcessSpec> {
        let node = self.via == Via::Berth && self.topology == Topology::Node;
        node.then(|| node_shim(settings, NODE_SHIM))
    }

    /// Returns the processes of an instance, in the order of their start. `own` is an address for
    /// the instance alone, for ways in which berth does not choose one.
    pub(crate) fn process_specs(
        &self,
        settings: &Settings,
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
        let mut command = instance.command(settings);
        match self.via {
            Via::Berth => match self.topology {
                Topology::Bridge => {
                    if instance.apiserver.is_simulated() {
                        command.push(format_flag(
                            "stand-in-bridge-name",
                            instance.temporary_instance_spec().name,
                        ));
                    }
                    command.extend(listen_flags(
                        self.listen_address(settings.address),
                        settings.address,
                    ));
                    vec![apiserver(command)]
                }
                Topology::Run => {
                    let mut argv = berth_command("run", settings, name);
                    argv.extend(shim_options(settings));
                    argv.push("--".into());
                    argv.append(&mut command);
                    vec![ProcessSpec {
                        role: Role::Unit,
                        argv,
                        awaits: None,
                    }]
                }
                topology => {
                    let mut exec = berth_command("exec", settings, name);
                    exec.push("--log-format=json".into());
                    exec.extend(pass_option(settings));
                    exec.push("--".into());
                    exec.append(&mut command);
                    if topology == Topology::Node {
                        return vec![apiserver(exec)];
                    }
                    let mut serve = berth_command("serve", settings, name);
                    serve.extend(shim_options(settings));
                    // The shim comes first, as if it were an init container. A kubelet may start a
                    // pod's other containers in any order.
                    vec![proxy(serve, None), apiserver(exec)]
                }
            },
            Via::Haproxy => {
                command.extend(listen_flags(own, settings.address));
                let file = settings.dir.join(haproxy::file_name(name));
                vec![
                    apiserver(command),
                    proxy(
                        vec!["haproxy".into(), "-db".into(), "-f".into(), file.into()],
                        Some(own),
                    ),
                ]
            }
            Via::PortSharing => {
                command.extend(listen_flags(settings.address, settings.address));
                command.push("--permit-port-sharing=true".into());
                vec![apiserver(command)]
            }
            Via::None => {
                command.extend(listen_flags(
                    self.listen_address(settings.address),
                    settings.address,
                ));
                vec![apiserver(command)]
            }
        }
    }

    /// Returns the process `berth bridge` for a running instance. `run` is COMMAND, which replaces
    /// the instance.
    pub(crate) fn bridge_spec(
        &self,
        settings: &Settings,
        running: &InstanceSpec,
        own: SocketAddr,
        limits: Limits,
        run: Vec<OsString>,
    ) -> ProcessSpec {
        let parts = self.process_specs(settings, running, own);
        let command: Vec<_> = parts
            .iter()
            .take(1)
            .flat_map(|part| &part.argv)
            .map(|word| word.to_string_lossy())
            .collect();
        let mut argv: Vec<OsString> = vec![
            settings.berth.clone().into(),
            "bridge".into(),
            format_flag("state-dir", settings.bridge_directory()),
            format!("--command={}", shell_words::join(command)).into(),
            format!("--settle={}ms", limits.settle.as_millis()).into(),
            format!("--ready-timeout={}ms", limits.ready.as_millis()).into(),
        ];
        argv.extend(probe_options(settings));
        argv.extend(speedup_option(settings));
        // A simulated apiserver has no Service `kubernetes`.
        if !running.apiserver.is_simulated() {
            argv.push(format_flag("kubeconfig", settings.certs.kubeconfig_file()));
        }
        argv.push("--".into());
        argv.extend(run);
        ProcessSpec {
            role: Role::Bridge,
            argv,
            awaits: None,
        }
    }

    /// Returns the process `berth bridge end`.
    pub(crate) fn bridge_end_spec(&self, settings: &Settings) -> ProcessSpec {
        let argv = vec![
            settings.berth.clone().into(),
            "bridge".into(),
            "end".into(),
            format_flag("state-dir", settings.bridge_directory()),
        ];
        ProcessSpec {
            role: Role::Bridge,
            argv,
            awaits: None,
        }
    }

    /// Returns groups of roles to stop, each role with its stop signal. A group gets its signals
    /// when the previous group has ended. Processes that still run after the grace period are
    /// killed.
    pub(crate) fn stop_groups(&self) -> Vec<Vec<(Role, Signal)>> {
        let apiserver = (Role::Apiserver, Signal::SIGTERM);
        let proxy = match self.via {
            Via::Haproxy => (Role::Proxy, haproxy::STOP_SIGNAL),
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
    pub(crate) fn relay_role(&self) -> Option<Role> {
        match (self.via, self.topology) {
            (Via::PortSharing | Via::None, _) | (Via::Berth, Topology::Bridge) => None,
            (Via::Berth, Topology::Run) => Some(Role::Unit),
            _ => Some(Role::Proxy),
        }
    }
}

/// Returns the shim of all instances.
fn node_shim(settings: &Settings, name: &str) -> ProcessSpec {
    let mut argv = berth_command("serve", settings, name);
    argv.push("--discover".into());
    argv.extend(shim_options(settings));
    ProcessSpec {
        role: Role::Proxy,
        argv,
        awaits: None,
    }
}

/// Returns a subcommand of berth with its listen address, run directory and instance.
fn berth_command(command: &str, settings: &Settings, instance: &str) -> Vec<OsString> {
    vec![
        settings.berth.clone().into(),
        command.into(),
        format!("--listen={}", settings.address).into(),
        format_flag("run-dir", settings.run_dir()),
        format!("--instance={instance}").into(),
    ]
}

/// Returns the options with which shims and bridges probe an apiserver.
fn probe_options(settings: &Settings) -> Vec<OsString> {
    let certs = &settings.certs;
    let mut options = vec![format_flag("probe-ca", &certs.ca_file)];
    if settings.probe_with_certificate {
        options.push(format_flag("probe-cert", certs.cert_file(PROBE)));
        options.push(format_flag("probe-key", certs.key_file(PROBE)));
    }
    options
}

/// Returns `--pass` if it differs from the default, because another berth may not know the option.
fn pass_option(settings: &Settings) -> Option<OsString> {
    (settings.pass != PassMode::Relay).then(|| format!("--pass={}", settings.pass.as_str()).into())
}

/// Returns `--speedup` if tests set it, because another berth may not know the option.
fn speedup_option(settings: &Settings) -> Option<OsString> {
    (settings.speedup != Speedup::NONE).then(|| format!("--speedup={}", settings.speedup).into())
}

/// Returns the options of a shim.
fn shim_options(settings: &Settings) -> Vec<OsString> {
    let mut options = probe_options(settings);
    options.push("--log-format=json".into());
    options.extend(pass_option(settings));
    options.extend(speedup_option(settings));
    options
}

/// Returns the listen flags of an apiserver that berth does not start.
pub(crate) fn listen_flags(address: SocketAddr, advertised: SocketAddr) -> Vec<OsString> {
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
            let groups = Layout { via, topology }.stop_groups();
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
        // The shim of all instances goes on, so only the apiserver is stopped. Under port sharing,
        // and with berth's bridge, an instance has no relay.
        assert_eq!(stopped(Via::Berth, Topology::Node), [[Apiserver]]);
        assert_eq!(stopped(Via::PortSharing, Topology::Sidecar), [[Apiserver]]);
        assert_eq!(stopped(Via::Berth, Topology::Bridge), [[Apiserver]]);
        assert_eq!(
            stopped(Via::Haproxy, Topology::Bridge),
            [[Apiserver, Proxy]]
        );
    }
}
