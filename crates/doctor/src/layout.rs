//! Finds the shim's container, and berth's options in each container, whatever the style of the
//! manifest. Options are read as berth itself reads them, from arguments and variables.

use berth_cluster::yaml::YamlNode;
use berth_manifest::{Container, Manifest};
use berth_options::{InPod, PodCommand};
use clap::builder::Resettable;
use clap::{ArgAction, CommandFactory, FromArgMatches};
use std::ffi::OsStr;

/// Placeholder for the node's address, if the manifest takes the address from the kubelet. The
/// address is from a block for documentation (RFC 5737).
pub(super) const HOST_IP: &str = "192.0.2.1";

/// berth's subcommands that a container of a control plane may run.
const COMMANDS: [&str; 3] = ["serve", "exec", "run"];

/// berth's options in a container, as far as doctor can read them.
#[derive(Debug)]
pub(super) enum ParsedOptions {
    Options(Box<PodCommand>),
    /// berth does not accept an option. The text is berth's error.
    Wrong(String),
    /// doctor cannot see some options, because they come from a ConfigMap, a Secret or another
    /// place in the cluster.
    Unseen,
}

impl ParsedOptions {
    pub(super) fn command(&self) -> Option<&PodCommand> {
        match self {
            Self::Options(command) => Some(command),
            Self::Wrong(_) | Self::Unseen => None,
        }
    }
}

/// A container that runs berth, with berth's subcommand and options.
#[derive(Debug)]
pub(super) struct BerthContainer<'a> {
    pub(super) container: Container<'a>,
    pub(super) command: &'static str,
    pub(super) parsed: ParsedOptions,
}

/// The containers of a pod that run berth.
#[derive(Debug)]
pub(super) struct Layout<'a> {
    /// kube-apiserver's container, in which `berth exec` or `berth run` starts kube-apiserver.
    pub(super) apiserver: BerthContainer<'a>,
    /// Path of the berth binary in kube-apiserver's container.
    pub(super) binary: &'a str,
    /// The container of the shim (`berth serve`). `None` with `berth run`, where
    /// [`Layout::apiserver`] is the shim too.
    pub(super) shim: Option<BerthContainer<'a>>,
}

impl<'a> Layout<'a> {
    /// Returns `None` if berth does not start kube-apiserver in this manifest.
    pub(super) fn from_manifest(manifest: &'a Manifest) -> Option<Self> {
        let apiserver = BerthContainer::from_container(manifest.container())
            .filter(|berth| matches!(berth.command, "exec" | "run"))?;
        let binary = apiserver
            .container
            .arguments()
            .first()
            .and_then(|word| word.text())
            .unwrap_or_default();
        let containers = manifest
            .containers("initContainers")
            .chain(manifest.containers("containers"));
        let shim = containers
            .filter_map(BerthContainer::from_container)
            .find(|berth| berth.command == "serve");
        Some(Self {
            apiserver,
            binary,
            shim,
        })
    }

    /// Returns the container that has the options of a shim. `None` if no container of the pod has.
    pub(super) fn serving_berth(&self) -> Option<&BerthContainer<'a>> {
        match &self.shim {
            Some(shim) => Some(shim),
            None => Some(&self.apiserver).filter(|berth| berth.command == "run"),
        }
    }
}

impl<'a> BerthContainer<'a> {
    /// Returns `None` if the container does not run berth.
    fn from_container(container: Container<'a>) -> Option<Self> {
        let words: Vec<_> = container
            .arguments()
            .iter()
            .filter_map(|word| word.text())
            .collect();
        if !container.runs_berth() {
            return None;
        }
        let words =
            &words[usize::from(!container.node().list("command").is_empty()).min(words.len())..];
        let ours = words.iter().take_while(|word| **word != "--");
        let (at, command) = ours.enumerate().find_map(|(at, word)| {
            let command = COMMANDS.into_iter().find(|command| command == word)?;
            Some((at, command))
        })?;
        Some(Self {
            container,
            command,
            parsed: parse_options(container, command, words, at),
        })
    }
}

/// Returns the uid with which a container runs. By default the uid is 0, because images of
/// kube-apiserver and of berth run as root.
pub(super) fn find_uid(container: Container<'_>) -> u32 {
    container
        .security_field("runAsUser")
        .and_then(YamlNode::number)
        .and_then(|uid| u32::try_from(uid).ok())
        .unwrap_or(0)
}

/// Parses berth's options from a container's arguments. Options that are missing there are read
/// from the container's environment variables.
fn parse_options(
    container: Container<'_>,
    command: &str,
    words: &[&str],
    at: usize,
) -> ParsedOptions {
    let variables = container.node().list("env");
    let elsewhere = |variable: &YamlNode| {
        let ours = variable
            .get_text("name")
            .is_some_and(|name| name.starts_with("BERTH_"));
        ours && variable
            .get("valueFrom")
            .is_some_and(|from| from.get("fieldRef").is_none())
    };
    if container.node().get("envFrom").is_some() || variables.iter().any(elsewhere) {
        return ParsedOptions::Unseen;
    }
    let environment = container.environment(|field| {
        Some(match field {
            "status.hostIP" | "status.podIP" => HOST_IP.to_owned(),
            field => field.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-"),
        })
    });
    let mut argv: Vec<String> = vec!["berth".into()];
    argv.extend(words[..=at].iter().map(|word| environment.expand(word)));
    let cli = InPod::command();
    let known = cli
        .find_subcommand(command)
        .into_iter()
        .flat_map(clap::Command::get_arguments);
    for arg in known.chain(cli.get_arguments()) {
        let (Some(long), Some(name)) = (arg.get_long(), arg.get_env().and_then(OsStr::to_str))
        else {
            continue;
        };
        let option = format!("--{long}");
        let given = words
            .iter()
            .any(|word| word.split('=').next() == Some(&option));
        let Some(value) = environment.get(name).filter(|_| !given) else {
            continue;
        };
        match arg.get_action() {
            ArgAction::SetTrue => match value.as_str() {
                "true" => argv.push(option),
                "false" => {}
                _ => return ParsedOptions::Wrong(format!("{name}={value}: give true or false")),
            },
            _ => argv.push(format!("{option}={value}")),
        }
    }
    argv.extend(words[at + 1..].iter().map(|word| environment.expand(word)));
    // berth's options also read environment variables. Those of doctor's own process must not
    // count.
    let without_env = |command: clap::Command| command.mut_args(|arg| arg.env(Resettable::Reset));
    let read = without_env(cli)
        .mut_subcommand(command, without_env)
        .try_get_matches_from(argv);
    match read.and_then(|matches| InPod::from_arg_matches(&matches)) {
        Ok(cli) => ParsedOptions::Options(Box::new(cli.command)),
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            ParsedOptions::Wrong(format!(
                "{}: see `berth {command} --help`",
                first.trim_start_matches("error: ")
            ))
        }
    }
}
