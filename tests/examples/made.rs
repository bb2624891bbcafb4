//! Manifests that a command of berth generates. Each manifest names its command in a comment.

use crate::support::process::{berth_command, expect_status, output_of};
use crate::{list_examples, read_example, root};
use libtest_mimic::{Completion, Failed};

/// Text before the command that generated a file.
const MADE_BY: &str = "# Made by: berth ";

/// Comment of a manifest that doctor must find healthy.
const DOCTOR: &str = "berth doctor finds nothing";

pub(crate) fn made_manifests_are_what_their_command_makes() -> Result<Completion, Failed> {
    for name in list_examples(".yaml") {
        let text = read_example(&name);
        let Some(command) = text.lines().find_map(|line| line.strip_prefix(MADE_BY)) else {
            continue;
        };
        let (out, _) = expect_status(
            berth_command(command.split_whitespace()).current_dir(root()),
            0,
            &[],
        );
        assert_eq!(
            body_of(&out),
            body_of(&text),
            "{name} is not what `berth {command}` makes"
        );
    }
    assert!(
        read_example("static-pod/after.yaml").contains(MADE_BY),
        "what an example was made by is written in another way"
    );
    let kubeadm = std::fs::read_to_string(root().join("tests/data/manifest/kubeadm-v1.36.yaml"))?;
    assert_eq!(
        body_of(&read_example("static-pod/before.yaml")),
        kubeadm.trim_end(),
        "kubeadm writes another manifest"
    );
    Ok(Completion::Completed)
}

pub(crate) fn doctor_finds_nothing() -> Result<Completion, Failed> {
    // Kustomizations are left out, because they need kubectl. scripts/manifests.sh checks them.
    let healthy = |name: &String| {
        !name.ends_with("kustomization.yaml") && read_example(name).contains(DOCTOR)
    };
    let healthy: Vec<_> = list_examples(".yaml").into_iter().filter(healthy).collect();
    assert!(
        healthy.contains(&"static-pod/after.yaml".to_owned()),
        "{healthy:?}"
    );
    for name in healthy {
        let (status, out, err) =
            output_of(berth_command(["doctor"]).arg(root().join("examples").join(&name)));
        assert!(
            status == Some(0) && out.contains("no error and no warning"),
            "{name}: {out}{err}"
        );
    }
    Ok(Completion::Completed)
}

/// Returns a manifest without the comment at the top, which differs in each file and which inject
/// keeps.
fn body_of(text: &str) -> &str {
    let head: usize = text
        .split_inclusive('\n')
        .take_while(|line| line.starts_with('#'))
        .map(str::len)
        .sum();
    text[head..].trim_end()
}
