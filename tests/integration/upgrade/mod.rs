//! `berth upgrade` with a stand-in for the kubelet, which runs a directory's static pods as `berth
//! run` processes, with the kubelet's order and signals. These tests run anywhere in seconds.
//! scripts/cluster.sh has a real kubelet with real apiservers.

use crate::stand_in::{API, BROKEN, EMULATES, STAND_IN};
use crate::support::cluster::Cluster;
use crate::support::load::{self, Load};
use crate::support::net::free_address;
use crate::support::process::{Running, berth_command, expect_status, output_of};
use crate::support::{eventually, in_memory};
use berth_cluster::service::slice_path;
use berth_options::cluster::host_name;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

mod judge;

const KUBEADM: &str = include_str!("../../data/manifest/kubeadm-v1.36.yaml");

/// Returns the shell script of a pod, by its image tag.
fn script_of(text: &str) -> &'static str {
    match text {
        text if text.contains("kube-apiserver:refuses") => {
            "echo 'Error: unknown flag: --no-such-flag' >&2; exit 1"
        }
        // This version fails only in the canonical file. Its temporary pod serves.
        text if text.contains("kube-apiserver:half") && !text.contains("\n  uid: ") => {
            "echo 'Error: no disk' >&2; exit 1"
        }
        text if text.contains("kube-apiserver:hangs") => "exec sleep 3600",
        _ => STAND_IN,
    }
}

/// A static pod that the kubelet runs.
struct Pod {
    text: String,
    uid: String,
    logs: PathBuf,
    process: Option<Child>,
    starts: u32,
    next: Instant,
    stopping: bool,
}

/// A task that the kubelet does not do yet. The upgrade stays in a step as long as a test checks
/// the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lags {
    Not,
    /// The kubelet starts no pod of the kind.
    Starting(Kind),
    /// The kubelet stops no pod of the kind.
    Stopping(Kind),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Canonical,
    Temporary,
}

/// Runs the pods of a directory until it is dropped.
struct Kubelet {
    logs: PathBuf,
    lags: Arc<Mutex<Lags>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Kubelet {
    fn start(node: &Node) -> Self {
        let (stop, lags) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(Mutex::new(Lags::Not)),
        );
        let (told, directory, logs, lagging) = (
            stop.clone(),
            node.directory(),
            node.path("pods"),
            lags.clone(),
        );
        let (listen, run_dir) = (node.listen, node.path("run"));
        let thread = std::thread::spawn(move || {
            let mut pods: BTreeMap<String, Pod> = BTreeMap::new();
            while !told.load(Ordering::Relaxed) {
                let files = read_files(&directory);
                for (name, pod) in &mut pods {
                    pod.tend(
                        files.get(name) == Some(&pod.text),
                        *lagging.lock().unwrap(),
                        listen,
                        &run_dir,
                    );
                }
                pods.retain(|_, pod| !pod.stopping || pod.process.is_some());
                for (name, text) in files {
                    pods.entry(name.clone())
                        .or_insert_with(|| Pod::new(&name, text, &logs));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        Self {
            logs: node.path("pods"),
            lags,
            stop,
            thread: Some(thread),
        }
    }

    fn lags(&self, how: Lags) {
        *self.lags.lock().unwrap() = how;
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if std::thread::panicking() {
            println!(
                "the kubelet: {ended:?}; its pods' logs in {}:",
                self.logs.display()
            );
            let found = Command::new("find")
                .arg(&self.logs)
                .args([
                    "-name", "*.log", "-print", "-exec", "tail", "-n", "20", "{}", ";",
                ])
                .output();
            println!(
                "{}",
                found
                    .map(|found| String::from_utf8_lossy(&found.stdout).into_owned())
                    .unwrap_or_default()
            );
        } else if let Some(Err(panic)) = ended {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Returns the manifests of a directory by pod names. A kubelet reads every file without a leading
/// dot.
fn read_files(directory: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Ok(text) = fs::read_to_string(entry.path()) else {
            continue;
        };
        let name = find_field(&text, "\n  name: ").expect("a whole manifest");
        assert!(
            found.insert(name.clone(), text).is_none(),
            "two files with the pod name {name}"
        );
    }
    found
}

/// Returns a scalar. A scalar that starts like a number, such as a UID with 0b, may be quoted.
fn find_field(text: &str, key: &str) -> Option<String> {
    Some(
        text.split_once(key)?
            .1
            .lines()
            .next()?
            .trim_matches('"')
            .to_owned(),
    )
}

impl Drop for Pod {
    fn drop(&mut self) {
        let Some(child) = &mut self.process else {
            return;
        };
        // The apiserver is a child of the process, and is notified of its end.
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Pod {
    fn new(name: &str, text: String, logs: &Path) -> Self {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let uid =
            find_field(&text, "\n  uid: ").unwrap_or_else(|| format!("{:016x}", hasher.finish()));
        let logs = logs.join(format!("kube-system_{name}-node_{uid}/kube-apiserver"));
        Self {
            text,
            uid,
            logs,
            process: None,
            starts: 0,
            next: Instant::now(),
            stopping: false,
        }
    }

    fn kind(&self) -> Kind {
        // berth sets a random UID in the manifest of a temporary pod.
        if self.text.contains("\n  uid: ") {
            Kind::Temporary
        } else {
            Kind::Canonical
        }
    }

    fn tend(&mut self, wanted: bool, lags: Lags, listen: SocketAddr, run_dir: &Path) {
        let begins = wanted && lags != Lags::Starting(self.kind());
        let wanted = wanted || lags == Lags::Stopping(self.kind());
        if let Some(child) = &mut self.process {
            if child.try_wait().unwrap().is_some() {
                self.process = None;
                self.next = Instant::now() + Duration::from_millis(100 << self.starts.min(5));
            } else if !wanted && !self.stopping {
                kill(
                    Pid::from_raw(child.id().try_into().unwrap()),
                    Signal::SIGTERM,
                )
                .unwrap();
            }
        }
        self.stopping |= !wanted;
        if begins && !self.stopping && self.process.is_none() && Instant::now() >= self.next {
            self.process = Some(self.launch(listen, run_dir));
            self.starts += 1;
        }
    }

    /// Starts the shim and the apiserver. Their log has no times, which berth accepts. With a long
    /// lease and long timeouts, a machine that stalls costs no shim and no client.
    fn launch(&self, listen: SocketAddr, run_dir: &Path) -> Child {
        fs::create_dir_all(&self.logs).unwrap();
        let log = self.logs.join(format!("{}.log", self.starts));
        let mut run = berth_command(["run", "--probe", "tcp", "--probe-interval", "20ms"]);
        run.args(["--lease", "60s", "--drain-timeout", "1m"]);
        run.args([
            "--listen",
            &listen.to_string(),
            "--instance",
            &self.uid,
            "--run-dir",
        ])
        .arg(run_dir);
        run.args(["--", "sh", "-c", script_of(&self.text), "kube-apiserver"]);
        run.env("TEST_BINARY", std::env::current_exe().unwrap());
        if self.text.contains("-judged") {
            let emulates = self.text.contains("--emulated-version=1.35")
                || self.text.contains("kube-apiserver:v1.35");
            run.env(API, run_dir.with_file_name("api"))
                .env(EMULATES, if emulates { "1.35" } else { "1.36" });
            // Compare the image's tag, since a UID may contain "-bad".
            if self.text.contains("-judged-bad")
                || (self.text.contains("-judged-late") && !emulates)
            {
                run.env(BROKEN, "1");
            }
        }
        run.stdout(Stdio::null())
            .stderr(fs::File::create(log).unwrap())
            .spawn()
            .unwrap()
    }
}

/// A node with a berth, and a directory of manifests.
struct Node {
    temp: TempDir,
    listen: SocketAddr,
    /// Mode and owner of the manifest.
    access: (u32, u32, u32),
}

impl Node {
    /// Creates a node with an apiserver of the image tag.
    fn new(tag: &str) -> Self {
        let mut node = Self {
            temp: in_memory(),
            listen: free_address(),
            access: (0, 0, 0),
        };
        fs::create_dir(node.directory()).unwrap();
        fs::write(node.canonical(), node.manifest(tag)).unwrap();
        fs::set_permissions(node.canonical(), fs::Permissions::from_mode(0o640)).unwrap();
        // Only root may change the owner.
        let _ = chown(node.canonical(), Some(7), Some(7));
        node.access = node.access();
        node
    }

    fn access(&self) -> (u32, u32, u32) {
        let now = fs::metadata(self.canonical()).unwrap();
        (now.mode(), now.uid(), now.gid())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn directory(&self) -> PathBuf {
        self.path("manifests")
    }

    fn canonical(&self) -> PathBuf {
        self.directory().join("kube-apiserver.yaml")
    }

    /// Returns kubeadm's manifest behind berth, with the node's paths and addresses.
    fn manifest(&self, tag: &str) -> String {
        let Self { listen, .. } = self;
        let ip = listen.ip().to_string();
        let kubeadm = KUBEADM
            .replace("10.0.0.5", &ip)
            .replace("6443", &listen.port().to_string())
            // The machine may be a control-plane node, with such files.
            .replace(
                "/etc/kubernetes/pki",
                &self.path("pki").display().to_string(),
            );
        // The run directory belongs to kube-apiserver's user, here the test's user.
        let user = format!(
            "  securityContext:\n    runAsUser: {}\n",
            nix::unistd::geteuid()
        );
        let kubeadm = kubeadm.replace("  securityContext:\n", &user);
        let file = self.path("kubeadm.yaml");
        fs::write(
            &file,
            kubeadm.replace("kube-apiserver:v1.36.3", &format!("kube-apiserver:{tag}")),
        )
        .unwrap();
        let mut inject = berth_command([
            "inject",
            "--image",
            "example/berth:v0.1.0",
            "--listen",
            &listen.to_string(),
        ]);
        inject
            .arg("--run-dir")
            .arg(self.path("run"))
            .arg("--state-dir")
            .arg(self.path("none"))
            .arg(file);
        let (out, _) = expect_status(&mut inject, 0, &[]);
        out
    }

    /// Writes a manifest outside the kubelet's directory.
    fn new_manifest(&self, tag: &str) -> PathBuf {
        let path = self.path(&format!("{tag}.yaml"));
        fs::write(&path, self.manifest(tag)).unwrap();
        path
    }

    fn upgrade(&self, options: &[&str]) -> Command {
        let mut upgrade = berth_command(["upgrade"]);
        upgrade.env("BERTH_SETTLE", "300ms");
        upgrade
            .arg("--manifests-dir")
            .arg(self.directory())
            .arg("--state-dir")
            .arg(self.path("kept"));
        upgrade
            .arg("--pod-logs-dir")
            .arg(self.path("pods"))
            .args(options);
        upgrade
    }

    /// Returns a command that upgrades to an image tag.
    fn upgrade_to(&self, tag: &str, options: &[&str]) -> Command {
        let mut upgrade = self.upgrade(options);
        upgrade.arg(self.new_manifest(tag));
        upgrade
    }

    /// Returns an upgrade command that takes the cluster's lock.
    fn upgrade_in(&self, cluster: &Cluster, options: &[&str]) -> Command {
        let mut upgrade = self.upgrade(options);
        upgrade.arg("--kubeconfig").arg(cluster.kubeconfig());
        upgrade
    }

    fn until_joined(&self) {
        eventually("the first instance joins", || {
            let (code, ..) = output_of(&mut berth_command([
                "ready",
                "--run-dir",
                self.path("run").to_str().unwrap(),
            ]));
            (code == Some(0)).then_some(())
        });
    }

    /// Returns the manifests that upgrades kept, ordered by name. Each has its version in the name.
    fn befores(&self) -> Vec<(String, String)> {
        let mut names: Vec<_> = fs::read_dir(self.path("kept"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        names.sort();
        let kept = |path: PathBuf| {
            let name = path.file_name().unwrap().to_str().unwrap();
            let (time, version) = name
                .strip_prefix("kube-apiserver.yaml.before-upgrade.")?
                .split_once('.')?;
            assert!(time.len() == 16 && time.ends_with('Z'), "{name}");
            Some((version.to_owned(), fs::read_to_string(&path).unwrap()))
        };
        names.into_iter().filter_map(kept).collect()
    }

    /// Checks that the directory has only one manifest, of the tag, with the original mode and
    /// owner.
    #[track_caller]
    fn is_whole(&self, tag: &str) {
        assert_eq!(
            fs::read_to_string(self.canonical()).unwrap(),
            self.manifest(tag)
        );
        assert_eq!(
            self.access(),
            self.access,
            "mode, uid and gid of the manifest"
        );
        assert_eq!(
            fs::read_dir(self.directory()).unwrap().count(),
            1,
            "nothing else in the directory"
        );
        assert!(
            !self.path("kept/upgrade.json").exists(),
            "the state is removed"
        );
    }
}

/// Creates a node with a ready instance of the tag v1.
fn start_serving_node() -> (Node, Kubelet) {
    let node = Node::new("v1");
    let kubelet = Kubelet::start(&node);
    node.until_joined();
    (node, kubelet)
}

/// Starts a client that connects again and again, and never retries.
fn start_load(node: &Node) -> Load {
    load::start_load(node.listen, 1, Duration::from_millis(2))
}

#[test]
fn mistakes_are_reported_and_nothing_is_changed() {
    let node = Node::new("v1");
    let (canonical, directory) = (node.canonical(), node.directory());
    let (canonical, directory) = (canonical.to_str().unwrap(), directory.to_str().unwrap());
    let options = [canonical, "--state-dir", directory, "--kubeconfig", "/none"];
    let mistakes = [canonical, "--state-dir", "--kubeconfig"];
    expect_status(
        berth_command(["upgrade", "--manifests-dir", directory]).args(options),
        64,
        &mistakes,
    );
    // A manifest that is not behind berth, and a manifest behind another berth.
    let plain = node
        .manifest("v2")
        .replace("    - /opt/berth/berth\n    - exec\n    - --\n", "");
    let elsewhere = node
        .manifest("v2")
        .replace(&node.listen.to_string(), "10.0.0.5:6443")
        .replace("metadata.uid", "metadata.name");
    for (text, mistakes) in [
        (&plain, &["berth inject"][..]),
        (&elsewhere, &["BERTH_INSTANCE", "BERTH_LISTEN"]),
    ] {
        let path = node.path("new.yaml");
        fs::write(&path, text).unwrap();
        expect_status(&mut node.upgrade(&[path.to_str().unwrap()]), 64, mistakes);
    }
    expect_status(&mut node.upgrade(&[]), 69, &["no instance"]);
    node.is_whole("v1");
    // The first switch needs `berth inject`.
    fs::write(canonical, plain).unwrap();
    for mut upgrade in [node.upgrade_to("v2", &[]), node.upgrade(&[])] {
        expect_status(&mut upgrade, 64, &["--write --bridge"]);
    }
}

#[test]
fn an_upgrade_and_a_restart_lose_nothing() {
    let (node, _kubelet) = start_serving_node();
    // The tag is not a release, so berth cannot check the version skew.
    let (out, _) = expect_status(
        &mut node.upgrade(&["--dry-run"]),
        0,
        &["names no version of kube-apiserver"],
    );
    assert_eq!(out.lines().count(), 8, "{out}");
    assert!(!node.path("kept").exists(), "a dry run touches nothing");
    node.is_whole("v1");

    let load = start_load(&node);
    expect_status(&mut node.upgrade_to("v2", &[]), 0, &["no --kubeconfig"]);
    node.is_whole("v2");
    assert_eq!(node.befores(), [("v1".into(), node.manifest("v1"))]);
    expect_status(&mut node.upgrade(&[]), 0, &["rolling restart"]);
    node.is_whole("v2");
    assert_eq!(
        node.befores().len(),
        1,
        "a restart leaves nothing to go back to"
    );
    load.end_without_loss();
}

#[test]
fn a_failing_new_version_is_removed_and_the_reason_is_printed() {
    let (node, _kubelet) = start_serving_node();
    let load = start_load(&node);
    expect_status(
        &mut node.upgrade_to("refuses", &[]),
        1,
        &["Error: unknown flag: --no-such-flag", "rolled back"],
    );
    node.is_whole("v1");
    let hangs = node.new_manifest("hangs");
    // The shim must come far enough to send a probe, which takes longer on a machine that stalls.
    for seconds in [1, 2, 4, 8, 16, 32] {
        let options = [
            hangs.to_str().unwrap(),
            "--ready-timeout",
            &format!("{seconds}s"),
        ];
        let (_, log) = expect_status(&mut node.upgrade(&options), 1, &[]);
        assert!(log.contains(&format!("not ready in {seconds}s")), "{log}");
        node.is_whole("v1");
        if log.contains("nothing listens on 127.") {
            return load.end_without_loss();
        }
    }
    panic!("why it is not ready is not told");
}

#[test]
fn an_image_that_the_kubelet_cannot_get_ends_the_upgrade_at_once() {
    let (node, kubelet) = start_serving_node();
    kubelet.lags(Lags::Starting(Kind::Temporary));
    let temporary = node.directory().join("berth-kube-apiserver.yaml");
    let line = r#""Error syncing pod, skipping" err="failed to \"StartContainer\" for \"kube-apiserver\" with ErrImagePull: \"not found\"""#;
    let programs = tempfile::tempdir().unwrap();
    let program = programs.path().join("journalctl");
    let uid = format!(
        "sed -n 's/^  uid: \"*\\([^\"]*\\)\"*$/\\1/p' {}",
        temporary.display()
    );
    fs::write(
        &program,
        format!("#!/bin/sh\necho '{line} podUID=\"'$({uid})'\"'\n"),
    )
    .unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut upgrade = node.upgrade_to("v2", &[]);
    upgrade.env(
        "PATH",
        format!(
            "{}:{}",
            programs.path().display(),
            std::env::var("PATH").unwrap()
        ),
    );
    expect_status(
        &mut upgrade,
        1,
        &[
            "the kubelet cannot start the instance",
            "ErrImagePull: \"not found\"",
            "rolled back",
        ],
    );
    node.is_whole("v1");
}

/// After a reboot, a systemd unit resumes the upgrade without the original options.
#[test]
fn a_resumed_upgrade_keeps_its_kubeconfig() {
    let (node, _kubelet) = start_serving_node();
    let cluster = Cluster::of(&[node.listen.ip()]);
    let kubeconfig = cluster.kubeconfig();
    let mut upgrade = node.upgrade(&["--settle", "1h"]);
    // The kubeconfig's path is relative to a directory, and the upgrade is resumed in another
    // directory.
    upgrade
        .current_dir(kubeconfig.parent().unwrap())
        .arg("--kubeconfig")
        .arg(kubeconfig.file_name().unwrap());
    let mut upgrade = Running::start(&mut upgrade);
    upgrade.logs("3/8");
    upgrade.kill();
    fs::write(&kubeconfig, "none").unwrap();
    let again = Running::start(&mut node.upgrade(&[]));
    again.logs("it goes on to the new manifest");
    again.logs(&format!("note: kubeconfig {}", kubeconfig.display()));
}

/// The new version serves as a temporary pod and fails from the canonical file, where the old
/// version comes back.
#[test]
fn a_new_version_that_fails_in_the_second_hop_gives_way_to_the_old_one() {
    let (node, _kubelet) = start_serving_node();
    let load = start_load(&node);
    expect_status(
        &mut node.upgrade_to("half", &[]),
        1,
        &[
            "failed: the instance of the canonical file",
            "Error: no disk",
            "5/8",
            "7/8",
            "rolled back",
        ],
    );
    node.is_whole("v1");
    load.end_without_loss();
}

/// An upgrade is killed in each step, and completed by the same command.
#[test]
fn an_upgrade_killed_at_any_step_is_resumed_by_the_same_command() {
    let (node, kubelet) = start_serving_node();
    let load = start_load(&node);
    // Steps, each with the cause that keeps the upgrade in the step: a task that the kubelet does
    // not do, or a long settle time.
    let steps = [
        (2, Lags::Starting(Kind::Temporary), "300ms"),
        (3, Lags::Not, "1h"),
        (4, Lags::Stopping(Kind::Canonical), "300ms"),
        (5, Lags::Starting(Kind::Canonical), "300ms"),
        (6, Lags::Not, "1h"),
        (7, Lags::Stopping(Kind::Temporary), "300ms"),
    ];
    // Each killed upgrade is resumed until the next kill, and then until its end.
    for (tag, killed) in [("v2", [2, 4, 6]), ("v3", [3, 5, 7])] {
        let (new, other) = (node.new_manifest(tag), node.new_manifest("other"));
        let mut options = vec![new.to_str().unwrap()];
        for (step, lags, settle) in steps.into_iter().filter(|(step, ..)| killed.contains(step)) {
            kubelet.lags(lags);
            options.extend(["--settle", settle]);
            let mut upgrade = Running::start(&mut node.upgrade(&options));
            upgrade.logs(&format!("{step}/8"));
            upgrade.signal(Signal::SIGKILL);
            assert_eq!(
                upgrade.ended().signal(),
                Some(Signal::SIGKILL as i32),
                "{}",
                upgrade.log()
            );
            assert!(node.path("kept/upgrade.json").exists(), "{}", upgrade.log());
            kubelet.lags(Lags::Not);
            expect_status(
                &mut node.upgrade(&[other.to_str().unwrap()]),
                64,
                &["to another manifest"],
            );
            options.clear();
        }
        expect_status(
            &mut node.upgrade(&[]),
            0,
            &["is under way (step ", "it goes on to the new manifest"],
        );
        node.is_whole(tag);
    }
    load.end_without_loss();
}

/// An operator who rescues a node in the middle of an upgrade finds the old manifest. And `eject`
/// does not write a manifest next to the running ones.
#[test]
fn in_the_middle_the_old_manifest_is_at_hand_and_inject_and_eject_refuse() {
    let (node, _kubelet) = start_serving_node();
    let v2 = node.new_manifest("v2");
    // A copy that an earlier upgrade kept. Its date is in the future, because the clock was set
    // back afterwards.
    let newest = node.path("kept/kube-apiserver.yaml.before-upgrade.29990101T000000Z.v0");
    fs::create_dir(node.path("kept")).unwrap();
    fs::write(&newest, node.manifest("v0")).unwrap();
    let mut upgrade = Running::start(&mut node.upgrade_to("v2", &["--settle", "1h"]));
    upgrade.logs("3/8");
    let log = upgrade.log();
    let named = log
        .lines()
        .find_map(|line| line.split_once("the old manifest is kept: "))
        .expect(&log)
        .1;
    assert_eq!(fs::read_to_string(named).unwrap(), node.manifest("v1"));
    fs::remove_file(newest).unwrap();
    assert_eq!(node.befores(), [("v1".into(), node.manifest("v1"))]);
    let (canonical, kept) = (node.canonical(), node.path("kept"));
    let on = |command: &str, file: &Path, write: &[&str]| {
        let mut command = berth_command([command]);
        command.arg(file).arg("--state-dir").arg(&kept).args(write);
        output_of(&mut command)
    };
    for (command, write) in [
        ("eject", &["--write"][..]),
        ("inject", &["--write", "--image", "example/berth:v0.2.0"]),
    ] {
        let (code, _, log) = on(command, &canonical, write);
        assert_eq!(code, Some(69), "{log}");
        assert!(log.contains("settle-temporary"), "{log}");
    }
    assert_eq!(fs::read_to_string(&canonical).unwrap(), node.manifest("v1"));
    assert_eq!(
        on("eject", &canonical, &["--diff"]).0,
        Some(0),
        "looking is free"
    );
    assert_eq!(
        on("eject", &v2, &["--write"]).0,
        Some(0),
        "a file elsewhere is none of the upgrade's"
    );
    upgrade.signal(Signal::SIGTERM);
    upgrade.ends(1);
    node.is_whole("v1");
    assert!(node.befores().is_empty(), "what serves is what was there");
}

#[test]
fn an_interrupt_rolls_back_while_the_old_version_serves_and_else_completes() {
    let (node, kubelet) = start_serving_node();
    let load = start_load(&node);
    // The step lasts until the signal has arrived: it has a long settle time, or waits for the
    // kubelet.
    let back = (3, "1h", Lags::Not, "going back", 1, "v1");
    let on = (
        5,
        "300ms",
        Lags::Starting(Kind::Canonical),
        "the old instance has already left",
        0,
        "v2",
    );
    for (step, settle, lags, said, code, tag) in [back, on] {
        kubelet.lags(lags);
        let mut upgrade = Running::start(&mut node.upgrade_to("v2", &["--settle", settle]));
        upgrade.logs(&format!("{step}/8"));
        upgrade.signal(Signal::SIGTERM);
        upgrade.logs(said);
        kubelet.lags(Lags::Not);
        upgrade.ends(code);
        node.is_whole(tag);
    }
    load.end_without_loss();
}

/// An upgrade that names a cluster must not begin without the cluster's lock, because another node
/// could be upgraded at the same time.
#[test]
fn a_cluster_that_gives_no_lock_ends_the_upgrade_before_any_change() {
    let (node, _kubelet) = start_serving_node();
    let cluster = Cluster::of(&[node.listen.ip()]);
    for status in [
        "403 Forbidden",
        "429 Too Many Requests",
        "503 Service Unavailable",
    ] {
        *cluster.no_leases.lock().unwrap() = Some(status);
        expect_status(
            &mut node.upgrade_in(&cluster, &[]),
            69,
            &["nothing was changed", "kubectl create namespace"],
        );
        node.is_whole("v1");
    }
    *cluster.no_leases.lock().unwrap() = None;
    let mut upgrade = Running::start(&mut node.upgrade_in(&cluster, &["--settle", "1h"]));
    upgrade.logs("3/8");
    // An upgrade that may have changed its node continues, whatever the cluster answers.
    *cluster.no_leases.lock().unwrap() = Some("503 Service Unavailable");
    upgrade.kill();
    let mut upgrade = Running::start(&mut node.upgrade_in(&cluster, &[]));
    upgrade.logs("8/8");
    // The cluster answers again, because the upgrade would else try for 15 s to release the lock.
    *cluster.no_leases.lock().unwrap() = None;
    upgrade.ends(0);
}

/// On the only node: a resumed upgrade takes over the slice of the killed process.
#[test]
fn the_node_is_in_the_service_until_the_upgrade_ends() {
    let (node, _kubelet) = start_serving_node();
    let cluster = Cluster::of(&[node.listen.ip()]);
    let path = slice_path(&format!("berth-upgrade-{}-ipv4", host_name()));
    let mut upgrade = Running::start(&mut node.upgrade_in(&cluster, &["--settle", "1h"]));
    let slice = eventually("the slice", || cluster.objects.get(&path));
    assert_eq!(
        slice["endpoints"][0]["addresses"][0],
        node.listen.ip().to_string()
    );
    upgrade.logs("3/8");
    upgrade.kill();
    assert!(cluster.objects.get(&path).is_some());
    let (code, _, log) = output_of(&mut node.upgrade_in(&cluster, &[]));
    assert_eq!((code, cluster.objects.get(&path)), (Some(0), None), "{log}");
}

/// An upgrade that was killed in the middle locks the other nodes out until the upgrade is
/// completed or its lock is broken.
#[test]
fn two_nodes_are_never_upgraded_at_once() {
    let nodes = [Node::new("v1"), Node::new("v1")];
    let [first, second] = &nodes;
    let _kubelets = [Kubelet::start(first), Kubelet::start(second)];
    nodes.iter().for_each(Node::until_joined);
    let cluster = Cluster::of(&[first, second].map(|node| node.listen.ip()));
    let refused = |node: &Node| {
        expect_status(
            &mut node.upgrade_in(&cluster, &[]),
            69,
            &["the cluster's lock is held by node ", "--break-lock"],
        );
        node.is_whole("v1");
    };
    let mut upgrade = first.upgrade_to("v2", &["--settle", "1h"]);
    let mut upgrade = Running::start(upgrade.arg("--kubeconfig").arg(cluster.kubeconfig()));
    upgrade.logs("this upgrade holds the cluster's lock: no other node is upgraded meanwhile");
    upgrade.logs("3/8");
    assert_eq!(cluster.locked(), Some(true));
    refused(second);
    upgrade.kill();
    refused(second);

    expect_status(&mut first.upgrade_in(&cluster, &[]), 0, &[]);
    first.is_whole("v2");
    assert_eq!(
        cluster.locked(),
        None,
        "an upgrade that is done releases it"
    );

    let mut upgrade = Running::start(&mut first.upgrade_in(&cluster, &["--settle", "1h"]));
    upgrade.logs("3/8");
    upgrade.kill();
    let (code, _, log) = output_of(&mut second.upgrade_in(&cluster, &["--break-lock"]));
    assert_eq!((code, cluster.locked()), (Some(0), None), "{log}");
    // A rollback releases the lock, too.
    let mut upgrade = Running::start(&mut first.upgrade_in(&cluster, &["--settle", "1h"]));
    upgrade.logs("3/8");
    upgrade.signal(Signal::SIGTERM);
    assert_eq!(
        (upgrade.ended().code(), cluster.locked()),
        (Some(1), None),
        "{}",
        upgrade.log()
    );
}
