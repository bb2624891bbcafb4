//! The image of `scripts/image.sh`: two builds have the same digest, and the image has the expected
//! files and configuration. In `scripts/cluster.sh interrupted`, a real kubelet runs a pod of the
//! image, as `berth inject` makes it.
//!
//! The tests pack the image, and build nothing else. If a prerequisite is missing, the test counts
//! as ignored and prints the reason.

#[path = "support/mod.rs"]
mod support;

use libtest_mimic::{Arguments, Completion, Trial};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use support::process::output_of;

fn main() -> ExitCode {
    let trials = vec![
        Trial::test("wrong_arguments_exit_with_64", || {
            wrong_arguments_exit_with_64();
            Ok(())
        }),
        Trial::ignorable_test("two_builds_give_one_digest", || match obstacle() {
            Some(why) => Ok(Completion::ignored_with(why)),
            None => {
                two_builds_give_one_digest();
                Ok(Completion::Completed)
            }
        }),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Returns the reason why no image can be packed here, if any.
fn obstacle() -> Option<String> {
    if run_command(Command::new("umoci").arg("--version")).is_err() {
        return Some("it needs umoci (a Debian package of that name)".into());
    }
    run_command(image_sh(&["--check"])).err()
}

fn image_sh(args: &[&str]) -> Command {
    let mut script = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/image.sh"));
    script.args(args);
    script
}

/// Runs a command, and returns its output. If the command fails, returns its error messages in one
/// line.
fn run_command(mut command: impl std::borrow::BorrowMut<Command>) -> Result<String, String> {
    let output = command
        .borrow_mut()
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr)
        .trim()
        .replace('\n', "; "))
}

fn run_to_text(command: impl std::borrow::BorrowMut<Command>) -> String {
    run_command(command).unwrap_or_else(|why| panic!("{why}"))
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Packs the image, and returns its path and digest.
fn pack_image(dir: &Path, name: &str) -> (PathBuf, String) {
    let archive = dir.join(name);
    let said = run_to_text(image_sh(&[
        "--tag",
        "registry.example/berth:v1",
        "--output",
        archive.to_str().unwrap(),
    ]));
    let lines: HashMap<_, _> = said
        .lines()
        .filter_map(|line| line.split_once('='))
        .collect();
    assert_eq!(lines["IMAGE"], "registry.example/berth:v1", "{said}");
    assert_eq!(lines["ARCHIVE"], archive.to_str().unwrap(), "{said}");
    (archive, lines["DIGEST"].to_owned())
}

fn two_builds_give_one_digest() {
    let temp = tempfile::tempdir().unwrap();
    let ((one, digest), (other, again)) = (
        pack_image(temp.path(), "one.tar"),
        pack_image(temp.path(), "other.tar"),
    );
    assert_eq!(digest, again);
    assert!(
        fs::read(&one).unwrap() == fs::read(other).unwrap(),
        "the digest is the same, and the archive is not"
    );
    let layout = temp.path().join("layout");
    fs::create_dir(&layout).unwrap();
    run_to_text(
        Command::new("tar")
            .arg("-xf")
            .arg(&one)
            .arg("-C")
            .arg(&layout),
    );
    let blob = |digest: &Value| {
        layout
            .join("blobs")
            .join(digest.as_str().unwrap().replace(':', "/"))
    };
    let index = &read_json(&layout.join("index.json"))["manifests"][0];
    assert_eq!(index["digest"], digest);
    assert_eq!(
        index["annotations"]["io.containerd.image.name"],
        "registry.example/berth:v1"
    );
    let manifest = read_json(&blob(&index["digest"]));
    let [layer] = &manifest["layers"].as_array().unwrap()[..] else {
        panic!("{manifest}")
    };
    let root = temp.path().join("root");
    fs::create_dir(&root).unwrap();
    run_to_text(
        Command::new("tar")
            .arg("-xzf")
            .arg(blob(&layer["digest"]))
            .arg("-C")
            .arg(&root),
    );
    let files: Vec<_> = fs::read_dir(&root)
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    assert_eq!(files, ["berth"]);
    let (status, ..) = output_of(Command::new(root.join("berth")).arg("rehearse"));
    assert_eq!(status, Some(64), "the image has berth rehearse");
    let config = read_json(&blob(&manifest["config"]["digest"]));
    assert_eq!(config["config"]["Entrypoint"], json!(["/berth"]));
    assert_eq!(config["config"].get("User"), None);
    let label =
        |name: &str| config["config"]["Labels"][format!("org.opencontainers.image.{name}")].clone();
    assert_eq!(label("title"), "berth");
    assert_eq!(label("version"), env!("CARGO_PKG_VERSION"));
    assert_eq!(label("description"), env!("CARGO_PKG_DESCRIPTION"));
    assert_eq!(label("licenses"), env!("CARGO_PKG_LICENSE"));
    assert_eq!(label("created"), config["created"]);
}

/// Mistakes are reported before the script builds or looks for anything.
fn wrong_arguments_exit_with_64() {
    for script in ["image", "release"] {
        for args in [
            &["--nonsense"][..],
            &["--output"],
            &["--output", ""],
            &["--check", "--verify"],
        ] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("scripts/{script}.sh"));
            let (status, out, errors) = output_of(Command::new(path).args(args));
            assert!(
                status == Some(64) && out.is_empty() && errors.starts_with(script),
                "{script} {args:?}: {errors}"
            );
        }
    }
}
