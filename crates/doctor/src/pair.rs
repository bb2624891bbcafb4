//! Compares a manifest with the one that runs now and will be replaced. During an upgrade, both
//! kube-apiservers run behind one port: a client may write through one kube-apiserver and read
//! through the other, and may present to one kube-apiserver a token that the other has signed.

use super::checks::{ETCD_DIFFERS, KEYS_DIFFER, LISTEN_LOST, VERSION_SKEW};
use super::layout::Layout;
use super::node::{ENCRYPTION_FLAG, SIGNING_FLAG, list_addresses};
use super::options::is_covered;
use super::{Case, Check, Finding};
use berth_exec::args;
use berth_manifest::Manifest;
use std::collections::BTreeSet;

/// Largest difference between the minor versions of two kube-apiservers in a cluster, by
/// Kubernetes' version skew policy.
const MAX_SKEW: u64 = 1;

/// The prefix of kube-apiserver's keys in etcd, if `--etcd-prefix` is not given.
const DEFAULT_PREFIX: &str = "/registry";

/// The section of the documentation about changes that take two upgrades, for messages.
const KEY_CHANGE_PAGE: &str = "docs/upgrade.md, \"Changing keys\"";

/// The flag that names the public keys with which kube-apiserver verifies tokens.
const ACCEPTED_KEYS_FLAG: &str = "service-account-key-file";

pub(super) fn examine(case: &Case<'_>, running: &Manifest) -> Vec<Finding> {
    let mut pair = Pair {
        case,
        old: running,
        new: case.manifest,
        findings: Vec::new(),
    };
    pair.check_version();
    // Flags matter only if the old and the new kube-apiserver serve at the same time. If the
    // running one is not behind berth, it is restarted instead, so its flags are not compared.
    // Under a bridge, a copy of the old kube-apiserver serves meanwhile, but `inject` changes none
    // of the compared flags.
    if let Some(before) = Layout::from_manifest(running) {
        pair.check_listen(&before);
        pair.check_etcd();
        pair.check_keys();
    }
    pair.findings
}

struct Pair<'a> {
    case: &'a Case<'a>,
    old: &'a Manifest,
    new: &'a Manifest,
    findings: Vec<Finding>,
}

impl Pair<'_> {
    fn add_finding(
        &mut self,
        check: Check,
        line: usize,
        cause: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.findings
            .push(check.make_finding(self.case.format_place(line), cause, fix));
    }

    /// Returns the line of a flag in the new manifest. If the flag is missing, returns the line of
    /// the command.
    fn find_line(&self, flag: &str) -> usize {
        let command = || self.new.line_of(&self.new.apiserver_path().key("command"));
        self.new.flag(flag).map_or_else(command, |flag| flag.line)
    }

    fn check_version(&mut self) {
        let (Some(old), Some(new)) = (self.old.version(), self.new.version()) else {
            return;
        };
        if old.0 != new.0 || old.1.abs_diff(new.1) > MAX_SKEW {
            let line = self.new.line_of(&self.new.apiserver_path().key("image"));
            self.add_finding(
                VERSION_SKEW,
                line,
                format!(
                    "v{}.{} runs, and the new kube-apiserver is v{}.{}: kube-apiservers of a cluster may be at most one minor version apart, since they read each other's objects",
                    old.0, old.1, new.0, new.1
                ),
                "upgrade one minor version at a time",
            );
        }
    }

    fn check_listen(&mut self, before: &Layout<'_>) {
        let Some(now) = Layout::from_manifest(self.new).filter(|now| now.serving_berth().is_some())
        else {
            return;
        };
        let new = list_addresses(&now);
        let lost = list_addresses(before)
            .into_iter()
            .map(|listen| listen.addr)
            .filter(|addr| !is_covered(*addr, &new));
        let lost: Vec<_> = lost.map(|addr| addr.to_string()).collect();
        if !lost.is_empty() {
            let line = now
                .serving_berth()
                .map_or(1, |shim| shim.container.node().line);
            self.add_finding(
                LISTEN_LOST,
                line,
                format!("the running shim also listens on {}, and the new shim would not: clients of that address would be refused", lost.join(", ")),
                "to keep the addresses, run `berth inject` without --listen on the running manifest (with --kubeadm-patch also for kubeadm's patches); to give up an address, add --ignore-errors listen-lost",
            );
        }
    }

    fn check_etcd(&mut self) {
        let servers = |manifest: &Manifest| -> BTreeSet<String> {
            let values = manifest
                .flags("etcd-servers")
                .into_iter()
                .flat_map(|flag| flag.value.split(','));
            values
                .map(|url| url.trim().trim_end_matches('/').to_owned())
                .filter(|url| !url.is_empty())
                .collect()
        };
        let (old, new) = (servers(self.old), servers(self.new));
        let list = |urls: &BTreeSet<String>| urls.iter().cloned().collect::<Vec<_>>().join(", ");
        if old.is_disjoint(&new) && old != new {
            self.add_finding(
                ETCD_DIFFERS,
                self.find_line("etcd-servers"),
                format!(
                    "the running kube-apiserver keeps its objects at {}, the new kube-apiserver at {}: if these URLs are of two etcd clusters, one port would serve two sets of objects",
                    list(&old),
                    list(&new)
                ),
                "if all URLs are of one etcd cluster, upgrade once with the old and new URLs in --etcd-servers, then with the new URLs alone; two etcd clusters cannot be behind one port",
            );
        }
        let prefix = |manifest: &Manifest| {
            let given = manifest
                .flag("etcd-prefix")
                .map_or(DEFAULT_PREFIX, |flag| flag.value)
                .trim_matches('/')
                .to_owned();
            format!("/{given}")
        };
        let overrides = |manifest: &Manifest| {
            let values = manifest
                .flags("etcd-servers-overrides")
                .into_iter()
                .flat_map(|flag| flag.value.split(','));
            values.map(ToOwned::to_owned).collect::<BTreeSet<_>>()
        };
        let (old, new) = (prefix(self.old), prefix(self.new));
        if old != new {
            self.add_finding(
                ETCD_DIFFERS,
                self.find_line("etcd-prefix"),
                format!(
                    "the running kube-apiserver keeps its objects below {old} in etcd, the new kube-apiserver below {new}: one port would serve two sets of objects"
                ),
                format!("keep --etcd-prefix={old}"),
            );
        }
        if overrides(self.old) != overrides(self.new) {
            self.add_finding(
                ETCD_DIFFERS,
                self.find_line("etcd-servers-overrides"),
                "--etcd-servers-overrides differs: some resources would be in two etcd clusters behind one port",
                "keep the flag's value in an upgrade; resources can move to another etcd only while no kube-apiserver runs",
            );
        }
    }

    fn check_keys(&mut self) {
        let two = |what: &str| {
            format!(
                "in two upgrades ({KEY_CHANGE_PAGE}): {what}; if the key is the same, there is nothing to do"
            )
        };
        let value =
            |manifest: &Manifest, flag: &str| manifest.flag(flag).map(|flag| flag.value.to_owned());
        for (flag, cause, fix) in [
            (
                ENCRYPTION_FLAG,
                "if the first key differs, the running kube-apiserver cannot read objects that the new kube-apiserver writes",
                "first give both instances both keys, then put the new key first",
            ),
            (
                SIGNING_FLAG,
                "if the key differs, the running kube-apiserver refuses tokens that the new kube-apiserver signs",
                "first add the new public key as a further --service-account-key-file, then sign with the new key",
            ),
        ] {
            if value(self.old, flag) != value(self.new, flag) {
                self.add_finding(
                    KEYS_DIFFER,
                    self.find_line(flag),
                    format!("--{flag} differs: {cause}"),
                    two(fix),
                );
            } else if let Some(path) = self.find_changed_file(flag) {
                let cause = format!(
                    "{path} is newer than the running kube-apiserver, which may not have read the file: {cause}"
                );
                self.add_finding(KEYS_DIFFER, self.find_line(flag), cause, two(fix));
            }
        }
        let all = |manifest: &Manifest, flag: &str| -> Vec<String> {
            manifest
                .flags(flag)
                .into_iter()
                .map(|flag| flag.value.to_owned())
                .collect()
        };
        let (old, new) = (
            all(self.old, ACCEPTED_KEYS_FLAG),
            all(self.new, ACCEPTED_KEYS_FLAG),
        );
        let gone: Vec<_> = old
            .iter()
            .filter(|file| !new.contains(file))
            .cloned()
            .collect();
        if !gone.is_empty() {
            self.add_finding(
                KEYS_DIFFER,
                self.find_line(ACCEPTED_KEYS_FLAG),
                format!(
                    "--{} {} is gone: the new kube-apiserver refuses tokens that the running kube-apiserver signed",
                    ACCEPTED_KEYS_FLAG,
                    gone.join(", ")
                ),
                two("keep the file in the first, and remove the file in the second, after all tokens of that key have expired"),
            );
        }
        // kube-apiserver puts the first issuer into the tokens that it issues, and accepts tokens
        // of all listed issuers.
        let issuer = "service-account-issuer";
        let (old, new) = (all(self.old, issuer), all(self.new, issuer));
        let refused =
            |by: &[String], of: &[String]| of.first().is_some_and(|first| !by.contains(first));
        if refused(&old, &new) || refused(&new, &old) {
            self.add_finding(
                KEYS_DIFFER,
                self.find_line(issuer),
                format!(
                    "--{issuer} is {} in the running kube-apiserver and {} in the new kube-apiserver: one of the two refuses tokens that the other issues",
                    old.join(", "),
                    new.join(", ")
                ),
                format!(
                    "in two upgrades ({KEY_CHANGE_PAGE}): first add the new issuer after the present issuer, then put the new issuer first"
                ),
            );
        }
    }

    /// Returns the file that a flag names, if the file was changed after the running kube-apiserver
    /// started.
    fn find_changed_file(&self, flag: &str) -> Option<&str> {
        let changed = self
            .case
            .node
            .map(|facts| &facts.newer_keys[..])
            .unwrap_or_default();
        let reload = self.old.flag("encryption-provider-config-automatic-reload");
        // If the flag has no value, it is true. The manifest's parser then records the next
        // argument as its value.
        let reloads = reload.is_some_and(|flag| args::parse_bool(flag.value) != Some(false));
        let found = changed.iter().find(|(of, _)| *of == flag)?;
        (flag != ENCRYPTION_FLAG || !reloads).then_some(found.1.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::super::node::Facts;
    use super::super::tests::{KUBEADM, replace_in, static_pod};

    /// Returns the findings for a manifest that replaces another one.
    fn findings(old: &str, new: &str, facts: &Facts) -> Vec<(&'static str, Severity)> {
        let running = super::Manifest::parse(old).unwrap();
        let manifest = super::Manifest::parse(new).unwrap();
        let case = super::Case {
            node: Some(facts),
            ..super::Case::new("a.yaml", &manifest)
        };
        let found = super::examine(&case, &running);
        found
            .into_iter()
            .map(|finding| (finding.id, finding.severity))
            .collect()
    }

    fn compare_pods(old: &[(&str, &str)], new: &[(&str, &str)]) -> Vec<(&'static str, Severity)> {
        let pod = static_pod();
        findings(
            &replace_in(&pod, old),
            &replace_in(&pod, new),
            &Facts::default(),
        )
    }

    const ETCD: &str = "--etcd-servers=https://127.0.0.1:2379";
    const ISSUER: &str = "--service-account-issuer=https://kubernetes.default.svc.cluster.local";
    const SIGNING: &str = "--service-account-signing-key-file=/etc/kubernetes/pki/sa.key";
    const ACCEPTED: &str = "--service-account-key-file=/etc/kubernetes/pki/sa.pub";

    type Changes<'a> = &'a [(&'a str, &'a str)];

    /// Changes the static pod in two ways, as the old and the new manifest. Asserts that the
    /// finding is there, or for `false` that there is no finding.
    fn assert_found(found: (&'static str, Severity), pairs: &[(Changes<'_>, Changes<'_>, bool)]) {
        for (old, new, is_found) in pairs {
            assert_eq!(
                compare_pods(old, new).first(),
                is_found.then_some(&found),
                "{old:?} {new:?}"
            );
        }
    }

    #[test]
    fn two_stores_behind_one_port_are_an_error() {
        let both = "--etcd-servers=https://127.0.0.1:2379,https://10.0.0.5:2379";
        let other = "--etcd-servers=https://10.0.0.5:2379/";
        let prefix = |prefix: &str| format!("{ETCD}\n    - --etcd-prefix={prefix}");
        let events =
            format!("{ETCD}\n    - --etcd-servers-overrides=/events#https://10.0.0.5:2379");
        assert_found(
            ("etcd-differs", Severity::Error),
            &[
                (&[], &[], false),
                (&[], &[(ETCD, other)], true),
                // An operator can replace the etcd server by two upgrades: the first one names both
                // URLs, the second one only the new URL.
                (&[], &[(ETCD, both)], false),
                (&[(ETCD, both)], &[(ETCD, other)], false),
                (&[], &[(ETCD, &prefix("/other"))], true),
                (&[], &[(ETCD, &prefix("registry/"))], false),
                (&[], &[(ETCD, &events)], true),
            ],
        );
    }

    #[test]
    fn more_than_one_minor_version_is_an_error_either_way() {
        let image = "registry.k8s.io/kube-apiserver:v1.36.3";
        for (old, new, is_found) in [
            ("r/kube-apiserver:v1.34.9", image, true),
            (image, "r/kube-apiserver:v1.34.9@sha256:00", true),
            ("r:5000/kube-apiserver:v1.35.0", image, false),
            (image, "r/kube-apiserver:v1.35.0", false),
            // An image without a tag has no version to compare.
            ("r:5000/kube-apiserver", image, false),
        ] {
            assert_found(
                ("version-skew", Severity::Error),
                &[(&[(image, old)], &[(image, new)], is_found)],
            );
        }
    }

    #[test]
    fn an_address_of_the_running_shim_must_stay() {
        let pod = static_pod();
        let more = pod.replace(
            "value: 10.0.0.5:6443",
            "value: 10.0.0.5:6443 127.0.0.1:6443",
        );
        assert_eq!(
            findings(&more, &pod, &Facts::default()),
            [("listen-lost", Severity::Error)]
        );
        assert_eq!(findings(&pod, &more, &Facts::default()), []);
        let free = more.replace("127.0.0.1:6443", "127.0.0.1:6443,freebind");
        assert_eq!(findings(&more, &free, &Facts::default()), []);
    }

    #[test]
    fn a_key_that_one_instance_lacks_is_warned_of() {
        let config = format!("{ETCD}\n    - --encryption-provider-config=/etc/kubernetes/pki/a");
        let added =
            format!("{ACCEPTED}\n    - --service-account-key-file=/etc/kubernetes/pki/b.pub");
        let new = "--service-account-issuer=https://new";
        let before = format!("{new}\n    - {ISSUER}");
        let behind = format!("{ISSUER}\n    - {new}");
        assert_found(
            ("keys-differ", Severity::Warning),
            &[
                (&[], &[(ETCD, &config)], true),
                (
                    &[],
                    &[(
                        SIGNING,
                        "--service-account-signing-key-file=/etc/kubernetes/pki/b.key",
                    )],
                    true,
                ),
                (&[], &[(ACCEPTED, &added)], false),
                (&[(ACCEPTED, &added)], &[], true),
                (&[], &[(ISSUER, new)], true),
                (&[], &[(ISSUER, &before)], true),
                (&[], &[(ISSUER, &behind)], false),
                (&[(ISSUER, &behind)], &[(ISSUER, &before)], false),
            ],
        );
    }

    #[test]
    fn a_key_file_newer_than_the_running_instance_is_warned_of() {
        let config = format!("{ETCD}\n    - --encryption-provider-config=/etc/kubernetes/pki/a");
        let pod = replace_in(&static_pod(), &[(ETCD, &config)]);
        let newer = |flag| Facts {
            newer_keys: vec![(flag, "/etc/kubernetes/pki/a".into())],
            ..Facts::default()
        };
        assert_eq!(
            findings(&pod, &pod, &newer(super::ENCRYPTION_FLAG)),
            [("keys-differ", Severity::Warning)]
        );
        let reload = |value| {
            let reload =
                format!("--encryption-provider-config-automatic-reload{value}\n    - {ETCD}");
            let reloads = replace_in(&pod, &[(ETCD, &reload)]);
            findings(&reloads, &reloads, &newer(super::ENCRYPTION_FLAG))
        };
        for on in ["=true", "=1", ""] {
            assert_eq!(reload(on), [], "{on}");
        }
        assert_eq!(reload("=F"), [("keys-differ", Severity::Warning)]);
        assert_eq!(
            findings(&pod, &pod, &newer(super::SIGNING_FLAG)),
            [("keys-differ", Severity::Warning)]
        );
    }

    #[test]
    fn only_the_version_counts_if_the_running_instance_is_not_behind_berth() {
        let plain = KUBEADM.replace(ETCD, "--etcd-servers=https://10.0.0.5:2379");
        assert_eq!(findings(&plain, &static_pod(), &Facts::default()), []);
        let old = plain.replace("v1.36.3", "v1.34.0");
        assert_eq!(
            findings(&old, &static_pod(), &Facts::default()),
            [("version-skew", Severity::Error)]
        );
    }
}
