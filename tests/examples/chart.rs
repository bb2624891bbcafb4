//! The Helm chart: its files come from the examples, and it renders the objects that kubectl
//! kustomize builds from them.

use crate::support::process::{berth_command, expect_status, output_of};
use crate::{find_tool, read_example, root};
use berth_cluster::yaml::{YamlNode, parse_documents};
use libtest_mimic::{Completion, Failed};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const NODE_SHIM: &str = "--set=layout=node-shim";
const IN_CLUSTER: &str = "--set=cluster.nodes={cp-1}";

/// Images that differ from the images in the files.
const IMAGES: &str = "images:\n- {name: registry.example/berth, newTag: v9}\n\
                      - {name: registry.k8s.io/kube-apiserver, newTag: v1.36.9}\n";
const IMAGES_OF_VALUES: [&str; 2] = [
    "--set=image=registry.example/berth:v9",
    "--set=kubeApiserver.image=registry.k8s.io/kube-apiserver:v1.36.9",
];

pub(crate) fn the_charts_files_are_those_of_the_examples() -> Result<Completion, Failed> {
    let mut files: Vec<_> = std::fs::read_dir(chart_path().join("files"))?
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let sources = [
        "kustomize/cluster/access.yaml",
        "node-shim/daemonset.yaml",
        "kustomize/base/kube-apiserver.yaml",
        "kustomize/base/pod-disruption-budget.yaml",
        "monitoring/rules.yaml",
    ];
    assert_eq!(files.len(), sources.len(), "{files:?}");
    for (file, source) in files.iter().zip(sources) {
        let copy = std::fs::read_to_string(chart_path().join("files").join(file))?;
        assert!(
            copy == read_example(source),
            "copy examples/{source} to charts/berth/files/{file}"
        );
    }
    let about = parse_objects(&std::fs::read_to_string(chart_path().join("Chart.yaml"))?).remove(0);
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        (&about["version"], &about["appVersion"]),
        (&json!(version), &json!(version))
    );
    Ok(Completion::Completed)
}

pub(crate) fn the_chart_renders_what_kustomize_builds() -> Result<Completion, Failed> {
    let (helm, kubectl) = match find_tool("helm").and_then(|helm| Ok((helm, find_tool("kubectl")?)))
    {
        Ok(programs) => programs,
        Err(ignored) => return Ok(ignored),
    };
    let dir = tempfile::tempdir()?;
    let copied = Command::new("cp")
        .arg("-r")
        .arg(root().join("examples/kustomize"))
        .arg(dir.path())
        .status()?;
    assert!(copied.success());
    let metrics = dir.path().join("kustomize/metrics/kustomization.yaml");
    std::fs::write(
        &metrics,
        std::fs::read_to_string(&metrics)?.replace("127.0.0.1:9443", "$(BERTH_HOST_IP):9443"),
    )?;
    let own = dir.path().join("kustomize/own");
    std::fs::create_dir(&own)?;
    std::fs::write(
        own.join("daemonset.yaml"),
        read_example("node-shim/daemonset.yaml"),
    )?;

    for (values, kustomization) in [
        (&[][..], "resources: [../base]"),
        (
            &["--set=kubeApiserver.replicas=3"],
            "resources: [../several-control-plane-nodes]",
        ),
        (
            &[IN_CLUSTER, "--set=monitoring.port=9443"],
            "resources: [../base]\ncomponents: [../cluster, ../metrics]",
        ),
        (
            &[IN_CLUSTER, "--set=monitoring.port=9443", "--set=pass=auto"],
            "resources: [../base]\ncomponents: [../cluster, ../pass, ../metrics]",
        ),
        (&[NODE_SHIM], "resources: [daemonset.yaml]"),
        (
            &[NODE_SHIM, IN_CLUSTER, "--set=pass=auto"],
            "resources: [daemonset.yaml]\ncomponents: [../cluster, ../pass]",
        ),
    ] {
        std::fs::write(
            own.join("kustomization.yaml"),
            format!("{kustomization}\n{IMAGES}"),
        )?;
        let (built, _) = expect_status(Command::new(&kubectl).arg("kustomize").arg(&own), 0, &[]);
        let rendered = render_chart(&helm, values).map_err(|err| format!("{values:?}: {err}"))?;
        let mut objects_rendered = parse_objects(&rendered);
        for object in &mut objects_rendered {
            let annotations = object["metadata"]
                .as_object_mut()
                .unwrap()
                .remove("annotations");
            assert_eq!(
                annotations,
                Some(json!({"helm.sh/resource-policy": "keep"})),
                "{object}"
            );
        }
        assert_eq!(
            objects_rendered,
            parse_objects(&built),
            "{values:?} and {kustomization}"
        );

        expect_status(
            Command::new(&helm)
                .args(["lint", "--strict"])
                .arg(chart_path())
                .args(values),
            0,
            &[],
        );
        let file = dir.path().join("rendered.yaml");
        std::fs::write(&file, rendered)?;
        let (_, out, err) = output_of(berth_command(["doctor"]).arg(&file));
        assert!(
            values.contains(&NODE_SHIM) || out.contains("no error and no warning"),
            "{values:?}: {out}{err}"
        );
    }
    Ok(Completion::Completed)
}

pub(crate) fn values_change_what_they_name() -> Result<Completion, Failed> {
    let helm = match find_tool("helm") {
        Ok(helm) => helm,
        Err(ignored) => return Ok(ignored),
    };
    for (layout, value, gone, added) in [
        (
            "sidecar",
            "--set=kubeApiserver.flags.etcd-servers=https://10.0.0.5:2379",
            &["- --etcd-servers=https://127.0.0.1:2379"][..],
            &["- --etcd-servers=https://10.0.0.5:2379"][..],
        ),
        (
            "sidecar",
            "--set-string=kubeApiserver.flags.v=2",
            &[],
            &["- --v=2"],
        ),
        (
            "sidecar",
            "--set=kubeApiserver.secret=pki",
            &["secretName: kube-apiserver"],
            &["secretName: pki"],
        ),
        (
            "sidecar",
            "--set=env.BERTH_HOLD=9s",
            &[],
            &["- name: BERTH_HOLD", "value: 9s"],
        ),
        (
            "node-shim",
            "--set=nodeShim.ca=/srv/tls/server-ca.crt",
            &[
                "value: /etc/kubernetes/pki/ca.crt",
                "- mountPath: /etc/kubernetes/pki/ca.crt",
                "subPath: ca.crt",
                "path: /etc/kubernetes/pki",
            ],
            &[
                "value: /srv/tls/server-ca.crt",
                "- mountPath: /srv/tls/server-ca.crt",
                "subPath: server-ca.crt",
                "path: /srv/tls",
            ],
        ),
    ] {
        let lines = |values: &[&str]| {
            render_chart(&helm, values)
                .map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        };
        let layout = format!("--set=layout={layout}");
        let (before, after) = (lines(&[&layout])?, lines(&[&layout, value])?);
        let only = |these: &[String], those: &[String]| -> Vec<String> {
            these
                .iter()
                .filter(|line| !those.contains(line))
                .map(|line| line.trim().to_owned())
                .collect()
        };
        assert_eq!(only(&before, &after), gone, "{value}");
        assert_eq!(only(&after, &before), added, "{value}");
    }

    let two = parse_objects(&render_chart(&helm, &["--set=cluster.nodes={cp-1,cp-2}"])?);
    let slices = json!([
        "berth-cp-1-ipv4",
        "berth-cp-1-ipv6",
        "berth-cp-2-ipv4",
        "berth-cp-2-ipv6"
    ]);
    assert!(
        two.iter()
            .any(|object| object["rules"][2]["resourceNames"] == slices),
        "{two:#?}"
    );

    let operator = [
        "--set=monitoring.operator=true",
        "--set=monitoring.port=9443",
        "--set=monitoring.labels.a=b",
    ];
    let rendered = parse_objects(&render_chart(
        &helm,
        &[
            &operator[..],
            &["--set=monitoring.runbooks=https://a.example/docs"],
        ]
        .concat(),
    )?);
    let of = |kind: &str| {
        rendered
            .iter()
            .find(|object| object["kind"] == kind)
            .unwrap_or_else(|| panic!("no {kind}"))
    };
    let rules = read_example("monitoring/rules.yaml")
        .replace("_url: docs/", "_url: https://a.example/docs/");
    assert_eq!(of("PrometheusRule")["spec"], parse_objects(&rules)[0]);
    assert_eq!(
        of("PrometheusRule")["metadata"]["labels"],
        json!({"a": "b"})
    );
    let relabelings = of("ScrapeConfig")["spec"]["relabelings"]
        .as_array()
        .unwrap();
    let made: Vec<_> = relabelings
        .iter()
        .map(|made| (made["targetLabel"].as_str(), made["replacement"].as_str()))
        .collect();
    assert_eq!(
        made,
        [
            (Some("job"), Some("berth")),
            (Some("node"), None),
            (Some("__address__"), Some("$1:9443"))
        ]
    );
    Ok(Completion::Completed)
}

pub(crate) fn wrong_values_are_refused() -> Result<Completion, Failed> {
    let helm = match find_tool("helm") {
        Ok(helm) => helm,
        Err(ignored) => return Ok(ignored),
    };
    for (value, message) in [
        (
            "--set=image=",
            "image has no default: set it to your own build",
        ),
        (
            "--set=kubeApiserver.image=",
            "kubeApiserver.image has no default: set it",
        ),
        ("--set=image=a b", "at '/image'"),
        ("--set=imge=a", "additional properties 'imge' not allowed"),
        (
            "--set=layout=static-pod",
            "at '/layout': value must be one of 'sidecar', 'node-shim'",
        ),
        (
            "--set=kubeApiserver.replicas=0",
            "at '/kubeApiserver/replicas': minimum: got 0, want 1",
        ),
        (
            "--set=kubeApiserver.flags.secure-port=443",
            "at '/kubeApiserver/flags/secure-port': false schema",
        ),
        (
            "--set=kubeApiserver.flags.v=2",
            "at '/kubeApiserver/flags/v': got number, want string",
        ),
        (
            "--set=env.BERTH_ADMIN=127.0.0.1:1",
            "at '/env/BERTH_ADMIN': false schema",
        ),
        (
            "--set=env.BERTH_PASS=auto",
            "at '/env/BERTH_PASS': false schema",
        ),
        (
            "--set=pass=off",
            "at '/pass': value must be one of 'relay', 'auto', 'inject'",
        ),
        ("--set=nodeShim.ca=ca.crt", "at '/nodeShim/ca'"),
        ("--set=cluster.nodes={CP_1}", "at '/cluster/nodes/0'"),
        (
            "--set=monitoring.operator=true",
            "at '/monitoring/port': minimum: got 0, want 1",
        ),
    ] {
        let error = render_chart(&helm, &[value]).expect_err(value);
        assert!(error.contains(message), "{value}: {error}");
    }
    Ok(Completion::Completed)
}

fn chart_path() -> PathBuf {
    root().join("charts/berth")
}

/// Returns the output of `helm template`, or its error message.
fn render_chart(helm: &Path, values: &[&str]) -> Result<String, String> {
    let (status, out, err) = output_of(
        Command::new(helm)
            .args(["template", "berth"])
            .arg(chart_path())
            .args(IMAGES_OF_VALUES)
            .args(values),
    );
    if status == Some(0) { Ok(out) } else { Err(err) }
}

/// Returns the objects of a file, sorted by kind and metadata.
fn parse_objects(text: &str) -> Vec<Value> {
    let mut objects: Vec<_> = parse_documents(text)
        .unwrap()
        .iter()
        .map(YamlNode::value)
        .collect();
    objects.sort_by_key(|object| format!("{} {}", object["kind"], object["metadata"]));
    objects
}
