//! The command line: clap types with help texts, but no logic. The options of the commands that run
//! in a pod are in [`berth_options`].

#[cfg(feature = "operate")]
mod bridge;
#[cfg(feature = "operate")]
mod grant;
#[cfg(feature = "operate")]
mod operate;
#[cfg(feature = "rehearse")]
mod rehearse;
mod status;

use berth_options::PodCommand;
#[cfg(any(feature = "operate", feature = "rehearse"))]
use berth_options::ask::parse_duration;
use berth_options::log::LogArgs;
#[cfg(feature = "operate")]
use bridge::BRIDGE_STATUS;
#[cfg(feature = "operate")]
pub use bridge::{
    BridgeAction, BridgeArgs, BridgeDirArgs, BridgeEndArgs, BridgeRestoreArgs, BridgeStartArgs,
    Words,
};
use clap::{Arg, Parser, Subcommand};
#[cfg(feature = "operate")]
pub use grant::GrantArgs;
#[cfg(feature = "operate")]
use operate::UPGRADE_STATUS;
#[cfg(feature = "operate")]
pub use operate::{DoctorArgs, InjectArgs, JudgeArgs, ManifestArgs, UpgradeArgs};
#[cfg(feature = "rehearse")]
pub use rehearse::{RehearseArgs, StandInArgs};
pub use status::StatusArgs;
#[cfg(any(feature = "operate", feature = "rehearse"))]
use std::time::Duration;

/// Two kube-apiservers share one node and one secure port, so that an upgrade loses nothing.
#[derive(Debug, Parser)]
#[command(
    name = "berth",
    version,
    max_term_width = 100,
    mut_args(shorten_help),
    mut_subcommands(shorten_helps),
    after_long_help = "Exit status: 0 done, 1 the answer is no (not ready, something was lost), 64 wrong command line or \
                  configuration, 69 a required port or file is not available, 70 a bug in berth, 71 (rehearse) this machine \
                  was too busy for a verdict, 74 standard output cannot be written, 75 (upgrade, bridge) neither done nor \
                  rolled back: the next step is printed; (rehearse) the run proves nothing."
)]
pub struct Cli {
    /// Form and level of the log.
    #[command(flatten)]
    pub log: LogArgs,
    #[command(subcommand)]
    pub command: Command,
}

/// Parses a duration of at least one second.
#[cfg(any(feature = "operate", feature = "rehearse"))]
fn parse_seconds(text: &str) -> Result<Duration, String> {
    parse_duration(text).and_then(|time| {
        if time.as_secs() > 0 {
            Ok(time)
        } else {
            Err("at least 1s".to_owned())
        }
    })
}

/// Options that `-h` leaves out, so that its text fits a screen; `--help` has all options.
const RARE_OPTIONS: [&str; 37] = [
    "accept",
    "berth",
    "bind_wait",
    "break_lock",
    "canary_local",
    "canary_time",
    "fault",
    "first",
    "ignore_errors",
    "instance",
    "judge_requests",
    "lasts",
    "log_connections",
    "log_format",
    "log_level",
    "manifests_dir",
    "max_connections",
    "max_openings",
    "no_emulate",
    "node_name",
    "probe",
    "probe_ca",
    "probe_cert",
    "probe_insecure",
    "probe_key",
    "probe_server_name",
    "probe_timeout",
    "probe_token_file",
    "ready_timeout",
    "run_dir",
    "seed",
    "settle",
    "state_dir",
    "storm",
    "threads",
    "undecided",
    "watches",
];

/// Hides the value of an environment variable in help texts: the value may be secret, and help
/// texts should be the same for every reader. Hides rare options in the text of `-h`.
fn shorten_help(option: Arg) -> Arg {
    let is_rare = RARE_OPTIONS.contains(&option.get_id().as_str());
    option.hide_env_values(true).hide_short_help(is_rare)
}

fn shorten_helps(command: clap::Command) -> clap::Command {
    command
        .mut_args(shorten_help)
        .mut_subcommands(shorten_helps)
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Replace or restart this node's kube-apiserver while a temporary kube-apiserver serves;
    /// nothing is lost
    #[cfg(feature = "operate")]
    #[command(after_long_help = BRIDGE_STATUS)]
    Bridge(Box<BridgeArgs>),
    /// Upgrade or restart the kube-apiserver of a static pod; nothing is lost
    #[cfg(feature = "operate")]
    #[command(after_long_help = UPGRADE_STATUS)]
    Upgrade(Box<UpgradeArgs>),
    /// Rehearse an upgrade under load on this machine, and report what was lost
    #[cfg(feature = "rehearse")]
    Rehearse(Box<RehearseArgs>),
    /// Check whether a kube-apiserver's manifest and its node allow an upgrade that loses nothing
    #[cfg(feature = "operate")]
    Doctor(DoctorArgs),
    /// Show the berths and kube-apiservers on this node
    Status(StatusArgs),
    /// Put the kube-apiserver of a manifest behind berth
    #[cfg(feature = "operate")]
    Inject(Box<InjectArgs>),
    /// Take berth out of a manifest
    #[cfg(feature = "operate")]
    Eject(ManifestArgs),
    /// Create least-privilege credentials for the shims of a node
    #[cfg(feature = "operate")]
    Grant(Box<GrantArgs>),
    /// Commands that run in a pod.
    #[command(flatten)]
    InPod(PodCommand),
    /// A small apiserver with kube-apiserver's flags and phases, for rehearsals and tests
    #[cfg(feature = "rehearse")]
    #[command(hide = true, disable_version_flag = true)]
    StandIn(StandInArgs),
    /// Write a shell's completions to standard output
    Completions {
        /// Name of the shell
        shell: clap_complete::Shell,
    },
    /// Print version
    #[command(short_flag = 'v')]
    Version,
}

#[cfg(all(test, feature = "operate"))]
mod tests {
    use super::*;
    use clap::{ArgAction, CommandFactory};

    #[test]
    fn the_short_help_fits_a_screen() {
        let mut cli = Cli::command();
        cli.build();
        let mut commands = vec![cli];
        let mut rare = std::collections::BTreeSet::new();
        while let Some(mut command) = commands.pop() {
            let lines = command.render_help().to_string().lines().count();
            assert!(lines <= 40, "{}: {lines} lines", command.get_name());
            rare.extend(command.get_arguments().map(|arg| arg.get_id().to_string()));
            commands.extend(command.get_subcommands().cloned());
        }
        for option in RARE_OPTIONS {
            assert!(rare.contains(option), "no command has {option}");
        }
    }

    /// If these options had environment variables, a variable that is still set would make each
    /// later run write a manifest or ignore errors.
    #[test]
    fn an_option_for_one_run_has_no_environment_variable() {
        let values = [
            "accept",
            "canary",
            "canary_time",
            "ignore_errors",
            "kubeadm_patch",
            "on_failure",
            "undecided",
            "write",
        ];
        let probe = ["probe_insecure"];
        let of_one_run = |arg: &&Arg| {
            let id = arg.get_id().as_str();
            !probe.contains(&id)
                && (matches!(arg.get_action(), ArgAction::SetTrue) || values.contains(&id))
        };
        let mut seen = Vec::new();
        let cli = Cli::command();
        let operators = [
            "bridge", "upgrade", "doctor", "inject", "eject", "grant", "status",
        ];
        for command in cli
            .get_subcommands()
            .filter(|command| operators.contains(&command.get_name()))
        {
            for command in std::iter::once(command).chain(command.get_subcommands()) {
                for arg in command.get_arguments().filter(of_one_run) {
                    assert_eq!(
                        arg.get_env(),
                        None,
                        "{} {}",
                        command.get_name(),
                        arg.get_id()
                    );
                    seen.push(arg.get_id().to_string());
                }
            }
        }
        for known in
            values
                .into_iter()
                .chain(["bridge", "break_lock", "diff", "dry_run", "judge", "revoke"])
        {
            assert!(
                seen.iter().any(|id| id == known),
                "{known} is not in {seen:?}"
            );
        }
    }
}
