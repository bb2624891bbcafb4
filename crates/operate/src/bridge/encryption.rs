//! The keys with which a kube-apiserver encrypts what it stores: what was written with one is unreadable without it.

use crate::manifest::Manifest;
use berth_cluster::yaml::{self, YamlNode};
use std::collections::BTreeSet;
use std::path::PathBuf;

const FLAG: &str = "encryption-provider-config";

/// Writes plain text, and has no key.
const IDENTITY: &str = "identity";

/// The encryption configuration that a manifest names, on the node.
pub fn named(manifest: &str) -> Option<PathBuf> {
    let manifest = Manifest::parse(manifest).ok()?;
    let path = manifest.flag(FLAG)?.value;
    manifest.container().on_node(path).map(PathBuf::from)
}

/// A way to read a resource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Such as `secrets`, `jobs.batch` or `*.*`.
    resource: String,
    provider: String,
    /// The key's; of a KMS plugin its own.
    name: String,
    /// Never shown.
    secret: String,
}

impl Key {
    fn reads(&self, other: &Self) -> bool {
        (&self.provider, &self.name, &self.secret) == (&other.provider, &other.name, &other.secret)
            && covers(&self.resource, &other.resource)
    }
}

/// The keys that the first configuration has and the second one lacks, for people. A configuration that cannot be read has none:
/// kube-apiserver does not start with it.
pub fn missing(has: &str, then: &str) -> Vec<String> {
    let then = keys(then);
    let is_covered = |key: &Key| {
        // What no entry covers is written and read as plain text.
        let is_plain = key.provider == IDENTITY && !then.iter().any(|other| covers(&other.resource, &key.resource));
        is_plain || then.iter().any(|other| other.reads(key))
    };
    let mut missing: Vec<_> = keys(has).iter().filter(|key| !is_covered(key)).map(describe).collect();
    missing.dedup();
    missing
}

fn describe(key: &Key) -> String {
    match key.provider.as_str() {
        IDENTITY => format!("{IDENTITY} (for {})", key.resource),
        provider => format!("{provider} {} (for {})", key.name, key.resource),
    }
}

/// Whether an entry for one resource counts for another.
fn covers(entry: &str, resource: &str) -> bool {
    match entry {
        "*.*" => true,
        // Of the core group, whose resources have no dot.
        "*." => !resource.contains('.') || resource == "*.",
        entry => entry == resource || entry.strip_prefix('*').is_some_and(|group| resource.ends_with(group)),
    }
}

/// Whether the keys of a configuration can be seen. An empty one has none.
pub fn is_readable(text: &str) -> bool {
    yaml::parse(text).is_ok()
}

fn keys(text: &str) -> BTreeSet<Key> {
    let documents = yaml::parse(text).unwrap_or_default();
    documents.iter().flat_map(|document| document.list("resources")).flat_map(of_entry).collect()
}

fn of_entry(entry: &YamlNode) -> Vec<Key> {
    let resources: Vec<_> = entry.list("resources").iter().filter_map(YamlNode::text).collect();
    let providers = entry.list("providers").iter().flat_map(YamlNode::entries);
    let named = providers.flat_map(|(kind, provider)| {
        let kind = kind.text().unwrap_or_default();
        let text = |node: &YamlNode, field| node.text_of(field).unwrap_or_default().to_owned();
        match kind {
            IDENTITY => vec![(kind, String::new(), String::new())],
            // The plugin has the keys. A plugin at another socket is another plugin.
            "kms" => vec![(kind, text(provider, "name"), text(provider, "endpoint"))],
            _ => provider.list("keys").iter().map(|key| (kind, text(key, "name"), text(key, "secret"))).collect(),
        }
    });
    let named: Vec<_> = named.collect();
    let key = |resource: &&str| {
        let resource = (*resource).to_owned();
        named.iter().map(move |(provider, name, secret)| Key {
            resource: resource.clone(),
            provider: (*provider).to_owned(),
            name: name.clone(),
            secret: secret.clone(),
        })
    };
    resources.iter().flat_map(key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(resources: &str, providers: &[&str]) -> String {
        let providers: String = providers.iter().map(|provider| format!("  - {provider}\n")).collect();
        format!("kind: EncryptionConfiguration\nresources:\n- resources: [{resources}]\n  providers:\n{providers}")
    }

    fn key(kind: &str, name: &str, secret: &str) -> String {
        format!("{kind}: {{keys: [{{name: {name}, secret: {secret}}}]}}")
    }

    #[test]
    fn a_key_that_only_the_new_one_has_is_named_and_its_secret_is_not() {
        let (one, two) = (key("aescbc", "key1", "b25l"), key("aescbc", "key2", "dHdv"));
        let before = config("secrets", &[&one, "identity: {}"]);
        let added = config("secrets", &[&two, &one, "identity: {}"]);
        assert_eq!(missing(&added, &before), ["aescbc key2 (for secrets)"]);
        assert_eq!(missing(&before, &added), Vec::<String>::new());
        assert_eq!(missing(&before, &before), Vec::<String>::new());
        // Nothing is encrypted without a configuration.
        assert_eq!(missing(&before, ""), ["aescbc key1 (for secrets)"]);
        assert_eq!(missing("", &before), Vec::<String>::new());
        assert_eq!(missing("a: [", &before), Vec::<String>::new());
        // Another secret, provider or resource by the same name.
        for other in [key("aescbc", "key1", "dHdv"), key("secretbox", "key1", "b25l")] {
            assert_eq!(missing(&config("secrets", &[&other]), &before).len(), 1, "{other}");
        }
        let more = config("secrets, configmaps", &[&one, "identity: {}"]);
        assert_eq!(missing(&more, &before), ["aescbc key1 (for configmaps)"]);
        // What was written in plain text.
        let strict = config("secrets", &[&one]);
        assert_eq!(missing(&before, &strict), ["identity (for secrets)"]);
        let kms = |socket: &str| config("secrets", &[&format!("kms: {{name: a, endpoint: unix:///{socket}}}")]);
        assert_eq!(missing(&kms("b"), &kms("a")), ["kms a (for secrets)"]);
    }

    #[test]
    fn a_wildcard_counts_for_what_it_matches() {
        for (entry, resource, is_covered) in [
            ("*.*", "secrets", true),
            ("*.*", "jobs.batch", true),
            ("*.", "secrets", true),
            ("*.", "jobs.batch", false),
            ("*.batch", "jobs.batch", true),
            ("*.batch", "secrets", false),
            ("jobs.batch", "*.batch", false),
            ("secrets", "*.*", false),
        ] {
            assert_eq!(covers(entry, resource), is_covered, "{entry} {resource}");
        }
    }

    #[test]
    fn what_is_no_configuration_is_not_taken_for_one_without_keys() {
        assert!(is_readable("") && is_readable(&config("secrets", &["identity: {}"])));
        assert!(!is_readable("resources: ["));
    }

    #[test]
    fn the_file_is_found_where_it_is_on_the_node() {
        let manifest = "apiVersion: v1\nkind: Pod\nmetadata: {name: kube-apiserver}\nspec:\n  containers:\n  - name: kube-apiserver\n    \
                        command: [kube-apiserver, --encryption-provider-config=/etc/enc/config.yaml]\n    \
                        volumeMounts: [{name: enc, mountPath: /etc/enc}]\n  \
                        volumes: [{name: enc, hostPath: {path: /etc/kubernetes/enc}}]\n";
        assert_eq!(named(manifest), Some("/etc/kubernetes/enc/config.yaml".into()));
        assert_eq!(named(&manifest.replace("--encryption", "--no-encryption")), None);
        assert_eq!(named("a: ["), None);
    }
}
