//! Throw-away certificates of one rehearsal: an authority, and a serving certificate for both
//! stand-ins. Nobody outside trusts them, and their folder goes with the rehearsal.

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};
use rustls::pki_types::CertificateDer;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Names that a kube-apiserver's serving certificate carries.
const NAMES: [&str; 5] =
    ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"];

/// Where the certificates are, and the authority for this process's own clients.
#[derive(Debug)]
pub struct Certs {
    /// PEM file with the authority.
    pub ca_file: PathBuf,
    /// PEM file with the serving certificate.
    pub cert_file: PathBuf,
    /// PEM file with its key, readable by the owner alone.
    pub key_file: PathBuf,
    /// The authority.
    pub ca: CertificateDer<'static>,
}

/// Why there are no certificates.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// They could not be made.
    #[error("cannot make certificates: {0}")]
    Make(#[from] rcgen::Error),
    /// They could not be written.
    #[error("cannot write {0}: {1}")]
    Write(PathBuf, io::Error),
}

/// Makes them in `dir`, for the usual names, 127.0.0.1 and `ips`.
pub fn make(dir: &Path, ips: &[IpAddr]) -> Result<Certs, Error> {
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    ca.distinguished_name.push(DnType::CommonName, "berth rehearsal");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca = rcgen::CertifiedIssuer::self_signed(ca, ca_key)?;

    let mut names: Vec<String> = NAMES.map(str::to_owned).to_vec();
    names.push("127.0.0.1".into());
    names.extend(ips.iter().map(ToString::to_string));
    let mut serving = CertificateParams::new(names)?;
    serving.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    serving.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    serving.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let cert = serving.signed_by(&key, &ca)?;

    let certs = Certs {
        ca_file: dir.join("ca.crt"),
        cert_file: dir.join("apiserver.crt"),
        key_file: dir.join("apiserver.key"),
        ca: ca.der().clone(),
    };
    write(&certs.ca_file, &ca.pem())?;
    write(&certs.cert_file, &cert.pem())?;
    write(&certs.key_file, &key.serialize_pem())?;
    Ok(certs)
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    use io::Write;
    let open = || fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    open().and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| Error::Write(path.to_owned(), error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_key_is_for_the_owner_and_nothing_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let certs = make(dir.path(), &["127.3.4.5".parse().unwrap()]).unwrap();
        assert_eq!(fs::metadata(&certs.key_file).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(make(dir.path(), &[]), Err(Error::Write(..))));
    }
}
