//! A container of a pod: command, user and mounts.

use super::basename;
use berth_cluster::yaml::YamlNode;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The command line of a probe or a hook; empty if no program is run.
pub fn exec_words(hook: &YamlNode) -> Vec<&str> {
    hook.get("exec")
        .map(|exec| {
            exec.list("command")
                .iter()
                .filter_map(YamlNode::text)
                .collect()
        })
        .unwrap_or_default()
}

/// Maximum length of a value after expansion. Without a limit, nested references could double a
/// value again and again.
const MAX_EXPANDED: usize = 4096;

/// A container's environment variables, as far as their values are known.
#[derive(Debug, Default)]
pub struct Environment<'a>(HashMap<&'a str, String>);

impl Environment<'_> {
    pub fn get(&self, name: &str) -> Option<&String> {
        self.0.get(name)
    }

    /// Expands `$(NAME)` as the kubelet does: `$$` becomes `$`, and a reference to an unknown name
    /// stays.
    pub fn expand(&self, text: &str) -> String {
        let mut out = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('$') {
            out.push_str(before);
            let named = after
                .strip_prefix('(')
                .and_then(|inner| inner.split_once(')'));
            let known = named.and_then(|(name, after)| Some((self.get(name)?.as_str(), after)));
            let (new, after) = match (after.strip_prefix('$'), known) {
                (Some(after), _) => ("$", after),
                (None, Some(known)) if out.len() + known.0.len() <= MAX_EXPANDED => known,
                _ => ("$", after),
            };
            out.push_str(new);
            rest = after;
        }
        out + rest
    }
}

/// A container and its pod.
#[derive(Debug, Clone, Copy)]
pub struct Container<'a> {
    node: &'a YamlNode,
    pod: &'a YamlNode,
}

impl<'a> Container<'a> {
    /// A container of a pod's `spec`.
    pub fn new(node: &'a YamlNode, pod: &'a YamlNode) -> Self {
        Self { node, pod }
    }

    pub fn node(self) -> &'a YamlNode {
        self.node
    }

    pub fn name(self) -> &'a str {
        self.node.get_text("name").unwrap_or_default()
    }

    /// True if the container runs berth. The command decides. A container without a command runs
    /// the entrypoint of its image; then the container's name or a variable of berth decides.
    pub fn runs_berth(self) -> bool {
        match self.node.list("command").first().and_then(YamlNode::text) {
            Some(program) => basename(program) == "berth",
            None => self.name().contains("berth") || self.variable("BERTH_LISTEN").is_some(),
        }
    }

    /// The container's command line: `command`, then `args`.
    pub fn arguments(self) -> Vec<&'a YamlNode> {
        self.node
            .list("command")
            .iter()
            .chain(self.node.list("args"))
            .collect()
    }

    /// A variable by name. The last entry of a name counts.
    pub fn variable(self, name: &str) -> Option<&'a YamlNode> {
        let all = self.node.list("env");
        all.iter()
            .rev()
            .find(|variable| variable.get_text("name") == Some(name))
    }

    /// The container's environment. References to earlier variables are expanded. `field` returns
    /// the value of a pod's field, if known.
    pub fn environment(self, field: impl Fn(&str) -> Option<String>) -> Environment<'a> {
        let mut known = Environment::default();
        for variable in self.node.list("env") {
            let Some(name) = variable.get_text("name") else {
                continue;
            };
            let value = match variable.get("valueFrom") {
                Some(from) => from
                    .find_path(&["fieldRef", "fieldPath"])
                    .and_then(YamlNode::text)
                    .and_then(&field),
                None => Some(known.expand(variable.get_text("value").unwrap_or_default())),
            };
            match value {
                Some(value) => drop(known.0.insert(name, value)),
                None => drop(known.0.remove(name)),
            }
        }
        known
    }

    /// A field of the container's security context or, if the field is missing there, of the pod's.
    pub fn security_field(self, field: &str) -> Option<&'a YamlNode> {
        let own = self.node.find_path(&["securityContext", field]);
        own.or_else(|| self.pod.find_path(&["securityContext", field]))
    }

    /// The volume mount that contains a file: the mount with the longest path.
    pub fn find_mount(self, file: &str) -> Option<&'a YamlNode> {
        let mounts = self.node.list("volumeMounts");
        let path = |mount: &YamlNode| {
            mount
                .get_text("mountPath")
                .unwrap_or_default()
                .trim_end_matches('/')
                .to_owned()
        };
        let covers = |mount: &&YamlNode| {
            let below = file
                .strip_prefix(&path(mount))
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
            below && mount.get("mountPath").is_some()
        };
        mounts
            .iter()
            .filter(covers)
            .max_by_key(|mount| path(mount).len())
    }

    /// The volume behind a mount.
    pub fn find_volume(self, mount: &YamlNode) -> Option<&'a YamlNode> {
        let name = mount.get_text("name")?;
        Some(self.pod.get("volumes")?.find_named(name)?.1)
    }

    /// Maps a path in the container to a path on the node. `None` if the path is in no hostPath.
    pub fn path_on_node(self, path: &str) -> Option<String> {
        let mount = self.find_mount(path)?;
        let field = |node: &YamlNode, key: &str| node.get_text(key).map(ToOwned::to_owned);
        let base = field(self.find_volume(mount)?.get("hostPath")?, "path")?;
        let within = field(mount, "subPath").unwrap_or_default();
        let rest = path.strip_prefix(field(mount, "mountPath")?.trim_end_matches('/'))?;
        let whole: PathBuf = Path::new(&base)
            .join(within)
            .join(rest.trim_start_matches('/'))
            .components()
            .collect();
        Some(whole.to_string_lossy().into_owned())
    }
}
