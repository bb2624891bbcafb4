//! The kubelet's probes, the shim's probe, and the preStop hook.

use super::{Change, MIN_PROBE_SECONDS, Planner, Problem, YamlNode, basename, parts};
use crate::exec_words;
use berth_exec::args;
use berth_options::ask;
use serde_json::{Map, Value, json};
use std::net::IpAddr;
use std::time::Duration;

const PROBE_KINDS: [&str; 3] = ["httpGet", "tcpSocket", "grpc"];

/// The path that `berth live` asks for.
const LIVE_PATH: &str = "/livez";

/// The effect of a probe that asks the port which both instances share. On localhost, the port is
/// shared too if the shim listens there.
const MISTAKEN_PROBE: &str = "the kubelet judges this instance by the other instance's answer, and kills this instance when no instance answers";

impl<'a> Planner<'a> {
    /// Replaces a probe that asks the port which both instances share. The new probe asks this
    /// instance through berth. Its period and timeout are at least [`MIN_PROBE_SECONDS`] seconds.
    pub(super) fn replace_probe(&mut self, name: &str, port: u16) {
        let Some(probe) = self.manifest.apiserver().get(name) else {
            return;
        };
        match self.find_target(probe, port) {
            ProbeTarget::Own | ProbeTarget::Other(_) => return,
            ProbeTarget::Name(port) => {
                return self.add_problem(
                    probe.line,
                    format!("{name} asks the port {port} by its name, and berth inject removes named ports: write the port's number"),
                );
            }
            ProbeTarget::Program(program) => {
                let cause = format!(
                    "{name} runs {program}, which asks the shared port or localhost; {MISTAKEN_PROBE}"
                );
                return self.add_problem(
                    probe.line,
                    format!("{cause}: {}", self.suggest_fix(name, port)),
                );
            }
            ProbeTarget::Shared => {}
        }
        let path = self.container.key(name);
        let mut original = Map::new();
        let reason = "on the shared port, the other instance may answer; berth asks this instance";
        let asking = self.make_probe_exec(name);
        self.add_edit(path.key("exec"), Change::Set(asking), reason);
        for (kind, _) in probe.entries() {
            let Some(kind) = kind.text().filter(|kind| PROBE_KINDS.contains(kind)) else {
                continue;
            };
            original.insert(
                kind.into(),
                probe.get(kind).map_or(Value::Null, YamlNode::value),
            );
            self.add_edit(path.key(kind), Change::Remove, "berth asks instead");
        }
        self.raise_period(name, &mut original);
        self.original
            .fields
            .insert(name.into(), Value::Object(original));
    }

    /// Warns of a probe that asks another process, which in turn may ask the shared port.
    pub(super) fn check_probe_of_other_server(&self, name: &str, port: u16) -> Option<Problem> {
        let probe = self.manifest.apiserver().get(name)?;
        let ProbeTarget::Other(whom) = self.find_target(probe, port) else {
            return None;
        };
        let cause = format!(
            "{name} asks {whom}; if the answer comes from the shared port or localhost, {MISTAKEN_PROBE}"
        );
        Some(Problem::new(
            probe.line,
            format!("{cause}: {}", self.suggest_fix(name, port)),
        ))
    }

    /// The fix that makes a probe ask this instance.
    fn suggest_fix(&self, name: &str, port: u16) -> String {
        match self.wrapping.inserted_arguments {
            0 => format!(
                "let the probe run `{} {}`",
                self.wrapping.binary,
                probe_subcommand(name)
            ),
            _ => {
                format!(
                    "write the probe as an httpGet of the port {port}, so that berth inject can replace the probe"
                )
            }
        }
    }

    /// Raises period and timeout of an exec probe to the minimum, and records the original values.
    pub(super) fn raise_period(&mut self, name: &str, original: &mut Map<String, Value>) {
        let Some(probe) = self.manifest.apiserver().get(name) else {
            return;
        };
        for (key, default) in [("periodSeconds", 10), ("timeoutSeconds", 1)] {
            let old = probe.get(key);
            if old
                .map_or(Some(default), YamlNode::number)
                .is_none_or(|seconds| seconds < MIN_PROBE_SECONDS)
            {
                original.insert(key.into(), old.map_or(Value::Null, YamlNode::value));
                let path = self.container.key(name).key(key);
                self.add_edit(
                    path,
                    Change::Set(MIN_PROBE_SECONDS.into()),
                    "an exec probe starts a process each time",
                );
            }
        }
    }

    pub(super) fn add_readiness(&mut self) {
        let path = self
            .manifest
            .apiserver()
            .find_path(&["readinessProbe", "httpGet", "path"])
            .and_then(YamlNode::text);
        if let Some(path) = path.filter(|path| path.contains('?')) {
            self.notes.push(format!(
                "readinessProbe asks for {path}, and the shim asks for /readyz with all checks: while an excluded check fails, new connections go to another instance, if another instance is ready"
            ));
        }
        if self.manifest.apiserver().get("readinessProbe").is_some() {
            return;
        }
        let name = "readinessProbe";
        self.original.fields.insert(name.into(), Value::Null);
        let new = json!({"exec": self.make_probe_exec(name), "periodSeconds": MIN_PROBE_SECONDS, "timeoutSeconds": MIN_PROBE_SECONDS});
        self.add_edit(
            self.container.key(name),
            Change::Set(new),
            "an update waits until the new instance is ready",
        );
    }

    /// Makes the `exec` of a probe. The probe waits for an answer as long as the kubelet allows,
    /// less one second for the runtime to start it. With a shorter wait, the kubelet would kill a
    /// live apiserver under a storm of requests.
    fn make_probe_exec(&mut self, probe: &str) -> Value {
        let timeout = format!("{}s", self.probe_seconds(probe) - 1);
        let mut words = vec![
            self.wrapping.binary,
            probe_subcommand(probe),
            "--timeout",
            &timeout,
        ];
        let path = self
            .manifest
            .apiserver()
            .find_path(&[probe, "httpGet", "path"])
            .and_then(YamlNode::text);
        // A tcpSocket probe needs only an open port, so its replacement asks for /livez/ping: with
        // /livez, an outage of etcd would restart kube-apiserver.
        let connects = self
            .manifest
            .apiserver()
            .find_path(&[probe, "tcpSocket"])
            .is_some();
        // The kubelet also accepts a path without the first slash.
        let path = path.map(|path| format!("/{}", path.trim_start_matches('/')));
        let path = path.or(connects.then(|| "/livez/ping".to_owned()));
        let path = path
            .as_deref()
            .filter(|path| probe_subcommand(probe) == "live" && *path != LIVE_PATH);
        match path.map(|path| (path, ask::parse_path(path))) {
            Some((path, Ok(_))) => words.extend(["--path", path]),
            Some((path, Err(_))) => self.notes.push(format!(
                "{probe} asks for {path:?}, which is no path of a request: berth live asks for {LIVE_PATH} instead"
            )),
            None => {}
        }
        json!({"command": words})
    }

    /// Adds `--timeout` to a probe that runs `berth live` without it: one second less than the
    /// kubelet's timeout.
    pub(super) fn add_timeout(&mut self, name: &str) {
        let Some(probe) = self.manifest.apiserver().get(name) else {
            return;
        };
        let mut words = exec_words(probe);
        let patient = words
            .iter()
            .any(|word| word.starts_with("--timeout") || word.starts_with("--probe-timeout"));
        if patient || words.get(1) != Some(&"live") {
            return;
        }
        let timeout = format!("{}s", self.probe_seconds(name) - 1);
        words.extend(["--timeout", &timeout]);
        let path = self.container.key(name).key("exec").key("command");
        let reason = "without --timeout, kube-apiserver has 2s to answer, and the kubelet kills a slow kube-apiserver";
        self.add_edit(path, Change::Set(words.into()), reason);
    }

    /// Returns how many seconds the kubelet waits for a probe of berth: as in the manifest, but at
    /// least [`MIN_PROBE_SECONDS`].
    fn probe_seconds(&self, probe: &str) -> u64 {
        let timeout = self
            .manifest
            .apiserver()
            .find_path(&[probe, "timeoutSeconds"])
            .and_then(YamlNode::number);
        timeout.unwrap_or(MIN_PROBE_SECONDS).max(MIN_PROBE_SECONDS)
    }

    fn find_target(&self, probe: &YamlNode, port: u16) -> ProbeTarget {
        if probe.get("exec").is_some() {
            let words = exec_words(probe);
            return match words.first().map(|program| basename(program)) {
                None | Some("berth") => ProbeTarget::Own,
                Some(program)
                    if words
                        .iter()
                        .any(|word| names_shared_port_or_loopback(word, port)) =>
                {
                    ProbeTarget::Program(program.to_owned())
                }
                Some(program) => ProbeTarget::Other(program.to_owned()),
            };
        }
        let asked = PROBE_KINDS
            .into_iter()
            .find_map(|kind| probe.find_path(&[kind, "port"]));
        let Some(asked) = asked.and_then(YamlNode::text) else {
            return ProbeTarget::Own;
        };
        let ports = self.manifest.apiserver().get("ports");
        let number = match asked.parse::<u16>() {
            Ok(number) => Some(number),
            Err(_) => ports.and_then(|ports| {
                ports
                    .find_named(asked)?
                    .1
                    .get("containerPort")?
                    .text()?
                    .parse()
                    .ok()
            }),
        };
        match number {
            Some(number) if number == port => ProbeTarget::Shared,
            _ if asked.parse::<u16>().is_ok() => ProbeTarget::Other(format!("the port {asked}")),
            _ => ProbeTarget::Name(asked.to_owned()),
        }
    }

    /// The CA that the probe trusts, if no option names one: kubeadm's CA.
    pub(super) fn find_ca(&mut self) -> Option<&'a str> {
        if self.options.probing.trusts {
            return None;
        }
        let directory = |flag: &str| {
            self.manifest
                .flag(flag)
                .and_then(|flag| flag.value.rsplit_once('/').map(|(directory, _)| directory))
        };
        match self.manifest.flag("client-ca-file") {
            Some(ca) if directory("client-ca-file") == directory("tls-cert-file") => Some(ca.value),
            _ => {
                let line = self.manifest.apiserver().line;
                self.add_problem(line, "the manifest does not show which CA issued the apiserver's certificate: give --probe-ca FILE, or --probe-insecure");
                None
            }
        }
    }

    pub(super) fn check_anonymous(&mut self) {
        if let Some(flag) = self.manifest.flag("anonymous-auth")
            && args::parse_bool(flag.value) == Some(false)
            && !self.wrapping.credentials
            && !self.options.probing.credentials
        {
            self.add_problem(flag.line, "anonymous requests are refused, so the probe needs credentials: give --probe-cert and --probe-key, or --probe-token-file");
        }
    }

    /// Makes a mount through which the shim sees a file of the apiserver's container.
    pub(super) fn add_mount(&mut self, file: &str) -> Option<Value> {
        let found = self.manifest.container().find_mount(file);
        let Some(mount) = found else {
            let line = self.manifest.apiserver().line;
            self.add_problem(
                line,
                format!(
                    "{file}, which the probe needs, is in no volumeMount of the container: mount that file"
                ),
            );
            return None;
        };
        let name = mount.get_text("name").unwrap_or_default();
        let volume = self
            .manifest
            .pod()
            .get("volumes")
            .and_then(|volumes| volumes.find_named(name));
        Some(parts::file_mount(
            &mount.value(),
            file,
            volume.is_some_and(|(_, volume)| volume.get("hostPath").is_some()),
        ))
    }

    pub(super) fn add_pre_stop(&mut self) {
        if let Some(hook) = self
            .manifest
            .apiserver()
            .find_path(&["lifecycle", "preStop"])
        {
            if !hook_runs_drain(hook) {
                self.notes.push(
                    "the container's preStop hook is kept, and lets no sibling take over: if possible, let the hook first run \
                     `berth drain --wait --if-sibling`"
                        .into(),
                );
            }
            return;
        }
        let hook =
            json!({"exec": {"command": [self.wrapping.binary, "drain", "--wait", "--if-sibling"]}});
        let path = self.container.key("lifecycle").key("preStop");
        self.add_edit(
            path,
            Change::Set(hook),
            "the sibling takes new connections before kube-apiserver receives SIGTERM",
        );
    }

    /// How long the container's preStop hook sleeps or waits for streams, as far as the manifest
    /// shows. This time counts toward the grace period.
    pub(super) fn hook_duration(&self) -> Duration {
        let Some(hook) = self
            .manifest
            .apiserver()
            .find_path(&["lifecycle", "preStop"])
        else {
            return Duration::ZERO;
        };
        let seconds = hook
            .find_path(&["sleep", "seconds"])
            .and_then(YamlNode::number)
            .unwrap_or_default();
        let words: Vec<_> = exec_words(hook)
            .into_iter()
            .flat_map(|word| word.split([' ', '=', ';', '&', '\n']))
            .collect();
        let waits = |pair: &&[&str]| basename(pair[0]) == "sleep" || pair[0] == "--wait-streams";
        let time = |pair: &[&str]| match pair[1].parse() {
            Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
            Err(_) => humantime::parse_duration(pair[1]).ok(),
        };
        let slept = words.windows(2).filter(waits).filter_map(time);
        slept.fold(Duration::from_secs(seconds), Duration::saturating_add)
    }
}

/// True if a hook runs `berth drain --if-sibling`, directly or within another command.
fn hook_runs_drain(hook: &YamlNode) -> bool {
    let words: Vec<_> = exec_words(hook)
        .into_iter()
        .flat_map(str::split_whitespace)
        .collect();
    let drain = words
        .windows(2)
        .any(|pair| basename(pair[0]) == "berth" && pair[1] == "drain");
    drain && words.contains(&"--if-sibling")
}

/// The subcommand of berth that replaces a probe.
fn probe_subcommand(probe: &str) -> &'static str {
    if probe == "readinessProbe" {
        "ready"
    } else {
        "live"
    }
}

/// True if a word of a command names the shared port or a loopback address, where another instance
/// may listen, or nobody.
pub(super) fn names_shared_port_or_loopback(word: &str, port: u16) -> bool {
    let port = port.to_string();
    let mut parts = word.split(|c: char| !(c.is_ascii_alphanumeric() || c == '.'));
    let loopback = |part: &str| part.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
    word.contains("::1") || parts.any(|part| part == port || part == "localhost" || loopback(part))
}

enum ProbeTarget {
    /// The shared port.
    Shared,
    /// A program that asks the shared port or localhost.
    Program(String),
    /// The instance of this manifest, which berth probes, or no target at all.
    Own,
    /// Another process.
    Other(String),
    /// A named port that is not the shared port.
    Name(String),
}
