//! TLS for clients. Each part of berth that opens a TLS connection gets its configuration here.

mod p521;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{
    AlgorithmIdentifier, CertificateDer, PrivateKeyDer, ServerName, UnixTime, alg_id,
};
use rustls::server::ParsedCertificate;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, Error,
    PeerIncompatible,
};
use rustls::{RootCertStore, SignatureScheme};
use std::ops::RangeInclusive;
use std::sync::{Arc, LazyLock};

/// The cryptographic algorithms that every connection uses.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(p521::build_provider()));

/// The reason why a file cannot be used for TLS, for example `holds no certificate in PEM form`.
#[derive(Debug)]
pub enum TlsError {
    Ca(String),
    Certificate(String),
    Key(String),
}

/// CAs and server certificates that are trusted when a server's certificate is verified.
#[derive(Debug)]
pub struct Trust {
    anchors: RootCertStore,
    certificates: Vec<CertificateDer<'static>>,
}

impl Trust {
    pub fn new(certificates: Vec<CertificateDer<'static>>) -> Self {
        let mut anchors = RootCertStore::empty();
        anchors.add_parsable_certificates(certificates.iter().cloned());
        Self {
            anchors,
            certificates,
        }
    }

    /// Reads certificates from a PEM file, which may have comments.
    ///
    /// # Errors
    /// The file contains no certificate.
    pub fn from_pem(pem: &[u8]) -> Result<Self, TlsError> {
        let trust = Self::new(parse_certificates(pem));
        if trust.anchors.is_empty() {
            Err(TlsError::Ca(NO_CERTIFICATE.to_owned()))
        } else {
            Ok(trust)
        }
    }

    /// Checks the certificate of a server. In `chain`, the certificates of the issuers follow the
    /// server's certificate.
    ///
    /// A server's certificate that is itself among the trusted certificates needs no issuer, and
    /// may be a CA's certificate. Go's `crypto/x509`, used by most clients of kube-apiserver,
    /// accepts such a certificate too.
    ///
    /// # Errors
    /// The server cannot be trusted.
    pub fn verify(
        &self,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), Error> {
        let (shown, issuers) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        let parsed = ParsedCertificate::try_from(shown)?;
        let algorithms = PROVIDER.signature_verification_algorithms.all;
        let key = parsed.subject_public_key_info();
        let is = |kind: AlgorithmIdentifier| key.windows(kind.len()).any(|part| part == &*kind);
        let known = algorithms
            .iter()
            .any(|algorithm| is(algorithm.public_key_alg_id()));
        if !known || is(alg_id::RSA_ENCRYPTION) && !RSA_KEY_BYTES.contains(&key.len()) {
            return Err(PeerIncompatible::NoSignatureSchemesInCommon.into());
        }
        match verify_server_cert_signed_by_trust_anchor(
            &parsed,
            &self.anchors,
            issuers,
            now,
            algorithms,
        ) {
            // If the certificate has expired, webpki returns that error and none of these.
            Err(Error::InvalidCertificate(
                CertificateError::UnknownIssuer
                | CertificateError::BadSignature
                | CertificateError::UnsupportedSignatureAlgorithmContext { .. }
                | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. }
                | CertificateError::Other(_),
            )) if self.certificates.contains(shown) => {}
            checked => checked?,
        }
        verify_server_name(&parsed, name)
    }
}

const NO_CERTIFICATE: &str = "holds no certificate in PEM form";

/// Length of the DER form of an RSA public key with 2048 to 8192 bits, in bytes.
const RSA_KEY_BYTES: RangeInclusive<usize> = 290..=1070;

/// Describes a TLS error in words, because rustls prints algorithms as lists of bytes.
pub fn describe_error(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(
            CertificateError::UnsupportedSignatureAlgorithmContext { .. }
            | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. },
        ) => "the certificate, or its issuer's certificate, is signed with an unknown algorithm"
            .to_owned(),
        Error::PeerIncompatible(PeerIncompatible::NoSignatureSchemesInCommon)
        | Error::AlertReceived(AlertDescription::HandshakeFailure) => {
            format!(
                "{error}: the certificate's key must be of RSA with 2048 to 8192 bits, P-256, P-384, P-521 or Ed25519"
            )
        }
        _ => error.to_string(),
    }
}

/// Returns the certificates in the text of a PEM file. Empty if there are none.
pub fn parse_certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).flatten().collect()
}

/// Makes a configuration from the texts of PEM files: the CAs that verify the server's certificate,
/// and the client's own certificate and key. Without CAs, the server's certificate is not verified.
pub fn from_pem(
    ca: Option<&[u8]>,
    client: Option<(&[u8], &[u8])>,
) -> Result<ClientConfig, TlsError> {
    let trust = ca.map(Trust::from_pem).transpose()?;
    let client = client.map(|(certificate, key)| {
        let chain = parse_certificates(certificate);
        if chain.is_empty() {
            return Err(TlsError::Certificate(NO_CERTIFICATE.to_owned()));
        }
        let key = PrivateKeyDer::from_pem_slice(key);
        Ok((
            chain,
            key.map_err(|error| TlsError::Key(format!("holds no key in PEM form: {error}")))?,
        ))
    });
    build_config(trust, client.transpose()?).map_err(|error| {
        TlsError::Key(match error {
            Error::InconsistentKeys(_) => "is not the key of the certificate".to_owned(),
            _ => format!(
                "cannot be used ({error}): make a key of RSA with 2048 to 4096 bits, P-256, P-384, P-521 or Ed25519"
            ),
        })
    })
}

/// Makes a configuration from parsed certificates and key.
///
/// # Errors
/// The key cannot be used, or does not belong to the certificate.
pub fn build_config(
    trust: Option<Trust>,
    client: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<ClientConfig, Error> {
    let builder = ClientConfig::builder_with_provider(PROVIDER.clone())
        .with_safe_default_protocol_versions()?;
    let builder = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier(trust)));
    match client {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key),
        None => Ok(builder.with_no_client_auth()),
    }
}

/// Verifies servers. With `None`, any server is accepted, as with Go's `InsecureSkipVerify`. The
/// handshake's signature is then not verified either: a signature by an unverified key proves
/// nothing, and verifying would need a key of a known kind.
#[derive(Debug)]
struct Verifier(Option<Trust>);

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        issuers: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        if let Some(trust) = &self.0 {
            trust.verify(&[std::slice::from_ref(shown), issuers].concat(), name, now)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if self.0.is_none() {
            return Ok(HandshakeSignatureValid::assertion());
        }
        verify_tls12_signature(
            message,
            cert,
            signed,
            &PROVIDER.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if self.0.is_none() {
            return Ok(HandshakeSignatureValid::assertion());
        }
        verify_tls13_signature(
            message,
            cert,
            signed,
            &PROVIDER.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests;
