//! When the certificates expire that kube-apiserver uses, and others in the same directories.
//!
//! `kubeadm upgrade apply` renews them on its way, but not where it finds nothing to do, and after a `berth upgrade` it
//! finds nothing to do: without a renewal of their own all of them expire on the same day.

use super::super::checks::{CERTIFICATE_EXPIRED, CERTIFICATE_EXPIRES_SOON};
use super::super::{Case, Finding};
use super::clients::kubeconfigs;
use crate::manifest::Manifest;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use berth_cluster::yaml::{YamlNode, parse};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, Error, RootCertStore};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Flags that name what kube-apiserver shows of itself: the first certificate of the file is its own.
const OWN: [&str; 4] = ["tls-cert-file", "kubelet-client-certificate", "proxy-client-cert-file", "etcd-certfile"];

/// Flags that name CAs that it trusts: the file may hold a CA that expires together with its successor.
const TRUSTED: [&str; 4] =
    ["client-ca-file", "etcd-cafile", "requestheader-client-ca-file", "kubelet-certificate-authority"];

const DAY: u64 = 24 * 60 * 60;

/// Time left that is an error, and a warning; of a certificate with a short life at most a quarter of it, since whatever
/// issues such ones renews them in time.
const SHORT: u64 = 7 * DAY;
const SOON: u64 = 60 * DAY;

/// From when to when a certificate is valid, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    pub from: u64,
    pub until: u64,
}

/// The certificates of a node, by where they are; why one cannot be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Certificates {
    /// When they were read, in seconds since 1970.
    pub now: u64,
    pub all: BTreeMap<String, Result<Validity, String>>,
    /// Those of them that no flag of kube-apiserver names: they may be unused.
    pub beside: BTreeSet<String>,
}

impl Certificates {
    /// Those that the manifest names, those in the same directories, and clients' in the node's kubeconfigs.
    pub(super) fn gather(root: &Path, manifest: &Manifest) -> Self {
        let (mut all, mut beside) = (BTreeMap::new(), BTreeSet::new());
        let mut directories = Vec::new();
        let at = |path: &str| root.join(path.trim_start_matches('/'));
        for (flag, trusted) in OWN.map(|flag| (flag, false)).into_iter().chain(TRUSTED.map(|flag| (flag, true))) {
            let Some(path) = manifest.flag(flag).and_then(|flag| manifest.container().on_node(flag.value)) else {
                continue;
            };
            let Ok(pem) = fs::read(at(&path)) else { continue };
            let found = if trusted {
                let each =
                    CertificateDer::pem_slice_iter(&pem).filter_map(|certificate| validity(&certificate.ok()?).ok());
                each.max_by_key(|validity| validity.until).ok_or_else(none)
            } else {
                first(&pem)
            };
            directories.extend(Path::new(&path).parent().map(Path::to_owned));
            all.insert(path, found);
        }
        directories.sort();
        directories.dedup();
        // Whatever the flag: --tls-sni-cert-key names several in one.
        let words = manifest.arguments().into_iter().filter_map(YamlNode::text);
        let words = words.flat_map(|argument| argument.split(['=', ',', ':']));
        let named: BTreeSet<_> = words.filter_map(|word| manifest.container().on_node(word)).collect();
        for directory in directories {
            let entries = fs::read_dir(at(&directory.to_string_lossy())).into_iter().flatten().flatten();
            for entry in entries.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "crt")) {
                let path = directory.join(entry.file_name()).display().to_string();
                // A file that no flag names may be anything.
                let validity = fs::read(entry.path()).ok().and_then(|pem| first(&pem).ok());
                if let Some(validity) = validity {
                    if !named.contains(&path) {
                        beside.insert(path.clone());
                    }
                    all.entry(path).or_insert(Ok(validity));
                }
            }
        }
        for (name, text) in kubeconfigs(root) {
            if let Some(validity) = clients(&text).into_iter().min_by_key(|validity| validity.until) {
                all.insert(format!("/etc/kubernetes/{name}"), Ok(validity));
            }
        }
        Self { now: UnixTime::now().as_secs(), all, beside }
    }

    pub(super) fn examine(&self, case: &Case<'_>) -> Vec<Finding> {
        let fix = if case.manifest.is_kubeadm() {
            "kubeadm certs renew all, then `berth upgrade`, for a kube-apiserver that reads them; what kubeadm does not renew \
             (a CA, files of others) renew where it comes from"
        } else {
            "renew it where it comes from, then `berth upgrade`, for a kube-apiserver that reads it"
        };
        let mut found = Vec::new();
        for (path, validity) in &self.all {
            let Validity { from, until } = match validity {
                Ok(validity) => *validity,
                Err(why) => {
                    let fix = "put a certificate in PEM form there";
                    found.push(CERTIFICATE_EXPIRES_SOON.at(path.clone(), format!("it cannot be read: {why}"), fix));
                    continue;
                }
            };
            let left = until.saturating_sub(self.now);
            let quarter = until.saturating_sub(from) / 4;
            let beside = self.beside.contains(path);
            let check = match left {
                left if !beside && (left < SHORT.min(quarter) || left == 0) => CERTIFICATE_EXPIRED,
                left if left < SOON.min(quarter) || left == 0 => CERTIFICATE_EXPIRES_SOON,
                _ => continue,
            };
            let when = humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + Duration::from_secs(until));
            let cause = match left {
                0 => format!("the certificate expired at {when}"),
                left if left < DAY => format!("the certificate expires within a day, at {when}"),
                left => format!("the certificate expires in {} days, at {when}", left / DAY),
            };
            if beside {
                let cause = format!("{cause}; no argument of kube-apiserver names it");
                found.push(check.at(path.clone(), cause, format!("{fix}; if nothing uses it, remove it")));
            } else {
                found.push(check.at(path.clone(), cause, fix));
            }
        }
        found
    }
}

fn none() -> String {
    "there is no certificate in it".into()
}

/// The first certificate of a file.
fn first(pem: &[u8]) -> Result<Validity, String> {
    let certificate = CertificateDer::from_pem_slice(pem).map_err(|_| none())?;
    validity(&certificate)
}

/// Clients' certificates that are within a kubeconfig. One that it names as a file is the kubelet's, which renews it itself.
fn clients(text: &str) -> Vec<Validity> {
    let documents = parse(text).unwrap_or_default();
    let users = documents.iter().flat_map(|root| root.list("users"));
    let data = users.filter_map(|user| user.at(&["user", "client-certificate-data"])?.text());
    let decoded = data.filter_map(|data| STANDARD.decode(data.split_whitespace().collect::<String>()).ok());
    decoded.filter_map(|pem| first(&pem).ok()).collect()
}

/// From when to when a certificate is valid.
///
/// rustls shows neither, but its error for a certificate that it refuses does: before all else it compares the time. So it is asked at
/// the first and at the last second that there are, which saves another parser of certificates.
fn validity(certificate: &CertificateDer<'_>) -> Result<Validity, String> {
    let parsed = ParsedCertificate::try_from(certificate).map_err(|error| error.to_string())?;
    let ask = |second| {
        let time = UnixTime::since_unix_epoch(Duration::from_secs(second));
        verify_server_cert_signed_by_trust_anchor(&parsed, &RootCertStore::empty(), &[], time, &[])
    };
    let from = match ask(0) {
        Err(Error::InvalidCertificate(CertificateError::NotValidYetContext { not_before, .. })) => not_before.as_secs(),
        // It has been valid since 1970.
        _ => 0,
    };
    match ask(u64::MAX) {
        Err(Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) => {
            Ok(Validity { from, until: not_after.as_secs() })
        }
        Err(error) => Err(error.to_string()),
        Ok(()) => Err("it never ends".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, date_time_ymd};

    /// A certificate from 2020 on, in PEM form.
    fn pem(year: i32, month: u8, ca: bool) -> String {
        let mut params = CertificateParams::new(vec!["kubernetes".into()]).unwrap();
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(year, month, 1);
        params.is_ca = if ca { IsCa::Ca(BasicConstraints::Unconstrained) } else { IsCa::NoCa };
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem()
    }

    /// 2020-01-01.
    const FROM: u64 = 1_577_836_800;

    #[test]
    fn a_certificate_says_when_it_ends() {
        for ca in [false, true] {
            // 2021-03-01
            assert_eq!(first(pem(2021, 3, ca).as_bytes()), Ok(Validity { from: FROM, until: 1_614_556_800 }));
        }
        assert_eq!(first(b"none"), Err(none()));
        assert!(first(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").is_err());
    }

    #[test]
    fn what_the_manifest_names_and_what_is_beside_it_is_found() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let text = include_str!("../../../../../tests/manifest/kubeadm-v1.36.yaml");
        let sni = "    - --tls-sni-cert-key=/etc/kubernetes/pki/sni.crt,/etc/kubernetes/pki/sni.key:a.example\n";
        let text = text.replace("    - --secure-port=6443\n", &format!("    - --secure-port=6443\n{sni}"));
        let manifest = Manifest::parse(&text).unwrap();
        // A chain begins with the server's own; of CAs the last counts.
        write("etc/kubernetes/pki/apiserver.crt", &(pem(2021, 6, false) + &pem(2022, 6, true)));
        write("etc/kubernetes/pki/ca.crt", &(pem(2021, 6, true) + &pem(2031, 6, true)));
        write("etc/kubernetes/pki/beside.crt", &pem(2023, 6, false));
        write("etc/kubernetes/pki/sni.crt", &pem(2022, 6, false));
        write("etc/kubernetes/pki/etcd/ca.crt", "none");
        write("etc/kubernetes/pki/etcd/server.crt", &pem(2024, 6, false));
        write("etc/kubernetes/pki/apiserver.key", &pem(2021, 6, false));
        // Of several users the one that expires first counts.
        let user = |year| format!("- user: {{client-certificate-data: {}}}\n", STANDARD.encode(pem(year, 6, false)));
        write("etc/kubernetes/admin.conf", &format!("users:\n{}{}", user(2025), user(2026)));
        let found = Certificates::gather(root.path(), &manifest);
        let years: Vec<_> = found
            .all
            .iter()
            .map(|(path, validity)| {
                let year = validity.as_ref().map(|validity| 1970 + validity.until / (365 * DAY + DAY / 4));
                (path.strip_prefix("/etc/kubernetes/").unwrap(), year.ok())
            })
            .collect();
        assert_eq!(
            years,
            [
                ("admin.conf", Some(2025)),
                ("pki/apiserver.crt", Some(2021)),
                ("pki/beside.crt", Some(2023)),
                ("pki/ca.crt", Some(2031)),
                ("pki/etcd/ca.crt", None),
                ("pki/etcd/server.crt", Some(2024)),
                ("pki/sni.crt", Some(2022)),
            ]
        );
        let beside = ["beside.crt", "etcd/server.crt"].map(|name| format!("/etc/kubernetes/pki/{name}"));
        assert_eq!(found.beside, BTreeSet::from(beside));
        assert!(found.now > FROM);
    }
}
