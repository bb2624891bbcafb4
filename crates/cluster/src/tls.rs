//! TLS of clients. Everything in berth that opens a TLS connection gets its configuration here.

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use std::sync::Arc;

/// A file that TLS cannot be configured with, and why: `holds no certificate in PEM form`.
#[derive(Debug)]
pub enum TlsError {
    Ca(String),
    Certificate(String),
    Key(String),
    /// The key is not the certificate's.
    Pair(rustls::Error),
}

/// From PEM files: the CAs that the server's certificate is checked against (without any, it is not checked), and the
/// client's own certificate and key.
pub fn from_pem(ca: Option<&[u8]>, client: Option<(&[u8], &[u8])>) -> Result<ClientConfig, TlsError> {
    let none = || "holds no certificate in PEM form".to_owned();
    let roots = ca.map(|ca| {
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(CertificateDer::pem_slice_iter(ca).flatten());
        if added == 0 { Err(TlsError::Ca(none())) } else { Ok(roots) }
    });
    let client = client.map(|(certificate, key)| {
        let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate).flatten().collect();
        if chain.is_empty() {
            return Err(TlsError::Certificate(none()));
        }
        let key = PrivateKeyDer::from_pem_slice(key);
        Ok((chain, key.map_err(|error| TlsError::Key(format!("holds no key in PEM form: {error}")))?))
    });
    config(roots.transpose()?, client.transpose()?).map_err(TlsError::Pair)
}

/// From what was parsed already.
///
/// # Errors
/// The key does not fit the certificate.
pub fn config(
    roots: Option<RootCertStore>,
    client: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
    let builder = match roots {
        Some(roots) => builder.with_root_certificates(roots),
        None => builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(provider))),
    };
    match client {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key),
        None => Ok(builder.with_no_client_auth()),
    }
}

/// Accepts any certificate. Signatures are still checked, so that the server proves that it has the key.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
