//! Injections into manifests. Another reader can read the injected manifest, a second `inject`
//! changes nothing, and `eject` restores the values from before.
#![no_main]

use berth_cluster::yaml;
use berth_fuzz::yaml::{Read, read};
use berth_manifest::Manifest;
use berth_manifest::eject::undo_injection;
use berth_manifest::inject::{Addresses, InjectOptions, Probing, inject};
use berth_shim::config::PassMode;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// Keys of lists and mappings that Kubernetes treats alike if they are missing or empty. `eject`
/// removes the keys of empty lists and mappings.
const EMPTY: [&str; 8] = [
    "metadata",
    "annotations",
    "initContainers",
    "volumes",
    "env",
    "volumeMounts",
    "lifecycle",
    "ports",
];

fuzz_target!(|input: (u8, &str)| {
    let (choice, text) = input;
    let ca = "/pki/ca.crt".to_owned();
    let options = InjectOptions {
        image: "registry.example/berth:v1".into(),
        run_dir: "/run/berth".into(),
        addresses: Addresses::OfManifest,
        probing: Probing {
            variables: vec![("BERTH_PROBE_CA", ca.clone())],
            files: vec![ca],
            trusts: true,
            credentials: choice & 4 == 0,
        },
        service: (choice & 8 == 0).then(|| "/etc/kubernetes/berth-cluster/kubeconfig".into()),
        pass: if choice & 16 == 0 {
            PassMode::Relay
        } else {
            PassMode::Auto
        },
        added: vec![],
    };
    let Ok(injected) = inject(text, &options) else {
        return;
    };
    let values = |text: &str| {
        let documents =
            yaml::parse_documents(text).unwrap_or_else(|error| panic!("{error}, in\n{text}"));
        documents
            .iter()
            .map(|document| without_empty(document.value()))
            .collect::<Vec<_>>()
    };
    let new = &injected.text;
    let readable = |text| matches!(read(text), Read::Documents(_));
    assert!(
        !readable(text) || !matches!(read(new), Read::Refused),
        "another reader cannot read\n{new}\nmade from\n{text}"
    );
    let again = inject(new, &options)
        .unwrap_or_else(|why| panic!("a second inject fails: {why:?}, in\n{new}"));
    assert_eq!(again.text, *new, "a second inject changes the manifest");
    let manifest = Manifest::parse(new).expect("it was injected into");
    let ejected = undo_injection(&manifest)
        .unwrap_or_else(|why| panic!("{why}, in\n{new}"))
        .text;
    assert_eq!(
        values(&ejected),
        values(&injected.base),
        "{text}\nbecame\n{new}\nand\n{ejected}"
    );
});

fn without_empty(value: Value) -> Value {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    match value {
        Value::Array(items) => items.into_iter().map(without_empty).collect(),
        Value::Object(map) => {
            let inner = map
                .into_iter()
                .map(|(key, value)| (key, without_empty(value)));
            Value::Object(
                inner
                    .filter(|(key, value)| !(EMPTY.contains(&key.as_str()) && is_empty(value)))
                    .collect(),
            )
        }
        other => other,
    }
}
