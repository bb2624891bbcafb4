//! The results of a rehearsal: a file for programs and a page for people.
//!
//! * [`environment`]: the machine, and the versions of the programs.
//! * `page`: turns the data into an HTML page that needs neither a network nor a script. Pure. The
//!   page's two drawings are in `plot`.
//! * [`table`]: the figures and the verdict on the terminal.
//!
//! This module makes a report from the runs of a rehearsal, and writes the files, whole or not at
//! all.

pub mod environment;
mod page;
mod plot;
pub mod table;

use crate::config::Plan;
use crate::record::data::{self, Report};
use crate::run::outcome::Rehearsed;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// Makes the report of a rehearsal that has just ended on this machine. `argv` is the command of
/// the rehearsal.
pub fn assemble(plan: &Plan, rehearsed: Rehearsed, argv: &[String]) -> Report {
    Report {
        version: data::SCHEMA_VERSION,
        berth_version: berth_node::VERSION.to_owned(),
        made_at: environment::now(),
        command: argv
            .iter()
            .map(|word| quote_word(word))
            .collect::<Vec<_>>()
            .join(" "),
        environment: environment::read(environment::list_programs(plan, &rehearsed.runs)),
        aborted: rehearsed.aborted.as_ref().map(ToString::to_string),
        runs: rehearsed.runs,
    }
}

/// Returns a word quoted for a shell, as a person would write it: `--name='a value'`.
fn quote_word(word: &str) -> String {
    let plain = |name: &str| {
        name.bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    match word.split_once('=').filter(|(name, _)| plain(name)) {
        Some((name, value)) => format!("{name}={}", shell_words::quote(value)),
        None => shell_words::quote(word).into_owned(),
    }
}

/// A file that could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {why}; give a file in a directory that can be written", path.display())]
pub struct Error {
    path: PathBuf,
    why: io::Error,
}

/// Checks that a file can be written, before there is anything to write.
pub fn check_writable(path: &Path) -> Result<(), Error> {
    let error = |why| Error {
        path: path.to_owned(),
        why,
    };
    if path.is_dir() {
        return Err(error(io::ErrorKind::IsADirectory.into()));
    }
    if path.file_name().is_none() {
        return Err(error(io::Error::other("the path names no file")));
    }
    create_temporary(path).map(drop).map_err(error)
}

/// Writes the data and the page. After an error the remaining file is still written, and the first
/// error is returned.
pub fn write(report: &Report, json: Option<&Path>, html: Option<&Path>) -> Result<(), Error> {
    let written = json.map(|path| {
        let text = serde_json::to_string_pretty(report).map_err(io::Error::from);
        write_file(path, text.map(|text| text + "\n"))
    });
    let shown = html.map(|path| write_file(path, Ok(page::render(report))));
    written.into_iter().chain(shown).collect()
}

/// Writes a text, whole or not at all.
pub fn write_file(path: &Path, text: io::Result<String>) -> Result<(), Error> {
    let write = || {
        let mut file = create_temporary(path)?;
        file.write_all(text?.as_bytes())?;
        file.persist(path)?;
        Ok(())
    };
    write().map_err(|why| Error {
        path: path.to_owned(),
        why,
    })
}

/// A file in the target's directory. The file is removed unless it is renamed.
fn create_temporary(path: &Path) -> io::Result<NamedTempFile> {
    use std::os::unix::fs::PermissionsExt;
    let directory = path
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty());
    // The mode of any new file: the process's umask decides what remains.
    let mode = std::fs::Permissions::from_mode(0o666);
    Builder::new()
        .prefix(".berth-")
        .permissions(mode)
        .tempfile_in(directory.unwrap_or(Path::new(".")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Via;
    use crate::judges::judge;
    use crate::judges::tests::{plan, record};
    use crate::record::data::{Run, RunOutcome};
    use crate::run::outcome::Aborted;

    fn report() -> Report {
        Report {
            version: data::SCHEMA_VERSION,
            berth_version: "0.1.0".into(),
            made_at: "2026-05-04T03:02:01Z".into(),
            command: "berth rehearse".into(),
            environment: data::Environment::default(),
            aborted: None,
            runs: Vec::new(),
        }
    }

    #[test]
    fn words_are_quoted() {
        let argv = ["berth", "--rate=9", "--new=a b", "--old", "it's; $(x)", ""];
        assert_eq!(
            argv.map(quote_word).join(" "),
            r"berth --rate=9 --new='a b' --old 'it'\''s; $(x)' ''"
        );
    }

    #[test]
    fn both_files_are_written_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (json, html) = (dir.path().join("a.json"), dir.path().join("a.html"));
        std::fs::write(&json, "old").unwrap();
        check_writable(&json).unwrap();
        assert_eq!(std::fs::read_to_string(&json).unwrap(), "old");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        write(&report(), Some(&json), Some(&html)).unwrap();
        let read: Report = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        assert_eq!(read, report());
        assert!(
            std::fs::read_to_string(&html)
                .unwrap()
                .starts_with("<!DOCTYPE html>")
        );
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        write(&report(), None, None).unwrap();
    }

    #[test]
    fn what_cannot_be_written_is_reported_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing/a.json");
        let html = dir.path().join("a.html");
        for error in [
            check_writable(&missing),
            write(&report(), Some(&missing), Some(&html)),
        ] {
            assert_eq!(error.unwrap_err().path, missing);
        }
        assert!(html.exists());
        assert_eq!(
            [Path::new(""), dir.path()].map(|path| check_writable(path).unwrap_err().why.kind()),
            [io::ErrorKind::Other, io::ErrorKind::IsADirectory]
        );
    }

    #[test]
    fn runs_are_in_the_order_of_the_plan() {
        let run = |via, outcome| Run {
            via,
            topology: String::new(),
            outcome,
        };
        let ran = |via| {
            run(
                via,
                RunOutcome::Ran(Box::new(judge(&record(), &plan(0), None))),
            )
        };
        let rehearsed = Rehearsed {
            runs: vec![
                run(Via::Haproxy, RunOutcome::Skipped("no haproxy".into())),
                ran(Via::Berth),
                ran(Via::None),
            ],
            failed: Vec::new(),
            aborted: Some(Aborted::Signal(libc::SIGINT)),
        };
        let report = assemble(&Plan::default(), rehearsed, &["berth".into()]);
        assert_eq!(
            report.runs.iter().map(|run| run.via).collect::<Vec<_>>(),
            [Via::Haproxy, Via::Berth, Via::None]
        );
        assert_eq!(
            report.runs[0].outcome,
            RunOutcome::Skipped("no haproxy".into())
        );
        assert!(report.aborted.unwrap().contains("SIGINT"));
        assert_eq!(report.environment.programs.len(), 2);
    }
}
