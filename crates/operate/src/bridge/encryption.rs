//! The keys with which a kube-apiserver encrypts what it stores: what was written with one is unreadable without it.

use berth_cluster::yaml::{self, YamlNode};
use berth_manifest::Manifest;
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

/// An entry of a configuration: its resources, such as `secrets`, `jobs.batch` or `*.*`, and what reads and writes them.
#[derive(Debug)]
struct Entry {
    resources: Vec<String>,
    keys: Vec<Key>,
}

/// A way to read a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    provider: String,
    /// The key's; of a KMS plugin its own.
    name: String,
    /// Never shown.
    secret: String,
}

/// The keys that the first configuration has and the second one lacks, for people. A configuration that cannot be read has none:
/// kube-apiserver does not start with it.
pub fn missing(has: &str, then: &str) -> Vec<String> {
    let (has, then) = (entries(has), entries(then));
    // A wildcard stands for all that no other entry names.
    let resources: BTreeSet<_> = has.iter().chain(&then).flat_map(|entry| &entry.resources).collect();
    let missing = resources.into_iter().flat_map(|resource| {
        let then = keys_of(&then, resource);
        let keys = keys_of(&has, resource).into_iter();
        keys.filter(move |key| !then.contains(key)).map(move |key| key.describe(resource))
    });
    missing.collect()
}

/// As kube-apiserver finds them: those of all entries with the first name that covers a resource. What no entry covers is written and read
/// as plain text.
fn keys_of(entries: &[Entry], resource: &str) -> Vec<Key> {
    let mut names = entries.iter().flat_map(|entry| &entry.resources);
    let Some(name) = names.find(|name| covers(name, resource)) else { return vec![Key::plain()] };
    let named = entries.iter().filter(|entry| entry.resources.contains(name));
    named.flat_map(|entry| entry.keys.clone()).collect()
}

impl Key {
    fn plain() -> Self {
        Self { provider: IDENTITY.to_owned(), name: String::new(), secret: String::new() }
    }

    fn describe(&self, resource: &str) -> String {
        match self.provider.as_str() {
            IDENTITY => format!("{IDENTITY} (for {resource})"),
            provider => format!("{provider} {} (for {resource})", self.name),
        }
    }
}

/// Whether an entry for one resource counts for another. Those of the core group have no dot.
fn covers(entry: &str, resource: &str) -> bool {
    entry == "*.*" || entry == resource || entry.starts_with("*.") && group(entry) == group(resource)
}

fn group(resource: &str) -> &str {
    resource.split_once('.').map_or("", |(_, group)| group)
}

/// Whether the keys of a configuration can be seen. An empty one has none.
pub fn is_readable(text: &str) -> bool {
    yaml::parse(text).is_ok()
}

fn entries(text: &str) -> Vec<Entry> {
    let documents = yaml::parse(text).unwrap_or_default();
    let entry = |entry: &YamlNode| {
        let resources = entry.list("resources").iter().filter_map(YamlNode::text).map(str::to_owned).collect();
        let providers = entry.list("providers").iter().flat_map(YamlNode::entries);
        Entry { resources, keys: providers.flat_map(|(kind, provider)| keys(kind, provider)).collect() }
    };
    documents.iter().flat_map(|document| document.list("resources")).map(entry).collect()
}

fn keys(kind: &YamlNode, provider: &YamlNode) -> Vec<Key> {
    let text = |node: &YamlNode, field| node.text_of(field).unwrap_or_default().to_owned();
    let key = |provider: &str, name, secret| Key { provider: provider.to_owned(), name, secret };
    match kind.text().unwrap_or_default() {
        IDENTITY => vec![Key::plain()],
        // The plugin has the keys. A plugin at another socket is another plugin, and what is stored tells v1 from v2.
        "kms" => {
            let kind = if provider.text_of("apiVersion") == Some("v2") { "kms v2" } else { "kms" };
            vec![key(kind, text(provider, "name"), text(provider, "endpoint"))]
        }
        kind => provider.list("keys").iter().map(|it| key(kind, text(it, "name"), text(it, "secret"))).collect(),
    }
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
        let second = kms("a").replace("name: a", "apiVersion: v2, name: a");
        assert_eq!(missing(&second, &kms("a")), ["kms v2 a (for secrets)"]);
        assert_eq!(missing(&second, &second), Vec::<String>::new());
    }

    #[test]
    fn the_first_entry_that_covers_a_resource_counts() {
        let (one, two) = (key("aescbc", "key1", "b25l"), key("aescbc", "key2", "dHdv"));
        let entry = |resources: &str, key: &str| config(resources, &[key]).split_once('\n').unwrap().1.to_owned();
        let joined = |first: &str, second: &str| format!("{first}{}", second.split_once('\n').unwrap().1);
        let all = entry("'*.*'", &two);
        let both = joined(&entry("secrets", &one), &all);
        assert_eq!(missing(&all, &both), ["aescbc key2 (for secrets)"]);
        assert_eq!(missing(&both, &both), Vec::<String>::new());
        assert_eq!(missing(&both, &all), ["aescbc key1 (for secrets)"]);
        // Two entries of one name are one.
        let joined_keys = joined(&entry("secrets", &one), &entry("secrets", &two));
        assert_eq!(missing(&joined_keys, &joined_keys), Vec::<String>::new());
        assert_eq!(missing(&entry("secrets", &two), &joined_keys), Vec::<String>::new());
        assert_eq!(
            missing(&all, &entry("configmaps", &one)),
            ["aescbc key2 (for *.*)", "aescbc key2 (for configmaps)"]
        );
        // Written as plain text since.
        assert_eq!(missing(&entry("secrets", &one), &both), ["identity (for *.*)"]);
        assert_eq!(missing("", &entry("secrets", &one)), ["identity (for secrets)"]);
        // The second entry is never asked for secrets.
        assert_eq!(missing(&joined(&all, &entry("secrets", &one)), &all), Vec::<String>::new());
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
            ("*.k8s.io", "leases.coordination.k8s.io", false),
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
