//! The last lines of a container, from the kubelet's log files: why an instance did not get ready.
//!
//! `NAMESPACE_POD_UID/CONTAINER/N.log`; a static pod's name has "-NODE" at its end there. Each line is
//! `TIME STREAM TAG TEXT`, where the tag P means that the text goes on in the next line.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Most that is read of a file, from its end.
const TAIL: u64 = 64 * 1024;

/// Longest line that is shown, in characters.
const WIDTH: usize = 400;

#[derive(Debug, Clone)]
pub enum LoggedPod<'a> {
    /// The pod with this UID.
    Uid(&'a str),
    /// The static pod of this namespace and name, whatever its UID; the latest.
    Name(&'a str, &'a str),
}

/// The last lines of one of a pod's containers, and the file.
pub fn last_lines(
    directory: &Path,
    pod: &LoggedPod<'_>,
    container: &str,
    count: usize,
) -> Option<(PathBuf, Vec<String>)> {
    let pod = find(directory, pod)?;
    let mut files: Vec<(u64, PathBuf)> = fs::read_dir(pod.join(container))
        .ok()?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let number = path.file_name()?.to_str()?.strip_suffix(".log")?.parse().ok()?;
            Some((number, path))
        })
        .collect();
    files.sort();
    // The newest that is not empty: a container that was just started has logged nothing yet.
    files.into_iter().rev().find_map(|(_, path)| {
        let lines = parse(&tail(&path)?);
        let from = lines.len().saturating_sub(count);
        (!lines.is_empty()).then(|| (path, lines[from..].to_vec()))
    })
}

/// The last lines of a file that is no container's; none, if it cannot be read.
pub fn end_of(path: &Path, count: usize) -> Vec<String> {
    let lines = parse(&tail(path).unwrap_or_default());
    lines[lines.len().saturating_sub(count)..].to_vec()
}

fn find(directory: &Path, pod: &LoggedPod<'_>) -> Option<PathBuf> {
    let fits = |name: &str| match pod {
        LoggedPod::Uid(uid) => name.rsplit('_').next() == Some(uid),
        LoggedPod::Name(namespace, pod) => name
            .strip_prefix(namespace)
            .and_then(|rest| rest.strip_prefix('_')?.strip_prefix(pod))
            .is_some_and(|rest| rest.starts_with('-')),
    };
    let entries = fs::read_dir(directory).ok()?.filter_map(Result::ok);
    let found = entries.filter(|entry| entry.file_name().to_str().is_some_and(fits));
    let age = |path: &PathBuf| fs::metadata(path).and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    found.map(|entry| entry.path()).max_by_key(age)
}

fn tail(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    // The first line is cut, unless the file begins with it.
    let whole = if length > TAIL { text.split_once('\n').map_or("", |(_, rest)| rest) } else { &text };
    Some(whole.to_owned())
}

/// The texts of a log file's lines.
pub fn parse(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut open = String::new();
    for line in text.lines() {
        let (partial, said) = split(line);
        open.push_str(said);
        if !partial {
            lines.push(shown(&open));
            open.clear();
        }
    }
    if !open.is_empty() {
        lines.push(shown(&open));
    }
    lines.retain(|line| !line.trim().is_empty());
    lines
}

/// Whether a line goes on, and its text; a line of another form is all text.
fn split(line: &str) -> (bool, &str) {
    let mut parts = line.splitn(4, ' ');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(time), Some("stdout" | "stderr"), Some(tags), text) if time.contains('T') => {
            (tags.split(':').any(|tag| tag == "P"), text.unwrap_or_default())
        }
        _ => (false, line),
    }
}

/// Short enough, and without what would move a terminal's cursor.
fn shown(line: &str) -> String {
    line.chars().take(WIDTH).map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_put_together_and_stripped() {
        let text = "2026-10-06T00:17:09.669794202Z stderr F one two\n2026-10-06T00:17:09Z stdout P thr\n2026-10-06T00:17:10Z \
                    stdout F ee\n2026-10-06T00:17:10Z stdout F\nno such form\n2026-10-06T00:17:10Z stderr F \x1b[2J\n";
        assert_eq!(parse(text), ["one two", "three", "no such form", "\u{fffd}[2J"]);
    }

    #[test]
    fn the_newest_file_that_says_something_is_found_by_uid_or_name() {
        let temp = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = temp.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("kube-system_kube-apiserver-n1_u1/kube-apiserver/9.log", "2026-01-01T0 stderr F nine\n");
        write(
            "kube-system_kube-apiserver-n1_u1/kube-apiserver/10.log",
            "2026-01-01T0 stderr F a\n2026-01-01T0 stderr F b\n",
        );
        write("kube-system_kube-apiserver-n1_u1/kube-apiserver/11.log", "");
        write("kube-system_berth-kube-apiserver-n1_u2/berth/0.log", &format!("{}\nlast\n", "x".repeat(70_000)));
        let lines =
            |pod: &LoggedPod<'_>, container, count| last_lines(temp.path(), pod, container, count).map(|found| found.1);
        assert_eq!(lines(&LoggedPod::Uid("u1"), "kube-apiserver", 5), Some(vec!["a".into(), "b".into()]));
        assert_eq!(
            lines(&LoggedPod::Name("kube-system", "kube-apiserver"), "kube-apiserver", 1),
            Some(vec!["b".into()])
        );
        assert_eq!(lines(&LoggedPod::Uid("u2"), "berth", 5), Some(vec!["last".into()]));
        assert_eq!(lines(&LoggedPod::Uid("u2"), "kube-apiserver", 5), None);
        assert_eq!(lines(&LoggedPod::Name("kube-system", "kube-api"), "kube-apiserver", 5), None);
        assert_eq!(lines(&LoggedPod::Uid("u3"), "berth", 5), None);
    }

    proptest::proptest! {
        #[test]
        fn lines_are_short_and_steer_no_terminal(text in "(\\PC|\n| P | stdout ){0,60}") {
            for line in parse(&text) {
                assert!(line.chars().count() <= WIDTH && !line.contains('\x1b'));
            }
        }
    }
}
