//! What `berth upgrade --accept-gap` looks at before it ends a kube-apiserver that holds its port alone: the first switch
//! has a gap, and what can be known before must not make it longer. The apiserver is one that answers by TLS, the
//! container runtime is a script.

#[path = "support/mod.rs"]
mod support;

use nix::sys::signal::Signal;
use serde_json::Value;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use support::cluster::Cluster;
use support::net::fresh_ip;
use support::process::{Running, berth, said};
use support::tls::{Api, Ca};
use tempfile::TempDir;

const KUBEADM: &str = include_str!("manifest/kubeadm-v1.36.yaml");
const IMAGE: &str = "registry.example/berth:v0.1.0";

/// A node whose kube-apiserver is not behind berth.
struct Node {
    temp: TempDir,
    /// Where the shim is to listen: the apiserver of the test is none that doctor knows, and would be in its way.
    /// None: where `berth inject` lets it.
    listen: Option<SocketAddr>,
    ca: Ca,
    api: Api,
    /// What the apiserver is told of its address.
    flags: String,
}

impl Node {
    fn new() -> Self {
        let ip = fresh_ip();
        Self::with(ip, &format!("--advertise-address={ip}"))
    }

    /// Its apiserver listens there and is told so by these flags.
    fn with(ip: Ipv4Addr, flags: &str) -> Self {
        let (temp, ca) = (tempfile::tempdir().unwrap(), Ca::new());
        let api = Api::start_at(&ca, (ip, 0).into());
        let listen = SocketAddr::new(fresh_ip().into(), api.address.port());
        let node = Self { temp, listen: Some(listen), ca, api, flags: flags.into() };
        for directory in ["manifests", "pki", "bin"] {
            fs::create_dir(node.path(directory)).unwrap();
        }
        fs::write(node.path("pki/ca.crt"), node.ca.pem()).unwrap();
        fs::write(node.canonical(), node.manifest()).unwrap();
        node.program("crictl", "exit 0");
        node.program("journalctl", "exit 0");
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    fn canonical(&self) -> PathBuf {
        self.path("manifests/kube-apiserver.yaml")
    }

    /// kubeadm's manifest, for this node.
    fn manifest(&self) -> String {
        let (ip, port) = (self.api.address.ip().to_string(), self.api.address.port().to_string());
        let pki = self.path("pki").display().to_string();
        KUBEADM
            .replace("--advertise-address=10.0.0.5", &self.flags)
            .replace("10.0.0.5", &ip)
            .replace("6443", &port)
            .replace("path: /etc/kubernetes/pki", &format!("path: {pki}"))
    }

    /// A program in the PATH of berth, before all others.
    fn program(&self, name: &str, script: &str) {
        let path = self.path("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The kubelet says of the pod of the canonical file that it cannot get its image.
    fn lacks_image(&self) {
        let node = fs::read_to_string("/proc/sys/kernel/hostname").unwrap().trim().to_lowercase();
        let line = format!(
            r#""Error syncing pod, skipping" err="failed to \"StartContainer\" for \"kube-apiserver\" with ErrImagePull: \"not found\"" pod="kube-system/kube-apiserver-{node}""#
        );
        self.program("journalctl", &format!("echo '{line}'"));
    }

    fn switch(&self, inject: &[&str]) -> Command {
        let file = self.path("new.yaml");
        fs::write(&file, self.manifest()).unwrap();
        let run_dir = self.path("run").display().to_string();
        let mut make = berth(["inject", "--write", "--image", IMAGE, "--run-dir", &run_dir]);
        // Where many tests share a processor, 2 s are short.
        make.args(["--probe-timeout", "10s"]);
        make.args(self.listen.iter().flat_map(|listen| ["--listen".into(), listen.to_string()]));
        let (code, _, log) = said(make.arg("--backup-dir").arg(self.path("none")).args(inject).arg(&file));
        assert_eq!(code, Some(0), "{log}");
        let mut upgrade = berth(["upgrade", "--accept-gap", "--settle", "0s", "--manifest"]);
        upgrade.arg(file).arg("--manifests-dir").arg(self.path("manifests")).arg("--backup-dir").arg(self.path("kept"));
        upgrade.arg("--pod-logs-dir").arg(self.path("pods"));
        let path = std::env::var("PATH").unwrap();
        upgrade.env("PATH", format!("{}:{path}", self.path("bin").display()));
        upgrade
    }

    /// The switch does not begin, and this is said.
    #[track_caller]
    fn refuses(&self, inject: &[&str], parts: &[&str]) {
        let (code, _, log) = said(&mut self.switch(inject));
        assert_eq!(code, Some(69), "{log}");
        for part in parts.iter().chain(&["nothing was changed"]) {
            assert!(log.contains(part), "{part} in {log}");
        }
        assert_eq!(fs::read_to_string(self.canonical()).unwrap(), self.manifest());
        assert!(!self.path("kept/upgrade.json").exists());
    }

    /// It begins.
    #[track_caller]
    fn begins(&self, parts: &[&str]) {
        let switch = Running::start(&mut self.switch(&[]));
        switch.logs("2/4");
        switch.logs("is written (new manifest)");
        for part in parts {
            assert!(switch.log().contains(part), "{part} in {}", switch.log());
        }
    }
}

#[test]
fn a_probe_that_the_apiserver_refuses_ends_it_before_it_begins() {
    let node = Node::new();
    node.api.answer("401 Unauthorized");
    node.refuses(&[], &["(401 for /readyz)", "--probe-cert"]);
    node.api.answer("403 Forbidden");
    node.refuses(&[], &["(403 for /readyz)"]);
    node.api.answer("500 Internal Server Error");
    node.refuses(&[], &["500 for /readyz"]);
    node.api.answer("200 OK");
    node.refuses(&["--probe-server-name", "elsewhere"], &["TLS handshake failed", "--probe-server-name"]);
    fs::write(node.path("pki/ca.crt"), Ca::new().pem()).unwrap();
    node.refuses(&[], &["TLS handshake failed", "--probe-ca"]);
    fs::remove_file(node.path("pki/ca.crt")).unwrap();
    node.refuses(&[], &["--probe-ca", "pki/ca.crt"]);
}

#[test]
fn an_image_that_is_not_on_the_node_ends_it_before_it_begins() {
    let node = Node::new();
    let absent = |image: &str| {
        format!(
            "case \"$*\" in *{image}*) echo \"FATA[0000] no such image \\\"{image}\\\" present\" >&2; exit 1;; esac"
        )
    };
    node.program("crictl", &absent(IMAGE));
    node.refuses(&[], &[&format!("{IMAGE} is not on the node"), &format!("crictl pull {IMAGE}")]);
    // containerd's own command, where the other one cannot be asked.
    node.program("crictl", "echo 'FATA[0000] validate service connection' >&2; exit 1");
    node.program("ctr", &format!("case \"$*\" in *{IMAGE}*) ;; *) echo it;; esac"));
    node.refuses(&[], &[&format!("{IMAGE} is not on the node"), &format!("ctr -n k8s.io images pull {IMAGE}")]);
    // It is another containerd, which does not even have the image that runs.
    node.program("ctr", "exit 0");
    node.begins(&["whether the images are on the node cannot be known", "validate service connection"]);
}

#[test]
fn with_all_in_order_it_begins_and_what_the_kubelet_cannot_get_ends_it_at_once() {
    let node = Node::new();
    node.lacks_image();
    let (code, _, log) = said(&mut node.switch(&[]));
    // The apiserver of this test answers all the time.
    assert_eq!(code, Some(1), "{log}");
    for part in ["the kubelet cannot get its image", "ErrImagePull: \"not found\"", "rolled back"] {
        assert!(log.contains(part), "{part} in {log}");
    }
    assert_eq!(fs::read_to_string(node.canonical()).unwrap(), node.manifest());
}

/// Before and after: the probe gets its answer, and that the old manifest serves again is seen.
#[test]
fn the_apiserver_is_asked_where_it_listens() {
    let bound = fresh_ip();
    for (ip, flags) in [
        (bound, format!("--bind-address={bound}")),
        (bound, format!("--bind-address={bound}\n    - --advertise-address=203.0.113.9")),
        // A router's address, by which the node may not reach itself.
        (Ipv4Addr::LOCALHOST, "--advertise-address=203.0.113.9".into()),
    ] {
        let node = Node::with(ip, &flags);
        node.lacks_image();
        let (code, _, log) = said(&mut node.switch(&[]));
        assert!(code == Some(1) && log.contains("rolled back"), "{flags}: {code:?} {log}");
    }
}

/// The manifest has status.hostIP in it: which address that is only the kubelet knows, but not 127.0.0.1.
#[test]
fn an_address_that_is_given_up_is_not_waited_for() {
    let mut node = Node::with(Ipv4Addr::LOCALHOST, "--v=1");
    node.listen = None;
    let _client = TcpStream::connect(node.api.address).unwrap();
    let (code, _, log) = said(&mut node.switch(&[]));
    assert!(code == Some(1) && log.contains("error[client-address]"), "{code:?} {log}");
    let switch = Running::start(node.switch(&[]).args(["--ignore-errors", "client-address"]));
    switch.logs("is written (new manifest)");
    let state: Value = serde_json::from_slice(&fs::read(node.path("kept/upgrade.json")).unwrap()).unwrap();
    assert_eq!(state["dialled"].as_array().map_or(0, Vec::len), 0);
}

/// As a unit does it after a reboot, which does not know the options.
#[test]
fn who_goes_on_has_the_kubeconfig_that_it_was_begun_with() {
    let (node, cluster) = (Node::new(), Cluster::of(&[]));
    let kubeconfig = cluster.kubeconfig();
    let mut switch = node.switch(&[]);
    // Relative, from another directory than the one in which it goes on.
    switch.current_dir(kubeconfig.parent().unwrap()).arg("--kubeconfig").arg(kubeconfig.file_name().unwrap());
    let mut switch = Running::start(&mut switch);
    switch.logs("is written (new manifest)");
    switch.signal(Signal::SIGKILL);
    switch.ended();
    fs::write(&kubeconfig, "none").unwrap();
    let mut again = berth(["upgrade"]);
    again.arg("--manifests-dir").arg(node.path("manifests")).arg("--backup-dir").arg(node.path("kept"));
    let again = Running::start(&mut again);
    again.logs("it goes on to the new manifest");
    again.logs(&format!("note: kubeconfig {}", kubeconfig.display()));
}
