//! `berth doctor` as an operator runs it: exit statuses, both forms of its output, and the facts
//! that it finds on a node and in a cluster.

use crate::support::process::{self, BERTH, can_inject, output_of, stdin_with};
use crate::support::tls::{Api, Ca};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::Path;

const KUBEADM: &str = include_str!("../data/manifest/kubeadm-v1.36.yaml");
const DOCUMENTATION: &str = include_str!("../../docs/doctor.md");

struct Done {
    status: Option<i32>,
    out: String,
    err: String,
}

fn run_berth(directory: &Path, args: &[&str], text: &str) -> Done {
    let (status, out, err) = output_of(
        process::berth_command(args)
            .current_dir(directory)
            .stdin(stdin_with(text)),
    );
    Done { status, out, err }
}

fn inject_manifest() -> String {
    let done = run_berth(
        Path::new("."),
        &["inject", "-", "--image", "registry.example/berth:v0.1.0"],
        KUBEADM,
    );
    assert_eq!(done.status, Some(0), "{}", done.err);
    done.out
}

/// Returns a manifest with an error and a warning.
fn ailing_manifest() -> String {
    let sound = inject_manifest();
    let (before, shim) = sound.split_at(sound.find("    - serve\n").unwrap());
    let shim = shim.replacen("runAsUser: 0", "runAsUser: 1000", 1);
    format!("{before}{shim}").replace(
        "terminationGracePeriodSeconds: 120",
        "terminationGracePeriodSeconds: 30",
    )
}

fn list_found(json: &str) -> Vec<String> {
    let report: Value = serde_json::from_str(json).unwrap();
    let findings = report["findings"].as_array().unwrap();
    findings
        .iter()
        .map(|finding| finding["id"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn the_documentation_shows_the_output() {
    let temp = tempfile::tempdir().unwrap();
    fs::write(temp.path().join("kube-apiserver.yaml"), ailing_manifest()).unwrap();
    let text = run_berth(temp.path(), &["doctor", "kube-apiserver.yaml"], "");
    assert_eq!((text.status, text.err.as_str()), (Some(1), ""));
    let shown = format!(
        "```text\n$ berth doctor kube-apiserver.yaml\n{}```\n",
        text.out
    );
    assert!(
        DOCUMENTATION.contains(&shown),
        "docs/doctor.md lacks:\n{shown}"
    );
    let json = run_berth(
        temp.path(),
        &["doctor", "kube-apiserver.yaml", "--json"],
        "",
    );
    assert_eq!(json.status, Some(1));
    let shown = format!("```json\n{}```\n", json.out);
    assert!(
        DOCUMENTATION.contains(&shown),
        "docs/doctor.md lacks:\n{shown}"
    );
}

#[test]
fn the_exit_status_distinguishes_errors_warnings_and_bad_input() {
    let here = Path::new(".");
    let sound = run_berth(here, &["doctor", "-"], &inject_manifest());
    assert_eq!(
        (sound.status, sound.err.as_str()),
        (Some(0), ""),
        "{}",
        sound.out
    );
    assert!(
        sound
            .out
            .ends_with("\nstandard input: no error and no warning\n"),
        "{}",
        sound.out
    );
    let warned = inject_manifest().replace(
        "terminationGracePeriodSeconds: 120",
        "terminationGracePeriodSeconds: 30",
    );
    let warned = run_berth(here, &["doctor", "-"], &warned);
    assert!(
        warned.status == Some(0) && warned.out.ends_with(": 1 warning\n"),
        "{}",
        warned.out
    );
    let none = run_berth(here, &["doctor", "-"], "kind: Pod\n");
    assert!(
        none.status == Some(64) && none.err.starts_with("berth: standard input:1: there is no"),
        "{}",
        none.err
    );
    let temp = tempfile::tempdir().unwrap();
    fs::write(temp.path().join("latin"), b"kind: Pod # \xe9\n").unwrap();
    for command in [
        &["doctor", "latin"][..],
        &["inject", "latin", "--image", "a"],
    ] {
        let latin = run_berth(temp.path(), command, "");
        let told = "berth: cannot read latin: line 1 is not UTF-8: ";
        assert!(
            latin.status == Some(64) && latin.err.starts_with(told),
            "{}",
            latin.err
        );
    }
    let absent = run_berth(here, &["doctor", "/nonexistent"], "");
    assert_eq!(absent.status, Some(69), "{}", absent.err);
}

#[test]
fn a_node_is_checked_with_its_directory_and_its_ports() {
    // Plays another user's program that listens without SO_REUSEPORT.
    let listener = TcpListener::bind("127.83.7.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let temp = tempfile::tempdir().unwrap();
    let (directory, run_dir) = (temp.path().join("manifests"), temp.path().join("run"));
    fs::create_dir(&directory).unwrap();
    let text = inject_manifest()
        .replace("value: 10.0.0.5:6443", &format!("value: 127.83.7.1:{port}"))
        .replace(
            "--advertise-address=10.0.0.5",
            "--advertise-address=127.83.7.1",
        )
        .replace("path: /run/berth", &format!("path: {}", run_dir.display()));
    let manifest = directory.join("kube-apiserver.yaml");
    fs::write(&manifest, &text).unwrap();
    fs::write(directory.join("kube-apiserver.yaml.bak"), KUBEADM).unwrap();
    fs::write(directory.join(".kube-apiserver.yaml.new"), KUBEADM).unwrap();
    fs::create_dir(&run_dir).unwrap();
    fs::set_permissions(
        &run_dir,
        std::os::unix::fs::PermissionsExt::from_mode(0o777),
    )
    .unwrap();
    let state = temp.path().join("state");
    fs::create_dir(&state).unwrap();
    fs::write(state.join("upgrade.json"), "torn").unwrap();
    let (directory, manifest) = (directory.to_str().unwrap(), manifest.to_str().unwrap());
    let options = [
        "--json",
        "--node",
        "--manifests-dir",
        directory,
        "--state-dir",
        state.to_str().unwrap(),
    ];
    let done = run_berth(
        temp.path(),
        &[&["doctor", manifest], &options[..]].concat(),
        "",
    );
    let ids = list_found(&done.out);
    assert_eq!(done.status, Some(1), "{}", done.err);
    for id in [
        "port-held",
        "same-pod-name",
        "run-dir-owner",
        "upgrade-interrupted",
    ] {
        assert_eq!(
            ids.iter().filter(|found| *found == id).count(),
            1,
            "{id} in {}",
            done.out
        );
    }
    // A second file in a directory that is not the kubelet's is no finding. Without --node, doctor
    // ignores the state of this machine, too.
    let done = run_berth(temp.path(), &["doctor", manifest, "--node", "--json"], "");
    assert!(
        !list_found(&done.out).contains(&"same-pod-name".into()),
        "{}",
        done.out
    );
    assert_eq!(
        list_found(&run_berth(temp.path(), &["doctor", manifest, "--json"], "").out),
        ["loopback-address", "not-checked"]
    );
}

/// A manifest on standard input or from another directory is meant to replace the running one.
/// Without FILE, doctor reads the running manifest.
#[test]
fn the_kubelets_directory_is_read_with_any_manifest() {
    let temp = tempfile::tempdir().unwrap();
    let directory = temp.path().join("kubelet.d");
    fs::create_dir(&directory).unwrap();
    let etcd = "kind: Pod\nmetadata: {name: etcd, namespace: kube-system}\n";
    for (name, text) in [
        ("apiserver.yaml", KUBEADM),
        ("kube-apiserver.yaml.bak", KUBEADM),
        (".kube-apiserver.yaml.swp", KUBEADM),
        ("etcd.yaml", etcd),
        ("etcd-backup.yaml", etcd),
    ] {
        fs::write(directory.join(name), text).unwrap();
    }
    fs::write(temp.path().join("new.yaml"), inject_manifest()).unwrap();
    let same = |args: &[&str], text: &str| {
        let options = [
            "--node",
            "--manifests-dir",
            directory.to_str().unwrap(),
            "--json",
        ];
        let done = run_berth(temp.path(), &[&["doctor"], args, &options].concat(), text);
        let report: Value =
            serde_json::from_str(&done.out).unwrap_or_else(|_| panic!("{}", done.err));
        let same = report["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|finding| finding["id"] == "same-pod-name");
        let places = same.map(|finding| {
            finding["where"]
                .as_str()
                .unwrap()
                .rsplit_once('/')
                .unwrap()
                .1
                .to_owned()
        });
        (
            list_found(&done.out).contains(&"not-behind-berth".into()),
            places.collect::<Vec<_>>(),
        )
    };
    let both = ["etcd-backup.yaml", "kube-apiserver.yaml.bak"].map(str::to_owned);
    assert_eq!(same(&["-"], &inject_manifest()), (false, both.to_vec()));
    assert_eq!(same(&["new.yaml"], ""), (false, both.to_vec()));
    fs::rename(
        directory.join("apiserver.yaml"),
        directory.join("kube-apiserver.yaml"),
    )
    .unwrap();
    assert_eq!(same(&[], ""), (true, both.to_vec()));
}

/// A client on this machine dials an address on which the future shim would not listen.
#[test]
fn clients_that_dial_another_address_are_seen_before_the_switch() {
    let temp = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.83.7.2:0").unwrap();
    let dialled = listener.local_addr().unwrap();
    // doctor recognizes kube-apiserver's own connections by the process's name.
    let _client = std::net::TcpStream::connect(dialled).unwrap();
    let own = format!("127.0.0.1:{}", dialled.port());
    let manifest = temp.path().join("kube-apiserver.yaml");
    let inject = |listen: &[&str]| {
        let mut args = vec!["inject", "-", "--image", "registry.example/berth:v0.1.0"];
        args.extend(listen.iter().flat_map(|address| ["--listen", address]));
        run_berth(temp.path(), &args, KUBEADM)
    };
    let asked = |text: &str| {
        fs::write(&manifest, text).unwrap();
        run_berth(
            temp.path(),
            &["doctor", "kube-apiserver.yaml", "--node", "--json"],
            "",
        )
    };
    // A note of `berth inject` names the dialled address.
    let is_noted = |injected: &Done| {
        assert_eq!(injected.status, Some(0), "{}", injected.err);
        injected.err.contains(&format!(" at {dialled}, "))
    };
    let other = inject(&[&own]);
    assert!(is_noted(&other), "{}", other.err);
    let done = asked(&other.out);
    assert_eq!(done.status, Some(1), "{}", done.out);
    assert!(
        list_found(&done.out).contains(&"client-address".into()),
        "{}",
        done.out
    );

    let both = inject(&[&own, &dialled.to_string()]);
    assert!(!is_noted(&both), "{}", both.err);
    assert!(!list_found(&asked(&both.out).out).contains(&"client-address".into()));
    // Only the kubelet knows the address. It is not 127.x.
    let from_node = KUBEADM
        .replace("--advertise-address=10.0.0.5", "--v=1")
        .replace("6443", &dialled.port().to_string());
    let from_node = run_berth(
        temp.path(),
        &["inject", "-", "--image", "registry.example/berth:v0.1.0"],
        &from_node,
    );
    assert!(is_noted(&from_node), "{}", from_node.err);
    // The manifest is for another node, so clients on this machine are ignored.
    let other = inject(&["192.0.2.7:6443"]);
    assert!(!is_noted(&other), "{}", other.err);
}

/// Returns an administrator's kubeconfig, for the directory of ca.crt.
fn render_kubeconfig(api: &Api) -> String {
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts:\n- name: a\n  context: {{cluster: a, user: a}}\nclusters:\n\
         - name: a\n  cluster: {{server: 'https://{}', certificate-authority: ca.crt, tls-server-name: kubernetes}}\nusers:\n\
         - name: a\n  user: {{token: secret}}\n",
        api.address
    )
}

#[test]
fn the_ports_of_other_nodes_come_from_the_cluster() {
    let temp = tempfile::tempdir().unwrap();
    let ca = Ca::new();
    let slices =
        r#"{"items":[{"endpoints":[{"addresses":["10.0.0.6"]}],"ports":[{"port":7443}]}]}"#;
    let api = Api::start_with(&ca, slices);
    fs::write(temp.path().join("ca.crt"), ca.pem()).unwrap();
    let kubeconfig = render_kubeconfig(&api);
    fs::write(temp.path().join("admin.conf"), kubeconfig).unwrap();
    let done = run_berth(
        temp.path(),
        &["doctor", "-", "--json", "--kubeconfig", "admin.conf"],
        &inject_manifest(),
    );
    assert_eq!(
        (done.status, list_found(&done.out)),
        (Some(1), vec!["secure-ports".into()]),
        "{}",
        done.err
    );
    assert!(done.out.contains("10.0.0.6:7443"), "{}", done.out);
    let options = [
        "doctor",
        "-",
        "--json",
        "--kubeconfig",
        "admin.conf",
        "--ignore-errors",
        "secure-ports",
    ];
    let done = run_berth(temp.path(), &options, &inject_manifest());
    let report: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(
        (done.status, report["findings"][0]["severity"].as_str()),
        (Some(0), Some("warning")),
        "{}",
        done.out
    );
    let unknown = run_berth(
        temp.path(),
        &["doctor", "-", "--ignore-errors", "memroy"],
        &inject_manifest(),
    );
    assert_eq!(unknown.status, Some(64), "{}", unknown.err);

    // doctor reports requests that fail, and checks the rest.
    api.answer("403 Forbidden");
    let done = run_berth(
        temp.path(),
        &["doctor", "-", "--json", "--kubeconfig", "admin.conf"],
        &inject_manifest(),
    );
    assert_eq!(done.status, Some(69), "{}", done.err);
    assert_eq!(list_found(&done.out), ["not-checked"]);
    let done = run_berth(
        temp.path(),
        &["doctor", "-", "--kubeconfig", "none"],
        &ailing_manifest(),
    );
    assert_eq!(done.status, Some(1), "{}", done.err);
}

/// The kernel allows one supervisor for a process, so the self-test fails under another supervisor.
#[test]
fn obstacles_to_passing_sockets_are_found_by_the_self_test() {
    if !can_inject() {
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let run_dir = temp.path().join("run").display().to_string();
    let found = |json: &str| -> Vec<Value> {
        let report: Value =
            serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {json}"));
        let found = report["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|finding| finding["id"] == "pass-obstacle");
        found.map(|finding| finding["severity"].clone()).collect()
    };
    for (pass, severity) in [
        ("relay", None),
        ("auto", Some("warning")),
        ("inject", Some("error")),
    ] {
        let inject = [
            "inject",
            "-",
            "--image",
            "registry.example/berth:v0.1.0",
            "--pass",
            pass,
        ];
        let injected = run_berth(temp.path(), &inject, KUBEADM);
        assert_eq!(injected.status, Some(0), "{}", injected.err);
        fs::write(temp.path().join("kube-apiserver.yaml"), injected.out).unwrap();
        let doctor = ["doctor", "kube-apiserver.yaml", "--node", "--json"];
        assert!(
            found(&run_berth(temp.path(), &doctor, "").out).is_empty(),
            "{pass}"
        );
        let exec = [
            "exec",
            "--listen",
            "10.0.0.5:6443",
            "--run-dir",
            &run_dir,
            "--pass",
            "inject",
            "--",
            "sh",
            "-c",
        ];
        let under = format!("exec {BERTH} {}", doctor.join(" "));
        let done = run_berth(
            temp.path(),
            &[&exec[..], &[&under, "kube-apiserver"]].concat(),
            "",
        );
        assert_eq!(found(&done.out), Vec::from_iter(severity), "{pass}");
    }
}
