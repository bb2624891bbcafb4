//! `berth status --cluster` as an operator runs it.

use crate::support::process::{berth, output_of};
use crate::support::tls::{Api, Ca};
use serde_json::Value;
use std::fs;
use tempfile::TempDir;

/// Each question has this answer: a Lease, and a slice of the Service.
const OBJECTS: &str = r#"{"items": [
    {"metadata": {"name": "cp-1.a", "annotations": {"berth/node": "cp-1", "berth/instance": "a", "berth/address": "10.0.0.5:6443",
        "berth/state": "joined", "berth/version": "v1.36.3"}}, "spec": {"holderIdentity": "x", "leaseTransitions": 0,
        "acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2026-01-01T00:00:10.000000Z"}},
    {"metadata": {"name": "kubernetes"}, "endpoints": [{"addresses": ["10.0.0.5", "10.0.0.6"]}]}]}"#;

fn kubeconfig(ca: &Ca, server: &str) -> TempDir {
    let temp = tempfile::tempdir().unwrap();
    fs::write(temp.path().join("ca.crt"), ca.pem()).unwrap();
    let text = format!(
        "current-context: a\ncontexts: [{{name: a, context: {{cluster: a, user: a}}}}]\nusers: [{{name: a, user: {{token: t}}}}]\n\
         clusters: [{{name: a, cluster: {{server: 'https://{server}', certificate-authority: ca.crt, tls-server-name: kubernetes}}}}]\n"
    );
    fs::write(temp.path().join("admin.conf"), text).unwrap();
    temp
}

#[test]
fn all_nodes_are_shown() {
    let ca = Ca::new();
    let api = Api::start_with(&ca, OBJECTS);
    let temp = kubeconfig(&ca, &api.address.to_string());
    let status = |more: &[&str]| {
        let mut command = berth(["status", "--cluster", "--kubeconfig"]);
        output_of(command.arg(temp.path().join("admin.conf")).args(more))
    };
    let (code, out, log) = status(&[]);
    assert_eq!(code, Some(0), "{log}");
    let row = out.lines().nth(1).unwrap();
    assert!(row.starts_with("cp-1  a ") && row.ends_with("d ago, expired  kubernetes"), "{out}");
    assert!(out.contains("names 10.0.0.6 too"), "{out}");
    let (_, out, _) = status(&["--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["version"], &json["instances"][0]["expired"]), (&1.into(), &true.into()), "{out}");

    api.answer("403 Forbidden");
    let (code, out, log) = status(&[]);
    assert_eq!((code, out.as_str()), (Some(69), ""));
    assert!(
        log.contains("who may list Leases in berth-system and berth-upgrade,") && log.lines().count() == 1,
        "{log}"
    );
}

#[test]
fn an_unreachable_cluster_is_reported_in_one_line() {
    let temp = kubeconfig(&Ca::new(), "127.0.0.1:1");
    for (file, told) in
        [("admin.conf", "see that an apiserver answers there"), ("none", "give another with --kubeconfig")]
    {
        let (code, out, log) = output_of(berth(["status", "--cluster", "--kubeconfig"]).arg(temp.path().join(file)));
        assert_eq!((code, out.as_str()), (Some(69), ""), "{log}");
        assert!(log.contains(told) && log.lines().count() == 1, "{log}");
    }
}
