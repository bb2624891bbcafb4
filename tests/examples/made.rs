//! Manifests that a command generates. Each names its command.

use crate::support::process::{berth, ends, output_of};
use crate::{example, examples, root};
use libtest_mimic::{Completion, Failed};

/// Text before the command that generated a file.
const MADE_BY: &str = "# Made by: berth ";

/// Comment of a manifest that doctor must find healthy.
const DOCTOR: &str = "berth doctor finds nothing";

pub(crate) fn made_manifests_are_what_their_command_makes() -> Result<Completion, Failed> {
    for name in examples(".yaml") {
        let text = example(&name);
        let Some(command) = text.lines().find_map(|line| line.strip_prefix(MADE_BY)) else {
            continue;
        };
        let (out, _) = ends(
            berth(command.split_whitespace()).current_dir(root()),
            0,
            &[],
        );
        assert_eq!(
            body(&out),
            body(&text),
            "{name} is not what `berth {command}` makes"
        );
    }
    assert!(
        example("static-pod/after.yaml").contains(MADE_BY),
        "what an example was made by is written in another way"
    );
    let kubeadm = std::fs::read_to_string(root().join("tests/data/manifest/kubeadm-v1.36.yaml"))?;
    assert_eq!(
        body(&example("static-pod/before.yaml")),
        kubeadm.trim_end(),
        "kubeadm writes another manifest"
    );
    Ok(Completion::Completed)
}

pub(crate) fn doctor_finds_nothing() -> Result<Completion, Failed> {
    // kustomizations need kubectl: scripts/manifests.sh checks them.
    let healthy =
        |name: &String| !name.ends_with("kustomization.yaml") && example(name).contains(DOCTOR);
    let healthy: Vec<_> = examples(".yaml").into_iter().filter(healthy).collect();
    assert!(
        healthy.contains(&"static-pod/after.yaml".to_owned()),
        "{healthy:?}"
    );
    for name in healthy {
        let (status, out, err) =
            output_of(berth(["doctor"]).arg(root().join("examples").join(&name)));
        assert!(
            status == Some(0) && out.contains("no error and no warning"),
            "{name}: {out}{err}"
        );
    }
    Ok(Completion::Completed)
}

/// Returns a manifest without the comment at the top, which differs in each file and which inject
/// keeps.
fn body(text: &str) -> &str {
    let head: usize = text
        .split_inclusive('\n')
        .take_while(|line| line.starts_with('#'))
        .map(str::len)
        .sum();
    text[head..].trim_end()
}
