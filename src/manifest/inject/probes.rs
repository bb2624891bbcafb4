//! What the kubelet asks, what the shim asks, and the hook before the stop.

use super::{BINARY, Change, LEAST, Node, PROBES, Planner, parts};
use serde_json::{Map, Value, json};

/// What asks a port.
const KINDS: [&str; 3] = ["httpGet", "tcpSocket", "grpc"];

impl Planner<'_> {
    pub(super) fn probes(&mut self, port: u16) {
        for name in PROBES {
            let probe = self.manifest.apiserver().get(name);
            let asks = probe.map_or(Asks::Elsewhere, |probe| self.asks(probe, port));
            match (probe, asks) {
                (Some(probe), Asks::Shared) => self.probe(name, probe),
                (Some(probe), Asks::Name(port)) => {
                    self.wrong(
                        probe.line,
                        format!("{name} asks the port {port} by its name, which goes with ports: write its number"),
                    );
                }
                (None, _) if name == "readinessProbe" => {
                    self.original.fields.insert(name.into(), Value::Null);
                    let new = json!({"exec": asking(name), "periodSeconds": LEAST, "timeoutSeconds": LEAST});
                    self.edit(
                        self.container.key(name),
                        Change::Set(new),
                        "an update waits until the new instance is ready",
                    );
                }
                _ => {}
            }
        }
    }

    /// Lets a probe ask berth, as patiently as it asked before.
    fn probe(&mut self, name: &str, probe: &Node) {
        let path = self.container.key(name);
        let mut original = Map::new();
        let reason = "the shared port may be answered by the other instance; berth asks this one";
        self.edit(path.key("exec"), Change::Set(asking(name)), reason);
        for (kind, _) in probe.entries() {
            let Some(kind) = kind.text().filter(|kind| KINDS.contains(kind)) else { continue };
            original.insert(kind.into(), probe.get(kind).map_or(Value::Null, Node::value));
            self.edit(path.key(kind), Change::Remove, "berth asks instead");
        }
        for (key, default) in [("periodSeconds", 10), ("timeoutSeconds", 1)] {
            let old = probe.get(key).map(Node::value);
            if old.as_ref().map_or(Some(default), Value::as_u64).is_none_or(|seconds| seconds < LEAST) {
                original.insert(key.into(), old.unwrap_or(Value::Null));
                self.edit(path.key(key), Change::Set(LEAST.into()), "an exec probe starts a process each time");
            }
        }
        self.original.fields.insert(name.into(), Value::Object(original));
    }

    fn asks(&self, probe: &Node, port: u16) -> Asks {
        let asked = KINDS.into_iter().find_map(|kind| probe.at(&[kind, "port"]));
        let Some(asked) = asked.and_then(Node::text) else { return Asks::Elsewhere };
        let ports = self.manifest.apiserver().get("ports");
        let number = match asked.parse::<u16>() {
            Ok(number) => Some(number),
            Err(_) => ports.and_then(|ports| ports.named(asked)?.1.get("containerPort")?.text()?.parse().ok()),
        };
        match number {
            Some(number) if number == port => Asks::Shared,
            _ if asked.parse::<u16>().is_ok() => Asks::Elsewhere,
            _ => Asks::Name(asked.to_owned()),
        }
    }

    /// The authority that the probe trusts where no option says one: kubeadm's.
    pub(super) fn authority(&mut self) -> Option<String> {
        if self.options.probing.trusts {
            return None;
        }
        let folder = |flag: &str| {
            self.manifest.flag(flag).and_then(|flag| flag.value.rsplit_once('/').map(|(folder, _)| folder))
        };
        match self.manifest.flag("client-ca-file") {
            Some(ca) if folder("client-ca-file") == folder("tls-cert-file") => Some(ca.value.to_owned()),
            _ => {
                let line = self.manifest.apiserver().line;
                self.wrong(line, "which authority issued the apiserver's serving certificate cannot be seen: give --probe-ca FILE, or --probe-insecure");
                None
            }
        }
    }

    pub(super) fn probe_files(&mut self) -> Vec<String> {
        let ca = if self.options.probing.trusts {
            None
        } else {
            self.manifest.flag("client-ca-file").map(|flag| flag.value.to_owned())
        };
        if let Some(flag) = self.manifest.flag("anonymous-auth")
            && flag.value == "false"
            && !self.options.probing.credentials
        {
            self.wrong(flag.line, "anonymous requests are refused, so the probe needs credentials: give --probe-cert and --probe-key, or --probe-token-file");
        }
        ca.into_iter().chain(self.options.probing.files.iter().cloned()).collect()
    }

    /// A mount for the shim through which it sees a file of the apiserver's.
    pub(super) fn mount(&mut self, file: &str) -> Option<Value> {
        let found = self.manifest.mount_of(file);
        let Some(mount) = found else {
            let line = self.manifest.apiserver().line;
            self.wrong(line, format!("{file}, which the probe needs, is in no volumeMount of the container: mount it"));
            return None;
        };
        let name = mount.get("name").and_then(Node::text).unwrap_or_default();
        let volume = self.manifest.pod().get("volumes").and_then(|volumes| volumes.named(name));
        Some(parts::file_mount(
            &mount.value(),
            file,
            volume.is_some_and(|(_, volume)| volume.get("hostPath").is_some()),
        ))
    }

    pub(super) fn pre_stop(&mut self) {
        if self.manifest.apiserver().at(&["lifecycle", "preStop"]).is_some() {
            self.notes.push(
                "the container's preStop hook is kept: if it can, let it run `berth drain --wait --if-sibling` first"
                    .into(),
            );
            return;
        }
        let hook = json!({"exec": {"command": [BINARY, "drain", "--wait", "--if-sibling"]}});
        let path = self.container.key("lifecycle").key("preStop");
        self.edit(path, Change::Set(hook), "the sibling takes new connections before kube-apiserver hears of the stop");
    }
}

/// Whom a probe asks.
enum Asks {
    /// The port that is shared.
    Shared,
    /// Another port, or nobody.
    Elsewhere,
    /// A port of this name, which is not the shared one.
    Name(String),
}

/// The `exec` of a probe.
fn asking(probe: &str) -> Value {
    json!({"command": [BINARY, if probe == "readinessProbe" { "ready" } else { "live" }]})
}
