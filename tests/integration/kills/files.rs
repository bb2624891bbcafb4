//! Commands that change files, and no process.

use super::{Scene, every_kill};
use crate::support::process::{berth_command, expect_status};
use berth_bridge::restore::{self, SavedFile};
use berth_testing::{Objects, create_ca, format_answer, serve_at};
use serde_json::json;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

const KUBEADM: &str = include_str!("../../data/manifest/kubeadm-v1.36.yaml");

#[test]
fn inject() {
    every_kill(12, 80, || Manifest::new("inject"));
}

#[test]
fn eject() {
    every_kill(12, 40, || Manifest::new("eject"));
}

/// The manifest of a node.
struct Manifest {
    temp: tempfile::TempDir,
    command: &'static str,
    old: String,
    new: String,
    access: (u32, u32, u32),
}

impl Manifest {
    fn new(command: &'static str) -> Self {
        let temp = tempfile::tempdir().unwrap();
        // A comment that only the saved original has.
        let original = KUBEADM.replace("    ports:\n", "    ports: # kubeadm's\n");
        let mut node = Self {
            temp,
            command: "inject",
            old: original.clone(),
            new: String::new(),
            access: (0, 0, 0),
        };
        fs::create_dir(node.directory()).unwrap();
        fs::write(node.manifest(), &original).unwrap();
        fs::set_permissions(node.manifest(), fs::Permissions::from_mode(0o640)).unwrap();
        // Only root may change the owner.
        let _ = chown(node.manifest(), Some(7), Some(7));
        node.access = node.access();
        (node.new, _) = expect_status(&mut node.berth(), 0, &[]);
        if command == "eject" {
            expect_status(node.berth().arg("--write"), 0, &[]);
            node.command = command;
            (node.old, node.new) = (node.new, original);
        }
        node
    }

    fn berth(&self) -> Command {
        let mut berth = berth_command([self.command]);
        berth
            .arg(self.manifest())
            .arg("--state-dir")
            .arg(self.temp.path().join("kept"));
        if self.command == "inject" {
            berth.args(["--image", "registry.example/berth:v0.1.0"]);
        }
        berth
    }

    fn directory(&self) -> PathBuf {
        self.temp.path().join("manifests")
    }

    fn manifest(&self) -> PathBuf {
        self.directory().join("kube-apiserver.yaml")
    }

    fn access(&self) -> (u32, u32, u32) {
        let now = fs::metadata(self.manifest()).unwrap();
        (now.mode(), now.uid(), now.gid())
    }
}

impl Scene for Manifest {
    fn root(&self) -> PathBuf {
        self.temp.path().to_owned()
    }

    fn command(&self) -> Command {
        let mut berth = self.berth();
        berth.arg("--write");
        berth
    }

    fn is_whole(&mut self) {
        let text = fs::read_to_string(self.manifest()).unwrap();
        assert!(
            [&self.old, &self.new].contains(&&text),
            "half a manifest: {text}"
        );
        for path in super::disk::walk(&self.temp.path().join("kept")) {
            let name = path.file_name().unwrap().to_string_lossy();
            let text = fs::read_to_string(&path).unwrap();
            assert!(
                name.starts_with('.') || [&self.old, &self.new].contains(&&text),
                "half a copy {name}: {text}"
            );
        }
        assert_eq!(self.access(), self.access, "mode, uid and gid");
        let names = fs::read_dir(self.directory())
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        let read: Vec<_> = names
            .filter(|name| !name.as_encoded_bytes().starts_with(b"."))
            .collect();
        assert_eq!(
            read,
            ["kube-apiserver.yaml"],
            "a kubelet would run the others"
        );
    }

    fn is_done(&mut self) {
        assert_eq!(fs::read_to_string(self.manifest()).unwrap(), self.new);
        if self.command == "inject" {
            // The saved original still exists.
            let mut eject = berth_command(["eject"]);
            eject
                .arg(self.manifest())
                .arg("--state-dir")
                .arg(self.temp.path().join("kept"));
            let (out, _) = expect_status(&mut eject, 0, &["the original is "]);
            assert_eq!(out, self.old);
        }
    }

    fn diagnosis(&self) -> String {
        let (_, out, log) =
            crate::support::process::output_of(berth_command(["doctor"]).arg(self.manifest()));
        out + &log
    }
}

#[test]
fn grant() {
    every_kill(12, 150, Granted::new);
}

/// A node, and the cluster's API.
struct Granted {
    temp: tempfile::TempDir,
    api: String,
    objects: Objects,
}

impl Granted {
    fn new() -> Self {
        let (temp, objects, ca) = (
            tempfile::tempdir().unwrap(),
            Objects::default(),
            create_ca(),
        );
        fs::write(temp.path().join("ca.crt"), ca.pem()).unwrap();
        objects.set(
            "/api/v1/namespaces/default",
            Some(json!({"metadata": {"name": "default"}})),
        );
        let (answers, (tell, told)) = (objects.clone(), std::sync::mpsc::channel());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let at = ([127, 0, 0, 1], 0).into();
                let server = serve_at(&ca, at, "kubernetes", move |request| {
                    let line = request.lines().next().unwrap_or_default();
                    let body = match () {
                        () if line.contains("/token ") => {
                            json!({"status": {"token": "n3w", "expirationTimestamp": "2100-01-01T00:00:00Z"}})
                        }
                        () if line.contains("selfsubjectaccessreviews") => json!({"status": {"allowed": true}}),
                        () => return answers.answer(request),
                    };
                    format_answer("200 OK", &body.to_string())
                });
                let mut server = server.await;
                tell.send(server.access.server).unwrap();
                while server.asked.recv().await.is_some() {}
            });
        });
        let server: String = told.recv().unwrap();
        let text = format!(
            "current-context: a\ncontexts: [{{name: a, context: {{cluster: a, user: a}}}}]\nusers: [{{name: a, user: {{token: t}}}}]\n\
             clusters: [{{name: a, cluster: {{server: '{server}', certificate-authority: ca.crt, tls-server-name: kubernetes}}}}]\n"
        );
        fs::write(temp.path().join("admin.conf"), text).unwrap();
        Self {
            temp,
            api: server.strip_prefix("https://").unwrap().to_owned(),
            objects,
        }
    }

    fn read(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.temp.path().join("cluster").join(name)).ok()
    }
}

impl Scene for Granted {
    fn root(&self) -> PathBuf {
        self.temp.path().to_owned()
    }

    fn command(&self) -> Command {
        let uid = format!("--uid={}", nix::unistd::geteuid());
        let mut grant = berth_command([
            "grant",
            "--node=cp-1",
            "--listen",
            &self.api,
            &uid,
            "--manifest=/nonexistent",
        ]);
        grant
            .arg("--out")
            .arg(self.temp.path().join("cluster/kubeconfig"));
        grant
            .arg("--kubeconfig")
            .arg(self.temp.path().join("admin.conf"));
        grant
    }

    fn is_whole(&mut self) {
        assert!(self.read("token").is_none_or(|token| token == "n3w"));
        let whole =
            |text: String| self.read("token").is_some() && text.ends_with("tokenFile: token\n");
        assert!(
            self.read("kubeconfig").is_none_or(whole),
            "{:?}",
            self.read("kubeconfig")
        );
    }

    fn is_done(&mut self) {
        assert!(self.read("token").is_some() && self.read("kubeconfig").is_some());
    }

    fn work(&self) -> String {
        let objects = self
            .objects
            .all_objects()
            .into_iter()
            .map(|(path, mut object)| {
                object["metadata"]["resourceVersion"].take();
                format!("{path}: {object:#}\n")
            });
        let files = ["token", "kubeconfig"].map(|name| self.read(name).unwrap());
        // Each node has a CA of its own.
        let access = berth_cluster::Access::read(&self.temp.path().join("cluster/kubeconfig"));
        let ca = fs::read_to_string(self.temp.path().join("ca.crt")).unwrap();
        let granted = String::from_utf8(access.unwrap().ca).unwrap();
        assert!(
            granted.trim_end().lines().eq(ca.trim_end().lines()),
            "{granted}"
        );
        let lines = files.iter().flat_map(|text| text.lines());
        let lines: Vec<_> = lines
            .filter(|line| !line.contains("certificate-authority-data: "))
            .collect();
        format!("{}{}", objects.collect::<String>(), lines.join("\n"))
    }
}

/// A directory. If the variable is set, this process is not a test but a bridge's restore of the
/// node in the directory.
const RESTORES: &str = "BERTH_TEST_RESTORES";

/// Not a test: the restore of a bridge. A real bridge needs a container of a runtime. The copies
/// are in memory, as a bridge's are, so a killed bridge has none.
#[test]
fn restore() {
    if let Some(directory) = std::env::var_os(RESTORES) {
        let restored = restore::restore_files(&saved_files(Path::new(&directory)));
        restored
            .kept
            .iter()
            .for_each(|path| println!("kept: {}", path.display()));
        restored.files.unwrap_or_else(|why| panic!("{why}"));
        return;
    }
    every_kill(12, 240, Restored::new);
}

const SAVED: [&str; 4] = [
    "pki/apiserver.crt",
    "pki/apiserver.key",
    "pki/gone.crt",
    "manifests/kube-apiserver.yaml",
];

fn saved_files(directory: &Path) -> Vec<SavedFile> {
    let copy = |(at, name): (usize, &&str)| SavedFile {
        path: directory.join(name),
        copy: directory.join("copies").join(at.to_string()),
        shown: name.ends_with(".yaml"),
    };
    SAVED.iter().enumerate().map(copy).collect()
}

/// Text of a file, or of its kept copy, after COMMAND. Each file has a text of its own.
fn changed_text(path: &Path) -> String {
    let name = path.file_name().unwrap().to_string_lossy();
    match name.split(".replaced-").next().unwrap() {
        "kube-apiserver.yaml" => KUBEADM.replace("v1.36.3", "v1.37.0"),
        name => format!("a new {name}\n"),
    }
}

/// A node on which COMMAND has changed every file from which the kube-apiserver is started.
struct Restored(tempfile::TempDir);

impl Restored {
    fn new() -> Self {
        let temp = tempfile::tempdir().unwrap();
        for directory in ["pki", "manifests", "copies"] {
            fs::create_dir(temp.path().join(directory)).unwrap();
        }
        for SavedFile { path, copy, shown } in saved_files(temp.path()) {
            let text = if shown {
                KUBEADM.to_owned()
            } else {
                format!("{} of before\n", path.display())
            };
            fs::write(copy, text).unwrap();
            if !path.ends_with("gone.crt") {
                fs::write(&path, changed_text(&path)).unwrap();
            }
        }
        Self(temp)
    }

    /// Paths of the copies of replaced files. A hidden file is a half-written copy.
    fn kept(&self) -> impl Iterator<Item = PathBuf> {
        let is_copy = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.contains(".replaced-") && !name.starts_with('.')
        };
        super::disk::walk(self.0.path()).into_iter().filter(is_copy)
    }
}

impl Scene for Restored {
    fn root(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    fn command(&self) -> Command {
        let mut restore = Command::new(std::env::current_exe().unwrap());
        restore
            .args(["--exact", "kills::files::restore", "--nocapture"])
            .env(RESTORES, self.0.path());
        restore
    }

    /// The copies that a restore keeps are meant to stay. They have the names of their files, and
    /// `is_whole` checks the contents of each copy.
    fn diagnosis(&self) -> String {
        self.kept()
            .map(|copy| format!("{}\n", copy.display()))
            .collect()
    }

    fn is_whole(&mut self) {
        for SavedFile { path, copy, .. } in saved_files(self.0.path()) {
            let (was, is) = (
                fs::read_to_string(copy).unwrap(),
                fs::read_to_string(&path).ok(),
            );
            let is_gone = is.is_none() && path.ends_with("gone.crt");
            assert!(
                is_gone || is.as_ref() == Some(&was) || is == Some(changed_text(&path)),
                "{}: {is:?}",
                path.display()
            );
        }
        for copy in self.kept() {
            let text = fs::read_to_string(&copy).unwrap();
            assert_eq!(text, changed_text(&copy), "{}", copy.display());
        }
    }

    fn is_done(&mut self) {
        for SavedFile { path, copy, .. } in saved_files(self.0.path()) {
            assert_eq!(
                fs::read_to_string(path).unwrap(),
                fs::read_to_string(copy).unwrap()
            );
        }
    }
}
