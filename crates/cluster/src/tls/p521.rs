//! Adds the curve P-521 to certificates, handshake signatures and clients' keys. kube-apiserver and
//! its usual clients support this curve, but ring does not.

use ::p521::SecretKey;
use ::p521::ecdsa::signature::Signer as _;
use ::p521::ecdsa::signature::hazmat::PrehashVerifier;
use ::p521::ecdsa::{DerSignature, Signature, SigningKey, VerifyingKey};
use ::p521::pkcs8::DecodePrivateKey;
use ring::digest::{self, digest};
use rustls::crypto::{CryptoProvider, KeyProvider, WebPkiSupportedAlgorithms, ring as usual};
use rustls::pki_types::{
    AlgorithmIdentifier, InvalidSignature, PrivateKeyDer, SignatureVerificationAlgorithm,
    SubjectPublicKeyInfoDer, alg_id,
};
use rustls::sign::{self, Signer, public_key_to_spki};
use rustls::{Error, SignatureAlgorithm, SignatureScheme};
use std::sync::Arc;

const SCHEME: SignatureScheme = SignatureScheme::ECDSA_NISTP521_SHA512;

type Algorithm = &'static dyn SignatureVerificationAlgorithm;

const SHA256: Algorithm = &Verified {
    signature: alg_id::ECDSA_SHA256,
    hash: &digest::SHA256,
};
const SHA384: Algorithm = &Verified {
    signature: alg_id::ECDSA_SHA384,
    hash: &digest::SHA384,
};
const SHA512: Algorithm = &Verified {
    signature: alg_id::ECDSA_SHA512,
    hash: &digest::SHA512,
};

/// Returns ring's provider with P-521 added. Call it only once, because each call leaks the lists
/// of algorithms that it makes.
pub(super) fn build_provider() -> CryptoProvider {
    let ring = usual::default_provider();
    let WebPkiSupportedAlgorithms { all, mapping } = ring.signature_verification_algorithms;
    // In TLS 1.2 a signature scheme names a hash, but not a curve. So P-521 is added to the schemes
    // of both hashes.
    let with_p521 = |(scheme, algorithms): &(SignatureScheme, &'static [Algorithm])| {
        let p521 = match scheme {
            SignatureScheme::ECDSA_NISTP256_SHA256 => SHA256,
            SignatureScheme::ECDSA_NISTP384_SHA384 => SHA384,
            _ => return (*scheme, *algorithms),
        };
        (*scheme, &*Vec::leak([algorithms, &[p521][..]].concat()))
    };
    let mapping: Vec<_> = mapping
        .iter()
        .map(with_p521)
        .chain([(SCHEME, &[SHA512][..])])
        .collect();
    let signature_verification_algorithms = WebPkiSupportedAlgorithms {
        all: Vec::leak([all, &[SHA256, SHA384, SHA512]].concat()),
        mapping: Vec::leak(mapping),
    };
    CryptoProvider {
        signature_verification_algorithms,
        key_provider: &Keys,
        ..ring
    }
}

#[derive(Debug)]
struct Verified {
    signature: AlgorithmIdentifier,
    hash: &'static digest::Algorithm,
}

impl SignatureVerificationAlgorithm for Verified {
    fn verify_signature(
        &self,
        key: &[u8],
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), InvalidSignature> {
        let verified = VerifyingKey::from_sec1_bytes(key).and_then(|key| {
            key.verify_prehash(
                digest(self.hash, message).as_ref(),
                &Signature::from_der(signature)?,
            )
        });
        verified.map_err(|_| InvalidSignature)
    }

    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        alg_id::ECDSA_P521
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        self.signature
    }
}

#[derive(Debug)]
struct Keys;

impl KeyProvider for Keys {
    fn load_private_key(
        &self,
        key: PrivateKeyDer<'static>,
    ) -> Result<Arc<dyn sign::SigningKey>, Error> {
        let p521 = match &key {
            PrivateKeyDer::Pkcs8(key) => SecretKey::from_pkcs8_der(key.secret_pkcs8_der()).ok(),
            PrivateKeyDer::Sec1(key) => SecretKey::from_sec1_der(key.secret_sec1_der()).ok(),
            _ => None,
        };
        match p521 {
            Some(key) => Ok(Arc::new(Key(key.into()))),
            None => usual::default_provider().key_provider.load_private_key(key),
        }
    }
}

#[derive(Debug, Clone)]
struct Key(SigningKey);

impl sign::SigningKey for Key {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        offered
            .contains(&SCHEME)
            .then(|| Box::new(self.clone()) as Box<dyn Signer>)
    }

    fn public_key(&self) -> Option<SubjectPublicKeyInfoDer<'_>> {
        Some(public_key_to_spki(
            &alg_id::ECDSA_P521,
            self.0.verifying_key().to_sec1_point(false),
        ))
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        SignatureAlgorithm::ECDSA
    }
}

impl Signer for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        let signature: DerSignature = self
            .0
            .try_sign(message)
            .map_err(|error| Error::General(error.to_string()))?;
        Ok(signature.as_bytes().to_vec())
    }

    fn scheme(&self) -> SignatureScheme {
        SCHEME
    }
}
