//! Checks whether the shim's probe can trust the certificate that kube-apiserver serves. Both are
//! read from files of the node.

use super::super::checks::SERVING_CERTIFICATE;
use super::super::layout::Layout;
use super::super::{Finding, options};
use berth_cluster::tls::{self, Trust, parse_certificates};
use berth_manifest::{Container, Manifest};
use berth_options::check::{Checks, READY_PATH, check_probe};
use berth_os::file::read_small;
use berth_shim::backend::probe::ProbeKind;
use rustls::CertificateError::{
    Expired, ExpiredContext, NotValidForNameContext, NotValidYetContext,
};
use rustls::Error::{InvalidCertificate, PeerIncompatible};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use std::path::Path;

/// Finds why the probe of a manifest's shim would never trust kube-apiserver, and the options that
/// help. The node's files are below `root`. Returns `None` if the probe trusts it, or if the
/// certificate cannot be read on the node.
pub(crate) fn find_untrusted_certificate(root: &Path, manifest: &Manifest) -> Option<Finding> {
    let layout = Layout::from_manifest(manifest)?;
    let serving = layout.serving_berth()?;
    let args =
        options::probe_args(&serving.parsed).filter(|args| args.probe == ProbeKind::Https)?;
    let probe = check_probe(args, READY_PATH, true, &mut Checks::default())?;
    let (name, now) = (probe.server_name.clone(), UnixTime::now());
    let at = |container: Container<'_>, file: &str| {
        Some(root.join(container.path_on_node(file)?.trim_start_matches('/')))
    };
    let shown = |file: &str| {
        Some(parse_certificates(
            &read_small(&at(manifest.container(), file)?).ok()?,
        ))
    };
    let trust_itself =
        |chain: &[CertificateDer<'static>]| Trust::new(chain.to_vec()).verify(chain, &name, now);
    // Only a client that dials a host name sends the name (SNI), so an SNI certificate needs a
    // name.
    let pairs = manifest
        .flags("tls-sni-cert-key")
        .into_iter()
        .flat_map(|flag| flag.value.split([';', ' ']));
    let mut pairs = pairs
        .filter_map(|pair| pair.split_once(','))
        .filter(|_| matches!(name, ServerName::DnsName(_)));
    let by_name = pairs.find(|(file, rest)| match rest.split_once(':') {
        Some((_, names)) => names.split(',').any(|known| known == name.to_str()),
        None => shown(file).is_some_and(|chain| trust_itself(&chain).is_ok()),
    });
    let file = by_name
        .map(|(file, _)| file)
        .or_else(|| manifest.flag("tls-cert-file").map(|flag| flag.value))?;
    let (chain, place) = (shown(file)?, manifest.container().path_on_node(file)?);
    let probe = probe.with_files(|file| {
        file.to_str()
            .and_then(|file| at(serving.container, file))
            .unwrap_or_default()
    });
    if let Err(why) = probe.check() {
        let cause = format!("the shim does not start: {why}");
        return Some(SERVING_CERTIFICATE.make_finding(
            place,
            cause,
            "give the shim's probe other files",
        ));
    }
    // A TLS message has a length for each certificate, and rustls reads at most 64 KiB of
    // certificates.
    let length = chain
        .iter()
        .map(|certificate| certificate.len() + 5)
        .sum::<usize>()
        + 4;
    if length > 0xffff {
        let cause = format!(
            "the file has {length} bytes of certificates, and the shim's probe reads 64 KiB at most"
        );
        return Some(SERVING_CERTIFICATE.make_finding(
            place,
            cause,
            "keep only the certificate and its issuers in the file",
        ));
    }
    let error = Trust::from_pem(&read_small(&probe.ca?).ok()?)
        .ok()?
        .verify(&chain, &name, now)
        .err()?;
    let fix = match (&error, trust_itself(&chain)) {
        (InvalidCertificate(NotValidForNameContext { .. }), _) => {
            "berth inject --probe-server-name NAME with a name of the certificate, in addition to the present options of berth inject"
                .into()
        }
        (_, Ok(())) => format!("berth inject --probe-ca {file}, in addition to the present options of berth inject"),
        (_, Err(error @ InvalidCertificate(NotValidForNameContext { .. }))) => {
            format!(
                "berth inject --probe-ca {file} --probe-server-name NAME, in addition to the present options of berth inject: {error}"
            )
        }
        (
            _,
            Err(InvalidCertificate(Expired | ExpiredContext { .. } | NotValidYetContext { .. })),
        ) => "renew the certificate (kubeadm certs renew apiserver; kube-apiserver reads a renewed certificate without a restart), or set the clock of the node".into(),
        (PeerIncompatible(_), _) => {
            "issue a certificate with one of these keys, or berth inject --probe-insecure".into()
        }
        _ => "issue another certificate, or berth inject --probe-insecure".into(),
    };
    let cause = format!(
        "the shim's probe refuses this certificate, so the shim would never serve a client (--probe-ca {}, --probe-server-name {}): {}",
        args.probe_ca.as_deref().unwrap_or(Path::new("")).display(),
        args.probe_server_name,
        tls::describe_error(&error)
    );
    Some(SERVING_CERTIFICATE.make_finding(place, cause, fix))
}
