//! The image of `scripts/image.sh`: two builds, one digest; and a pod of it, as `berth inject` makes one, in
//! runc: containers of an empty root with nothing but berth, on the host's network, read-only, without
//! capabilities, and with a uid that is not root's. The apiserver behind it is the simulated apiserver.
//!
//! Nothing is built here but what packing takes. Where that, or a container, cannot be had, the tests count
//! as ignored and print why.

#[path = "support/mod.rs"]
mod support;

use berth_rehearse::{certs, log::Recorder, store::Store, store_server};
use libtest_mimic::{Arguments, Completion, Trial};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use support::net::{connect, free_address};
use support::process::{Running, output_of};
use support::{eventually, tls};
use tempfile::TempDir;

/// Most bytes that an image may have.
const LIMIT: u64 = 8_000_000;

/// A uid that is neither root nor a user of this machine.
const UID: u32 = 65_534;

/// Where the pod's volumes are in its containers, as `berth inject` mounts them.
const BIN: &str = "/opt/berth";
const RUN: &str = "/run/berth";
const PKI: &str = "/etc/kubernetes/pki";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tests: [(&str, fn()); 2] = [
        ("two_builds_give_one_digest", two_builds_give_one_digest),
        ("a_pod_in_an_empty_root", a_pod_in_an_empty_root),
    ];
    let mut trials = vec![Trial::test("wrong_arguments_exit_with_64", || {
        wrong_arguments_exit_with_64();
        Ok(())
    })];
    trials.extend(tests.map(|(name, test)| {
        Trial::ignorable_test(name, move || match obstacle() {
            Some(why) => Ok(Completion::ignored_with(why)),
            None => {
                test();
                Ok(Completion::Completed)
            }
        })
    }));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Why there is no image, or why it cannot be run here.
fn obstacle() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("it needs root, for containers".into());
    }
    let namespaces = ["--mount", "--pid", "--ipc", "--uts", "--fork", "true"];
    if output(Command::new("unshare").args(namespaces)).is_err() {
        return Some("no namespaces can be made here".into());
    }
    if output(Command::new("runc").arg("--version")).is_err() {
        return Some("it needs runc (a Debian package of that name)".into());
    }
    output(image_sh(&["--check"])).err()
}

fn image_sh(args: &[&str]) -> Command {
    let mut script = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/image.sh"));
    script.args(args);
    script
}

/// The output of a command; or its error messages, in one line, if it fails.
fn output(mut command: impl std::borrow::BorrowMut<Command>) -> Result<String, String> {
    let output = command.borrow_mut().stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; "))
}

fn text(command: impl std::borrow::BorrowMut<Command>) -> String {
    output(command).unwrap_or_else(|why| panic!("{why}"))
}

fn parsed(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Packs the image; where it is, and its digest.
fn packed(dir: &Path, name: &str) -> (PathBuf, String) {
    let archive = dir.join(name);
    let said = text(image_sh(&["--tag", "registry.example/berth:v1", "--output", archive.to_str().unwrap()]));
    let lines: HashMap<_, _> = said.lines().filter_map(|line| line.split_once('=')).collect();
    assert_eq!(lines["IMAGE"], "registry.example/berth:v1", "{said}");
    assert_eq!(lines["ARCHIVE"], archive.to_str().unwrap(), "{said}");
    (archive, lines["DIGEST"].to_owned())
}

/// An archive's layout, as umoci and containers take it.
fn opened(archive: &Path, dir: &Path) -> PathBuf {
    let layout = dir.join("layout");
    fs::create_dir(&layout).unwrap();
    text(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&layout));
    layout
}

fn two_builds_give_one_digest() {
    let temp = tempfile::tempdir().unwrap();
    let ((one, digest), (other, again)) = (packed(temp.path(), "one.tar"), packed(temp.path(), "other.tar"));
    assert_eq!(digest, again);
    assert!(fs::read(&one).unwrap() == fs::read(other).unwrap(), "the digest is the same, and the archive is not");
    let size = fs::metadata(&one).unwrap().len();
    assert!(size <= LIMIT, "{size} bytes");

    let layout = opened(&one, temp.path());
    let blob = |digest: &Value| layout.join("blobs").join(digest.as_str().unwrap().replace(':', "/"));
    let index = &parsed(&layout.join("index.json"))["manifests"][0];
    assert_eq!(index["digest"], digest);
    assert_eq!(index["annotations"]["io.containerd.image.name"], "registry.example/berth:v1");
    let manifest = parsed(&blob(&index["digest"]));
    assert_eq!(manifest["layers"].as_array().unwrap().len(), 1);
    let config = parsed(&blob(&manifest["config"]["digest"]));
    assert_eq!(config["config"]["Entrypoint"], json!(["/berth"]));
    assert_eq!(config["config"].get("User"), None);
    let label = |name: &str| config["config"]["Labels"][format!("org.opencontainers.image.{name}")].clone();
    assert_eq!(label("title"), "berth");
    assert_eq!(label("version"), env!("CARGO_PKG_VERSION"));
    assert_eq!(label("description"), env!("CARGO_PKG_DESCRIPTION"));
    assert_eq!(label("licenses"), env!("CARGO_PKG_LICENSE"));
    assert_eq!(label("created"), config["created"]);
}

/// Before anything is built or searched for.
fn wrong_arguments_exit_with_64() {
    for script in ["image", "release"] {
        for args in [&["--nonsense"][..], &["--output"], &["--output", ""], &["--check", "--verify"]] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("scripts/{script}.sh"));
            let (status, out, errors) = output_of(Command::new(path).args(args));
            assert!(status == Some(64) && out.is_empty() && errors.starts_with(script), "{script} {args:?}: {errors}");
        }
    }
}

/// The volumes of a pod on this node, and the image that its containers have.
struct Pod {
    temp: TempDir,
    /// As umoci makes it of the image.
    config: Value,
    volumes: Vec<(PathBuf, &'static str, &'static str)>,
    env: Vec<String>,
    uid: u32,
    capabilities: Vec<&'static str>,
}

/// A container. Dropping it kills it.
struct Container {
    name: String,
    state: PathBuf,
    runc: Running,
}

impl Pod {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        let (archive, _) = packed(temp.path(), "image.tar");
        let layout = opened(&archive, temp.path());
        let (image, bundle) = (format!("{}:v1", layout.display()), temp.path().join("image"));
        text(Command::new("umoci").args(["unpack", "--image", &image]).arg(&bundle));
        let config = parsed(&bundle.join("config.json"));
        let root: Vec<_> = fs::read_dir(bundle.join("rootfs")).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(root, ["berth"]);
        let (status, ..) = output_of(Command::new(bundle.join("rootfs/berth")).arg("rehearse"));
        assert_eq!(status, Some(64), "the image has berth rehearse");
        Self { temp, config, volumes: Vec::new(), env: Vec::new(), uid: UID, capabilities: Vec::new() }
    }

    fn dir(&self, name: &str) -> PathBuf {
        let dir = self.temp.path().join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn rootfs(&self) -> PathBuf {
        self.temp.path().join("image/rootfs")
    }

    /// The image's entrypoint, with arguments.
    fn run(&self, name: &str, args: &[&str]) -> Container {
        let mut config = self.config.clone();
        config["process"]["args"].as_array_mut().unwrap().extend(args.iter().map(|&arg| arg.into()));
        self.start(name, config)
    }

    /// What the apiserver's container starts, which is not the image's.
    fn run_command(&self, name: &str, args: &[String]) -> Container {
        let mut config = self.config.clone();
        config["process"]["args"] = json!(args);
        self.start(name, config)
    }

    fn start(&self, name: &str, mut config: Value) -> Container {
        let capabilities = &self.capabilities;
        let process = &mut config["process"];
        process["terminal"] = false.into();
        process["noNewPrivileges"] = true.into();
        process["user"] = json!({"uid": self.uid, "gid": self.uid});
        process["env"] = json!(self.env);
        process["capabilities"] =
            json!({"bounding": capabilities, "effective": capabilities, "permitted": capabilities});
        process.as_object_mut().unwrap().remove("rlimits");
        config["root"] = json!({"path": self.rootfs(), "readonly": true});
        // The host's network, and nothing of its cgroups.
        config["linux"]["namespaces"].as_array_mut().unwrap().retain(|namespace| namespace["type"] != "network");
        let mounts = config["mounts"].as_array_mut().unwrap();
        mounts.retain(|mount| ["/proc", "/dev"].contains(&mount["destination"].as_str().unwrap()));
        mounts.extend(self.volumes.iter().map(|(source, destination, mode)| {
            json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", mode]})
        }));
        let bundle = self.dir(name);
        fs::write(bundle.join("config.json"), config.to_string()).unwrap();

        let (name, state) = (format!("berth-{name}-{}", std::process::id()), self.dir("state"));
        let mut runc = runc(&state);
        runc.args(["run", "--bundle"]).arg(&bundle).arg(&name);
        Container { runc: Running::start(runc.stdin(Stdio::null())), name, state }
    }
}

fn runc(state: &Path) -> Command {
    let mut runc = Command::new("runc");
    runc.arg("--root").arg(state);
    runc
}

impl Container {
    /// Waits for an end with exit status 0.
    #[track_caller]
    fn succeeds(&mut self) {
        let status = self.runc.ended();
        assert!(status.success(), "{status}: {}\n{}", self.runc.log(), self.runc.out());
    }

    /// Exit status, output and errors of berth in this container, as an exec probe runs it.
    #[track_caller]
    fn exec(&self, args: &[&str]) -> (Option<i32>, String, String) {
        output_of(runc(&self.state).args(["exec", &self.name, "/berth"]).args(args).stdin(Stdio::null()))
    }

    /// A line of /proc/PID/status of its first process.
    #[track_caller]
    fn status(&self, key: &str) -> String {
        let state: Value = serde_json::from_str(&text(runc(&self.state).args(["state", &self.name]))).unwrap();
        let status = fs::read_to_string(format!("/proc/{}/status", state["pid"])).unwrap();
        let mut lines = status.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        lines.next().unwrap_or_else(|| panic!("no {key} in {status}")).trim().to_owned()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = output(runc(&self.state).args(["delete", "--force", &self.name]));
    }
}

/// What the simulated apiserver gets its objects from, instead of an etcd; until the process ends.
fn store(socket: &Path) {
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    fs::set_permissions(socket, Permissions::from_mode(0o666)).unwrap();
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            store_server::serve(listener, Arc::new(Store::with_history(8)), Arc::new(Recorder::default())).await;
        });
    });
}

fn a_pod_in_an_empty_root() {
    let mut pod = Pod::new();
    let (bin, run, pki) = (pod.dir("bin"), pod.dir("run"), pod.dir("pki"));
    pod.volumes = vec![(bin.clone(), BIN, "rw"), (run.clone(), RUN, "rw")];
    fs::set_permissions(&run, Permissions::from_mode(0o755)).unwrap();

    // The first init container: root, and nothing else that is not needed.
    (pod.uid, pod.capabilities) = (0, vec!["CAP_CHOWN"]);
    let copy = format!("{BIN}/berth");
    pod.run("install", &["copy-self", &copy, "--run-dir", RUN, "--owner", &UID.to_string()]).succeeds();
    assert!(fs::read(bin.join("berth")).unwrap() == fs::read(pod.rootfs().join("berth")).unwrap(), "not the binary");
    assert_eq!(fs::metadata(bin.join("berth")).unwrap().mode() & 0o7777, 0o755);
    let meta = fs::metadata(&run).unwrap();
    assert_eq!((meta.uid(), meta.mode() & 0o7777), (UID, 0o700));

    // The shim, before there is an apiserver.
    let listen = free_address();
    let certs = certs::make(&pki, &[listen.ip()]).unwrap();
    certs.issue("a").unwrap();
    for file in [certs.ca_file.clone(), certs.cert_file("a"), certs.key_file("a")] {
        chown(file, Some(UID), None).unwrap();
    }
    store(&pki.join("store"));
    let within = |file: &Path| format!("{PKI}/{}", file.strip_prefix(&pki).unwrap().display());
    (pod.uid, pod.capabilities) = (UID, Vec::new());
    pod.volumes = vec![(run, RUN, "rw"), (pki.clone(), PKI, "ro")];
    pod.env = ["BERTH_INSTANCE=a".into(), format!("BERTH_LISTEN={listen}"), format!("BERTH_RUN_DIR={RUN}")].into();
    pod.env.extend([format!("BERTH_PROBE_CA={}", within(&certs.ca_file))]);
    let mut shim = pod.run("shim", &["serve", "--probe-interval=50ms"]);
    shim.runc.logs("waiting for the instance's record");
    for (key, value) in [("CapEff", "0000000000000000"), ("CapBnd", "0000000000000000"), ("NoNewPrivs", "1")] {
        assert_eq!(shim.status(key), value, "{key}");
    }
    assert_eq!(shim.status("Uid").split_whitespace().next(), Some(UID.to_string().as_str()));
    let (status, _, errors) = shim.exec(&["copy-self", "/elsewhere"]);
    assert!(status == Some(69) && errors.contains("Read-only file system"), "{status:?} {errors}");
    let (status, _, errors) = shim.exec(&["ready"]);
    assert_eq!(status, Some(1), "{errors}");

    // The apiserver's container, which has a C library and the copy of berth in its own root.
    let program = Path::new(env!("CARGO_BIN_EXE_berth"));
    pod.volumes.extend([(bin, BIN, "ro"), ("/usr".into(), "/usr", "ro"), ("/lib".into(), "/lib", "ro")]);
    pod.volumes.extend([("/lib64".into(), "/lib64", "ro"), (program.into(), "/apiserver", "ro")]);
    pod.volumes.retain(|(source, ..)| source.exists());
    let flags = [
        "--stand-in-name=a".into(),
        format!("--etcd-servers=unix://{PKI}/store"),
        format!("--tls-cert-file={}", within(&certs.cert_file("a"))),
        format!("--tls-private-key-file={}", within(&certs.key_file("a"))),
    ];
    let command = [copy.as_str(), "exec", "--", "/apiserver", "stand-in"].map(str::to_owned);
    let mut apiserver = pod.run_command("apiserver", &[&command[..], &flags].concat());

    shim.runc.logs("joined");
    for probe in ["ready", "live"] {
        eventually(&format!("berth {probe}"), || (shim.exec(&[probe]).0 == Some(0)).then_some(()));
    }
    let answer = tls::get(&certs.ca, connect(listen), "/version");
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("gitVersion"), "{answer}");
    let (status, table, errors) = shim.exec(&["status"]);
    assert!(status == Some(0) && table.contains(&listen.to_string()), "{table}{errors}");

    let (status, _, errors) = shim.exec(&["drain"]);
    assert_eq!(status, Some(0), "{errors}");
    shim.runc.logs("drain requested");
    shim.runc.signal(Signal::SIGTERM);
    apiserver.runc.signal(Signal::SIGTERM);
    apiserver.succeeds();
    shim.succeeds();
}
