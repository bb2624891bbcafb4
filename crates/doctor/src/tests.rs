//! Tests with one case for each check, and tests with manifests that have no findings.

use super::node::{Credentials, Facts, HeldPort, LiveShim, RunningProcess};
use super::*;
use crate::cluster::Cluster;
use berth_manifest::grant::files;
use berth_manifest::inject::{Addresses, InjectOptions, Probing, inject};
use berth_node::registry;
use berth_os::proc_net::{Entry, NamedProcess};
use berth_shim::config::PassMode;
use berth_testing::pages::expect_table;
use berth_testing::{create_ca, issue_certificate};
use proptest::prelude::*;
use rcgen::{CertificateParams, KeyPair};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, UNIX_EPOCH};

pub(super) const KUBEADM: &str = include_str!("../../../tests/data/manifest/kubeadm-v1.36.yaml");
const DEPLOYMENT: &str = include_str!("../../../tests/data/manifest/deployment.yaml");

/// A change of the manifest that turns on kube-apiserver's mixed version proxy: the old text and
/// the new text.
const PEERS: (&str, &str) = (
    "    - --allow-privileged=true\n",
    "    - --allow-privileged=true\n    - --peer-ca-file=/etc/kubernetes/pki/ca.crt\n",
);

fn options() -> InjectOptions {
    InjectOptions {
        image: "registry.example/berth:v0.1.0".into(),
        run_dir: "/run/berth".into(),
        ..InjectOptions::default()
    }
}

/// Returns options for the Deployment. inject finds no CA in it, so the options name one.
fn options_with_ca() -> InjectOptions {
    let ca = "/etc/kubernetes/secrets/ca.crt".to_owned();
    let probing = Probing {
        variables: vec![("BERTH_PROBE_CA", ca.clone())],
        files: vec![ca],
        trusts: true,
        credentials: false,
    };
    InjectOptions {
        probing,
        ..options()
    }
}

pub(super) fn static_pod() -> String {
    inject(KUBEADM, &options()).unwrap().text
}

fn pod_with_pass(pass: PassMode) -> String {
    inject(KUBEADM, &InjectOptions { pass, ..options() })
        .unwrap()
        .text
}

fn injected_deployment() -> String {
    inject(DEPLOYMENT, &options_with_ca()).unwrap().text
}

/// Returns the findings for a manifest in a cluster without other nodes. `look` can add facts to
/// the case.
fn findings(text: &str, look: impl FnOnce(&mut Case<'_>)) -> Vec<Finding> {
    let manifest = Manifest::parse(text).unwrap();
    let mut case = Case {
        cluster: Some(&NO_OTHERS),
        ..Case::new("a.yaml", &manifest)
    };
    look(&mut case);
    examine(&case)
}

fn text_findings(text: &str) -> Vec<Finding> {
    findings(text, |_| {})
}

fn node_findings(text: &str, facts: &Facts) -> Vec<Finding> {
    let manifest = Manifest::parse(text).unwrap();
    examine(&Case {
        node: Some(facts),
        cluster: Some(&NO_OTHERS),
        ..Case::new("a.yaml", &manifest)
    })
}

/// Replaces each old text once by its new text. Each old text must exist.
pub(super) fn replace_in(text: &str, changes: &[(&str, &str)]) -> String {
    changes.iter().fold(text.to_owned(), |text, (old, new)| {
        assert!(text.contains(old), "{old:?} is not in {text}");
        text.replacen(old, new, 1)
    })
}

/// Replaces texts like [`replace_in`], but only behind the shim's argument `serve`.
fn replace_in_shim(text: &str, changes: &[(&str, &str)]) -> String {
    let at = text.find("    - serve\n").unwrap();
    format!("{}{}", &text[..at], replace_in(&text[at..], changes))
}

/// Facts about a cluster that has no other node, and no slice that was left.
static NO_OTHERS: Cluster = Cluster {
    addresses: Vec::new(),
    left: Vec::new(),
};

/// Returns the static pod. The pod's shim has credentials for the cluster's API, in files as `berth
/// grant` writes them.
fn pod_with_cluster_credentials() -> String {
    let variables = "    - name: BERTH_CLUSTER\n      value: /etc/kubernetes/berth-cluster/kubeconfig\n    - name: BERTH_NODE_NAME\n      \
                     valueFrom:\n        fieldRef:\n          fieldPath: spec.nodeName\n    - name: BERTH_BIND_WAIT\n";
    let mount = "    - mountPath: /etc/kubernetes/berth-cluster\n      name: berth-cluster\n    - mountPath: /run/berth\n";
    let volume = "  - hostPath:\n      path: /etc/kubernetes/berth-cluster\n      type: Directory\n    name: berth-cluster\n  - hostPath:\n      path: /run/berth\n";
    let pod = replace_in(
        &static_pod(),
        &[("  - hostPath:\n      path: /run/berth\n", volume)],
    );
    replace_in_shim(
        &pod,
        &[
            ("    - name: BERTH_BIND_WAIT\n", variables),
            ("    - mountPath: /run/berth\n", mount),
        ],
    )
}

/// Returns cases that each have exactly one finding, with the name of the check that must find it.
fn manifest_cases() -> Vec<(&'static str, Vec<Finding>)> {
    let pod = static_pod();
    let changed = |changes: &[(&str, &str)]| text_findings(&replace_in(&pod, changes));
    let shim = |changes: &[(&str, &str)]| text_findings(&replace_in_shim(&pod, changes));
    // Examines the pod as the new manifest. In the running pod, the text `now` is `before`.
    let replacing = |(id, now, before)| {
        let old = pod.replace(now, before);
        assert_ne!(old, pod);
        let old = Manifest::parse(&old).unwrap();
        let manifest = Manifest::parse(&pod).unwrap();
        (
            id,
            examine(&Case {
                running: Some(&old),
                cluster: Some(&NO_OTHERS),
                ..Case::new("a.yaml", &manifest)
            }),
        )
    };
    let instance = "- name: BERTH_INSTANCE\n      valueFrom:\n        fieldRef:\n          fieldPath: metadata.uid\n";
    let literal = "- name: BERTH_INSTANCE\n      value: one\n";
    let asks_berth = "    livenessProbe:\n      exec:\n        command:\n        - /opt/berth/berth\n        - live\n        - --timeout\n        - 14s\n";
    let live = |words: &[&str]| {
        changed(&[(
            asks_berth,
            &format!("    livenessProbe:\n      exec:\n        command: {words:?}\n"),
        )])
    };
    let no_shim = {
        let (from, to) = (
            pod.find("  - args:\n    - serve\n").unwrap(),
            pod.find("  priority: ").unwrap(),
        );
        format!("{}{}", &pod[..from], &pod[to..])
    };
    let granted_pod = pod_with_cluster_credentials();
    assert_eq!(text_findings(&granted_pod), []);
    let credentials = |changes: &[(&str, &str)]| text_findings(&replace_in(&granted_pod, changes));
    let mounted = "mountPath: /etc/kubernetes/berth-cluster\n      name: berth-cluster\n";
    let field = "      valueFrom:\n        fieldRef:\n          fieldPath: spec.nodeName\n";
    let without_token = |changes: &[(&str, &str)]| {
        let waits = "            - name: BERTH_BIND_WAIT\n";
        let variables = format!(
            "            - {{name: BERTH_CLUSTER, value: in-cluster}}\n            - {{name: BERTH_NODE_NAME, valueFrom: {{fieldRef: \
             {{fieldPath: spec.nodeName}}}}}}\n{waits}"
        );
        let base = include_str!("../../../examples/kustomize/base/kube-apiserver.yaml");
        text_findings(&replace_in(
            base,
            &[&[(waits, variables.as_str())], changes].concat(),
        ))
    };
    let passing = pod_with_pass(PassMode::Inject);
    assert_eq!(text_findings(&passing), []);
    let localhost = "seccompProfile:\n      type: Localhost\n      localhostProfile: a.json\n  terminationGracePeriodSeconds:";
    let default = "seccompProfile:\n      type: RuntimeDefault\n  terminationGracePeriodSeconds:";
    assert_eq!(
        text_findings(&replace_in(&pod, &[(default, localhost)])),
        []
    );
    let account = (
        "automountServiceAccountToken: false",
        "serviceAccountName: berth",
    );
    assert_eq!(without_token(&[account]), []);
    // A static pod runs on one node only, so its manifest may contain the node's name.
    assert_eq!(credentials(&[(field, "      value: cp-1\n")]), []);
    let mut cases = vec![
        ("cluster-account", credentials(&[("value: /etc/kubernetes/berth-cluster/kubeconfig", "value: in-cluster")])),
        ("cluster-account", without_token(&[])),
        ("cluster-mount", credentials(&[(mounted, &format!("{mounted}      subPath: a\n"))])),
        ("cluster-mount", credentials(&[(mounted, &format!("{mounted}      readOnly: true\n"))])),
        ("node-name", without_token(&[account, ("valueFrom: {fieldRef: {fieldPath: spec.nodeName}}", "value: cp-1")])),
        ("not-checked", text_findings(&replace_in(&passing, &[(default, localhost)]))),
        ("pass-differs", text_findings(&replace_in_shim(&passing, &[("value: inject", "value: relay")]))),
        ("pass-differs", text_findings(&replace_in(&passing, &[("- name: BERTH_PASS", "- name: OTHER")]))),
        ("berth-options", text_findings(&replace_in_shim(&passing, &[("value: inject", "value: off")]))),
        ("not-behind-berth", text_findings(KUBEADM)),
        ("shim-missing", text_findings(&no_shim)),
        (
            "berth-options",
            text_findings(&pod.replace("value: 10.0.0.5:6443", "value: 10.0.0.5:6443 0.0.0.0:6443"))
                .into_iter()
                .filter(|finding| finding.cause.starts_with("berth serve"))
                .collect(),
        ),
        ("instance-not-unique", text_findings(&pod.replace(instance, literal))[..1].to_vec()),
        (
            "run-dir-volume",
            changed(&[(
                "  - hostPath:\n      path: /run/berth\n      type: DirectoryOrCreate\n    name: berth-run",
                "  - emptyDir: {}\n    name: berth-run",
            )])[..1]
                .to_vec(),
        ),
        ("probe-on-shared-port", live(&["kubectl", "get", "--server=https://localhost:6443/", "--raw=/livez"])),
        ("probe-on-shared-port", live(&["curl", "--insecure", "https://10.0.0.5:6443/livez"])),
        ("probe-elsewhere", live(&["/healthcheck"])),
        ("update-strategy", text_findings(&replace_in(&injected_deployment(), &[("maxUnavailable: 0", "maxUnavailable: 1")]))),
        ("update-strategy", text_findings(&replace_in(&injected_deployment(), &[("kind: Deployment", "kind: DaemonSet")]))),
        (
            "host-ip",
            text_findings(&inject(&replace_in(KUBEADM, &[("--advertise-address=10.0.0.5", "--v=1")]), &options()).unwrap().text),
        ),
        ("not-checked", findings(&pod, |case| case.cluster = None)),
        ("not-checked", changed(&[("kube-apiserver:v1.36.3", "kube-apiserver@sha256:00")])),
        ("loopback-address", changed(&[("--advertise-address=10.0.0.5", "--advertise-address=127.0.0.1")])),
        // If the flag is missing, `berth exec` advertises the berth's address, which is on loopback
        // here.
        (
            "loopback-address",
            text_findings(
                &replace_in(&pod, &[("--advertise-address=10.0.0.5", "--v=1")])
                    .replace("value: 10.0.0.5", "value: 127.0.0.9"),
            ),
        ),
    ];
    let of_pod = [
        ("host-network", "hostNetwork: true", "hostNetwork: false"),
        (
            "advertise-address",
            "--advertise-address=10.0.0.5",
            "--advertise-address=10.0.0.6",
        ),
        (
            "probe-on-shared-port",
            asks_berth,
            "    livenessProbe:\n      httpGet: {port: 6443}\n",
        ),
        (
            "probe-elsewhere",
            asks_berth,
            "    livenessProbe:\n      httpGet: {host: 127.0.0.1, port: 3990}\n",
        ),
        (
            "readiness-missing",
            "    readinessProbe:\n",
            "    livenessProbe2:\n",
        ),
        (
            "probe-pace",
            "      periodSeconds: 5\n",
            "      periodSeconds: 1\n",
        ),
        ("probe-pace", "        - --timeout\n        - 14s\n", ""),
        (
            "declared-ports",
            "    name: kube-apiserver\n    readinessProbe",
            "    name: kube-apiserver\n    ports: [{containerPort: 8080}]\n    readinessProbe",
        ),
        (
            "other-container",
            "  hostNetwork: true\n",
            "  - {name: kms-plugin, image: kms:v1}\n  hostNetwork: true\n",
        ),
        (
            "shared-file",
            "    - --advertise-address=10.0.0.5\n",
            "    - --advertise-address=10.0.0.5\n    - --audit-log-path=/l/a.log\n",
        ),
        ("pre-stop", "          - drain\n", "          - status\n"),
        ("pre-stop", "    lifecycle:\n", "    lifecycle2:\n"),
        (
            "shutdown-delay",
            "    - --shutdown-delay-duration=5s",
            "    - --shutdown-delay-duration=0s",
        ),
        ("peer-proxy", PEERS.0, PEERS.1),
        (
            "grace-period",
            "GracePeriodSeconds: 120",
            "GracePeriodSeconds: 119",
        ),
        (
            "anonymous-auth",
            "    - --allow-privileged=true\n",
            "    - --anonymous-auth=false\n",
        ),
        (
            "anonymous-auth",
            "    - --allow-privileged=true\n",
            "    - --anonymous-auth=False\n",
        ),
        (
            "authentication-config",
            "    - --allow-privileged=true\n",
            "    - --authentication-config=/etc/kubernetes/pki/a\n",
        ),
        (
            "not-checked",
            "    env:\n    - name: BERTH_INSTANCE",
            "    envFrom: [{configMapRef: {name: a}}]\n    env:\n    - name: BERTH_INSTANCE",
        ),
    ];
    cases.extend(of_pod.map(|(id, old, new)| (id, changed(&[(old, new)]))));
    let of_shim = [
        ("berth-options", "value: 10m", "value: soon"),
        ("berth-differs", "10.0.0.5:6443", "10.0.0.5:7443"),
        ("uid-mismatch", "runAsUser: 0", "runAsUser: 1000"),
        ("shim-blocks-start", "    restartPolicy: Always\n", ""),
        (
            "run-dir-volume",
            "mountPath: /run/berth\n      name: berth-run",
            "mountPath: /run/other\n      name: berth-run",
        ),
        (
            "run-dir-volume",
            "name: berth-run",
            "name: berth-run\n      readOnly: true",
        ),
        ("run-dir-volume", "name: berth-run", "name: k8s-certs"),
        (
            "grace-period",
            "- name: BERTH_BIND_WAIT\n      value: 10m",
            "- name: BERTH_DRAIN_TIMEOUT\n      value: 61s",
        ),
    ];
    cases.push((
        "declared-ports",
        shim(&[(
            "    restartPolicy: Always\n",
            "    restartPolicy: Always\n    ports: [{containerPort: 9443}]\n",
        )]),
    ));
    cases.extend(of_shim.map(|(id, old, new)| (id, shim(&[(old, new)]))));
    let of_credentials = [
        (
            "cluster-mount",
            "mountPath: /etc/kubernetes/berth-cluster\n",
            "mountPath: /elsewhere\n",
        ),
        (
            "cluster-mount",
            "mountPath: /etc/kubernetes/berth-cluster\n",
            "mountPath: /etc/kubernetes/berth-cluster/kubeconfig\n",
        ),
        (
            "cluster-mount",
            "  - hostPath:\n      path: /etc/kubernetes/berth-cluster\n      type: Directory\n",
            "  - emptyDir: {}\n",
        ),
        (
            "node-name",
            "    - name: BERTH_NODE_NAME\n",
            "    - name: OTHER\n",
        ),
        (
            "node-name",
            "fieldPath: spec.nodeName",
            "fieldPath: metadata.name",
        ),
    ];
    cases.extend(of_credentials.map(|(id, old, new)| (id, credentials(&[(old, new)]))));
    let of_another = [
        (
            "version-skew",
            "kube-apiserver:v1.36.3",
            "kube-apiserver:v1.34.0",
        ),
        (
            "listen-lost",
            "10.0.0.5:6443",
            "10.0.0.5:6443 127.0.0.1:6443",
        ),
        (
            "etcd-differs",
            "https://127.0.0.1:2379",
            "https://10.0.0.9:2379",
        ),
        ("keys-differ", "pki/sa.key", "pki/sb.key"),
    ];
    cases.extend(of_another.map(replacing));
    cases
}

/// The mixed version proxy identifies a kube-apiserver by the host's name, which two instances of a
/// node share behind berth. Without a CA, kube-apiserver has no such proxy.
#[test]
fn peer_proxy_is_reported_only_behind_berth_and_with_a_ca() {
    assert_eq!(
        ids_of(&text_findings(&replace_in(KUBEADM, &[PEERS]))),
        ["not-behind-berth"]
    );
    let off = PEERS.1.replace("=/etc/kubernetes/pki/ca.crt", "=");
    assert_eq!(
        text_findings(&replace_in(&static_pod(), &[(PEERS.0, &off)])),
        []
    );
    let [found] = &text_findings(&replace_in(&static_pod(), &[PEERS]))[..] else {
        panic!()
    };
    assert_eq!(
        (found.id, found.severity),
        ("peer-proxy", Severity::Warning)
    );
}

/// `berth grant` needs the shim's address and uid, from a manifest before or after `berth inject`.
#[test]
fn shim_of_reads_address_uid_and_ca() {
    let of = |text: &str| find_shim(&Manifest::parse(text).unwrap());
    let berth = Some("10.0.0.5:6443".parse().unwrap());
    let server_name = "kubernetes".to_owned();
    let ca = Some("/etc/kubernetes/pki/ca.crt".into());
    assert_eq!(
        of(KUBEADM),
        ShimOf {
            berth,
            uid: 0,
            server_name: server_name.clone(),
            ca: None
        }
    );
    assert_eq!(
        of(&static_pod()),
        ShimOf {
            berth,
            uid: 0,
            server_name: server_name.clone(),
            ca
        }
    );
    // The manifest takes the address from the kubelet, so it is unknown here.
    assert_eq!(
        of(&injected_deployment()),
        ShimOf {
            berth: None,
            uid: 65534,
            server_name,
            ca: None
        }
    );
    assert_eq!(
        of(include_str!(
            "../../../examples/node-shim/kube-apiserver.yaml"
        ))
        .berth,
        berth
    );
}

fn file_cases() -> Vec<(&'static str, Vec<Finding>)> {
    let pod = static_pod();
    let with_file = |name: &str, text: Result<&str, &str>| {
        let text = text.map(ToOwned::to_owned).map_err(ToOwned::to_owned);
        let files = [other_files::ManifestFile {
            path: name.into(),
            text,
        }];
        let manifest = Manifest::parse(&pod).unwrap();
        examine(&Case {
            other_files: Some(&files),
            cluster: Some(&NO_OTHERS),
            ..Case::new("/m/a.yaml", &manifest)
        })
    };
    let etcd = "kind: Pod\nmetadata: {name: etcd, namespace: kube-system}\n";
    assert_eq!(with_file("etcd.yaml", Ok(etcd)), []);
    vec![
        (
            "same-pod-name",
            with_file("kube-apiserver.yaml.bak", Ok(KUBEADM)),
        ),
        ("stray-file", with_file("etcd.yaml~", Ok(etcd))),
        ("stray-file", with_file("notes.yaml", Ok("kind: ConfigMap"))),
        ("stray-file", with_file("notes", Ok("a: ["))),
        ("stray-file", with_file("socket", Err("no text"))),
    ]
}

/// Facts about a node on which berth's static pod has no findings.
fn healthy_node() -> Facts {
    Facts {
        addresses: Some(vec!["10.0.0.5".parse().unwrap()]),
        listeners: vec![
            held_port("10.0.0.5:6443", 0, "berth"),
            held_port("127.1.2.3:6443", 0, "kube-apiserver"),
        ],
        apiservers: vec![RunningProcess {
            resident: 1 << 30,
            started: None,
        }],
        available: Some(1 << 30),
        shims: vec![LiveShim {
            instance: "a".into(),
            version: berth_node::VERSION.into(),
        }],
        ..Facts::default()
    }
}

fn held_port(local: &str, uid: u32, name: &str) -> HeldPort {
    let remote = "0.0.0.0:0".parse().unwrap();
    let entry = Entry {
        local: local.parse().unwrap(),
        remote,
        state: 0x0a,
        uid,
        inode: 7,
    };
    HeldPort {
        entry,
        process: Some(NamedProcess {
            pid: 812,
            name: name.into(),
        }),
    }
}

fn node_cases() -> Vec<(&'static str, Vec<Finding>)> {
    let pod = static_pod();
    let node = |change: &dyn Fn(&mut Facts)| {
        let mut facts = healthy_node();
        change(&mut facts);
        node_findings(&pod, &facts)
    };
    let held = |local: &str, uid, name: &str| {
        node(&|facts| facts.listeners = vec![held_port(local, uid, name)])
    };
    let secured = replace_in(
        &pod,
        &[(
            "    - --allow-privileged=true\n",
            "    - --authentication-config=/etc/kubernetes/pki/a\n",
        )],
    );
    let config = |anonymous: &str| {
        let text = format!("kind: AuthenticationConfiguration\nanonymous: {anonymous}\n");
        node_findings(
            &secured,
            &Facts {
                authentication: Some(text),
                ..healthy_node()
            },
        )
    };
    let dialled = |address: &str| {
        node(&|facts| {
            facts
                .clients
                .add(address.parse().unwrap(), "kubelet.conf".into());
        })
    };
    assert_eq!(dialled("10.0.0.5:6443"), []);
    let owner = |owner| registry::Error::Owner {
        path: "/run/berth".into(),
        owner,
        uid: 0,
    };
    let granted = |change: &dyn Fn(&mut Credentials)| {
        let directory = std::path::Path::new("/etc/kubernetes/berth-cluster");
        let file = |name: &str| (directory.join(name), 0, 0o600);
        let files = vec![
            (directory.to_owned(), 0, 0o700),
            file("kubeconfig"),
            file("token"),
        ];
        let mut credentials = Credentials {
            path: directory.join("kubeconfig"),
            files,
            has_certificate: Ok(false),
        };
        change(&mut credentials);
        node_findings(
            &pod_with_cluster_credentials(),
            &Facts {
                credentials: Some(credentials),
                ..healthy_node()
            },
        )
    };
    assert_eq!(granted(&|_| {}), []);
    let passing = |change: &dyn Fn(&mut Facts)| {
        let mut facts = healthy_node();
        change(&mut facts);
        node_findings(&pod_with_pass(PassMode::Inject), &facts)
    };
    let yama = |scope: &'static str| {
        move |facts: &mut Facts| {
            drop(
                facts
                    .settings
                    .insert("kernel.yama.ptrace_scope", format!("{scope}\n")),
            );
        }
    };
    assert_eq!((passing(&yama("1")), node(&yama("3"))), (vec![], vec![]));
    assert_eq!(
        config("{enabled: true, conditions: [{path: /livez}, {path: /readyz}]}"),
        []
    );
    vec![
        (
            "run-dir-owner",
            node(&|facts| facts.run_dir = Some(owner(7))),
        ),
        (
            "run-dir-owner",
            node(&|facts| {
                facts.run_dir = Some(registry::Error::Mode {
                    path: "/x".into(),
                    mode: 0o777,
                });
            }),
        ),
        (
            "run-dir-owner",
            node(&|facts| {
                facts.run_dir = Some(registry::Error::NotADirectory {
                    path: "/x".into(),
                    found: "a file",
                });
            }),
        ),
        (
            "address-missing",
            node(&|facts| facts.addresses = Some(Vec::new())),
        ),
        ("port-held", held("10.0.0.5:6443", 7, "berth")),
        ("port-held", held("10.0.0.5:6443", 0, "haproxy")),
        ("port-held", held("0.0.0.0:6443", 0, "nginx")),
        ("client-address", dialled("127.0.0.1:6443")),
        // The node lacks this address. It may be a load balancer's, or a virtual IP.
        ("not-checked", dialled("10.0.0.9:6443")),
        ("not-checked", node(&|facts| facts.unprivileged = true)),
        (
            "file-missing",
            node(&|facts| {
                facts.missing.push((
                    "--client-ca-file".into(),
                    "/etc/kubernetes/pki/ca.crt".into(),
                ));
            }),
        ),
        ("first-switch", held("[::]:6443", 0, "kube-apiserver")),
        (
            "serving-certificate",
            node(&|facts| {
                facts.certificate = certificate_finding(&[("apiserver.crt", "")], &options());
            }),
        ),
        (
            "memory",
            node(&|facts| facts.available = Some((1 << 30) - 1)),
        ),
        (
            "cluster-kubeconfig",
            granted(&|seen| seen.has_certificate = Err("there is no such file".into())),
        ),
        (
            "cluster-kubeconfig",
            granted(&|seen| seen.has_certificate = Ok(true)),
        ),
        (
            "cluster-kubeconfig",
            granted(&|seen| seen.files[0].1 = 65534),
        ),
        (
            "cluster-kubeconfig",
            granted(&|seen| seen.files[2].2 = 0o640),
        ),
        (
            "tcp-migrate-req",
            node(&|facts| {
                drop(
                    facts
                        .settings
                        .insert("net.ipv4.tcp_migrate_req", "1\n".to_owned()),
                );
            }),
        ),
        ("pass-obstacle", passing(&yama("2"))),
        ("pass-obstacle", passing(&yama("3"))),
        (
            "pass-obstacle",
            passing(&|facts| facts.obstacle = Some("seccomp(2) is forbidden: allow it".into())),
        ),
        (
            "berth-version",
            node(&|facts| facts.shims[0].version = "9.0.0".into()),
        ),
        (
            "shims-unconnected",
            node(&|facts| {
                facts
                    .unconnected
                    .push("the shims of a and b have no connection".into());
            }),
        ),
        (
            "upgrade-interrupted",
            node(&|facts| facts.interrupted = Some("one of yesterday".into())),
        ),
        ("anonymous-auth", config("{enabled: false}")),
        (
            "anonymous-auth",
            config("{enabled: true, conditions: [{path: /livez}]}"),
        ),
        (
            "secure-ports",
            findings(&pod, |case| case.cluster = Some(&NO_OTHERS))
                .into_iter()
                .chain(examine_with_other_apiservers(&pod))
                .collect(),
        ),
        (
            "bridge-slice",
            examine_cluster(
                &pod,
                &Cluster {
                    addresses: Vec::new(),
                    left: vec!["berth-bridge-a-ipv4".into()],
                },
            ),
        ),
    ]
}

fn examine_with_other_apiservers(text: &str) -> Vec<Finding> {
    let list = serde_json::json!({"items": [{
        "endpoints": [{"addresses": ["10.0.0.5"]}, {"addresses": ["10.0.0.6"]}], "ports": [{"port": 7443}]
    }, {"endpoints": [{"addresses": ["fd00::5"]}], "ports": [{"port": 6443}]}]});
    let addresses = cluster::list_endpoints(&list);
    let wanted =
        ["10.0.0.5:7443", "10.0.0.6:7443", "[fd00::5]:6443"].map(|text| text.parse().unwrap());
    assert_eq!(addresses, wanted);
    examine_cluster(
        text,
        &Cluster {
            addresses,
            left: Vec::new(),
        },
    )
}

fn examine_cluster(text: &str, cluster: &Cluster) -> Vec<Finding> {
    let manifest = Manifest::parse(text).unwrap();
    examine(&Case {
        cluster: Some(cluster),
        ..Case::new("a.yaml", &manifest)
    })
}

#[test]
fn each_check_finds_its_case_and_nothing_else() {
    let refused = text_findings(&replace_in(
        KUBEADM,
        &[("hostNetwork: true", "hostNetwork: false")],
    ));
    assert_eq!(ids_of(&refused), ["inject-refuses", "not-behind-berth"]);
    let mut seen = BTreeSet::from(["inject-refuses"]);
    let cases = manifest_cases()
        .into_iter()
        .chain(file_cases())
        .chain(node_cases());
    let (right, wrong): (Vec<_>, Vec<_>) =
        cases.partition(|(id, findings)| ids_of(findings) == [*id]);
    assert!(wrong.is_empty(), "{wrong:#?}");
    for (id, findings) in right {
        let Finding {
            severity,
            cause,
            fix,
            place,
            ..
        } = &findings[0];
        assert!(
            !cause.is_empty() && !fix.is_empty() && !place.is_empty(),
            "{findings:#?}"
        );
        let check = CHECKS.iter().find(|check| check.id == id).unwrap();
        assert_eq!(*severity, check.severity);
        seen.insert(id);
    }
    let all: BTreeSet<_> = CHECKS.iter().map(|check| check.id).collect();
    assert_eq!((seen, all.len()), (all, CHECKS.len()));
}

fn ids_of(findings: &[Finding]) -> Vec<&'static str> {
    findings.iter().map(|finding| finding.id).collect()
}

#[test]
fn an_obstacle_to_pass_is_an_error_only_if_kube_apiserver_would_not_start() {
    let facts = Facts {
        obstacle: Some("the kernel (old) refuses: use another".into()),
        ..healthy_node()
    };
    assert_eq!(node_findings(&static_pod(), &facts), []);
    for (pass, severity, cause) in [
        (
            PassMode::Auto,
            Severity::Warning,
            "the kernel (old) refuses, so with --pass auto clients are relayed",
        ),
        (
            PassMode::Inject,
            Severity::Error,
            "the kernel (old) refuses, so with --pass inject kube-apiserver is not started",
        ),
    ] {
        let [found] = &node_findings(&pod_with_pass(pass), &facts)[..] else {
            panic!()
        };
        let Finding { place, fix, .. } = found;
        assert_eq!(
            (found.severity, found.cause.as_str(), place.as_str()),
            (severity, cause, "this node")
        );
        assert_eq!(fix, "use another");
    }
}

#[test]
fn an_excused_error_is_a_warning_behind_the_others() {
    let refused = replace_in(
        &replace_in_shim(&static_pod(), &[("runAsUser: 0", "runAsUser: 7")]),
        &[("hostNetwork: true", "x: true")],
    );
    let mut found = text_findings(&refused);
    assert_eq!(ids_of(&found), ["host-network", "uid-mismatch"]);
    excuse_findings(
        &mut found,
        &["host-network".to_owned(), "pre-stop".to_owned()],
    );
    assert_eq!(ids_of(&found), ["uid-mismatch", "host-network"]);
    assert_eq!(
        (found[0].severity, found[1].severity),
        (Severity::Error, Severity::Warning)
    );
}

#[test]
fn the_table_of_checks_is_made_from_the_code() {
    let row = |check: &Check| {
        let Check {
            id,
            severity,
            scope,
            rule,
        } = check;
        format!("| `{id}` | {} | {scope} | {rule} |", severity.as_str())
    };
    let rows: Vec<_> = CHECKS.iter().map(row).collect();
    expect_table(
        "docs/doctor.md",
        "| check | severity | looks at | what must hold |",
        &rows,
    );
}

#[test]
fn a_manifest_that_inject_wrote_has_no_findings() {
    let given = Addresses::Given(
        ["10.0.0.5:6443", "10.0.0.9:6443,freebind"]
            .map(|text| berth_options::check::parse_listen(text).unwrap())
            .to_vec(),
    );
    let insecure = Probing {
        variables: vec![("BERTH_PROBE_INSECURE", "true".into())],
        trusts: true,
        ..Probing::default()
    };
    let tcp = Probing {
        variables: vec![("BERTH_PROBE", "tcp".into())],
        trusts: true,
        credentials: true,
        files: vec![],
    };
    for (text, base) in [(KUBEADM, options()), (DEPLOYMENT, options_with_ca())] {
        for addresses in [Addresses::OfManifest, given.clone()] {
            for probing in [base.probing.clone(), insecure.clone(), tcp.clone()] {
                for run_dir in ["/run/berth", "/run/b"] {
                    let options = InjectOptions {
                        addresses: addresses.clone(),
                        probing: probing.clone(),
                        run_dir: run_dir.into(),
                        ..base.clone()
                    };
                    assert_eq!(
                        text_findings(&inject(text, &options).unwrap().text),
                        [],
                        "{options:?}"
                    );
                }
            }
        }
    }
    assert_eq!(node_findings(&static_pod(), &healthy_node()), []);
}

#[test]
fn hand_written_manifests_are_read() {
    let hand_made = include_str!("../../../tests/data/manifest/hand-made.yaml");
    let found = text_findings(hand_made);
    assert!(
        !found
            .iter()
            .any(|finding| finding.severity == Severity::Error),
        "{found:#?}"
    );
    // With `berth run`, one container is both the shim and the instance.
    let run = "kind: Pod\nspec:\n  hostNetwork: true\n  containers:\n  - name: kube-apiserver\n    env: [{name: BERTH_LISTEN, value: '10.0.0.5:6443'}]\n    command: [/berth, run, --probe, tcp, --, kube-apiserver]\n";
    let found = ids_of(&text_findings(run));
    assert!(
        !found.contains(&"shim-missing") && !found.contains(&"berth-options"),
        "{found:?}"
    );
    // If a node shim serves, it runs in another pod, so a preStop hook of this pod would have no
    // shim to drain.
    let node_shim = run.replace("/berth, run, --probe, tcp,", "/berth, exec,");
    let found = ids_of(&text_findings(&node_shim));
    assert!(
        found.contains(&"shim-missing") && !found.contains(&"pre-stop"),
        "{found:?}"
    );
    let entrypoint = replace_in_shim(
        &static_pod(),
        &[("    - serve\n", "    - serve\n    command: []\n")],
    );
    assert_eq!(text_findings(&entrypoint), []);
    // A variable that refers to a later variable is not expanded. So references in a circle do no
    // harm.
    let circle = run.replace(
        "'10.0.0.5:6443'",
        "'$(A):6443'}, {name: A, value: '$(A)$(A)'",
    );
    assert!(ids_of(&text_findings(&circle)).contains(&"berth-options"));
}

/// The credentials are those that `berth grant` writes. doctor finds them through the mount of the
/// shim's container.
#[test]
fn credentials_are_read_through_the_shims_mount() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("etc/kubernetes/berth-cluster");
    let own = nix::unistd::geteuid().as_raw();
    let manifest = Manifest::parse(&pod_with_cluster_credentials()).unwrap();
    let look = || Facts::gather(root.path(), &manifest).credentials.unwrap();
    assert!(look().has_certificate.is_err());
    assert!(
        Facts::gather(root.path(), &Manifest::parse(&static_pod()).unwrap())
            .credentials
            .is_none()
    );
    let file = directory.join("kubeconfig");
    let text =
        files::render_kubeconfig("berth-cp-1", "https://10.0.0.5:6443", "kubernetes", b"PEM");
    std::fs::create_dir_all(directory.parent().unwrap()).unwrap();
    files::write_credentials(
        &file,
        own,
        &text,
        "head.eyJpYXQiOjMwMCwiZXhwIjozOTAwLCJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6YTpiIn0.s",
    )
    .unwrap();
    let seen = look();
    assert_eq!(
        seen.path,
        std::path::Path::new("/etc/kubernetes/berth-cluster/kubeconfig")
    );
    let modes: Vec<_> = seen
        .files
        .iter()
        .map(|(path, uid, mode)| (path.file_name().unwrap().to_str().unwrap(), *uid, *mode))
        .collect();
    assert_eq!(
        modes,
        [
            ("berth-cluster", own, 0o700),
            ("kubeconfig", own, 0o600),
            ("token", own, 0o600)
        ]
    );
    assert_eq!(
        (seen.has_certificate.clone(), seen.examine(own)),
        (Ok(false), Vec::new())
    );
    // Here the kubeconfig names the token by its path in the container, and has a certificate, as
    // an operator's kubeconfig has.
    let text = text.replace(
        "tokenFile: token",
        "tokenFile: /etc/kubernetes/berth-cluster/token\n    client-certificate-data: QQ==\n    client-key-data: QQ==",
    );
    std::fs::write(&file, text).unwrap();
    assert_eq!(look().has_certificate, Ok(true));
    std::fs::remove_file(directory.join("token")).unwrap();
    assert!(
        look()
            .has_certificate
            .unwrap_err()
            .starts_with("tokenFile: ")
    );
}

/// Returns the finding about the certificate, if /etc/kubernetes/pki has these files. An empty text
/// stands for a certificate of another CA.
fn certificate_finding(files: &[(&str, &str)], options: &InjectOptions) -> Option<Finding> {
    let root = tempfile::tempdir().unwrap();
    let pki = root.path().join("etc/kubernetes/pki");
    std::fs::create_dir_all(&pki).unwrap();
    std::fs::write(pki.join("ca.crt"), create_ca().pem()).unwrap();
    for (name, text) in files {
        let other = if text.is_empty() {
            issue_certificate(&create_ca(), &["kubernetes"]).0
        } else {
            (*text).to_owned()
        };
        std::fs::write(pki.join(name), other).unwrap();
    }
    let sni = "    - --tls-cert-file=/etc/kubernetes/pki/apiserver.crt\n    - --tls-sni-cert-key=/etc/kubernetes/pki/sni.crt,/a:kubernetes";
    let has_sni = files.iter().any(|(name, _)| *name == "sni.crt");
    let text = if has_sni {
        KUBEADM.replace(
            "    - --tls-cert-file=/etc/kubernetes/pki/apiserver.crt",
            sni,
        )
    } else {
        KUBEADM.to_owned()
    };
    node::find_untrusted_certificate(root.path(), &inject(&text, options).unwrap().manifest)
}

#[test]
fn a_certificate_that_the_probe_refuses_is_found_with_the_options_that_help() {
    let (kube, corp) = (create_ca(), create_ca());
    let ca = kube.pem();
    let of = |issuer, names: &[&str]| issue_certificate(issuer, names).0;
    let mut old = CertificateParams::new(vec!["kubernetes".into()]).unwrap();
    old.not_after = rcgen::date_time_ymd(2001, 1, 1);
    let old = old
        .signed_by(&KeyPair::generate().unwrap(), &kube)
        .unwrap()
        .pem();
    let (ca_file, itself) = (
        "/etc/kubernetes/pki/ca.crt",
        "/etc/kubernetes/pki/apiserver.crt",
    );
    let rsa_1024 = include_str!("../../cluster/tests/certificates/certificates.txt");
    let rsa_1024 = rsa_1024.split_once("\nshown:").unwrap().0;
    for (shown, trusted, fix, options_that_help) in [
        (of(&kube, &["kubernetes"]), &ca, "", None),
        (corp.pem(), &corp.pem(), "--probe-server-name NAME", None),
        (
            of(&corp, &["kubernetes"]),
            &ca,
            "--probe-ca /etc/kubernetes/pki/apiserver.crt,",
            Some((itself, "kubernetes")),
        ),
        (
            of(&kube, &["kube.example.com"]),
            &ca,
            "--probe-server-name NAME",
            Some((ca_file, "kube.example.com")),
        ),
        (
            of(&kube, &["10.0.0.5"]),
            &ca,
            "--probe-server-name NAME",
            Some((ca_file, "10.0.0.5")),
        ),
        (
            of(&corp, &["fd00::5"]),
            &ca,
            "apiserver.crt --probe-server-name NAME",
            Some((itself, "fd00::5")),
        ),
        (old, &ca, "renew the certificate", None),
        (
            of(&kube, &["kubernetes"]),
            &"none".to_owned(),
            "other files",
            None,
        ),
        (rsa_1024.to_owned(), &ca, "with one of these keys", None),
        (
            of(&kube, &["kubernetes"]).repeat(200),
            &ca,
            "its issuers",
            None,
        ),
    ] {
        let files = [("apiserver.crt", shown.as_str()), ("ca.crt", trusted)];
        let found = certificate_finding(&files, &options());
        assert_eq!(found.is_some(), !fix.is_empty(), "{found:?}");
        assert!(
            found
                .iter()
                .all(|found| found.fix.contains(fix) && found.place == itself),
            "{fix}: {found:?}"
        );
        if let Some((ca, name)) = options_that_help {
            let variables = vec![
                ("BERTH_PROBE_CA", ca.into()),
                ("BERTH_PROBE_SERVER_NAME", name.into()),
            ];
            let probing = Probing {
                variables,
                files: vec![ca.into()],
                trusts: true,
                credentials: false,
            };
            assert_eq!(
                certificate_finding(
                    &files,
                    &InjectOptions {
                        probing,
                        ..options()
                    }
                ),
                None
            );
        }
    }
    // A probe that asks for this name gets the certificate for the name (SNI), not the default one.
    let (good, bad) = (of(&kube, &["kubernetes"]), of(&corp, &["kubernetes"]));
    for (default, by_name, refused) in [
        (&good, &bad, Some("/etc/kubernetes/pki/sni.crt")),
        (&bad, &good, None),
    ] {
        let files = [
            ("apiserver.crt", default.as_str()),
            ("sni.crt", by_name),
            ("ca.crt", &ca),
        ];
        assert_eq!(
            certificate_finding(&files, &options())
                .map(|found| found.place)
                .as_deref(),
            refused
        );
    }
}

#[test]
fn facts_are_gathered_below_a_root() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    // Each file is a copy of the same file of this machine's kernel, with one line replaced.
    for (path, like, name, line) in [
        (
            "proc/7/status",
            "/proc/self/status",
            "VmRSS:",
            "VmRSS:\t    2048 kB",
        ),
        ("proc/stat", "/proc/stat", "btime", "btime 2000000000"),
        (
            "proc/meminfo",
            "/proc/meminfo",
            "MemAvailable:",
            "MemAvailable:      1024 kB",
        ),
    ] {
        let text = std::fs::read_to_string(like).unwrap();
        let lines: Vec<_> = text
            .lines()
            .filter(|line| !line.starts_with(name))
            .chain([line])
            .collect();
        write(path, &(lines.join("\n") + "\n"));
    }
    write(
        "proc/7/stat",
        &format!(
            "7 (kube-apiserver) S{} 10000{}",
            " 0".repeat(18),
            " 0".repeat(30)
        ),
    );
    write("proc/8/comm", "gone");
    write("proc/sys/net/ipv4/ip_nonlocal_bind", "1\n");
    write("etc/kubernetes/pki/a", "kind: A");
    for directory in ["instances", "leases"] {
        std::fs::create_dir_all(root.path().join("run/berth/10.0.0.5:6443").join(directory))
            .unwrap();
    }
    let text = replace_in(
        &static_pod(),
        &[
            (
                "    - --allow-privileged=true\n",
                "    - --authentication-config=/etc/kubernetes/pki/a\n",
            ),
            // The manifest has this process's uid, which owns the run directory below the test's
            // root.
            (
                "  securityContext:\n    seccomp",
                &format!(
                    "  securityContext:\n    runAsUser: {}\n    seccomp",
                    nix::unistd::geteuid()
                ),
            ),
        ],
    );
    let manifest = Manifest::parse(&text).unwrap();
    let facts = Facts::gather(root.path(), &manifest);
    // The process started 100 s after the boot.
    let started = Some(UNIX_EPOCH + Duration::from_secs(2_000_000_100));
    let apiserver = RunningProcess {
        resident: 2 << 20,
        started,
    };
    assert_eq!(
        (&facts.apiservers[..], facts.available),
        (&[apiserver][..], Some(1 << 20))
    );
    assert!(facts.run_dir.is_none(), "{facts:?}");
    // Only the first of these flags names a file that exists.
    let missing = |flag: &str| facts.missing.iter().any(|(missing, _)| missing == flag);
    assert_eq!(
        ["--authentication-config", "--client-ca-file"].map(missing),
        [false, true]
    );
    assert_eq!(facts.authentication.as_deref(), Some("kind: A"));
    assert_eq!(
        facts.settings,
        BTreeMap::from([("net.ipv4.ip_nonlocal_bind", "1\n".to_owned())])
    );
    assert_eq!(facts.newer_keys, []);
    let key = std::fs::File::create(root.path().join("etc/kubernetes/pki/sa.key")).unwrap();
    key.set_modified(UNIX_EPOCH + Duration::from_secs(2_000_000_101))
        .unwrap();
    assert_eq!(
        Facts::gather(root.path(), &manifest).newer_keys,
        [(
            "service-account-signing-key-file",
            "/etc/kubernetes/pki/sa.key".to_owned()
        )]
    );
    let found = ids_of(&node_findings(&text, &facts));
    for id in ["memory", "authentication-config"] {
        assert!(found.contains(&id), "{id} in {found:?}");
    }
    std::fs::set_permissions(
        root.path().join("run/berth"),
        std::os::unix::fs::PermissionsExt::from_mode(0o777),
    )
    .unwrap();
    assert!(
        ids_of(&node_findings(
            &text,
            &Facts::gather(root.path(), &manifest)
        ))
        .contains(&"run-dir-owner")
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(32)))]
    #[test]
    fn no_manifest_causes_a_panic(
        deployed: bool,
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0..40_usize, "[-a-z0-9:$(){}\\[\\]&* \n]{0,12}"), 1..6),
    ) {
        let (text, options) = if deployed { (DEPLOYMENT, options_with_ca()) } else { (KUBEADM, options()) };
        let mut text = inject(text, &options).unwrap().text;
        for (at, length, new) in cuts {
            let at = at.index(text.len());
            text.replace_range(at..(at + length).min(text.len()), &new);
        }
        if let Ok(manifest) = Manifest::parse(&text) {
            let facts = healthy_node();
            let files = [other_files::ManifestFile { path: "b.yaml".into(), text: Ok(text.clone()) }];
            let case = Case {
                running: Some(&manifest),
                other_files: Some(&files),
                node: Some(&facts),
                ..Case::new("a", &manifest)
            };
            for finding in examine(&case) {
                prop_assert!(!finding.cause.is_empty() && !finding.fix.is_empty(), "{:?}", finding);
            }
        }
    }
}
