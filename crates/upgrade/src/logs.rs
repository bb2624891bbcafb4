//! The last lines of a container, from the kubelet's log files: why an instance did not get ready.
//!
//! The files are `NAMESPACE_POD_UID/CONTAINER/N.log`, with "-NODE" at the end of a static pod's
//! name. Each line is `TIME STREAM TAG TEXT`, and is shown unchanged.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// How much of a file is read, from its end.
const TAIL_BYTES: u64 = 64 * 1024;

/// Longest line to show, in characters, and the number of lines.
const MAX_WIDTH: usize = 400;
const MAX_LINES: usize = 12;

#[derive(Debug, Clone)]
pub enum LoggedPod<'a> {
    /// The pod with this UID.
    Uid(&'a str),
    /// The latest static pod of this namespace and name, with any UID.
    Name(&'a str, &'a str),
}

/// Finds the last lines of a pod's container, and the log file that has them.
pub fn find_last_lines(
    directory: &Path,
    pod: &LoggedPod<'_>,
    container: &str,
) -> Option<(PathBuf, Vec<String>)> {
    let pod = find_directory(directory, pod)?;
    let mut files: Vec<(u64, PathBuf)> = fs::read_dir(pod.join(container))
        .ok()?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let number = path
                .file_name()?
                .to_str()?
                .strip_suffix(".log")?
                .parse()
                .ok()?;
            Some((number, path))
        })
        .collect();
    files.sort();
    // The newest file with text is used, because a container that has just started has logged
    // nothing yet.
    files.into_iter().rev().find_map(|(_, path)| {
        let lines = read_last_lines(&path);
        (!lines.is_empty()).then_some((path, lines))
    })
}

/// The last lines of a file. Empty if the file cannot be read.
pub fn read_last_lines(path: &Path) -> Vec<String> {
    let mut lines = sanitize_lines(&read_tail(path).unwrap_or_default());
    lines.split_off(lines.len().saturating_sub(MAX_LINES))
}

fn find_directory(directory: &Path, pod: &LoggedPod<'_>) -> Option<PathBuf> {
    let fits = |name: &str| match pod {
        LoggedPod::Uid(uid) => name.rsplit('_').next() == Some(uid),
        LoggedPod::Name(namespace, pod) => name
            .strip_prefix(namespace)
            .and_then(|rest| rest.strip_prefix('_')?.strip_prefix(pod))
            .is_some_and(|rest| rest.starts_with('-')),
    };
    let entries = fs::read_dir(directory).ok()?.filter_map(Result::ok);
    let found = entries.filter(|entry| entry.file_name().to_str().is_some_and(fits));
    let age = |path: &PathBuf| {
        fs::metadata(path)
            .and_then(|meta| meta.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH)
    };
    found.map(|entry| entry.path()).max_by_key(age)
}

fn read_tail(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))
        .ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    // The first line is incomplete if the file is longer than the part that was read.
    let whole = if length > TAIL_BYTES {
        text.split_once('\n').map_or("", |(_, rest)| rest)
    } else {
        &text
    };
    Some(whole.to_owned())
}

/// Returns the lines of a log that are not empty, in a form that is safe for a terminal.
fn sanitize_lines(text: &str) -> Vec<String> {
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(sanitize_line)
        .collect()
}

/// Shortens a line and replaces control characters, which could move a terminal's cursor.
fn sanitize_line(line: &str) -> String {
    line.chars()
        .take(MAX_WIDTH)
        .map(|c| {
            if c.is_control() && c != '\t' {
                '\u{fffd}'
            } else {
                c
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_file_with_text_is_found_by_uid_or_name() {
        let temp = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = temp.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(
            "kube-system_kube-apiserver-n1_u1/kube-apiserver/9.log",
            "nine\n",
        );
        write(
            "kube-system_kube-apiserver-n1_u1/kube-apiserver/10.log",
            &format!("{}a\n\nb\n", "more\n".repeat(20)),
        );
        write("kube-system_kube-apiserver-n1_u1/kube-apiserver/11.log", "");
        write(
            "kube-system_berth-kube-apiserver-n1_u2/berth/0.log",
            &format!("{}\nlast\n", "x".repeat(70_000)),
        );
        let last = [["more"; 10].as_slice(), &["a", "b"]].concat();
        let (u1, named) = (LoggedPod::Uid("u1"), |name| {
            LoggedPod::Name("kube-system", name)
        });
        for (pod, container, lines) in [
            (&u1, "kube-apiserver", Some(&last[..])),
            (&named("kube-apiserver"), "kube-apiserver", Some(&last[..])),
            (&LoggedPod::Uid("u2"), "berth", Some(&["last"])),
            (&LoggedPod::Uid("u2"), "kube-apiserver", None),
            (&named("kube-api"), "kube-apiserver", None),
            (&LoggedPod::Uid("u3"), "berth", None),
        ] {
            let found = find_last_lines(temp.path(), pod, container).map(|found| found.1);
            assert_eq!(
                found.as_deref(),
                lines
                    .map(|lines| lines.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>())
                    .as_deref()
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn lines_are_short_and_steer_no_terminal(text in "(\\PC|\n|\x1b){0,60}") {
            for line in sanitize_lines(&text) {
                assert!(line.chars().count() <= MAX_WIDTH && !line.contains('\x1b'));
            }
        }
    }
}
