//! The kube-apiserver in a manifest: document, pod, container and command line.

use super::edit::{Path, Step};
use super::{Container, Problem};
use berth_cluster::yaml::{YamlNode, parse_documents};
use std::net::IpAddr;

/// Kinds of objects that contain a pod, and the path from the object to the pod.
const POD_KINDS: [(&str, &[&str]); 5] = [
    ("Pod", &[]),
    ("Deployment", &["spec", "template"]),
    ("DaemonSet", &["spec", "template"]),
    ("ReplicaSet", &["spec", "template"]),
    ("StatefulSet", &["spec", "template"]),
];

/// Programs that would run the apiserver as a child process.
const SHELLS: [&str; 5] = ["sh", "bash", "ash", "dash", "busybox"];

/// An annotation that only kubeadm's manifests have.
const KUBEADM_ANNOTATION: &str = "kubeadm.kubernetes.io/kube-apiserver.advertise-address.endpoint";

/// A manifest file that was parsed and has one kube-apiserver.
#[derive(Debug, Clone)]
pub struct Manifest {
    text: String,
    root: YamlNode,
    document: usize,
    template: &'static [&'static str],
    container: usize,
    name: String,
    /// [`Manifest::arguments`] with expanded variables. `{instance}` stands for values that differ
    /// from pod to pod.
    words: Vec<String>,
}

/// Flags with a value that berth reads or changes. [`berth_exec::args`] refuses the first three
/// without a value.
const VALUED_FLAGS: [&str; 8] = [
    "bind-address",
    "secure-port",
    "advertise-address",
    "audit-log-path",
    "cert-dir",
    "debug-socket-path",
    "shutdown-delay-duration",
    "shutdown-watch-termination-grace-period",
];

/// A flag of the kube-apiserver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flag<'a> {
    /// The value with expanded variables; empty if the flag has no value.
    pub value: &'a str,
    /// The value as written.
    pub written: &'a str,
    /// Line of the value.
    pub line: usize,
    /// Index of the argument with the value, counted through `command` and `args`.
    pub argument: usize,
    /// True if the value is an argument after the flag's name (no `=`).
    pub apart: bool,
}

impl Manifest {
    /// Reads a file and finds the kube-apiserver by its command, or else by the container's name.
    ///
    /// # Errors
    /// The file is no YAML, has no kube-apiserver or several, or has arguments that cannot be
    /// changed.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let mut found = Vec::new();
        for (document, root) in parse_documents(text)?.into_iter().enumerate() {
            let kind = root.get_text("kind").unwrap_or_default().to_owned();
            if kind == "List" {
                return Err(Problem::new(
                    root.line,
                    "kind: List: write each item of the list as a document of its own (---)",
                ));
            }
            let Some((_, template)) = POD_KINDS.into_iter().find(|(known, _)| *known == kind)
            else {
                continue;
            };
            let containers = root
                .find_path(template)
                .and_then(|pod| pod.find_path(&["spec", "containers"]));
            let containers = containers.map(YamlNode::items).unwrap_or_default();
            let by = |wanted: fn(&YamlNode) -> bool| containers.iter().position(wanted);
            let container = by(runs_apiserver)
                .or_else(|| by(|it| it.get_text("name") == Some("kube-apiserver")));
            let Some(container) = container else { continue };
            let node = &containers[container];
            let name = node.get_text("name");
            let name = name
                .ok_or_else(|| {
                    Problem::new(
                        node.line,
                        "the container has no name: give the container a name",
                    )
                })?
                .to_owned();
            // Edits find the container by its name, so no other container may have the name.
            if containers
                .iter()
                .filter(|it| it.get_text("name") == Some(&name))
                .count()
                > 1
            {
                return Err(Problem::new(
                    node.line,
                    format!("{name} is the name of several containers: rename all but one"),
                ));
            }
            found.push(Self {
                text: text.to_owned(),
                root,
                document,
                template,
                container,
                name,
                words: Vec::new(),
            });
        }
        let mut found = found.into_iter();
        match (found.next(), found.next()) {
            (None, _) => Err(Problem::new(
                1,
                "there is no kube-apiserver: no Pod, Deployment or DaemonSet has a container that runs kube-apiserver or is named kube-apiserver",
            )),
            (Some(mut first), None) => {
                first.words = first.expand_arguments();
                first.check_command().map(|()| first)
            }
            (Some(first), Some(second)) => Err(Problem::new(
                second.root.line,
                format!(
                    "a second kube-apiserver; the first kube-apiserver is in line {}: put each kube-apiserver into a file of its own",
                    first.root.line
                ),
            )),
        }
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    /// Index of kube-apiserver's document among the YAML documents of the file.
    pub fn document_index(&self) -> usize {
        self.document
    }

    pub fn root(&self) -> &YamlNode {
        &self.root
    }

    /// The object's kind: `Pod`, `Deployment` and so on.
    pub fn kind(&self) -> &str {
        self.root.get_text("kind").unwrap_or_default()
    }

    /// True if kubeadm wrote the manifest, and will write it again.
    pub fn is_kubeadm(&self) -> bool {
        self.annotation(KUBEADM_ANNOTATION).is_some()
    }

    /// The pod or the pod template.
    pub fn template(&self) -> &YamlNode {
        self.root.find_path(self.template).unwrap_or(&self.root)
    }

    /// Path of [`Manifest::template`].
    pub fn template_path(&self) -> Path {
        Path(
            self.template
                .iter()
                .map(|key| Step::Key((*key).to_owned()))
                .collect(),
        )
    }

    /// The pod's `spec`.
    pub fn pod(&self) -> &YamlNode {
        self.template().get("spec").unwrap_or(&self.root)
    }

    /// Path of [`Manifest::pod`].
    pub fn pod_path(&self) -> Path {
        self.template_path().key("spec")
    }

    pub fn apiserver(&self) -> &YamlNode {
        &self.pod().list("containers")[self.container]
    }

    /// Path of [`Manifest::apiserver`].
    pub fn apiserver_path(&self) -> Path {
        self.pod_path().key("containers").name(&self.name)
    }

    /// Index of the apiserver's container in the pod.
    pub fn apiserver_index(&self) -> usize {
        self.container
    }

    /// An annotation of the pod.
    pub fn annotation(&self, name: &str) -> Option<&YamlNode> {
        self.template()
            .find_path(&["metadata", "annotations", name])
    }

    /// kube-apiserver's container, with its pod.
    pub fn container(&self) -> Container<'_> {
        Container::new(self.apiserver(), self.pod())
    }

    /// The containers of one of the pod's lists, `containers` or `initContainers`.
    pub fn containers(&self, list: &str) -> impl Iterator<Item = Container<'_>> {
        let pod = self.pod();
        let containers = pod.list(list);
        containers.iter().map(move |node| Container::new(node, pod))
    }

    /// The containers that run as long as the pod: `containers`, and native sidecars.
    pub fn long_running_containers(&self) -> impl Iterator<Item = Container<'_>> {
        let sidecars = self.containers("initContainers");
        sidecars
            .filter(|it| it.node().get_text("restartPolicy") == Some("Always"))
            .chain(self.containers("containers"))
    }

    /// The containers that run as long as the pod, except kube-apiserver's and berth's.
    pub fn other_containers(&self) -> impl Iterator<Item = Container<'_>> {
        self.long_running_containers()
            .filter(|it| it.name() != self.name && !it.runs_berth())
    }

    /// The command line of kube-apiserver's container: `command`, then `args`.
    pub fn arguments(&self) -> Vec<&YamlNode> {
        self.container().arguments()
    }

    /// Path of one of [`Manifest::arguments`].
    pub fn argument_path(&self, argument: usize) -> Path {
        let command = self
            .apiserver()
            .get("command")
            .map_or(0, |command| command.items().len());
        match argument.checked_sub(command) {
            None => self.apiserver_path().key("command").index(argument),
            Some(index) => self.apiserver_path().key("args").index(index),
        }
    }

    /// Finds a flag by its name without dashes. If the flag is repeated, the last one counts.
    pub fn flag(&self, name: &str) -> Option<Flag<'_>> {
        self.flags(name).pop()
    }

    /// Finds all flags with this name, given without dashes: some flags may be repeated.
    pub fn flags(&self, name: &str) -> Vec<Flag<'_>> {
        let arguments = self.arguments();
        let found = self.words.iter().enumerate().filter_map(|(at, word)| {
            let (flag, value) = match word.split_once('=') {
                Some((flag, value)) => (flag, Some(value)),
                None => (word.as_str(), None),
            };
            if flag.strip_prefix("--")?.replace('_', "-") != name {
                return None;
            }
            let next = self.words.get(at + 1).filter(|_| value.is_none());
            let apart = next.is_some();
            let argument = at + usize::from(apart);
            let value = value.or(next.map(String::as_str)).unwrap_or_default();
            let whole = arguments[argument].text().unwrap_or_default();
            let written = if apart {
                whole
            } else {
                whole.split_once('=').map_or(value, |(_, written)| written)
            };
            Some(Flag {
                value,
                written,
                line: arguments[argument].line,
                argument,
                apart,
            })
        });
        found.collect()
    }

    /// Major and minor number of the kube-apiserver, from its image's tag.
    pub fn version(&self) -> Option<(u64, u64)> {
        let tag = image_tag(self.image())?;
        let numbers = tag
            .strip_prefix('v')
            .unwrap_or(tag)
            .split(|c: char| !c.is_ascii_digit());
        let mut numbers = numbers.map(|number| number.parse().ok());
        Some((numbers.next()??, numbers.next()??)).filter(|(major, _)| *major == 1)
    }

    pub fn image(&self) -> &str {
        self.apiserver().get_text("image").unwrap_or_default()
    }

    /// The apiserver's secure port.
    ///
    /// # Errors
    /// The value is no port.
    pub fn secure_port(&self) -> Result<u16, Problem> {
        let Some(flag) = self.flag("secure-port") else {
            return Ok(6443);
        };
        let port = flag.value.parse().ok().filter(|port| *port != 0);
        port.ok_or_else(|| {
            Problem::new(
                flag.line,
                format!(
                    "--secure-port={} is no port: give a port, such as 6443",
                    flag.value
                ),
            )
        })
    }

    /// The address of --bind-address. `None` if the apiserver listens on all addresses.
    pub fn bind_address(&self) -> Option<IpAddr> {
        self.address("bind-address")
            .filter(|ip| !ip.is_unspecified())
    }

    /// The address of --advertise-address. `None` for 0.0.0.0, as in kube-apiserver. The address
    /// may be a router's, and need not be one of the node.
    pub fn advertise_address(&self) -> Option<IpAddr> {
        self.address("advertise-address")
            .filter(|ip| !ip.is_unspecified())
    }

    fn address(&self, flag: &str) -> Option<IpAddr> {
        parse_address(self.flag(flag)?.value)
    }

    /// Returns the path as text, relative to the apiserver's container, or else to the pod.
    pub fn relative_path(&self, path: &Path) -> String {
        let whole = path.to_string();
        let above = [self.apiserver_path(), self.pod_path(), self.template_path()];
        let within = above
            .iter()
            .find_map(|above| whole.strip_prefix(&format!("{above}.")));
        within.map_or_else(|| whole.clone(), ToOwned::to_owned)
    }

    /// Returns the line of the last value along a path that exists.
    pub fn line_of(&self, path: &Path) -> usize {
        let (mut node, mut line) = (&self.root, self.root.line);
        for step in &path.0 {
            let next = match step {
                Step::Key(key) => node.find_entry(key).map(|(key, value)| (key.line, value)),
                Step::Name(name) => node.find_named(name).map(|(_, item)| (item.line, item)),
                Step::Index(index) => node.items().get(*index).map(|item| (item.line, item)),
            };
            let Some(next) = next else { break };
            (line, node) = next;
        }
        line
    }

    fn expand_arguments(&self) -> Vec<String> {
        let own = |field: &str| {
            matches!(field, "metadata.uid" | "metadata.name").then(|| "{instance}".to_owned())
        };
        let environment = self.container().environment(own);
        self.arguments()
            .iter()
            .map(|word| environment.expand(word.text().unwrap_or_default()))
            .collect()
    }

    fn check_command(&self) -> Result<(), Problem> {
        let container = self.apiserver();
        for key in ["command", "args"] {
            let Some(list) = container.get(key) else {
                continue;
            };
            if list.items().is_empty() || list.items().iter().any(|item| item.text().is_none()) {
                return Err(Problem::new(
                    list.line,
                    format!("{key} is no list of strings: write a list"),
                ));
            }
        }
        let Some(command) = container.get("command") else {
            return Err(Problem::new(
                container.line,
                format!(
                    "the container {} has no command: write the command out, such as command: [kube-apiserver]",
                    self.name
                ),
            ));
        };
        let program = command.items()[0].text().unwrap_or_default();
        if SHELLS.contains(&basename(program)) {
            return Err(Problem::new(
                command.line,
                format!(
                    "the command is a shell ({program}): make kube-apiserver itself the command, so that berth can exec it"
                ),
            ));
        }
        VALUED_FLAGS
            .into_iter()
            .try_for_each(|name| self.check_flag_has_value(name))
    }

    /// Checks that a flag has a value. Otherwise the next flag would be read as the value, and
    /// vanish.
    fn check_flag_has_value(&self, name: &str) -> Result<(), Problem> {
        for flag in self.flags(name) {
            let written = self.arguments()[flag.argument];
            let fix = format!("write --{name}=VALUE, or leave the flag out");
            if flag.apart && flag.value.starts_with("--") {
                let cause = format!("--{name} has no value, {} follows", flag.value);
                return Err(Problem::new(flag.line, format!("{cause}: {fix}")));
            }
            if !flag.apart && written.text().is_some_and(|text| !text.contains('=')) {
                let cause = format!("--{name} is the last argument and has no value");
                return Err(Problem::new(flag.line, format!("{cause}: {fix}")));
            }
        }
        Ok(())
    }
}

/// An IP address, as Go reads it: a mapped IPv4 address counts as IPv4.
pub(crate) fn parse_address(text: &str) -> Option<IpAddr> {
    text.trim().parse().ok().map(|ip: IpAddr| ip.to_canonical())
}

/// True if a container's command is kube-apiserver: directly, behind hyperkube or behind berth.
fn runs_apiserver(container: &YamlNode) -> bool {
    let words: Vec<_> = container
        .list("command")
        .iter()
        .chain(container.list("args"))
        .take(5)
        .filter_map(YamlNode::text)
        .collect();
    let programs = words
        .iter()
        .skip_while(|word| basename(word) == "berth" || **word == "exec" || word.starts_with('-'));
    programs
        .take(2)
        .any(|word| !word.starts_with('-') && basename(word) == "kube-apiserver")
}

/// The last part of a path.
pub fn basename(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

/// The tag of an image.
pub fn image_tag(image: &str) -> Option<&str> {
    Some(basename(image.split('@').next()?).split_once(':')?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_error(text: &str) -> String {
        Manifest::parse(text).unwrap_err().to_string()
    }

    fn pod_with(container: &str) -> String {
        format!("kind: Pod\nspec:\n  containers:\n  - {container}\n")
    }

    #[test]
    fn a_flag_without_a_value_is_named() {
        for (words, cause) in [
            (
                "--secure-port, --v=2",
                "4: --secure-port has no value, --v=2 follows: write --secure-port=VALUE, ",
            ),
            (
                "--v=2, --audit_log_path, --secure-port=1",
                "--audit-log-path has no value, --secure-port=1 follows",
            ),
            (
                "--bind-address",
                "--bind-address is the last argument and has no value: write --bind-address=VALUE, ",
            ),
        ] {
            let refused = parse_error(&pod_with(&format!(
                "{{name: a, command: [kube-apiserver, {words}]}}"
            )));
            assert!(refused.contains(cause), "{refused}");
        }
        for words in [
            "--audit-log-path, '-'",
            "--audit-log-path=",
            "--profiling, --secure-port, 6443",
        ] {
            Manifest::parse(&pod_with(&format!(
                "{{name: a, command: [kube-apiserver, {words}]}}"
            )))
            .unwrap();
        }
    }

    #[test]
    fn finds_the_apiserver_by_command_or_name() {
        for (container, name) in [
            ("{name: a, command: [/usr/local/bin/kube-apiserver]}", "a"),
            ("{name: a, command: [/hyperkube, kube-apiserver]}", "a"),
            (
                "{name: a, command: [/x/berth, exec, --, kube-apiserver, --v=1]}",
                "a",
            ),
            (
                "{name: kube-apiserver, command: [/server]}",
                "kube-apiserver",
            ),
            (
                "{name: kube-apiserver, command: [x]}\n  - {name: b, command: [kube-apiserver]}",
                "b",
            ),
        ] {
            assert_eq!(
                Manifest::parse(&pod_with(container)).unwrap().name,
                name,
                "{container}"
            );
        }
        let second = format!(
            "kind: Service\n---\n{}",
            pod_with("{name: a, command: [kube-apiserver]}")
        );
        assert_eq!(Manifest::parse(&second).unwrap().document_index(), 1);
    }

    #[test]
    fn an_unsuitable_manifest_is_refused_with_line_and_fix() {
        let one = pod_with("{name: a, command: [kube-apiserver]}");
        for (text, why) in [
            ("kind: Pod\n", "1: there is no kube-apiserver: "),
            (
                "\nkind: List\nitems: []\n",
                "2: kind: List: write each item",
            ),
            (
                &format!("{one}---\n{one}"),
                "6: a second kube-apiserver; the first kube-apiserver is in line 1",
            ),
        ] {
            assert!(parse_error(text).starts_with(why), "{text}");
        }
        for (container, why) in [
            (
                "{command: [kube-apiserver]}",
                "4: the container has no name",
            ),
            (
                "{name: a, command: [kube-apiserver]}\n  - {name: a}",
                "4: a is the name of several containers",
            ),
            (
                "{name: kube-apiserver}",
                "no command: write the command out",
            ),
            (
                "{name: kube-apiserver, command: [/bin/sh, -c, kube-apiserver]}",
                "is a shell (/bin/sh)",
            ),
            (
                "{name: kube-apiserver, command: kube-apiserver}",
                "no list of strings",
            ),
        ] {
            assert!(
                parse_error(&pod_with(container)).contains(why),
                "{container}"
            );
        }
    }

    #[test]
    fn the_last_flag_counts_in_every_form() {
        let text = pod_with(
            "{name: a, command: [kube-apiserver, --secure_port, '7443'], args: [--v=1, --v=2, --x]}",
        );
        let manifest = Manifest::parse(&text).unwrap();
        assert_eq!(manifest.secure_port(), Ok(7443));
        assert_eq!(
            manifest
                .flag("v")
                .map(|flag| (flag.value, flag.argument, flag.apart)),
            Some(("2", 4, false))
        );
        assert_eq!(
            manifest.argument_path(4).to_string(),
            "spec.containers[a].args[1]"
        );
        assert_eq!(
            manifest
                .flag("secure-port")
                .map(|flag| (flag.argument, flag.apart)),
            Some((2, true))
        );
        assert_eq!(
            (
                manifest.flag("x").map(|flag| flag.value),
                manifest.flag("y")
            ),
            (Some(""), None)
        );
    }

    #[test]
    fn a_file_is_in_the_deepest_mount() {
        // A mount without a path mounts nothing.
        let mounts = "[{name: x, mountPath: /a}, {name: y, mountPath: /a/b/}, {name: z, mountPath: /a/bc}, v, {name: w}]";
        let text = pod_with(&format!(
            "{{name: a, command: [kube-apiserver], volumeMounts: {mounts}}}"
        ));
        let manifest = Manifest::parse(&text).unwrap();
        let of = |file| {
            manifest
                .container()
                .find_mount(file)
                .and_then(|mount| mount.get("name"))
                .and_then(YamlNode::text)
        };
        assert_eq!(
            (of("/a/b/c"), of("/a/bcd"), of("/b"), of("/a/bc")),
            (Some("y"), Some("x"), None, Some("z"))
        );
    }
}
