//! The role for kubespray: YAML that parses, with commands that berth accepts.

use crate::read_example;
use crate::support::process::{berth_command, expect_status};
use berth::cli::{BridgeAction, Cli, Command};
use berth_cluster::yaml::{YamlNode, parse_documents};
use clap::Parser;
use libtest_mimic::{Completion, Failed};

const ROLE: &str = "kubespray/roles/berth_bridge/tasks/main.yaml";

pub(crate) fn the_role_calls_berth() -> Result<Completion, Failed> {
    let tasks = parse_documents(&read_example(ROLE)).map_err(|problem| format!("{problem:?}"))?;
    let mut steps = Vec::new();
    for task in tasks[0].items() {
        let argv = task
            .find_path(&["ansible.builtin.command", "argv"])
            .ok_or("a task that runs no command")?;
        let line: Vec<_> = words_of(argv)
            .into_iter()
            .skip_while(|word| word != "bridge")
            .collect();
        let cli = Cli::try_parse_from(std::iter::once("berth".to_owned()).chain(line))?;
        let Command::Bridge(bridge) = cli.command else {
            return Err(format!("{:?}", cli.command).into());
        };
        steps.push(match bridge.action {
            Some(BridgeAction::Status(_)) => "status",
            Some(BridgeAction::Start(_)) => "start",
            Some(BridgeAction::End(_)) => "end",
            other => return Err(format!("{other:?}").into()),
        });
    }
    assert_eq!(steps, ["status", "start", "end"]);
    // The first task recognizes by exit status 69 that no bridge runs.
    let none = tempfile::tempdir()?;
    expect_status(
        berth_command(["bridge", "status", "--state-dir"]).arg(none.path()),
        69,
        &[],
    );
    assert!(read_example(ROLE).contains("berth_bridge_status.rc not in [0, 69]"));
    Ok(Completion::Completed)
}

/// Returns the words of a list, or of a template that makes a list.
fn words_of(argv: &YamlNode) -> Vec<String> {
    match argv.text() {
        Some(template) => template
            .split('\'')
            .skip(1)
            .step_by(2)
            .map(str::to_owned)
            .collect(),
        None => argv
            .items()
            .iter()
            .filter_map(YamlNode::text)
            .map(str::to_owned)
            .collect(),
    }
}
