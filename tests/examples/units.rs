//! systemd units, and containers that are written by hand: berth accepts their commands, and
//! systemd the units.

use crate::{find_tool, list_examples, read_example, root};
use berth::cli::{Cli, Command as Sub};
use berth_options::{PodCommand, check};
use clap::Parser;
use libtest_mimic::{Completion, Failed};
use std::process::Command;

/// The only file that berth reads to check the command lines.
const CA: &str = "/etc/kubernetes/pki/ca.crt";

pub(crate) fn berth_takes_the_commands() -> Result<Completion, Failed> {
    let ca = tempfile::NamedTempFile::new()?;
    let ca = ca.path().to_str().unwrap();
    let units = list_examples(".service");
    let all = [
        "bare-metal/berth-node@.service",
        "bare-metal/berth-run@.service",
        "static-pod/berth-upgrade-resume.service",
    ];
    assert_eq!(units, all);
    for name in units {
        let text = read_example(&name).replace(CA, ca);
        let (variables, command) = of_unit(&text);
        let (file, arguments) = command.split_first().unwrap();
        assert!(file.ends_with("/berth"), "{name}: {file}");
        if let Sub::Upgrade(args) = check_arguments(&name, arguments, &variables) {
            assert!(
                args.manifest.is_none() && !args.dry_run,
                "{name} begins no upgrade"
            );
            let state = args.state.state_dir.join("upgrade.json");
            assert!(
                text.contains(&format!("\nConditionPathExists={}\n", state.display())),
                "{name}: {state:?}"
            );
            assert!(
                text.contains("\nKillSignal=SIGKILL\n"),
                "{name}: a shutdown is no operator who wants it back"
            );
        }
    }
    // Variables as a kubelet sets them. `berth inject` writes the other manifests.
    let text = read_example("node-shim/daemonset.yaml")
        .replace(&format!("value: {CA}"), &format!("value: {ca}"));
    assert!(text.contains("args: [serve, --discover]\n"));
    let mut variables = Vec::new();
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        let Some(name) = line.strip_prefix("- name: BERTH_") else {
            continue;
        };
        let value = match lines.next().and_then(|line| line.strip_prefix("value: ")) {
            Some(value) => value.replace("$(BERTH_HOST_IP)", "10.0.0.5"),
            None if name == "INSTANCE" => "0b0e3d5a-93ae-4a2a-a5ba-2d1c8a3ff86a".to_owned(),
            None => continue,
        };
        variables.push((format!("BERTH_{name}"), value));
    }
    check_arguments(
        "node-shim/daemonset.yaml",
        &["serve".into(), "--discover".into()],
        &variables,
    );
    Ok(Completion::Completed)
}

/// Returns variables and command of a unit, as systemd sets them for the instance `v1`.
fn of_unit(text: &str) -> (Vec<(String, String)>, Vec<String>) {
    let text = text.replace("\\\n", " ").replace("%i", "v1");
    let values = |key: &str| {
        text.lines()
            .filter_map(|line| line.strip_prefix(key))
            .map(str::to_owned)
            .collect()
    };
    let (variables, commands): (Vec<String>, Vec<String>) =
        (values("Environment="), values("ExecStart="));
    let pair = |variable: &String| {
        variable
            .split_once('=')
            .map(|(name, value)| (name.into(), value.into()))
            .unwrap()
    };
    assert_eq!(commands.len(), 1);
    (
        variables.iter().map(pair).collect(),
        commands[0].split_whitespace().map(str::to_owned).collect(),
    )
}

/// Checks a command line: its options, and the options from its variables, give a configuration.
#[track_caller]
fn check_arguments(name: &str, arguments: &[String], variables: &[(String, String)]) -> Sub {
    // Passed as options, since all tests of the process share its environment.
    let options = variables
        .iter()
        .filter(|(name, _)| name != "BERTH_HOST_IP")
        .flat_map(|(name, value)| {
            let option = name
                .strip_prefix("BERTH_")
                .unwrap_or_else(|| panic!("{name} is no variable of berth's"));
            [
                format!("--{}", option.to_lowercase().replace('_', "-")),
                value.clone(),
            ]
        });
    let (command, rest) = arguments.split_first().unwrap();
    let line = ["berth".to_owned(), command.clone()]
        .into_iter()
        .chain(options)
        .chain(rest.iter().cloned());
    let cli = Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{name}: {error}"));
    let config = match &cli.command {
        Sub::InPod(PodCommand::Serve(args)) => check::check_serve(args),
        Sub::InPod(PodCommand::Run(args)) => check::check_run(args),
        // The options of `berth upgrade` are checked by clap alone.
        Sub::Upgrade(_) => return cli.command,
        other => panic!("{name}: {other:?}"),
    };
    config.unwrap_or_else(|mistakes| panic!("{name}: {mistakes}"));
    cli.command
}

/// Checks the recipes for template units in all documents: after a reboot, the enabled unit must
/// start.
pub(crate) fn a_reboot_starts_the_new_version() -> Result<Completion, Failed> {
    let guide = std::fs::read_to_string(root().join("docs/for-good.md"))?;
    let texts = list_examples("@.service")
        .into_iter()
        .map(|name| (read_example(&name), name));
    let mut recipes = 0;
    for (text, name) in texts.chain([(guide, "docs/for-good.md".to_owned())]) {
        let commands = text.lines().filter_map(|line| {
            line.trim_start_matches(['#', ' '])
                .strip_prefix("systemctl ")
        });
        let commands: Vec<_> = commands.filter(|command| command.contains('@')).collect();
        let [started, stopped] = commands[..] else {
            return Err(format!("{name}: {commands:?}").into());
        };
        let unit = |command: &str, verb: &str| {
            let unit = command
                .strip_prefix(verb)
                .and_then(|rest| rest.strip_prefix(" --now berth-"));
            unit.and_then(|unit| unit.split_once('@'))
                .map(|(unit, version)| (unit.to_owned(), version.to_owned()))
        };
        let (Some(new), Some(old)) = (unit(started, "enable"), unit(stopped, "disable")) else {
            return Err(
                format!("{name}: a reboot would start the old version after {commands:?}").into(),
            );
        };
        assert!(new.0 == old.0 && new.1 > old.1, "{name}: {commands:?}");
        recipes += 1;
    }
    assert_eq!(recipes, 3);
    for name in list_examples(".service") {
        assert!(
            read_example(&name).contains("\n[Install]\nWantedBy=multi-user.target"),
            "{name}: enabling does nothing"
        );
    }
    Ok(Completion::Completed)
}

pub(crate) fn systemd_takes_the_units() -> Result<Completion, Failed> {
    let analyze = match find_tool("systemd-analyze") {
        Ok(path) => path,
        Err(ignored) => return Ok(ignored),
    };
    let dir = tempfile::tempdir()?;
    for name in list_examples(".service") {
        // systemd checks that the program exists.
        let text = read_example(&name);
        let (_, command) = of_unit(&text);
        let program = command[0].replace("v1", "%i");
        let text = text.replace(&program, env!("CARGO_BIN_EXE_berth"));
        let unit = dir.path().join(name.rsplit('/').next().unwrap());
        let verified = |text: &str| -> std::io::Result<(bool, String)> {
            std::fs::write(&unit, text)?;
            let output = Command::new(&analyze)
                .args(["verify", "--man=no"])
                .arg(&unit)
                .output()?;
            Ok((
                output.status.success(),
                String::from_utf8_lossy(&output.stderr).into_owned(),
            ))
        };
        assert_eq!(verified(&text)?, (true, String::new()), "{name}");
        // The control: systemd-analyze finds an error.
        assert!(
            verified(&text.replace("Restart=", "Restrat="))?
                .1
                .contains("Restrat"),
            "it does not look"
        );
    }
    Ok(Completion::Completed)
}
