//! The recipe for Cluster API: YAML whose files exist, and a script for the node that takes nothing but
//! an action and a version. Nothing here starts an upgrade: `scripts/cluster.sh` does.

use crate::support::process::{berth_command, expect_status};
use crate::{find_tool, read_example, root};
use berth_cluster::yaml::{YamlNode, parse_documents};
use libtest_mimic::{Completion, Failed};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

const SCRIPT: &str = "cluster-api/berth-upgrade.sh";

pub(crate) fn cluster_api_finds_its_files() -> Result<Completion, Failed> {
    let text = read_example("cluster-api/kubeadmcontrolplane.yaml");
    let documents = parse_documents(&text).map_err(|problem| format!("{problem:?}"))?;
    let config = documents
        .iter()
        .find_map(|document| document.find_path(&["spec", "kubeadmConfigSpec"]))
        .ok_or("no kubeadmConfigSpec")?;
    let files = config.find_path(&["files"]).ok_or("no files")?;
    let mut paths = Vec::new();
    for file in files.items() {
        let field = |path: &[&str]| file.find_path(path).and_then(YamlNode::text);
        let key = field(&["contentFrom", "secret", "key"]).ok_or("a file from no secret")?;
        assert_eq!(field(&["owner"]), Some("root:root"), "{key}");
        assert_eq!(field(&["permissions"]), Some("0755"), "{key}");
        let source = root().join("examples/cluster-api").join(key);
        assert_eq!(
            source.metadata()?.permissions().mode() & 0o111,
            0o111,
            "{key}"
        );
        paths.push(field(&["path"]).ok_or("a file without a path")?.to_owned());
    }
    assert_eq!(
        paths,
        [
            "/usr/local/sbin/berth-upgrade",
            "/usr/local/sbin/install-kubernetes"
        ]
    );
    // The handler's user may run the script, and nothing else.
    let users = config.find_path(&["users"]).ok_or("no users")?;
    let sudo: Vec<_> = users
        .items()
        .iter()
        .filter_map(|user| user.find_path(&["sudo"])?.text())
        .collect();
    assert_eq!(sudo, [format!("ALL=(root) NOPASSWD: {}", paths[0])]);
    // The script tells by exit status and words that no bridge runs.
    let none = tempfile::tempdir()?;
    expect_status(
        berth_command(["bridge", "status", "--state-dir"]).arg(none.path()),
        69,
        &["no bridge is on: "],
    );
    assert!(read_example(SCRIPT).contains("$status == 69 && $said == *\"no bridge is on: \"*"));
    Ok(Completion::Completed)
}

pub(crate) fn berth_upgrade_refuses_arguments() -> Result<Completion, Failed> {
    let bash = match find_tool("bash") {
        Ok(bash) => bash,
        Err(skipped) => return Ok(skipped),
    };
    let lists: &[&[&str]] = &[
        &[],
        &["run"],
        &["v1.36.3"],
        &["upgrade", "v1.36.3"],
        &["check run", "v1.36.3"],
        &["run", "v1.36.3", "--yes"],
        &["run", ""],
        &["run", "1.36.3"],
        &["run", "v1.36"],
        &["run", "v2.0.0"],
        &["run", "v1.36.3-rc.0"],
        &["run", "v1.036.3"],
        &["run", "v1.36.3;id"],
        &["run", "v1.36.3 --force"],
        &["run", "v1.36.3\n"],
        &["run", "$(id)"],
        &["--", "v1.36.3"],
    ];
    for arguments in lists {
        let output = Command::new(&bash)
            .arg(root().join("examples").join(SCRIPT))
            .args(*arguments)
            .output()?;
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "usage: berth-upgrade check|run v1.MINOR.PATCH\n",
            "{arguments:?}"
        );
    }
    Ok(Completion::Completed)
}
