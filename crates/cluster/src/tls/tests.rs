use super::*;
use rcgen::{CertificateParams, CustomExtension, KeyPair};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConnection, ServerConfig, ServerConnection};
use std::collections::BTreeMap;

/// Examples of server certificates and trusted certificates, each with the verdict of Go.
/// tests/certificates/main.go made the file, and tests/e2e/certificates.rs checks the verdicts
/// again with main.go.
const EXAMPLES: &str = include_str!("../../tests/certificates/certificates.txt");

/// Names of examples that Go accepts and berth refuses on purpose, each with a part of berth's
/// error. `berth doctor` names each server that is refused.
const DIFFERENT: [(&str, &str); 6] = [
    ("rsa-1024", "InvalidCertificate"),
    ("p-256-sha512", "UnsupportedSignatureAlgorithm"),
    ("p-384-sha512", "UnsupportedSignatureAlgorithm"),
    ("ca-as-server", "CaUsedAsEndEntity"),
    ("purpose-any", "InvalidPurpose"),
    ("policies-critical", "UnsupportedCriticalExtension"),
];

/// Names of examples that Go refuses and berth accepts: berth checks neither the period of validity
/// nor the path length of a trusted certificate.
const MORE: [&str; 2] = ["intermediate-too-many", "issuer-expired"];

#[test]
fn berth_trusts_the_certificates_that_go_trusts() {
    let mut refused = BTreeMap::new();
    let mut all = 0;
    for example in EXAMPLES.split("== ").skip(1) {
        let field = |before: &str, after: &str| {
            example
                .split_once(before)
                .and_then(|(_, rest)| Some(rest.split_once(after)?.0))
                .unwrap()
                .to_owned()
        };
        let label = example.split_once('\n').unwrap().0;
        let name = ServerName::try_from(field("\nname: ", "\n")).unwrap();
        let at = humantime::parse_rfc3339(&field("\nat: ", "\n")).unwrap();
        let at = UnixTime::since_unix_epoch(at.duration_since(std::time::UNIX_EPOCH).unwrap());
        let newline = field("\nnewline: \"", "\"\n")
            .replace("\\r", "\r")
            .replace("\\n", "\n");
        let trusted = field("\ntrusted:\n", "\nshown:\n").replace('\n', &newline);
        let shown = parse_certificates(example.split_once("\nshown:\n").unwrap().1.as_bytes());
        let verified = Trust::from_pem(trusted.as_bytes())
            .unwrap()
            .verify(&shown, &name, at);
        let go = field("\ngo: ", "\n");
        match (go == "accepts", verified) {
            (true, Err(error)) => drop(refused.insert(label, format!("{error:?}"))),
            (false, Ok(())) => assert!(MORE.contains(&label), "{label}: {go}"),
            _ => {}
        }
        all += 1;
    }
    assert!(all > 60, "{all}");
    assert_eq!(
        refused.keys().copied().collect::<Vec<_>>(),
        {
            let mut expected = DIFFERENT.map(|(label, _)| label);
            expected.sort_unstable();
            expected
        },
        "{refused:#?}"
    );
    for (label, why) in DIFFERENT {
        assert!(refused[label].contains(why), "{label}: {}", refused[label]);
    }
}

const P521: &str = include_str!("../../tests/certificates/p-521.pem");

/// Server and client use keys of P-521, which ring does not know.
#[test]
fn server_and_client_may_have_keys_of_p_521() {
    let pem = P521.as_bytes();
    let (_, sec1) = P521.split_once("-----END PRIVATE KEY-----").unwrap();
    let clients = WebPkiClientVerifier::builder_with_provider(
        Trust::from_pem(pem).unwrap().anchors.into(),
        PROVIDER.clone(),
    );
    let clients = clients.build().unwrap();
    for (version, key) in [(&TLS12, P521), (&TLS13, sec1)] {
        let server = ServerConfig::builder_with_provider(PROVIDER.clone())
            .with_protocol_versions(&[version])
            .unwrap();
        let server = server.with_client_cert_verifier(clients.clone());
        let server = server
            .with_single_cert(
                parse_certificates(pem),
                PrivateKeyDer::from_pem_slice(pem).unwrap(),
            )
            .unwrap();
        let client = from_pem(Some(pem), Some((pem, key.as_bytes()))).unwrap();
        let server = shake_hands(server, client).unwrap();
        assert_eq!(server.peer_certificates().unwrap(), parse_certificates(pem));
    }
}

/// Runs a handshake between a client and a server in this process. Returns the server's side.
fn shake_hands(server: ServerConfig, client: ClientConfig) -> Result<ServerConnection, Error> {
    let mut server = ServerConnection::new(server.into())?;
    let mut client = ClientConnection::new(client.into(), "kubernetes".try_into().unwrap())?;
    while client.is_handshaking() || server.is_handshaking() {
        let mut sent = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut sent).unwrap();
        }
        server.read_tls(&mut &sent[..]).unwrap();
        server.process_new_packets()?;
        sent.clear();
        while server.wants_write() {
            server.write_tls(&mut sent).unwrap();
        }
        client.read_tls(&mut &sent[..]).unwrap();
        client.process_new_packets()?;
    }
    Ok(server)
}

/// The server's certificate has an unknown critical extension, as a company's policy may require.
/// Go's `InsecureSkipVerify` ignores it.
#[test]
fn without_a_ca_any_server_is_accepted() {
    let mut unknown = CustomExtension::from_oid_content(&[1, 3, 6, 1, 4, 1, 1, 1], vec![5, 0]);
    unknown.set_criticality(true);
    let mut params = CertificateParams::new(vec!["kubernetes".into()]).unwrap();
    params.custom_extensions.push(unknown);
    let key = KeyPair::generate().unwrap();
    let shown = params.self_signed(&key).unwrap();
    for version in [&TLS12, &TLS13] {
        let signs = PROVIDER
            .key_provider
            .load_private_key(PrivateKeyDer::try_from(key.serialize_der()).unwrap())
            .unwrap();
        let shows = Arc::new(SingleCertAndKey::from(CertifiedKey::new(
            vec![shown.der().clone()],
            signs,
        )));
        let server = || {
            let builder = ServerConfig::builder_with_provider(PROVIDER.clone())
                .with_protocol_versions(&[version])
                .unwrap();
            builder
                .with_no_client_auth()
                .with_cert_resolver(shows.clone())
        };
        shake_hands(server(), from_pem(None, None).unwrap()).unwrap();
        shake_hands(
            server(),
            from_pem(Some(shown.pem().as_bytes()), None).unwrap(),
        )
        .unwrap_err();
    }
}

#[test]
fn an_unusable_key_is_explained() {
    let other = berth_testing::issue_certificate(&berth_testing::create_ca(), &["client"]).1;
    for (key, why) in [
        (other.as_str(), "is not the key of the certificate"),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----\n",
            "make a key of RSA with 2048 to 4096 bits, P-256,",
        ),
        ("none", "holds no key in PEM form"),
    ] {
        let Err(TlsError::Key(told)) = from_pem(None, Some((P521.as_bytes(), key.as_bytes())))
        else {
            panic!("{why}")
        };
        assert!(told.contains(why), "{told}");
    }
}
