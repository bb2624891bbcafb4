//! Manifests that a command makes: each says which.

use crate::support::process::{berth, said};
use crate::{example, examples, root};
use libtest_mimic::{Completion, Failed};

/// Before the command that made a file.
const MADE_BY: &str = "# Made by: berth ";

/// What the comment of a manifest says that must be healthy.
const DOCTOR: &str = "berth doctor finds nothing";

pub(crate) fn made_manifests_are_what_their_command_makes() -> Result<Completion, Failed> {
    let mut made = 0;
    for name in examples(".yaml") {
        let text = example(&name);
        let Some(command) = text.lines().find_map(|line| line.strip_prefix(MADE_BY)) else { continue };
        let (status, out, err) = said(berth(command.split_whitespace()).current_dir(root()));
        assert_eq!(status, Some(0), "{name}: berth {command}: {err}");
        assert_eq!(body(&out), body(&text), "{name} is not what `berth {command}` makes");
        made += 1;
    }
    // As many as there were when this was written.
    assert!(made >= 5, "{made} only");
    let kubeadm = std::fs::read_to_string(root().join("tests/manifest/kubeadm-v1.36.yaml"))?;
    assert_eq!(body(&example("static-pod/before.yaml")), kubeadm.trim_end(), "kubeadm writes another manifest");
    Ok(Completion::Completed)
}

pub(crate) fn doctor_finds_nothing() -> Result<Completion, Failed> {
    let (_, help, _) = said(&mut berth(["--help"]));
    if !help.contains("\n  doctor ") {
        return Ok(Completion::ignored_with("this build has no berth doctor"));
    }
    let healthy: Vec<_> = examples(".yaml").into_iter().filter(|name| example(name).contains(DOCTOR)).collect();
    assert!(healthy.len() >= 4, "{healthy:?}");
    for name in healthy {
        let (status, out, err) = said(berth(["doctor"]).arg(root().join("examples").join(&name)));
        assert!(status == Some(0) && out.contains("no error and no warning"), "{name}: {out}{err}");
    }
    Ok(Completion::Completed)
}

/// Without the comment at the top, which inject keeps and each file has its own of.
fn body(text: &str) -> &str {
    let head: usize = text.split_inclusive('\n').take_while(|line| line.starts_with('#')).map(str::len).sum();
    text[head..].trim_end()
}
