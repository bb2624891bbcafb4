//! `berth grant` as an operator runs it: exit statuses, mistakes, and the output without a cluster.
//! tests/e2e/main.rs runs it with a cluster.

use crate::support::process::{berth_command, expect_status, output_of};
use std::fs;

const KUBEADM: &str = include_str!("../data/manifest/kubeadm-v1.36.yaml");

#[test]
fn all_mistakes_come_at_once() {
    let wrong = [
        "--node",
        "A b",
        "--listen",
        "x",
        "--uid",
        "z",
        "--out",
        "/etc/passwd",
    ];
    let (status, out, err) =
        output_of(berth_command(["grant", "--kubeconfig", "/nonexistent"]).args(wrong));
    assert_eq!((status, out.as_str()), (Some(64), ""));
    for mistake in [
        "--node \"A b\"",
        "--listen \"x\"",
        "--uid z",
        "--out /etc/passwd",
        "/nonexistent",
    ] {
        assert_eq!(
            err.lines().filter(|line| line.contains(mistake)).count(),
            1,
            "{mistake} in {err}"
        );
    }
    expect_status(
        &mut berth_command(["grant", "--node=a,b", "--manifest=/nonexistent"]),
        64,
        &[
            "run `berth grant` on each node, with the name of that node",
            "or give --listen and --uid",
            "--out is not given",
        ],
    );
}

#[test]
fn an_unreachable_cluster_is_unavailable_and_nothing_is_written() {
    let temp = tempfile::tempdir().unwrap();
    let (manifest, file) = (
        temp.path().join("kube-apiserver.yaml"),
        temp.path().join("cluster/kubeconfig"),
    );
    fs::write(&manifest, KUBEADM).unwrap();
    let run = || {
        // Only root may change the owner of files.
        let own = nix::unistd::geteuid();
        let mut command = berth_command(["grant", "--node=cp-1", &format!("--uid={own}")]);
        command
            .arg("--manifest")
            .arg(&manifest)
            .arg("--out")
            .arg(&file)
            .arg("--kubeconfig");
        command
    };
    // The address comes from the manifest.
    let (_, err) = expect_status(run().arg(temp.path().join("none")), 69, &[]);
    assert!(
        err.starts_with("berth: kubeconfig ") && err.lines().count() == 1,
        "{err}"
    );
    let ca = crate::support::tls::Ca::new();
    let admin = temp.path().join("admin.conf");
    fs::write(temp.path().join("ca.crt"), ca.pem()).unwrap();
    let text = "current-context: a\nclusters: [{name: a, cluster: {server: 'https://127.0.0.1:1', certificate-authority: ca.crt}}]\n\
                contexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {token: t}}]\n";
    fs::write(&admin, text).unwrap();
    for revoke in [false, true] {
        let mut command = if revoke {
            berth_command(["grant", "--node=cp-1", "--revoke", "--kubeconfig"])
        } else {
            run()
        };
        let (_, err) = expect_status(command.arg(&admin), 69, &[]);
        let told = "berth: --kubeconfig: https://127.0.0.1:1: cannot connect";
        assert!(
            err.starts_with(told) && err.ends_with("check that an apiserver answers there\n"),
            "{err}"
        );
    }
    assert!(!file.parent().unwrap().exists());
}

#[test]
fn objects_are_printed_without_a_cluster() {
    let (status, yaml, err) =
        output_of(&mut berth_command(["grant", "--print", "--node=cp-1,cp-2"]));
    assert_eq!((status, err.as_str()), (Some(0), ""));
    let documents = berth_cluster::yaml::parse_documents(&yaml).unwrap();
    let (json, _) = expect_status(
        &mut berth_command(["grant", "--print", "--json", "--node=cp-1,cp-2"]),
        0,
        &[],
    );
    let list: serde_json::Value = serde_json::from_str(&json).unwrap();
    let documents: Vec<_> = documents
        .iter()
        .map(berth_cluster::yaml::YamlNode::value)
        .collect();
    assert_eq!(list["items"].as_array(), Some(&documents));
    assert_eq!(documents.len(), 2 + 2 * 4);
    assert!(documents[1].to_string().contains("berth-cp-2-ipv6"));
}
