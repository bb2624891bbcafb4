use super::super::eject::undo_injection;
use super::super::kubeadm::make_patches;
use super::flags::insert_instance;
use super::probes::names_shared_port_or_loopback;
use super::*;
use berth_cluster::yaml::parse_documents;
use proptest::prelude::*;
use serde_json::json;
use similar::{ChangeTag, TextDiff};

const KUBEADM: &str = include_str!("../../../../tests/data/manifest/kubeadm-v1.36.yaml");
const DEPLOYMENT: &str = include_str!("../../../../tests/data/manifest/deployment.yaml");
const RKE2: &str = include_str!("../../../../tests/data/manifest/rke2.yaml");
const KOPS: &str = include_str!("../../../../tests/data/manifest/kops.yaml");

/// The flag in kubeadm's manifest that names the node's address.
const ADVERTISE: &str = "--advertise-address=10.0.0.5";

fn options() -> InjectOptions {
    InjectOptions {
        image: "registry.example/berth:v0.1.0".into(),
        run_dir: "/run/berth".into(),
        ..InjectOptions::default()
    }
}

/// Options for a shim that trusts any certificate of the probed apiserver.
fn trusting_options() -> InjectOptions {
    let probing = Probing {
        trusts: true,
        credentials: true,
        ..Probing::default()
    };
    InjectOptions {
        probing,
        ..options()
    }
}

/// Options for the Deployment, for which inject finds no CA.
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

fn parse_listens(texts: &[&str]) -> Vec<Listen> {
    texts
        .iter()
        .map(|text| berth_options::check::parse_listen(text).unwrap())
        .collect()
}

fn show_diff(old: &str, outcome: &Injection) -> String {
    let notes: String = outcome
        .notes
        .iter()
        .map(|note| format!("note: {note}\n"))
        .collect();
    notes
        + &TextDiff::from_lines(old, &outcome.text)
            .unified_diff()
            .to_string()
}

fn list_problems(text: &str) -> Vec<String> {
    inject(text, &options())
        .unwrap_err()
        .iter()
        .map(Problem::to_string)
        .collect()
}

fn parse_values(text: &str) -> Vec<Value> {
    parse_documents(text)
        .unwrap()
        .iter()
        .map(YamlNode::value)
        .collect()
}

fn eject_text(text: &str) -> String {
    undo_injection(&Manifest::parse(text).unwrap())
        .unwrap()
        .text
}

/// kubeadm's manifest with one replaced text.
fn replace_in_kubeadm_manifest(old: &str, new: &str) -> String {
    assert!(KUBEADM.contains(old), "{old}");
    KUBEADM.replacen(old, new, 1)
}

#[test]
fn kubeadms_manifest_is_put_behind_berth() {
    insta::assert_snapshot!(show_diff(KUBEADM, &inject(KUBEADM, &options()).unwrap()));
}

/// The shim of a static pod has credentials of its own. The shim in a Deployment's pod uses the
/// pod's service account.
#[test]
fn the_service_is_kept_with_the_shims_own_credentials() {
    let kubeconfig = "/etc/kubernetes/berth-cluster/kubeconfig";
    let directory = "/etc/kubernetes/berth-cluster";
    for (text, options, cluster, mount, host_path, note) in [
        (
            KUBEADM,
            options(),
            kubeconfig,
            // The whole directory is mounted, and writable, since the token is renewed by rename.
            json!({"name": VOLUMES[2], "mountPath": directory}),
            json!({"path": directory, "type": "Directory"}),
            None,
        ),
        (
            DEPLOYMENT,
            options_with_ca(),
            "in-cluster",
            Value::Null,
            Value::Null,
            Some("--service: the pod's service account"),
        ),
    ] {
        let outcome = inject(
            text,
            &InjectOptions {
                service: Some(kubeconfig.into()),
                ..options.clone()
            },
        )
        .unwrap();
        let manifest = Manifest::parse(&outcome.text).unwrap();
        let (pod, apiserver) = (manifest.pod().value(), manifest.apiserver().value());
        let named = |list: &Value, name: &str| {
            list.as_array()
                .unwrap()
                .iter()
                .find(|one| one["name"] == name)
                .cloned()
                .unwrap_or_default()
        };
        let shim = named(&pod["initContainers"], SHIM_CONTAINER);
        assert_eq!(named(&shim["env"], "BERTH_CLUSTER")["value"], cluster);
        assert_eq!(
            named(&shim["env"], "BERTH_NODE_NAME")["valueFrom"]["fieldRef"]["fieldPath"],
            "spec.nodeName"
        );
        assert_eq!(named(&shim["volumeMounts"], VOLUMES[2]), mount);
        assert_eq!(named(&pod["volumes"], VOLUMES[2])["hostPath"], host_path);
        assert_eq!(named(&apiserver["volumeMounts"], VOLUMES[2]), Value::Null);
        assert!(!apiserver["env"].to_string().contains("BERTH_CLUSTER"));
        assert!(
            note.is_none_or(|note| has_note(&outcome, note)),
            "{:?}",
            outcome.notes
        );
        let without = inject(&outcome.text, &options).unwrap();
        assert!(
            has_note(&without, "without --service the shim"),
            "{:?}",
            without.notes
        );
    }
}

fn has_note(outcome: &Injection, start: &str) -> bool {
    outcome.notes.iter().any(|note| note.starts_with(start))
}

/// Passing sockets takes one variable for `berth exec` and the shim: no capability, no mount.
#[test]
fn passing_sockets_is_one_variable_in_two_containers() {
    for (text, off) in [(KUBEADM, options()), (DEPLOYMENT, options_with_ca())] {
        let before = inject(text, &off).unwrap();
        assert!(!before.text.contains(PASS_VARIABLE));
        for pass in [PassMode::Auto, PassMode::Inject] {
            let on = InjectOptions {
                pass,
                ..off.clone()
            };
            let after = inject(text, &on).unwrap();
            let (before, after) = (before.text.as_str(), after.text.as_str());
            let manifest = Manifest::parse(after).unwrap();
            let of = |container: Container<'_>| {
                container
                    .variable(PASS_VARIABLE)
                    .unwrap()
                    .get_text("value")
                    .map(str::to_owned)
            };
            let both = [of(manifest.container()), of(find_shim(&manifest).unwrap())];
            assert_eq!(
                both,
                [Some(pass.as_str().into()), Some(pass.as_str().into())]
            );
            let diff = TextDiff::from_lines(before, after);
            let changed = diff
                .iter_all_changes()
                .filter(|change| change.tag() != ChangeTag::Equal);
            let changed: Vec<_> = changed
                .map(|change| (change.tag(), change.value().trim().to_owned()))
                .collect();
            let lines = [
                format!("- name: {PASS_VARIABLE}"),
                format!("value: {}", pass.as_str()),
            ]
            .map(|line| (ChangeTag::Insert, line));
            assert_eq!(changed, [&lines[..], &lines].concat());
            // Neither eject nor an injection without the option leaves a trace of the option. A
            // missing option means off, as for `--service`.
            assert_eq!(
                (eject_text(after), parse_values(&eject_text(after))),
                (eject_text(before), parse_values(text))
            );
            let again = inject(after, &off).unwrap();
            assert_eq!(parse_values(&again.text), parse_values(before));
            assert!(
                has_note(&again, "without --pass the shim relays"),
                "{:?}",
                again.notes
            );
            assert_eq!(
                parse_values(&inject(before, &on).unwrap().text),
                parse_values(after)
            );
            assert!(inject(after, &on).unwrap().edits.is_empty());
        }
    }
    let patches = |options: &InjectOptions| {
        let manifest = Manifest::parse(KUBEADM).unwrap();
        make_patches(&manifest, &plan_edits(&manifest, options).unwrap().0)
            .unwrap()
            .map(|file| file.text)
            .concat()
    };
    let [before, after] =
        [PassMode::Relay, PassMode::Auto].map(|pass| patches(&InjectOptions { pass, ..options() }));
    assert_eq!(
        (
            before.matches(PASS_VARIABLE).count(),
            after.matches(PASS_VARIABLE).count()
        ),
        (0, 2)
    );
    let taken = KUBEADM.replacen(
        "    name: kube-apiserver\n",
        "    name: kube-apiserver\n    env: [{name: BERTH_PASS, value: auto}]\n",
        1,
    );
    assert!(list_problems(&taken)[0].contains("BERTH_PASS"));
}

#[test]
fn a_deployment_is_put_behind_berth_and_keeps_its_comments() {
    insta::assert_snapshot!(show_diff(
        DEPLOYMENT,
        &inject(DEPLOYMENT, &options_with_ca()).unwrap()
    ));
}

#[test]
fn patches_for_kubeadm_make_the_same_changes() {
    let manifest = Manifest::parse(KUBEADM).unwrap();
    let (edits, _) = plan_edits(&manifest, &options()).unwrap();
    let [command, rest] = make_patches(&manifest, &edits).unwrap();
    insta::assert_snapshot!(format!(
        "{}\n{}\n{}\n{}",
        command.name, command.text, rest.name, rest.text
    ));
    let deployment = Manifest::parse(DEPLOYMENT).unwrap();
    assert!(
        make_patches(&deployment, &[])
            .unwrap_err()
            .message
            .starts_with("kubeadm did not write this")
    );
}

#[test]
fn a_second_inject_changes_nothing_and_eject_restores_the_original() {
    for (text, options) in [(KUBEADM, options()), (DEPLOYMENT, options_with_ca())] {
        let once = inject(text, &options).unwrap();
        let twice = inject(&once.text, &options).unwrap();
        assert_eq!((&twice.text, twice.edits.len()), (&once.text, 0));
        assert_eq!(parse_values(&eject_text(&once.text)), parse_values(text));
        // New options replace the earlier options without a trace.
        let other = InjectOptions {
            image: "other:v2".into(),
            run_dir: "/run/b".into(),
            ..options.clone()
        };
        assert_eq!(
            parse_values(&inject(&once.text, &other).unwrap().text),
            parse_values(&inject(text, &other).unwrap().text)
        );
    }
    let kubeadm = inject(KUBEADM, &options()).unwrap().text;
    assert_eq!(eject_text(&kubeadm), KUBEADM);
}

#[test]
fn eject_keeps_later_changes() {
    let injected = inject(DEPLOYMENT, &options_with_ca()).unwrap().text;
    let changes = [
        (
            "terminationGracePeriodSeconds: 130",
            "terminationGracePeriodSeconds: 300",
        ),
        ("v1.36.3", "v1.36.4"),
        ("initialDelaySeconds: 15", "initialDelaySeconds: 20"),
        ("audit-{instance}.log # grows", "b-{instance}.log"),
    ];
    let changed = changes
        .iter()
        .fold(injected, |text, (old, new)| text.replacen(old, new, 1));
    let mut wanted = parse_values(DEPLOYMENT);
    let pod = &mut wanted[1]["spec"]["template"]["spec"];
    pod["terminationGracePeriodSeconds"] = 300.into();
    pod["containers"][0]["image"] = "registry.k8s.io/kube-apiserver:v1.36.4".into();
    pod["containers"][0]["livenessProbe"]["initialDelaySeconds"] = 20.into();
    pod["containers"][0]["args"][1] =
        "--audit-log-path=/var/log/kubernetes/b-{instance}.log".into();
    assert_eq!(parse_values(&eject_text(&changed)), wanted);
}

#[test]
fn eject_refuses_manifests_without_readable_annotation() {
    let refused = |text: &str| {
        undo_injection(&Manifest::parse(text).unwrap())
            .unwrap_err()
            .to_string()
    };
    assert!(
        refused(KUBEADM).starts_with("1: berth inject did not write this"),
        "{}",
        refused(KUBEADM)
    );
    let torn = inject(KUBEADM, &options())
        .unwrap()
        .text
        .replace("'{\"fields\"", "'{fields\"");
    assert!(refused(&torn).starts_with("5: the annotation berth/original cannot be read"));
}

#[test]
fn all_problems_are_reported_at_once_with_their_lines() {
    let text = replace_in_kubeadm_manifest("hostNetwork: true", "hostNetwork: false")
        .replace("--secure-port=6443", "--secure-port=no")
        .replace("ca-certs", "berth-run")
        .replace(
            "    - --tls-cert-file=/etc/kubernetes/pki",
            "    - --anonymous-auth=false\n    - --tls-cert-file=/x",
        )
        .replace("status: {}", "  terminationGracePeriodSeconds: long");
    insta::assert_snapshot!(list_problems(&text).join("\n"), @r"
    12: hostNetwork is not true, so the pod has no address of the node to share: set hostNetwork to true
    96: berth-run is in volumes already, and berth needs the name: rename or remove that entry
    35: --secure-port=no is no port: give a port, such as 6443
    13: the manifest does not show which CA issued the apiserver's certificate: give --probe-ca FILE, or --probe-insecure
    104: terminationGracePeriodSeconds is no number: give a number of seconds
    40: anonymous requests are refused, so the probe needs credentials: give --probe-cert and --probe-key, or --probe-token-file
    ");
}

#[test]
fn shapes_that_cannot_be_put_behind_berth_are_refused() {
    let refused = |text: &str, why: &str| {
        let problems = list_problems(text);
        assert!(
            problems.len() == 1 && problems[0].contains(why),
            "{why} in {problems:?}"
        );
    };
    for (old, new, why) in [
        (
            "- kube-apiserver\n",
            "- /usr/bin/berth\n    - exec\n    - --\n    - kube-apiserver\n",
            "remove berth from the manifest by hand",
        ),
        (
            "port: probe-port",
            "port: other",
            "Probe asks the port other by its name",
        ),
        (
            "mountPath: /etc/kubernetes/pki",
            "mountPath: /etc/pki",
            "ca.crt, which the probe needs, is in no volumeMount",
        ),
        (
            "      type: RuntimeDefault",
            "      type: RuntimeDefault\n    runAsNonRoot: true",
            "runAsNonRoot without runAsUser",
        ),
        (
            "- --secure-port=6443",
            "- --shutdown-delay-duration=soon",
            "give a duration with units",
        ),
        (
            "- --advertise-address=10.0.0.5",
            "- --advertise-address=node-1",
            "node-1 is no IP address: give an address",
        ),
        (
            "- --secure-port=6443",
            "- --bind-address=[::]",
            "[::] is no IP address: give an address",
        ),
        (
            "    name: kube-apiserver\n",
            "    name: kube-apiserver\n    env: [{name: BERTH_LISTEN, value: '10.0.0.9:6443'}]\n",
            "BERTH_LISTEN is in env already, and berth needs the name",
        ),
    ] {
        refused(&replace_in_kubeadm_manifest(old, new), why);
    }
    let file = "- mountPath: /log/audit.log\n      name: ca-certs\n    - mountPath: /etc/ssl/certs";
    let text = replace_in_kubeadm_manifest("- mountPath: /etc/ssl/certs", file).replace(
        "- --secure",
        "- --audit-log-path=/log/audit.log\n    - --secure",
    );
    refused(
        &text,
        "is mounted as a single file, and each instance needs a file of its own: mount the directory of the file",
    );
}

/// A liveness probe may exclude etcd in its query. Without the query, an outage of etcd would
/// restart kube-apiserver, which does not bring etcd back.
#[test]
fn the_path_of_a_probe_is_kept() {
    for (path, words) in [
        ("/livez", ""),
        (
            "/livez?exclude=etcd&exclude=kms-provider-0",
            ", --path, /livez?exclude=etcd&exclude=kms-provider-0",
        ),
        ("/healthz", ", --path, /healthz"),
        ("livez/ping", ", --path, /livez/ping"),
        // No request can have these paths.
        ("'/livez x'", ""),
        ("'/livez?exclude=<b>'", ""),
    ] {
        let text = KUBEADM.replace("path: /livez", &format!("path: {path}"));
        let outcome = inject(&text, &options()).unwrap();
        let manifest = Manifest::parse(&outcome.text).unwrap();
        let asked = |probe| crate::exec_words(manifest.apiserver().get(probe).unwrap()).join(", ");
        assert_eq!(
            asked("livenessProbe"),
            format!("{BINARY}, live, --timeout, 14s{words}")
        );
        assert_eq!(asked("startupProbe"), asked("livenessProbe"));
        assert_eq!(
            parse_values(&eject_text(&outcome.text)),
            parse_values(&text)
        );
        assert_eq!(
            outcome
                .notes
                .iter()
                .any(|note| note.contains("is no path of a request")),
            path.contains('\''),
            "{path}"
        );
    }
    // A tcpSocket probe depends on nothing but an open port.
    let [http, connects] = [
        "httpGet:\n        host: 10.0.0.5\n        path: /livez\n",
        "tcpSocket:\n        host: 10.0.0.5\n",
    ];
    let text = KUBEADM.replace(http, connects);
    assert_ne!(text, KUBEADM);
    let outcome = inject(&text, &options()).unwrap();
    let manifest = Manifest::parse(&outcome.text).unwrap();
    let words = crate::exec_words(manifest.apiserver().get("livenessProbe").unwrap()).join(" ");
    assert!(words.ends_with(" --path /livez/ping"), "{words}");
    assert_eq!(
        parse_values(&eject_text(&outcome.text)),
        parse_values(&text)
    );
    let text = KUBEADM.replace("path: /readyz", "path: /readyz?exclude=informer-sync");
    let outcome = inject(&text, &options()).unwrap();
    assert!(has_note(
        &outcome,
        "readinessProbe asks for /readyz?exclude=informer-sync, and the shim asks for /readyz with all"
    ));
}

/// RKE2's probe asks the shared port. Behind berth, the kubelet would kill kube-apiserver again and
/// again because of such a probe.
#[test]
fn a_program_that_asks_the_shared_port_for_a_probe_is_refused() {
    let problems = inject(RKE2, &trusting_options()).unwrap_err();
    let lines = problems.iter().map(|problem| {
        let name = problem.message.split(' ').next().unwrap();
        assert!(problem.message.starts_with(&format!("{name} runs kubectl, which asks the shared port")), "{problem}");
        assert!(
            problem.message.ends_with(
                ": write the probe as an httpGet of the port 6443, so that berth inject can replace the probe"
            )
        );
        (name, problem.line)
    });
    assert_eq!(
        lines.collect::<Vec<_>>(),
        [
            ("startupProbe", 84),
            ("livenessProbe", 44),
            ("readinessProbe", 64)
        ]
    );
    // The suggested fix leaves nothing to report. A program that does not name the shared port is
    // reported in a note.
    let fixed = RKE2.replace(
        "      exec:\n        command:\n        - kubectl\n        - get\n        - --server=https://localhost:6443/\n",
        "      httpGet:\n        port: 6443\n      ignored:\n        command:\n",
    );
    assert_eq!(
        probe_exec(&inject(&fixed, &trusting_options()).unwrap()),
        ""
    );
    let other = RKE2.replace(
        "--server=https://localhost:6443/",
        "--server=https://api.example/",
    );
    let notes = probe_exec(&inject(&other, &trusting_options()).unwrap());
    assert_eq!(
        notes
            .matches("Probe asks kubectl; if the answer comes from the shared port or localhost")
            .count(),
        3,
        "{notes}"
    );
}

#[test]
fn a_sidecar_that_answers_a_probe_is_noted() {
    let outcome = inject(KOPS, &trusting_options()).unwrap();
    let notes = probe_exec(&outcome);
    assert!(
        notes.starts_with("livenessProbe asks the port 3990; if the answer comes"),
        "{notes}"
    );
    assert!(
        outcome
            .text
            .contains("        path: /healthz\n        port: 3990\n")
    );
}

/// Returns an injection's notes about probes of other processes, a line each.
fn probe_exec(outcome: &Injection) -> String {
    outcome
        .notes
        .iter()
        .filter(|note| note.contains("Probe asks"))
        .cloned()
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn words_that_name_the_shared_port_or_loopback_are_found() {
    for shared in [
        "https://localhost:6443/",
        "10.0.0.5:6443",
        "--port=6443",
        "curl -k https://127.0.0.1/",
        "[::1]:1",
        "::1",
    ] {
        assert!(names_shared_port_or_loopback(shared, 6443), "{shared}");
    }
    for other in [
        "https://10.0.0.5:16443/",
        "--raw=/livez",
        "localhost.example:1",
        "127",
        "6443s",
    ] {
        assert!(!names_shared_port_or_loopback(other, 6443), "{other}");
    }
}

/// The kubelet counts the ports of containers and of native sidecars, and a second pod runs a
/// second copy of each.
#[test]
fn other_containers_of_the_pod_are_noted() {
    for (list, fields, ports, runs) in [
        ("containers", "ports: [{containerPort: 8083}]", "8083", true),
        (
            "containers",
            "ports: [{containerPort: 80, hostPort: 8132}, {containerPort: 8133}]",
            "8132, 8133",
            true,
        ),
        (
            "initContainers",
            "restartPolicy: Always, ports: [{containerPort: 8083}]",
            "8083",
            true,
        ),
        ("initContainers", "restartPolicy: Always", "", true),
        ("containers", "ports: []", "", true),
        (
            "containers",
            "args: [--listen=/var/run/kmsplugin/socket.sock]",
            "",
            true,
        ),
        // The init container has ended before kube-apiserver starts.
        (
            "initContainers",
            "ports: [{containerPort: 8083}]",
            "",
            false,
        ),
    ] {
        let container = format!("  - {{name: kms-plugin, image: kms:v1, {fields}}}\n");
        let text = match list {
            "containers" => replace_in_kubeadm_manifest(
                "  hostNetwork: true\n",
                &format!("{container}  hostNetwork: true\n"),
            ),
            _ => replace_in_kubeadm_manifest(
                "  hostNetwork: true\n",
                &format!("  hostNetwork: true\n  initContainers:\n{container}"),
            ),
        };
        let Ok(outcome) = inject(&text, &options()) else {
            let refused = list_problems(&text);
            let wanted = format!(
                ": kms-plugin declares the port {ports}, and the kubelet refuses a second pod"
            );
            assert!(
                refused.len() == 1 && !ports.is_empty() && refused[0].contains(&wanted),
                "{fields}: {refused:?}"
            );
            continue;
        };
        assert_eq!(
            (
                ports,
                has_note(&outcome, "kms-plugin runs twice during an upgrade")
            ),
            ("", runs),
            "{fields}"
        );
    }
}

#[test]
fn native_sidecars_need_v1_29() {
    let with = |tag: &str| {
        replace_in_kubeadm_manifest("kube-apiserver:v1.36.3", &format!("kube-apiserver:{tag}"))
    };
    let refused = list_problems(&with("v1.28.15"));
    assert!(
        refused.len() == 1 && refused[0].starts_with("42: kube-apiserver is v1.28: "),
        "{refused:?}"
    );
    assert!(list_problems(&with("1.26.4"))[0].starts_with("42: kube-apiserver is v1.26: "));
    for (tag, is_known) in [
        ("v1.29.0", true),
        ("1.30.2-build1", true),
        ("v2.0.0", false),
        ("latest", false),
        ("1", false),
        ("v1@sha256:00", false),
    ] {
        let outcome = inject(&with(tag), &options()).unwrap();
        assert_eq!(
            has_note(&outcome, "the image registry.k8s.io/kube-apiserver:"),
            !is_known,
            "{tag}"
        );
    }
}

#[test]
fn inject_leaves_correct_settings_alone() {
    let text = replace_in_kubeadm_manifest(
        "- --secure-port=6443",
        "- --shutdown-delay-duration=20s\n    - --shutdown-watch-termination-grace-period=0s\n    - --audit-log-path=/l/{instance}.log",
    )
    .replace("  hostNetwork: true", "  hostNetwork: true\n  terminationGracePeriodSeconds: 600")
    .replace(
        "    name: kube-apiserver\n",
        "    name: kube-apiserver\n    lifecycle: {preStop: {exec: {command: [a]}}}\n",
    );
    let outcome = inject(&text, &options()).unwrap();
    let paths: Vec<_> = outcome
        .edits
        .iter()
        .map(|edit| edit.path.to_string())
        .collect();
    for path in ["terminationGrace", "lifecycle", "command[", "args"] {
        assert!(
            !paths.iter().any(|edited| edited.contains(path)),
            "{path} in {paths:?}"
        );
    }
    assert!(
        !outcome.text.contains("5s")
            && outcome
                .notes
                .iter()
                .any(|note| note.contains("preStop hook is kept"))
    );
}

#[test]
fn the_address_comes_from_the_manifest_or_the_node() {
    let six = "--advertise-address=fd00::5";
    let given = || Addresses::Given(parse_listens(&["10.0.0.5:6443", "10.0.0.9:6443,freebind"]));
    for (instead, addresses, wanted) in [
        (ADVERTISE, Addresses::OfManifest, "10.0.0.5:6443"),
        ("--v=1", Addresses::OfManifest, "$(BERTH_HOST_IP):6443"),
        (
            "--bind-address=10.0.0.7",
            Addresses::OfManifest,
            "10.0.0.7:6443",
        ),
        (six, Addresses::OfManifest, "[fd00::5]:6443"),
        // kube-apiserver reads 0.0.0.0 as no address.
        (
            "--advertise-address=0.0.0.0",
            Addresses::OfManifest,
            "$(BERTH_HOST_IP):6443",
        ),
        (ADVERTISE, given(), "10.0.0.5:6443 10.0.0.9:6443,freebind"),
    ] {
        let options = InjectOptions {
            addresses,
            ..options()
        };
        let outcome = inject(&replace_in_kubeadm_manifest(ADVERTISE, instead), &options).unwrap();
        let line = outcome
            .text
            .lines()
            .skip_while(|line| !line.contains("BERTH_LISTEN"))
            .nth(1)
            .unwrap();
        assert_eq!(
            line.trim().trim_start_matches("value: ").trim_matches('\''),
            wanted
        );
    }
}

#[test]
fn flags_have_the_values_of_the_variables_in_them() {
    let env = "    env: [{name: A, value: '10.9.9.9'}, {name: B, value: '$(A)'}, {name: C, value: '$$(A)$(D)'}, {name: P, value: '6443'}, {name: D, \
               value: 70s}]\n    name: kube-apiserver\n";
    let with = |flag: &str| {
        let text = replace_in_kubeadm_manifest(ADVERTISE, flag)
            .replace("--secure-port=6443", "--secure-port=$(P)");
        let outcome = inject(
            &text.replacen("    name: kube-apiserver\n", env, 1),
            &options(),
        )
        .unwrap();
        let manifest = Manifest::parse(&outcome.text).unwrap();
        let listen = manifest
            .container()
            .variable("BERTH_LISTEN")
            .and_then(|it| it.get_text("value"))
            .unwrap()
            .to_owned();
        (
            listen,
            manifest
                .pod()
                .get("terminationGracePeriodSeconds")
                .unwrap()
                .number()
                .unwrap(),
        )
    };
    for (flag, listen, grace) in [
        ("--bind-address=$(A)", "10.9.9.9:6443", 120),
        ("--bind-address=$(B)", "10.9.9.9:6443", 120),
        // Three references stay as written: one has an escaped $, one is to a later variable, and
        // one is to a missing variable.
        ("--bind-address=$(C)", "$(BERTH_HOST_IP):6443", 120),
        ("--advertise-address=$(NONE)", "$(BERTH_HOST_IP):6443", 120),
        (
            "--shutdown-delay-duration=$(D)",
            "$(BERTH_HOST_IP):6443",
            185,
        ),
    ] {
        assert_eq!(with(flag), (listen.into(), grace), "{flag}");
    }
    let doubled: String = (1..99)
        .map(|at| format!(", {{name: A{at}, value: '$(A{0})$(A{0})'}}", at - 1))
        .collect();
    let text = pod_with_env(&format!("{{name: A0, value: x}}{doubled}"));
    assert!(
        Manifest::parse(&text)
            .unwrap()
            .flag("v")
            .unwrap()
            .value
            .len()
            < 10_000
    );
}

fn pod_with_env(env: &str) -> String {
    format!(
        "kind: Pod\nspec:\n  containers:\n  - {{name: a, command: [kube-apiserver, --v=$(A98)], env: [{env}]}}\n"
    )
}

#[test]
fn a_loopback_address_is_noted() {
    for (flag, listen, told) in [
        ("--advertise-address=127.0.0.1", None, true),
        ("--advertise-address=fe80::1", None, true),
        ("--advertise-address=::ffff:169.254.1.1", None, true),
        ("--bind-address=::1", None, true),
        ("--advertise-address=127.0.0.1", Some("10.0.0.5:6443"), true),
        (ADVERTISE, Some("127.0.0.1:6443"), true),
        (ADVERTISE, None, false),
    ] {
        let addresses = listen.map_or(Addresses::OfManifest, |listen| {
            Addresses::Given(parse_listens(&[listen]))
        });
        let outcome = inject(
            &replace_in_kubeadm_manifest(ADVERTISE, flag),
            &InjectOptions {
                addresses,
                ..options()
            },
        )
        .unwrap();
        let told_of = outcome
            .notes
            .iter()
            .any(|note| note.contains("is a loopback or link-local address: no other node"));
        assert_eq!(told_of, told, "{flag} {listen:?}");
    }
}

/// The added containers need kube-apiserver's SELinux label to write to the run directory.
#[test]
fn added_containers_get_the_apiservers_labels() {
    let own = "{seLinuxOptions: {type: spc_t}, appArmorProfile: {type: Unconfined}}";
    let labelled = &format!("    name: kube-apiserver\n    securityContext: {own}\n");
    let text = replace_in_kubeadm_manifest("    name: kube-apiserver\n", labelled);
    let added = inject(&text, &options()).unwrap().manifest.pod().value()["initContainers"].clone();
    for container in added.as_array().unwrap() {
        let types = ["seLinuxOptions", "appArmorProfile"]
            .map(|field| &container["securityContext"][field]["type"]);
        assert_eq!(types, ["spc_t", "Unconfined"], "{}", container["name"]);
    }
}

/// The kubelet counts the preStop hook's time toward the grace period.
#[test]
fn a_hook_that_sleeps_is_in_the_grace_period() {
    for (hook, seconds) in [
        ("exec: {command: [sleep, '100']}", 220),
        (
            "exec: {command: [/bin/sh, -c, 'sleep 1m; kill 1 && sleep 5.5']}",
            185,
        ),
        ("sleep: {seconds: 15}", 135),
        (
            "exec: {command: [/opt/berth/berth, drain, --wait-streams=5m]}",
            420,
        ),
        ("exec: {command: [sleep, long]}", 120),
        (
            "exec: {command: [sh, -c, 'sleep 1.8e19; sleep 1.8e19']}",
            i64::MAX.unsigned_abs(),
        ),
    ] {
        let text = replace_in_kubeadm_manifest(
            "    name: kube-apiserver\n",
            &format!("    name: kube-apiserver\n    lifecycle: {{preStop: {{{hook}}}}}\n"),
        );
        let injected = inject(&text, &options()).unwrap().manifest;
        assert_eq!(
            injected
                .pod()
                .get("terminationGracePeriodSeconds")
                .and_then(YamlNode::number),
            Some(seconds),
            "{hook}"
        );
    }
}

/// Kubernetes reads YAML 1.1, where a leading 0 means octal, and converts it to JSON, which has no
/// floats of its own.
#[test]
fn numbers_are_read_as_kubernetes_reads_them() {
    let with = |uid: &str| {
        replace_in_kubeadm_manifest(
            "      type: RuntimeDefault",
            &format!("      type: RuntimeDefault\n    runAsUser: {uid}"),
        )
    };
    for (text, uid) in [("010", 8), ("08", 8), ("1e3", 1000)] {
        let injected = inject(&with(text), &options()).unwrap().text;
        let written = [
            format!("    - --owner\n    - \"{uid}\"\n"),
            format!("      runAsUser: {uid}\n"),
        ];
        assert!(
            written.iter().all(|line| injected.contains(line)),
            "{text}: {injected}"
        );
    }
    for text in ["'8'", "8.5", "-8"] {
        assert!(
            list_problems(&with(text))[0].contains("runAsUser is no uid"),
            "{text}"
        );
    }
    let text = KUBEADM
        .replace("periodSeconds: 10\n", "periodSeconds: 10.0\n")
        .replace("timeoutSeconds: 15", "timeoutSeconds: 15.0");
    let same =
        |text: &str| parse_values(&inject(text, &options()).unwrap().text.replace(".0\n", "\n"));
    assert_eq!(same(&text), same(KUBEADM));
}

#[test]
fn a_second_inject_keeps_the_addresses() {
    let given = parse_listens(&["10.0.0.5:6443", "127.0.0.1:6443", "10.0.0.9:6443,freebind"]);
    let on_node = replace_in_kubeadm_manifest(ADVERTISE, "--v=1");
    for (text, addresses) in [
        (KUBEADM, Addresses::Given(given)),
        (&on_node, Addresses::OfManifest),
    ] {
        let before = inject(
            text,
            &InjectOptions {
                addresses: addresses.clone(),
                ..options()
            },
        )
        .unwrap();
        let newer = InjectOptions {
            image: "registry.example/berth:v0.2.0".into(),
            ..options()
        };
        let wanted = inject(
            text,
            &InjectOptions {
                addresses,
                ..newer.clone()
            },
        )
        .unwrap();
        let again = inject(&before.text, &newer).unwrap();
        assert_eq!(parse_values(&again.text), parse_values(&wanted.text));
        // kubeadm's patches keep the addresses as well.
        let edits = |options: &InjectOptions| {
            plan_edits(&Manifest::parse(text).unwrap(), options)
                .unwrap()
                .0
        };
        assert_eq!(edits(&again.options), edits(&wanted.options));
    }
    let odd = inject(&on_node, &options()).unwrap().text;
    let odd = odd.replace(
        "value: $(BERTH_HOST_IP):6443",
        "value: $(BERTH_HOST_IP):6443 127.0.0.1:6443",
    );
    assert!(list_problems(&odd)[0].contains("--listen"));
}

#[test]
fn variables_added_to_the_shim_are_kept() {
    let admin = "    - name: BERTH_ADMIN\n      value: 127.0.0.1:9464\n    - name: BERTH_FIRST\n      value: 10.0.0.0/24\n";
    let before = options();
    let waits = "    - name: BERTH_BIND_WAIT\n      value: 10m\n";
    let text = inject(KUBEADM, &before).unwrap().text;
    let by_hand = text.replacen(waits, &format!("{}{admin}", waits.replace("10m", "5m")), 1);
    assert_ne!(text, by_hand);
    // `inject` with the same options leaves the file unchanged. With a newer image, `inject`
    // changes nothing but the image.
    assert_eq!(inject(&by_hand, &before).unwrap().text, by_hand);
    let newer = InjectOptions {
        image: "registry.example/berth:v0.2.0".into(),
        ..before
    };
    let again = inject(&by_hand, &newer).unwrap();
    assert_eq!(
        parse_values(&again.text),
        parse_values(&by_hand.replace("berth:v0.1.0", "berth:v0.2.0"))
    );
    // kubeadm's patches keep the variables as well.
    let manifest = Manifest::parse(&again.base).unwrap();
    let files = make_patches(&manifest, &plan_edits(&manifest, &again.options).unwrap().0).unwrap();
    let patched = files.map(|file| file.text).concat();
    for line in admin.lines() {
        assert!(patched.contains(line.trim()), "{line} in {patched}");
    }
    // Changes to other fields of the shim's container are lost, and a note says so.
    let mut tuned = by_hand.clone();
    let at = tuned.rfind("memory: 32Mi").unwrap();
    tuned.replace_range(at..at + "memory: 32Mi".len(), "memory: 64Mi");
    let notes = |text: &str| {
        inject(text, &newer)
            .unwrap()
            .notes
            .iter()
            .filter(|note| note.contains("has reset resources of"))
            .count()
    };
    assert_eq!((notes(&by_hand), notes(&tuned)), (0, 1));
    let changed = by_hand.replace(
        "    - serve\n",
        "    - serve\n    - --admin=127.0.0.1:9464\n",
    );
    assert!(list_problems(&changed)[0].contains("--admin"));
}

#[test]
fn only_the_pods_uid_or_name_makes_a_file_unique() {
    let audit = |field: &str| {
        let env = format!(
            "    env: [{{name: B, valueFrom: {{fieldRef: {{fieldPath: {field}}}}}}}, {{name: A, value: x-$(B)}}]\n"
        );
        let text = replace_in_kubeadm_manifest(
            "- --secure-port=6443",
            "- --secure-port=6443\n    - --audit-log-path=/l/$(A).log",
        );
        let text = text.replacen(
            "    name: kube-apiserver\n",
            &format!("    name: kube-apiserver\n{env}"),
            1,
        );
        let outcome = inject(&text, &options()).unwrap();
        (
            outcome
                .text
                .contains("--audit-log-path=/l/$(A)-{instance}.log"),
            outcome.notes.join("\n"),
        )
    };
    for own in ["metadata.uid", "metadata.name"] {
        let (changed, notes) = audit(own);
        assert!(
            !changed && notes.contains("each pod has an audit log of its own (/l/$(A).log"),
            "{own} {notes}"
        );
    }
    for shared in ["spec.nodeName", "status.hostIP", "metadata.namespace"] {
        let (changed, notes) = audit(shared);
        assert!(
            changed && notes.contains("(/l/$(A)-{instance}.log"),
            "{shared} {notes}"
        );
    }
    let unknown = replace_in_kubeadm_manifest(
        "- --secure-port=6443",
        "- --secure-port=6443\n    - --cert-dir=/c/$(UNKNOWN)",
    );
    assert!(
        inject(&unknown, &options())
            .unwrap()
            .text
            .contains("--cert-dir=/c/$(UNKNOWN)/{instance}")
    );
}

#[test]
fn devices_stay_as_log_files() {
    for (path, is_file) in [
        ("-", false),
        ("/dev/stdout", false),
        ("//dev/stderr", false),
        ("/dev/fd/1", false),
        ("/dev/null", false),
        ("/proc/self/fd/1", false),
        ("/dev/shm/audit", true),
        ("/device/audit", true),
    ] {
        let text = replace_in_kubeadm_manifest(
            "- --secure-port=6443",
            &format!("- --secure-port=6443\n    - --audit-log-path={path}"),
        );
        let outcome = inject(&text, &options()).unwrap();
        let changed = outcome
            .text
            .contains(&format!("--audit-log-path={path}-{{instance}}"));
        assert_eq!(
            (changed, has_note(&outcome, "each pod has an audit log")),
            (is_file, is_file),
            "{path}"
        );
    }
}

#[test]
fn the_instance_is_put_before_a_log_files_extension() {
    let names = [
        ("/l/audit.log", "/l/audit-{instance}.log"),
        ("/l.d/audit", "/l.d/audit-{instance}"),
        ("/l/.x", "/l/.x-{instance}"),
        // A dot inside $(…) is part of a variable's name, and begins no extension.
        ("/l/$(NODE.NAME)", "/l/$(NODE.NAME)-{instance}"),
        ("/l/$(A.B).log", "/l/$(A.B)-{instance}.log"),
    ];
    for (path, wanted) in names {
        assert_eq!(insert_instance(path), wanted);
    }
}

/// Manifests as people write them: in block or flow style, with lists here and there, and comments
/// everywhere.
fn any_manifest() -> impl Strategy<Value = String> {
    let pieces = (
        any::<[bool; 12]>(),
        prop::sample::select(vec![2, 3, 5]),
        1..30_u64,
        "[a-zé #:]{0,9}",
    );
    pieces.prop_map(|(is, words, seconds, comment)| {
        let comment = format!("# {comment}");
        let dash = if is[0] { "  - " } else { "- " };
        let given = |is: bool, text: String| if is { text } else { String::new() };
        let [first, second] = if is[3] { ["name: kube-apiserver", "image: i"] } else { ["image: i", "name: kube-apiserver"] };
        let words = &["kube-apiserver", "--secure-port=6443", "--audit-log-path=/l/a.log", "--cert-dir", "/c"][..words];
        let command = if is[4] {
            format!("command: [{}] {comment}\n", words.join(", "))
        } else {
            words.iter().fold("command:\n".into(), |command, word| format!("{command}{dash}{word} {comment}\n"))
        };
        let port = if is[5] { "https" } else { "6443" };
        let container = [
            format!("{first}\n{second}\n"),
            command,
            given(is[5], "ports: [{containerPort: 6443, name: https}]\n".into()),
            given(is[6], format!("livenessProbe: {{httpGet: {{port: {port}}}, periodSeconds: {seconds}}}\n")),
            given(
                !is[6],
                format!("livenessProbe:\n  timeoutSeconds: {seconds} {comment}\n  tcpSocket: {{port: {port}}}\n"),
            ),
            given(is[7], format!("env:\n{dash}{{name: A, value: b}} {comment}\n")),
            given(is[8], "lifecycle: {postStart: {exec: {command: [x]}}}\n".into()),
        ];
        let indent = " ".repeat(dash.len());
        let container = dash.to_owned() + container.concat().trim_end().replace('\n', &format!("\n{indent}")).as_str();
        let pod = [
            "hostNetwork: true\n".into(),
            given(is[1], format!("terminationGracePeriodSeconds: {seconds}0 {comment}\n")),
            given(is[2], format!("initContainers:\n{dash}name: wait {comment}\n{indent}image: w\n")),
            format!("{comment}\ncontainers:\n{container}\n"),
            given(is[9], format!("volumes:\n{dash}{{name: v, emptyDir: {{}}}}\n{comment}\n")),
        ];
        let (head, indent) = if is[10] {
            (format!("{comment}\napiVersion: v1\nkind: Pod\nmetadata: {{name: a}}\nspec:\n"), "  ")
        } else {
            let head = "kind: Service\n---\nkind: DaemonSet\nspec:\n  template:\n    metadata:\n      annotations: {a: b}\n    spec:\n";
            (head.to_owned(), "      ")
        };
        let body: String = pod.concat().lines().map(|line| format!("{indent}{line}\n")).collect();
        if is[11] { (head + &body).trim_end().to_owned() } else { head + &body + "---\nkind: Secret\n" }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(16)))]
    #[test]
    fn eject_restores_any_manifest(text in any_manifest(), service: bool, pass in prop::sample::select(&PassMode::ALL[..])) {
        let probing = Probing { trusts: true, ..Probing::default() };
        let service = service.then(|| "/etc/kubernetes/berth-cluster/kubeconfig".to_owned());
        let options = InjectOptions { probing, service, pass, ..options() };
        let once = inject(&text, &options).unwrap();
        prop_assert_eq!(&inject(&once.text, &options).unwrap().text, &once.text);
        prop_assert_eq!(parse_values(&eject_text(&once.text)), parse_values(&text));
        let comments = |text: &str| text.matches("# ").count() - text.matches("# berth: ").count();
        prop_assert_eq!(comments(&once.text), comments(&text));
        prop_assert_eq!(comments(&eject_text(&once.text)), comments(&text));
    }
}
