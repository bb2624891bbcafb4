//! `berth inject`, `berth eject` and `berth copy-self` as an operator and an init container run
//! them: the files afterwards, and the output.

use crate::support::process::{self, output_of, stdin_with};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const KUBEADM: &str = include_str!("../data/manifest/kubeadm-v1.36.yaml");
const IMAGE: &str = "registry.example/berth:v0.1.0";

/// A node's directory of manifests with kubeadm's manifest.
struct Node {
    temp: tempfile::TempDir,
}

/// Result of a command.
struct Done {
    status: Option<i32>,
    out: String,
    err: String,
}

impl Node {
    fn new() -> Self {
        let node = Self {
            temp: tempfile::tempdir().unwrap(),
        };
        fs::create_dir(node.directory()).unwrap();
        fs::write(node.manifest(), KUBEADM).unwrap();
        fs::set_permissions(node.manifest(), fs::Permissions::from_mode(0o600)).unwrap();
        node
    }

    fn directory(&self) -> PathBuf {
        self.temp.path().join("manifests")
    }

    fn manifest(&self) -> PathBuf {
        self.directory().join("kube-apiserver.yaml")
    }

    fn backups(&self) -> PathBuf {
        self.temp.path().join("berth")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.manifest()).unwrap()
    }

    fn berth(&self, command: &str, more: &[&str]) -> Done {
        let image = if command == "inject" {
            vec!["--image", IMAGE]
        } else {
            vec![]
        };
        let mut berth = berth_without_pass();
        berth
            .arg(command)
            .arg(self.manifest())
            .args(image)
            .args(more)
            .arg("--state-dir")
            .arg(self.backups());
        run_to_end(&mut berth)
    }
}

fn berth_without_pass() -> Command {
    let mut berth = process::berth_command::<&str>([]);
    berth.env_remove("BERTH_PASS");
    berth
}

fn run_to_end(command: &mut Command) -> Done {
    let (status, out, err) = output_of(command);
    Done { status, out, err }
}

fn list_names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_relative_state_directory_is_made() {
    let node = Node::new();
    let mut berth = berth_without_pass();
    berth
        .args(["inject", "--image", IMAGE, "--write"])
        .args(["--state-dir", "kept/originals"])
        .arg(node.manifest())
        .current_dir(node.temp.path());
    let done = run_to_end(&mut berth);
    assert_eq!(done.status, Some(0), "{}", done.err);
    let kept = list_names(&node.temp.path().join("kept/originals"));
    assert_eq!(kept.len(), 1, "{kept:?}");
}

#[test]
fn a_preview_writes_nothing() {
    let node = Node::new();
    let printed = node.berth("inject", &[]);
    assert_eq!(printed.status, Some(0), "{}", printed.err);
    assert!(
        printed
            .out
            .contains("\n    - /opt/berth/berth\n    - exec\n    - --\n    - kube-apiserver\n")
    );
    let diff = node.berth("inject", &["--diff"]);
    assert!(
        diff.out.starts_with("--- a/") && diff.out.contains("\n+    - /opt/berth/berth\n"),
        "{}",
        diff.out
    );
    let passing = node.berth("inject", &["--diff", "--pass", "auto"]);
    let lines = passing
        .out
        .lines()
        .filter(|line| !diff.out.contains(line))
        .collect::<Vec<_>>();
    assert_eq!(
        passing
            .out
            .matches("\n+    - name: BERTH_PASS\n+      value: auto\n")
            .count(),
        2,
        "{lines:?}"
    );
    // A preview never writes, and no variable of the environment makes it write.
    let both = node.berth("inject", &["--diff", "--write"]);
    assert_eq!(both.status, Some(64), "{}", both.err);
    let mut berth = berth_without_pass();
    berth
        .args(["inject", "--image", IMAGE, "--diff"])
        .arg(node.manifest())
        .arg("--state-dir")
        .arg(node.backups());
    let left = run_to_end(berth.env("BERTH_WRITE", "true").env("BERTH_BRIDGE", "true"));
    assert!(
        left.status == Some(0) && left.out.starts_with("--- a/"),
        "{}",
        left.err
    );
    assert_eq!(
        (node.text(), list_names(node.temp.path())),
        (KUBEADM.into(), vec!["manifests".into()])
    );
}

#[test]
fn write_keeps_the_original_elsewhere_and_eject_gives_it_back() {
    let node = Node::new();
    let printed = node.berth("inject", &[]).out;
    let done = node.berth("inject", &["--write"]);
    assert_eq!(
        (done.status, done.out.as_str()),
        (Some(0), ""),
        "{}",
        done.err
    );
    assert_eq!(node.text(), printed);
    assert_eq!(
        fs::metadata(node.manifest()).unwrap().permissions().mode() & 0o777,
        0o600
    );
    // A kubelet would run a second file.
    assert_eq!(list_names(&node.directory()), ["kube-apiserver.yaml"]);
    let backup = node.backups().join(&list_names(&node.backups())[0]);
    assert!(
        done.err
            .contains(&format!("the original is {}", backup.display())),
        "{}",
        done.err
    );
    // Decisions of the operator come first.
    let printed_in = |part: &str| {
        done.err
            .lines()
            .position(|line| line.contains(part))
            .unwrap_or_else(|| panic!("{}", done.err))
    };
    let refused = printed_in(
        "clients are refused until kube-apiserver is ready: --write --bridge prevents that",
    );
    assert_eq!(printed_in(" changes, see --diff"), refused + 1);
    assert!(!done.err.contains("spec.containers"), "{}", done.err);
    assert_eq!(fs::read_to_string(backup).unwrap(), KUBEADM);

    let again = node.berth("inject", &["--write"]);
    assert_eq!(again.status, Some(0), "{}", again.err);
    assert_eq!(
        (node.text(), list_names(&node.backups()).len()),
        (printed, 1)
    );

    // Undone edits lose the comment. The saved original has the comment.
    assert_eq!(node.berth("eject", &["--write"]).status, Some(0));
    assert_eq!(
        (node.text(), list_names(&node.directory()).len()),
        (KUBEADM.into(), 1)
    );
}

/// The manifest's errors are those of `berth doctor --node`: no interface has its address, and no
/// process serves at the port.
#[test]
fn a_bridge_is_not_begun_for_a_manifest_that_does_not_fit_the_node() {
    let node = Node::new();
    let original = KUBEADM.replace("6443", "1");
    fs::write(node.manifest(), &original).unwrap();
    let options = ["--write", "--bridge", "--listen", "192.0.2.7:1"];
    fs::write(node.directory().join("kube-apiserver.yaml.bak"), KUBEADM).unwrap();
    let refused = node.berth("inject", &options);
    assert_eq!(
        (
            refused.status,
            node.text() == original,
            list_names(node.temp.path()).len()
        ),
        (Some(1), true, 1)
    );
    let found = |kind: &str, text: &str| -> Vec<String> {
        let id = |line: &str| {
            Some(
                line.strip_prefix(kind)?
                    .strip_prefix('[')?
                    .split_once(']')?
                    .0
                    .to_owned(),
            )
        };
        text.lines().filter_map(id).collect()
    };
    let errors = found("error", &refused.err);
    for id in ["address-missing", "same-pod-name"] {
        assert!(errors.iter().any(|error| error == id), "{}", refused.err);
    }
    let ignored = errors.join(",");
    let excused = [&options[..], &["--ignore-errors", &ignored]].concat();
    let refused = node.berth("inject", &excused);
    // The bridge prints the warning.
    assert!(
        found("warning", &refused.err)
            .iter()
            .any(|id| id == "address-missing"),
        "{}",
        refused.err
    );
    assert_eq!(
        (refused.status, node.text() == original),
        (Some(69), true),
        "{}",
        refused.err
    );
}

/// A symbolic link names the same manifest as its target.
#[test]
fn an_original_is_found_by_its_path_and_by_a_link() {
    let original = KUBEADM.replace("    ports:\n", "    ports: # kubeadm's\n");
    let node = Node::new();
    fs::write(node.manifest(), &original).unwrap();
    let link = node.temp.path().join("link.yaml");
    std::os::unix::fs::symlink(node.manifest(), &link).unwrap();
    let by_link = |command: &mut Command| {
        run_to_end(
            command
                .arg(&link)
                .arg("--write")
                .arg("--state-dir")
                .arg(node.backups()),
        )
    };
    let done = by_link(berth_without_pass().args(["inject", "--image", IMAGE]));
    assert_eq!(done.status, Some(0), "{}", done.err);
    assert_eq!(node.berth("eject", &["--write"]).status, Some(0));
    assert_eq!(node.text(), original);
    node.berth("inject", &["--write"]);
    assert_eq!(by_link(berth_without_pass().arg("eject")).status, Some(0));
    assert_eq!(
        (node.text(), list_names(&node.backups()).len()),
        (original, 1)
    );
}

#[test]
fn other_options_are_made_from_the_original() {
    let node = Node::new();
    let original = KUBEADM.replace("    ports:\n", "    ports: # kubeadm's\n");
    fs::write(node.manifest(), &original).unwrap();
    node.berth("inject", &["--write"]);
    node.berth(
        "inject",
        &[
            "--write",
            "--listen",
            "10.0.0.5:6443",
            "--listen",
            "127.0.0.1:6443",
        ],
    );
    assert_eq!(list_names(&node.backups()).len(), 2);
    node.berth("eject", &["--write"]);
    assert_eq!(node.text(), original);
}

#[test]
fn standard_input_works_and_cannot_be_written() {
    let injected = run_to_end(
        berth_without_pass()
            .args(["inject", "-", "--image", IMAGE])
            .stdin(stdin_with(KUBEADM)),
    );
    let ejected = run_to_end(
        berth_without_pass()
            .args(["eject", "-"])
            .stdin(stdin_with(&injected.out)),
    );
    assert_eq!(ejected.out, KUBEADM);
    let refused = run_to_end(
        berth_without_pass()
            .args(["eject", "-", "--write"])
            .stdin(stdin_with(KUBEADM)),
    );
    assert_eq!((refused.status, refused.out.as_str()), (Some(64), ""));
}

#[test]
fn mistakes_are_reported_with_file_and_line_and_nothing_is_written() {
    let node = Node::new();
    fs::write(
        node.manifest(),
        KUBEADM.replace("hostNetwork: true", "hostNetwork: false"),
    )
    .unwrap();
    let refused = node.berth("inject", &["--write"]);
    let wanted = format!(
        "berth: {}:12: hostNetwork is not true, ",
        node.manifest().display()
    );
    assert!(
        refused.status == Some(64) && refused.err.contains(&wanted),
        "{}",
        refused.err
    );
    fs::write(node.manifest(), "a: [").unwrap();
    assert!(
        node.berth("eject", &["--write"])
            .err
            .contains(".yaml:2: this is no YAML"),
        "{}",
        refused.err
    );
    assert_eq!(list_names(node.temp.path()), ["manifests"]);

    let options = [
        "--run-dir",
        "run",
        "--listen",
        "nowhere",
        "--probe-key",
        "key",
        "--write",
    ];
    let refused = node.berth("inject", &options);
    let lines = refused.err.lines().count();
    for option in [
        "--run-dir \"run\"",
        "--listen \"nowhere\"",
        "--probe-key without",
        "--probe-key key: give an absolute",
    ] {
        assert!(refused.err.contains(option), "{option} in {}", refused.err);
    }
    assert_eq!((refused.status, lines), (Some(64), 4), "{}", refused.err);
    for pass in ["direct", ""] {
        let refused = node.berth("inject", &["--pass", pass, "--write"]);
        assert_eq!(refused.status, Some(64), "{}", refused.err);
    }
    let directory = node.directory();
    let beside = run_to_end(
        berth_without_pass()
            .arg("eject")
            .arg(node.manifest())
            .args(["--write", "--state-dir"])
            .arg(&directory),
    );
    assert_eq!(beside.status, Some(64), "{}", beside.err);
    assert_eq!(
        run_to_end(berth_without_pass().args(["eject", "/nonexistent"])).status,
        Some(69)
    );
    assert_eq!(
        run_to_end(berth_without_pass().args(["inject", "-"])).status,
        Some(64),
        "without an image"
    );
}

#[test]
fn patches_are_files_that_kubeadm_knows() {
    let node = Node::new();
    let patches = node.temp.path().join("patches");
    let done = node.berth("inject", &["--kubeadm-patch", patches.to_str().unwrap()]);
    assert_eq!(
        (done.status, done.out.as_str()),
        (Some(0), ""),
        "{}",
        done.err
    );
    assert_eq!(
        list_names(&patches),
        [
            "kube-apiserver9-berth+json.yaml",
            "kube-apiserver9-berth+strategic.yaml"
        ]
    );
    // A kubelet would run a patch in its own directory as a pod.
    let own = node.berth(
        "inject",
        &["--kubeadm-patch", node.directory().to_str().unwrap()],
    );
    assert_eq!(own.status, Some(64), "{}", own.err);
    assert_eq!(
        (node.text(), list_names(&node.directory()).len()),
        (KUBEADM.into(), 1)
    );
}

#[test]
fn copy_self_leaves_a_program_that_runs() {
    let temp = tempfile::tempdir().unwrap();
    let (copy, run_dir) = (temp.path().join("berth"), temp.path().join("run/berth"));
    for _ in 0..2 {
        let done = run_to_end(
            berth_without_pass()
                .arg("copy-self")
                .arg(&copy)
                .arg("--run-dir")
                .arg(&run_dir),
        );
        assert_eq!(
            (done.status, list_names(temp.path())),
            (Some(0), vec!["berth".into(), "run".into()]),
            "{}",
            done.err
        );
        assert_eq!(
            fs::metadata(&copy).unwrap().permissions().mode() & 0o7777,
            0o755
        );
    }
    assert!(
        run_to_end(Command::new(&copy).arg("--version"))
            .out
            .starts_with("berth ")
    );
    assert_eq!(
        fs::metadata(&run_dir).unwrap().permissions().mode() & 0o7777,
        0o700
    );
    let failed = run_to_end(
        berth_without_pass()
            .arg("copy-self")
            .arg(temp.path().join("none/berth")),
    );
    assert_eq!(failed.status, Some(69), "{}", failed.err);
}
