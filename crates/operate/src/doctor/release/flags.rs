//! Flags and feature gates of a manifest that the new kube-apiserver does not know: it is asked itself, by `--help` and, since that
//! leaves out what is deprecated and gates that are on for good, with each of these and `--version`: it then only looks at its command line.

use super::super::checks::UNKNOWN_FLAG;
use super::{Finding, Question, Release, arguments};
use crate::command::{find, output};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

/// Longest time that a run may take.
const PATIENCE: Duration = Duration::from_secs(10);

const GATES: &str = "feature-gates";

/// # Errors
/// Why the new kube-apiserver was not asked.
pub(super) async fn unknown(question: &Question<'_>) -> Result<Vec<Finding>, String> {
    // One that is found in an image could be anybody's, and it would run as root.
    let own = || find("kube-apiserver".as_ref()).filter(|_| question.root.is_some());
    let program = question.binary.map(Path::to_owned).or_else(own).ok_or("the new kube-apiserver is not given")?;
    let release = release(&program).await?;
    let program = program.display().to_string();
    if release != question.to {
        return Err(format!("{program} is {release}"));
    }
    let known = run(&program, &["--help"]).await?;
    let known: BTreeSet<_> = known.lines().filter_map(flag_of_help).collect();
    let mut findings = Vec::new();
    for word in arguments(question.manifest) {
        let Some(flag) = word.text().and_then(flag_of) else { continue };
        // The help has no deprecated ones.
        if !known.contains(&*flag) && is_refused(&program, &flag).await {
            let cause = format!("kube-apiserver {} has no flag --{flag}, so it does not start", question.to);
            findings.push(finding(question, word.line, cause));
        }
    }
    for flag in question.manifest.flags(GATES) {
        for gate in flag.value.split(',').filter(|gate| !gate.is_empty()) {
            let Err(why) = run(&program, &[&format!("--{GATES}={gate}"), "--version"]).await else { continue };
            let cause = format!("kube-apiserver {} does not start with the feature gate {gate}: {why}", question.to);
            findings.push(finding(question, flag.line, cause));
        }
    }
    Ok(findings)
}

fn finding(question: &Question<'_>, line: usize, cause: String) -> Finding {
    let fix = "take it out of the manifest, and out of kubeadm's ClusterConfiguration where that has it";
    UNKNOWN_FLAG.at(format!("{}:{}", question.name, line), cause, fix)
}

/// Whether it is unknown, whatever its value: a value that is wrong is another error.
async fn is_refused(program: &str, flag: &str) -> bool {
    run(program, &[&format!("--{flag}=x"), "--version"]).await.is_err_and(|why| why.contains("unknown flag"))
}

/// The name of an argument that is a flag.
fn flag_of(word: &str) -> Option<String> {
    let name = word.strip_prefix("--")?.split('=').next().unwrap_or_default();
    (!name.is_empty()).then(|| name.replace('_', "-"))
}

/// The flag that a line of the help is about: `  -v, --v Level   …` or `      --profiling   …`.
fn flag_of_help(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = line
        .strip_prefix('-')
        .filter(|rest| !rest.starts_with('-'))
        .map_or(line, |rest| rest.get(3..).unwrap_or_default());
    line.strip_prefix("--")?.split([' ', '=', '[']).next()
}

async fn release(program: &Path) -> Result<Release, String> {
    let version = run(&program.display().to_string(), &["--version"]).await?;
    let version = version.trim().rsplit(' ').next().unwrap_or_default();
    version.parse().map_err(|_| format!("{} --version prints {version:?}", program.display()))
}

/// What it prints, or why it fails.
async fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = output(program, arguments, PATIENCE).await?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let said = errors.lines().find_map(|line| line.split_once("err=").map(|(_, why)| why)).or(errors.lines().next());
    Err(said.unwrap_or("it fails").trim().trim_matches('"').to_owned())
}
