//! Throw-away certificates of a rehearsal: a CA, a serving certificate for each instance, client
//! certificates (one of them for the shims' probe), and the keys of service accounts. Nothing
//! outside trusts the CA. The directory is removed with the rehearsal.
//!
//! berth does not open TLS. So the certificate that a client sees tells which instance answers,
//! simulated or real: see `Names`.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, io};

/// DNS names in a kube-apiserver's serving certificate.
const DNS_NAMES: [&str; 5] = [
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
    "localhost",
];

/// Names of two users with certificates: the admin, and the shims' probe. The probe is in no group.
pub(crate) const ADMIN: &str = "admin";
pub(crate) const PROBE: &str = "berth-probe";

/// Group with all rights.
const ADMIN_GROUP: &str = "system:masters";

/// Group of the load's clients. Real apiservers must grant the group its rights.
pub(crate) const CLIENT_GROUP: &str = "berth-rehearse";

/// Certificates: their files, and the identities of this process's clients.
#[derive(Debug)]
pub struct Certs {
    /// PEM file with the CA.
    pub ca_file: PathBuf,
    /// PEM file with the public key of service accounts.
    pub account_public_key_file: PathBuf,
    /// PEM file with the private key of service accounts.
    pub account_key_file: PathBuf,
    pub ca: CertificateDer<'static>,
    /// Names of the instances, by their serving certificates.
    pub(crate) names: Names,
    dir: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// DNS names and IP addresses in every serving certificate.
    subjects: Vec<String>,
    admin: Identity,
    client: Identity,
}

/// A client certificate and its key.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) cert: CertificateDer<'static>,
    pub(crate) key: PrivatePkcs8KeyDer<'static>,
}

/// Names of the instances, by their serving certificates.
#[derive(Debug, Clone, Default)]
pub(crate) struct Names(Arc<Mutex<HashMap<CertificateDer<'static>, String>>>);

impl Names {
    /// Returns the instance of a certificate chain as received by a client. The first certificate
    /// of the chain counts.
    pub(crate) fn instance_of_chain(&self, chain: Option<&[CertificateDer<'_>]>) -> Option<String> {
        let served = chain?.first()?.clone().into_owned();
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&served)
            .cloned()
    }

    /// Attributes the certificate of one instance to another instance, which serves a copy of the
    /// certificate.
    pub(crate) fn rename_instance(&self, from: &str, to: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known
            .values_mut()
            .filter(|name| *name == from)
            .for_each(|name| to.clone_into(name));
    }

    fn add(&self, cert: CertificateDer<'static>, instance: &str) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(cert, instance.to_owned());
    }
}

/// The reason why there are no certificates.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Certificates could not be created.
    #[error("cannot make certificates: {0}")]
    Make(#[from] rcgen::Error),
    /// A certificate could not be written.
    #[error("cannot write {0}: {1}")]
    Write(PathBuf, io::Error),
}

/// Creates the certificates in `dir`, for the usual names, 127.0.0.1 and `ips`.
/// [`Certs::issue_certificate`] creates those of instances.
pub fn make_certs(dir: &Path, ips: &[IpAddr]) -> Result<Certs, Error> {
    let mut ca = CertificateParams::default();
    ca.distinguished_name
        .push(DnType::CommonName, "berth rehearsal");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let issuer = CertifiedIssuer::self_signed(ca, KeyPair::generate()?)?;

    let identity = |name: &str, group: Option<&str>| {
        let mut params = certificate_params(&[], ExtendedKeyUsagePurpose::ClientAuth, name)?;
        if let Some(group) = group {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group);
        }
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &issuer)?;
        write_file(&dir.join(format!("{name}.crt")), &cert.pem())?;
        write_file(&dir.join(format!("{name}.key")), &key.serialize_pem())?;
        Ok::<_, Error>(Identity {
            cert: cert.into(),
            key: key.serialize_der().into(),
        })
    };
    let (admin, client) = (
        identity(ADMIN, Some(ADMIN_GROUP))?,
        identity("client", Some(CLIENT_GROUP))?,
    );
    identity(PROBE, None)?;

    let mut subjects: Vec<String> = DNS_NAMES.map(str::to_owned).to_vec();
    subjects.push("127.0.0.1".into());
    subjects.extend(ips.iter().map(ToString::to_string));
    let certs = Certs {
        ca_file: dir.join("ca.crt"),
        account_public_key_file: dir.join("service-account.pub"),
        account_key_file: dir.join("service-account.key"),
        ca: issuer.der().clone(),
        names: Names::default(),
        dir: dir.to_owned(),
        issuer,
        subjects,
        admin,
        client,
    };
    let account_key = KeyPair::generate()?;
    write_file(&certs.ca_file, &certs.issuer.pem())?;
    write_file(
        &certs.account_public_key_file,
        &account_key.public_key_pem(),
    )?;
    write_file(&certs.account_key_file, &account_key.serialize_pem())?;
    Ok(certs)
}

impl Certs {
    /// Returns the PEM file with the serving certificate of an instance, or with the certificate of
    /// a client.
    pub fn cert_file(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.crt"))
    }

    /// Returns the PEM file with the private key. Only the owner can read the file.
    pub fn key_file(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.key"))
    }

    /// Creates an instance's serving certificate unless there is one already.
    pub fn issue_certificate(&self, instance: &str) -> Result<(), Error> {
        if self.cert_file(instance).exists() {
            return Ok(());
        }
        let key = KeyPair::generate()?;
        let serving = certificate_params(
            &self.subjects,
            ExtendedKeyUsagePurpose::ServerAuth,
            instance,
        )?;
        let cert = serving.signed_by(&key, &self.issuer)?;
        write_file(&self.key_file(instance), &key.serialize_pem())?;
        write_file(&self.cert_file(instance), &cert.pem())?;
        self.names.add(cert.into(), instance);
        Ok(())
    }

    /// Returns the path of the admin's kubeconfig, for other programs.
    pub(crate) fn kubeconfig_file(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// Writes the admin's kubeconfig for a server address, and returns its path. The file is JSON,
    /// which is valid YAML.
    pub(crate) fn write_kubeconfig(&self, server: SocketAddr) -> Result<PathBuf, Error> {
        let cluster =
            json!({"server": format!("https://{server}"), "certificate-authority": self.ca_file});
        let user = json!({"client-certificate": self.cert_file(ADMIN), "client-key": self.key_file(ADMIN)});
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "rehearsal",
            "clusters": [{"name": "rehearsal", "cluster": cluster}], "users": [{"name": "admin", "user": user}],
            "contexts": [{"name": "rehearsal", "context": {"cluster": "rehearsal", "user": "admin"}}],
        });
        let file = self.kubeconfig_file();
        fs::write(&file, config.to_string()).map_err(|error| Error::Write(file.clone(), error))?;
        Ok(file)
    }

    /// TLS client configuration for a user in the group `CLIENT_GROUP`, with this CA as the only
    /// trusted CA.
    pub fn client_config(&self) -> Result<ClientConfig, rustls::Error> {
        client_config([self.ca.clone()], Some(&self.client))
    }

    /// TLS client configuration for a user in `system:masters`.
    pub(crate) fn admin_config(&self) -> Result<ClientConfig, rustls::Error> {
        client_config([self.ca.clone()], Some(&self.admin))
    }
}

/// TLS client configuration with the given trusted CAs and an optional client certificate.
pub(crate) fn client_config(
    ca: impl IntoIterator<Item = CertificateDer<'static>>,
    identity: Option<&Identity>,
) -> Result<ClientConfig, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for ca in ca {
        roots.add(ca)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let config = config.with_root_certificates(roots);
    let mut config = match identity {
        Some(Identity { cert, key }) => config
            .with_client_auth_cert(vec![cert.clone()], PrivateKeyDer::Pkcs8(key.clone_key()))?,
        None => config.with_no_client_auth(),
    };
    // Every new connection is a full handshake, no matter what instance answers.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

fn certificate_params(
    subjects: &[String],
    usage: ExtendedKeyUsagePurpose,
    name: &str,
) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(subjects)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    Ok(params)
}

fn write_file(path: &Path, text: &str) -> Result<(), Error> {
    use io::Write;
    let open = || {
        fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
    };
    open()
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|error| Error::Write(path.to_owned(), error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::pem::PemObject;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn each_instance_has_a_certificate_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let certs = make_certs(dir.path(), &["127.3.4.5".parse().unwrap()]).unwrap();
        for instance in ["old", "new", "old"] {
            certs.issue_certificate(instance).unwrap();
        }
        let read = |instance| CertificateDer::from_pem_file(certs.cert_file(instance)).unwrap();
        for instance in ["old", "new"] {
            assert_eq!(
                certs
                    .names
                    .instance_of_chain(Some(&[read(instance)]))
                    .as_deref(),
                Some(instance)
            );
        }
        assert_eq!(
            certs
                .names
                .instance_of_chain(Some(std::slice::from_ref(&certs.ca))),
            None
        );
        assert_eq!(certs.names.instance_of_chain(None), None);
        assert!(certs.client_config().is_ok() && certs.admin_config().is_ok());
    }

    #[test]
    fn keys_are_for_the_owner_and_nothing_is_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let certs = make_certs(dir.path(), &[]).unwrap();
        certs.issue_certificate("old").unwrap();
        for key in [&certs.key_file("old"), &certs.account_key_file] {
            assert_eq!(
                fs::metadata(key).unwrap().permissions().mode() & 0o777,
                0o600
            );
        }
        assert!(matches!(make_certs(dir.path(), &[]), Err(Error::Write(..))));
    }
}
