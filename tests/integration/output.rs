//! Commands without a place for their output: the reader has closed the pipe, or the disk is full.

use crate::support::process::{berth_command, output_of};
use clap::CommandFactory as _;
use std::fs::{File, OpenOptions};
use std::io::{Write, pipe};
use std::path::Path;
use std::process::{Command, Stdio};

const KUBEADM: &str = include_str!("../data/manifest/kubeadm-v1.36.yaml");

/// Returns commands that write to standard output, with their exit statuses.
fn list_printing(directory: &Path) -> Vec<(Command, i32)> {
    let manifest = directory.join("kube-apiserver.yaml");
    std::fs::write(&manifest, KUBEADM).unwrap();
    let run_dir = directory.join("run");
    let words: [(&[&str], i32); 12] = [
        (&["--help"], 0),
        (&["--version"], 0),
        (&["serve", "--help"], 0),
        (&["completions", "bash"], 0),
        (&["status", "--run-dir", "RUN"], 69),
        (&["ready", "--run-dir", "RUN"], 1),
        (&["live", "--probe-insecure", "--run-dir", "RUN"], 1),
        (&["drain", "--run-dir", "RUN"], 1),
        (&["inject", "--image", "example/berth:v1", "FILE"], 0),
        (
            &["inject", "--image", "example/berth:v1", "--diff", "FILE"],
            0,
        ),
        (&["doctor", "FILE"], 0),
        (&["grant", "--print", "--node", "cp-1"], 0),
    ];
    let named = |word: &&str| match *word {
        "FILE" => manifest.to_str().unwrap().to_owned(),
        "RUN" => run_dir.to_str().unwrap().to_owned(),
        word => word.to_owned(),
    };
    words
        .into_iter()
        .map(|(words, status)| (berth_command(words.iter().map(named)), status))
        .collect()
}

/// Frequent mistakes on the command line: the wrong words, and the corrected command line in the
/// error message.
#[test]
#[cfg(feature = "operate")]
fn a_frequent_mistake_gets_the_right_command_line() {
    let wrong: [(&[&str], &str); 24] = [
        (
            &[
                "bridge",
                "kubeadm",
                "upgrade",
                "apply",
                "--etcd-upgrade=false",
            ],
            " bridge -- kubeadm upgrade apply '--etcd-upgrade=false'\n",
        ),
        (
            &["bridge", "--settle", "10s", "sh", "-c", "kubeadm upgrade"],
            " bridge --settle 10s -- sh -c 'kubeadm upgrade'\n",
        ),
        (
            &["upgrade", "v1.36.3"],
            "berth upgrade FILE; on a node without berth: berth bridge -- kubeadm upgrade apply v1.36.3\n",
        ),
        (
            &["upgrade", "--version", "v1.36.3"],
            "kubeadm upgrade apply VERSION\n",
        ),
        (
            &["upgrade", "apply", "v1.36.3"],
            "kubeadm upgrade apply v1.36.3\n",
        ),
        (
            &["upgrade", "--manifest", "next.yaml"],
            "  tip: give the new manifest without an option: berth upgrade FILE\n",
        ),
        (&["bridge", "start", "kubeadm"], ""),
        (&["bridge", "--settle", "10s", "start"], ""),
        (&["bridge", "stop"], "  tip: berth bridge end\n"),
        (&["bridge", "off", "--now"], "  tip: berth bridge end\n"),
        (&["install"], "  tip: berth inject --image IMAGE\n"),
        (&["remove"], "  tip: berth eject\n"),
        (
            &["uninstall", "kube-apiserver.yaml"],
            "  tip: berth eject\n",
        ),
        (&["restore"], "  tip: berth bridge --help\n"),
        (
            &["grant", "a.yaml"],
            "  tip: berth grant --manifest a.yaml\n",
        ),
        (
            &["rollback"],
            "  tip: berth upgrade FILE, with the previous manifest",
        ),
        (&["check"], "  tip: berth doctor\n"),
        (&["plan"], "  tip: berth upgrade FILE --dry-run"),
        (&["metrics"], "  tip: a shim serves its metrics at /metrics"),
        (
            &["status", "--all"],
            "  tip: berth status shows every berth of this node",
        ),
        (&["status", "-w"], "  tip: watch berth status\n"),
        (
            &["doctor", "--ignore-errors", "foo"],
            "unknown check `foo`, expected one of `host-network`, ",
        ),
        (
            &["upgrade", "--judge", "--accept", "foo"],
            "unknown finding `foo`, expected one of `errors`, ",
        ),
        (&["frobnicate"], ""),
    ];
    for (words, right) in wrong {
        let (code, log) = run_to_end(&mut berth_command(words));
        assert!(
            code == Some(64) && log.contains(right),
            "{words:?}: {code:?} {log}"
        );
        assert!(
            log.matches("tip: ").count() <= usize::from(!right.is_empty()),
            "{words:?}: {log}"
        );
    }
}

/// No command accepts a word with a leading dash as a value, so the error message must not suggest
/// that.
#[test]
fn an_unknown_option_is_not_taken_for_a_value() {
    let cli = berth::cli::Cli::command();
    let shown = cli
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    let nested = shown.flat_map(|command| {
        let own = command.get_name();
        let below = command
            .get_subcommands()
            .map(move |below| vec![own, below.get_name()]);
        std::iter::once(vec![own]).chain(below)
    });
    for mut words in nested.chain([vec![]]) {
        words.push("--no-such-option");
        let (code, log) = run_to_end(&mut berth_command(&words));
        assert!(
            code == Some(64) && !log.contains("to pass "),
            "{words:?}: {log}"
        );
    }
}

#[test]
fn the_version_is_a_command_an_option_and_a_letter() {
    for word in ["version", "-v", "-V", "--version"] {
        let (code, out, _) = output_of(&mut berth_command([word]));
        assert_eq!(
            (code, out),
            (
                Some(0),
                concat!("berth ", env!("CARGO_PKG_VERSION"), "\n").into()
            ),
            "{word}"
        );
    }
}

#[test]
fn a_status_without_a_berth_names_the_directory() {
    let (code, out, _) = output_of(&mut berth_command(["status", "--run-dir", "/nonexistent"]));
    assert_eq!(code, Some(69));
    assert!(
        out.starts_with("no berth on this node: the run directory /nonexistent has none ("),
        "{out}"
    );
    assert!(
        out.ends_with("--run-dir names another directory)\n"),
        "{out}"
    );
    assert_eq!(
        out.contains("run berth as root"),
        !nix::unistd::geteuid().is_root()
    );
}

/// The message neither denies that a shim exists, nor tells the user to change root's files.
#[test]
#[cfg(feature = "operate")]
fn a_user_who_is_not_root_is_told_so() {
    if nix::unistd::geteuid().is_root() {
        return crate::support::print_skipped("root may read every directory");
    }
    let temp = tempfile::tempdir().unwrap();
    let locked = temp.path().join("locked");
    std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0)
        .create(&locked)
        .unwrap();
    let manifest = temp.path().join("kube-apiserver.yaml");
    std::fs::write(&manifest, KUBEADM).unwrap();
    let [locked, manifest] = [&locked, &manifest].map(|path| path.to_str().unwrap());
    for words in [
        &["bridge", "status", "--state-dir", locked][..],
        &["bridge", "end", "--state-dir", locked],
        &["bridge", "restore", "--state-dir", locked],
        &["bridge", "--dry-run"],
        &["grant", "--revoke", "--kubeconfig", locked],
        &["status", "--run-dir", "/proc"],
        &["doctor", manifest, "--node", "--state-dir", locked],
    ] {
        let (code, log) = run_to_end(&mut berth_command(words));
        assert!(
            code > Some(0) && log.contains("run berth as root"),
            "{code:?} {log}"
        );
        assert!(
            !["no bridge is on", "chown", "berth upgrade"]
                .iter()
                .any(|part| log.contains(part)),
            "{log}"
        );
    }
}

/// The message has the system's words, and not its error number.
#[test]
#[cfg(all(feature = "operate", feature = "rehearse"))]
fn a_missing_file_is_named() {
    let missing = "/nonexistent/file";
    let temp = tempfile::tempdir().unwrap();
    let state = temp.path().join("state");
    let state_dir = format!("--state-dir={}", state.display());
    for words in [
        &["doctor", missing][..],
        &["inject", "--image=a", missing],
        &["upgrade", &state_dir, "--manifests-dir", missing],
        &["bridge", &state_dir, "--manifest", missing, "--", "true"],
        &[
            "serve",
            "--listen=127.0.0.1:6443",
            "--instance=a",
            "--probe-ca",
            missing,
        ],
        &[
            "exec",
            "--listen=127.0.0.1:6443",
            "--run-dir",
            "/proc/nonexistent/a",
            "--",
            "true",
        ],
        &["rehearse", "--report", missing],
        &["copy-self", missing],
    ] {
        // A user other than root first gets a message about root.
        if words[0] == "bridge" && !nix::unistd::geteuid().is_root() {
            continue;
        }
        let (code, log) = run_to_end(&mut berth_command(words));
        assert!(code > Some(0), "{words:?}: {log}");
        let lines = log
            .lines()
            .map(|line| line.matches("No such file or directory").count());
        assert_eq!(lines.max(), Some(1), "{words:?}: {log}");
        assert!(
            log.contains("/nonexistent/") && !log.contains("os error"),
            "{words:?}: {log}"
        );
        assert!(!state.exists(), "{words:?} made a directory for its state");
    }
}

/// Returns a pipe without a reader.
fn closed_pipe() -> Stdio {
    pipe().unwrap().1.into()
}

fn open_full_device() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

/// Returns exit status and standard error.
fn run_to_end(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (
        output.status.code(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn a_reader_that_closes_the_pipe_changes_no_exit_status() {
    let temp = tempfile::tempdir().unwrap();
    for (mut command, status) in list_printing(temp.path()) {
        let (code, log) = run_to_end(command.stdout(closed_pipe()));
        assert_eq!(code, Some(status), "{command:?}: {log}");
        assert!(
            !["standard output", "panicked"]
                .iter()
                .any(|part| log.contains(part)),
            "{command:?}: {log}"
        );
    }
}

#[test]
fn a_full_disk_has_its_own_exit_status() {
    let temp = tempfile::tempdir().unwrap();
    for (mut command, _) in list_printing(temp.path()) {
        let (code, log) = run_to_end(command.stdout(open_full_device()));
        assert_eq!(code, Some(74), "{command:?}: {log}");
    }
}

#[test]
fn a_standard_error_that_cannot_be_written_stops_no_command() {
    assert!(
        open_full_device().write_all(b"a").is_err(),
        "/dev/full takes nothing"
    );
    let temp = tempfile::tempdir().unwrap();
    for (mut command, status) in list_printing(temp.path()) {
        for error in [closed_pipe(), open_full_device().into()] {
            // Neither pipe has a reader.
            let code = command
                .stdout(closed_pipe())
                .stderr(error)
                .status()
                .unwrap()
                .code();
            assert_eq!(code, Some(status), "{command:?}");
        }
    }
    // Mistakes found by berth and by clap, and a line of the log (no kubelet runs).
    for words in [
        &["serve", "--listen="][..],
        &["status", "--no-such-option"],
        &["--log-level", "trace", "upgrade"],
    ] {
        let mut command = berth_command(words);
        command
            .env("BERTH_MANIFESTS_DIR", temp.path())
            .env("BERTH_STATE_DIR", temp.path().join("kept"));
        let known = run_to_end(&mut command).0;
        for error in [closed_pipe(), open_full_device().into()] {
            let code = command
                .stdout(Stdio::null())
                .stderr(error)
                .status()
                .unwrap()
                .code();
            assert!(code == known && code != Some(70), "{command:?}: {code:?}");
        }
    }
}
