//! Tests of a probe, against a small HTTPS server.

use super::*;
use berth_testing::{create_ca, format_answer, issue_certificate, serve_at};
use rcgen::{CertifiedIssuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fs::File;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

type Ca = CertifiedIssuer<'static, KeyPair>;

/// Answers every request with `answer`; an empty `answer` means silence.
async fn serve_and_record(
    ca: &Ca,
    answer: &str,
) -> (SocketAddr, mpsc::UnboundedReceiver<(String, usize)>) {
    let answer = answer.to_owned();
    let server = serve_at(ca, ([127, 0, 0, 1], 0).into(), "kubernetes", move |_| {
        answer.clone()
    })
    .await;
    (
        server
            .access
            .server
            .strip_prefix("https://")
            .unwrap()
            .parse()
            .unwrap(),
        server.asked,
    )
}

/// Serves a chain with `often` copies of the server's certificate.
async fn serve_repeated_certificate(ca: &Ca, often: usize) -> SocketAddr {
    let (certificate, key) = issue_certificate(ca, &["kubernetes"]);
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap(); often];
    let provider = rustls::crypto::ring::default_provider();
    let config = ServerConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(
        config
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap(),
    ));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = acceptor.accept(stream).await;
        }
    });
    address
}

/// A directory with the probe's files.
struct Files {
    temp: TempDir,
    config: ProbeConfig,
}

impl Files {
    fn new(ca: &Ca) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let config = ProbeConfig {
            kind: ProbeKind::Https,
            path: "/readyz".into(),
            ca: Some(temp.path().join("ca.crt")),
            client: None,
            token: None,
            server_name: ServerName::try_from("kubernetes").unwrap(),
            timeout: Duration::from_secs(20),
        };
        let files = Self { temp, config };
        files.write_file("ca.crt", &ca.pem());
        files
    }

    fn write_file(&self, name: &str, content: &str) {
        std::fs::write(self.temp.path().join(name), content).unwrap();
    }

    fn with_token(mut self, token: &str) -> Self {
        self.write_file("token", token);
        self.config.token = Some(self.temp.path().join("token"));
        self
    }

    fn with_client(mut self, (certificate, key): &(String, String)) -> Self {
        self.write_file("client.crt", certificate);
        self.write_file("client.key", key);
        self.config.client = Some((
            self.temp.path().join("client.crt"),
            self.temp.path().join("client.key"),
        ));
        self
    }

    fn probe(&self) -> Probe {
        Probe::new(self.config.clone())
    }
}

#[track_caller]
fn assert_failed(answer: &Answer, result: &str, parts: &[&str]) {
    let seen = match result {
        "unauthorized" | "tls" => Observation::Rejected,
        _ => Observation::Fail,
    };
    assert_eq!(
        (answer.seen, answer.result),
        (seen, result),
        "{}",
        answer.words
    );
    for part in parts {
        assert!(answer.words.contains(part), "{part} in {}", answer.words);
    }
}

#[tokio::test]
async fn a_probe_sends_its_request_and_accepts_200() {
    let ca = create_ca();
    let (address, mut asked) = serve_and_record(&ca, &format_answer("200 OK", "ok")).await;
    let files = Files::new(&ca).with_token(" secret\n");
    let ready = files.probe().probe_ready(address).await;
    assert_eq!(
        (ready.seen, ready.result),
        (Observation::Pass, "ok"),
        "{}",
        ready.words
    );
    let (head, certificates) = asked.recv().await.unwrap();
    assert!(
        head.starts_with("GET /readyz HTTP/1.1\r\n") && certificates == 0,
        "{head}"
    );
    for part in [
        "host: kubernetes\r\n",
        "authorization: Bearer secret\r\n",
        "user-agent: berth-probe/",
    ] {
        assert!(head.contains(part), "{part} in {head}");
    }
    assert_eq!(files.probe().get(address, "/version").await.unwrap(), "ok");
    assert!(asked.recv().await.unwrap().0.starts_with("GET /version "));
}

#[tokio::test]
async fn rejected_credentials_name_the_option_to_fix() {
    let ca = create_ca();
    for (code, result) in [
        ("401 Unauthorized", "unauthorized"),
        ("403 Forbidden", "forbidden"),
    ] {
        let (address, _asked) = serve_and_record(&ca, &format_answer(code, "")).await;
        let none = Files::new(&ca).probe().probe_ready(address).await;
        assert_failed(
            &none,
            result,
            &[
                "alive",
                &code[..3],
                "/readyz",
                "--probe-cert",
                "--probe-token-file",
            ],
        );
        let token = Files::new(&ca)
            .with_token("x")
            .probe()
            .probe_ready(address)
            .await;
        assert_failed(
            &token,
            result,
            &["alive", "the token of --probe-token-file"],
        );
        let client = Files::new(&ca)
            .with_client(&issue_certificate(&ca, &["probe"]))
            .probe()
            .probe_ready(address)
            .await;
        assert_failed(&client, result, &["alive", "the user of --probe-cert"]);
    }
}

#[tokio::test]
async fn other_answers_are_not_ready() {
    let ca = create_ca();
    let checks = "[+]ping ok\n[-]etcd failed: reason withheld\n[+]log ok\nreadyz check failed\n";
    let answers = [
        (
            format_answer("500 Internal Server Error", checks),
            "status",
            "500 for /readyz: [-]etcd failed: reason withheld",
        ),
        (
            format_answer("429 Too Many Requests", ""),
            "status",
            "429 for /readyz",
        ),
        (format_answer("302 Found", ""), "status", "302 for /readyz"),
        (
            format_answer("204 No Content", ""),
            "status",
            "204 for /readyz",
        ),
        // An endless answer, longer than the probe reads.
        (
            format!("HTTP/1.1 503 No\r\n\r\n{}", "x".repeat(1 << 20)),
            "status",
            "503 for /readyz",
        ),
        ("SSH-2.0-OpenSSH\r\n".to_owned(), "http", "no HTTP answer"),
        ("HTTP/1.1 ".to_owned(), "http", "no HTTP answer"),
    ];
    for (bytes, result, words) in answers {
        let (address, _asked) = serve_and_record(&ca, &bytes).await;
        assert_failed(
            &Files::new(&ca).probe().probe_ready(address).await,
            result,
            &[words],
        );
    }
}

#[tokio::test]
async fn silence_is_a_timeout_and_a_closed_port_a_refusal() {
    let ca = create_ca();
    let mut files = Files::new(&ca);
    files.config.timeout = Duration::from_millis(100);
    let (silent_in_http, _asked) = serve_and_record(&ca, "").await;
    // Nobody accepts from this listener: its connections are established, and nothing is sent on
    // them.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_in_tls = listener.local_addr().unwrap();
    for address in [silent_in_http, silent_in_tls] {
        assert_failed(
            &files.probe().probe_ready(address).await,
            "timeout",
            &["100ms", "--probe-timeout"],
        );
    }
    drop(listener);
    // A child process of another test keeps a duplicate of the listener until its execve.
    let is_gone = async { while TcpStream::connect(silent_in_tls).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(60), is_gone)
        .await
        .unwrap();
    for kind in [ProbeKind::Https, ProbeKind::Tcp] {
        files.config.kind = kind;
        let refused = files.probe().probe_ready(silent_in_tls).await;
        assert_eq!(
            (refused.seen, refused.result),
            (Observation::Refused, "refused"),
            "{}",
            refused.words
        );
    }
    let tcp = files.probe().probe_ready(silent_in_http).await;
    assert_eq!(
        (tcp.seen, tcp.result),
        (Observation::Pass, "ok"),
        "a TCP probe asks for no more: {}",
        tcp.words
    );
}

#[tokio::test]
async fn a_wrong_certificate_names_the_option_to_fix() {
    let (ca, other) = (create_ca(), create_ca());
    let (address, _asked) = serve_and_record(&ca, &format_answer("200 OK", "")).await;
    assert_failed(
        &Files::new(&other).probe().probe_ready(address).await,
        "tls",
        &["--probe-ca"],
    );
    let mut files = Files::new(&ca);
    files.config.server_name = ServerName::try_from("example.com").unwrap();
    assert_failed(
        &files.probe().probe_ready(address).await,
        "tls",
        &["--probe-server-name"],
    );
    files.config.ca = None;
    assert_eq!(
        files.probe().probe_ready(address).await.seen,
        Observation::Pass,
        "--probe-insecure"
    );

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let plain = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .await
            .unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    });
    let answer = Files::new(&ca).probe().probe_ready(plain).await;
    assert_eq!((answer.seen, answer.result), (Observation::Fail, "tls"));
}

/// The caller restarts an instance that does not live. A problem of the probe is no reason to
/// restart.
#[tokio::test]
async fn an_instance_that_answers_lives_whatever_the_probe_lacks() {
    let (ca, other) = (create_ca(), create_ca());
    let (well, _asked) = serve_and_record(&ca, &format_answer("200 OK", "ok")).await;
    let lives = async |files: &Files, address| {
        files
            .probe()
            .probe_alive(address)
            .await
            .map_err(|answer| answer.result)
    };
    assert_eq!(lives(&Files::new(&ca), well).await, Ok(None));
    let mut named = Files::new(&ca);
    named.config.server_name = ServerName::try_from("example.com").unwrap();
    let missing = Files::new(&ca);
    std::fs::remove_file(missing.temp.path().join("ca.crt")).unwrap();
    for files in [
        Files::new(&other),
        named,
        missing,
        Files::new(&ca).with_token(" "),
    ] {
        assert!(lives(&files, well).await.unwrap().is_some());
    }
    // The probe cannot read its files, because their disk hangs.
    let stuck = Files::new(&ca).probe();
    let (go_on, hangs) = std::sync::mpsc::channel::<()>();
    stuck
        .reading
        .call_within(Duration::from_millis(1), move || hangs.recv().is_err())
        .await
        .unwrap_err();
    assert!(stuck.probe_alive(well).await.unwrap().is_some());
    drop(go_on);
    for rejects in ["401 Unauthorized", "403 Forbidden"] {
        let (address, _asked) = serve_and_record(&ca, &format_answer(rejects, "")).await;
        for files in [Files::new(&ca).with_token("old"), Files::new(&other)] {
            assert!(lives(&files, address).await.unwrap().is_some(), "{rejects}");
        }
    }
    let (ill, _asked) = serve_and_record(
        &ca,
        &format_answer("500 Internal Server Error", "[-]etcd failed\n"),
    )
    .await;
    let (mute, _asked) = serve_and_record(&ca, "SSH-2.0-OpenSSH\r\n").await;
    for files in [Files::new(&ca), Files::new(&other)] {
        assert_eq!(lives(&files, ill).await, Err("status"));
        assert_eq!(lives(&files, mute).await, Err("http"));
    }
    // Other clients accept such a large chain: Go reads 256 KiB of certificates.
    let large = serve_repeated_certificate(&ca, 200).await;
    assert_eq!(
        Files::new(&ca).probe().probe_ready(large).await.seen,
        Observation::Rejected
    );
    assert!(lives(&Files::new(&ca), large).await.unwrap().is_some());
    let (silent, _asked) = serve_and_record(&ca, "").await;
    let mut hasty = Files::new(&other);
    hasty.config.timeout = Duration::from_millis(300);
    assert_eq!(lives(&hasty, silent).await, Err("timeout"));
}

#[tokio::test]
async fn certificates_and_tokens_are_read_again_when_they_change() {
    let (old, new) = (create_ca(), create_ca());
    let files = Files::new(&old)
        .with_token("one")
        .with_client(&issue_certificate(&old, &["probe-one"]));
    let probe = files.probe();
    let (at_old, mut asked_old) = serve_and_record(&old, &format_answer("200 OK", "")).await;
    let (at_new, mut asked_new) = serve_and_record(&new, &format_answer("200 OK", "")).await;
    assert_eq!(probe.probe_ready(at_old).await.seen, Observation::Pass);
    let (head, certificates) = asked_old.recv().await.unwrap();
    assert!(head.contains("Bearer one\r\n") && certificates == 1);
    assert_failed(&probe.probe_ready(at_new).await, "tls", &["--probe-ca"]);

    // The file has both CAs, as in a rotation.
    files.write_file("ca.crt", &format!("{}{}", old.pem(), new.pem()));
    let (certificate, key) = issue_certificate(&new, &["probe-two"]);
    // If certificate and key do not match for a moment, one probe fails and no more.
    files.write_file("client.crt", &certificate);
    assert_failed(
        &probe.probe_ready(at_new).await,
        "config",
        &["--probe-key", "is not the key of the certificate"],
    );
    files.write_file("client.key", &key);
    files.write_file("token", "two\n");
    assert_eq!(probe.probe_ready(at_new).await.seen, Observation::Pass);
    // The new CA's server accepts no certificate of the old CA.
    let (head, certificates) = asked_new.recv().await.unwrap();
    assert!(head.contains("Bearer two\r\n") && certificates == 1);

    files.write_file("token", "\n");
    assert_failed(
        &probe.probe_ready(at_new).await,
        "config",
        &["--probe-token-file", "is empty"],
    );
    std::fs::remove_file(files.temp.path().join("ca.crt")).unwrap();
    assert_failed(
        &probe.probe_ready(at_new).await,
        "config",
        &["cannot read --probe-ca"],
    );
}

#[tokio::test]
async fn a_ca_that_was_replaced_behind_its_mount_is_named() {
    let (old, new) = (create_ca(), create_ca());
    let mut files = Files::new(&old);
    let (at_old, _asked_old) = serve_and_record(&old, &format_answer("200 OK", "")).await;
    let (at_new, _asked_new) = serve_and_record(&new, &format_answer("200 OK", "")).await;
    // A mount of a single file shows this file, even if another file has its name now.
    let path = files.temp.path().join("ca.crt");
    let mounted = File::open(&path).unwrap();
    files.config.ca = Some(
        format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&mounted)
        )
        .into(),
    );
    let probe = files.probe();
    let both = format!("{}{}", old.pem(), new.pem());
    assert_failed(
        &probe.probe_ready(at_new).await,
        "tls",
        &["--probe-ca must hold"],
    );
    files.write_file("ca.crt", &both);
    assert_eq!(probe.probe_ready(at_new).await.seen, Observation::Pass);
    files.write_file("ca.crt", &old.pem());
    files.write_file("ca.crt.new", &both);
    std::fs::rename(files.temp.path().join("ca.crt.new"), &path).unwrap();
    assert_eq!(probe.probe_ready(at_old).await.seen, Observation::Pass);
    assert_failed(
        &probe.probe_ready(at_new).await,
        "tls",
        &["was replaced on the node", "`berth upgrade`"],
    );
}

#[tokio::test]
async fn wrong_files_are_reported_at_start() {
    let ca = create_ca();
    let credentials = issue_certificate(&ca, &["probe"]);
    let files = || Files::new(&ca).with_client(&credentials).with_token("x");
    assert_eq!(files().probe().check_files().await, Ok(()));
    let other_key = issue_certificate(&ca, &["probe"]).1;
    let broken = [
        ("ca.crt", "", "--probe-ca"),
        ("ca.crt", credentials.1.as_str(), "--probe-ca"),
        ("client.crt", "nonsense", "--probe-cert"),
        ("client.key", "nonsense", "--probe-key"),
        (
            "client.key",
            other_key.as_str(),
            "is not the key of the certificate",
        ),
        ("token", " ", "--probe-token-file"),
    ];
    for (name, content, part) in broken {
        let files = files();
        files.write_file(name, content);
        let error = files.probe().check_files().await.unwrap_err();
        assert!(error.contains(part), "{part} in {error}");
    }
    // A TCP probe reads none of the files.
    let mut tcp = files();
    tcp.write_file("ca.crt", "");
    tcp.config.kind = ProbeKind::Tcp;
    assert_eq!(tcp.probe().check_files().await, Ok(()));
}

/// As a node boots, a disk may take seconds.
#[tokio::test(start_paused = true)]
async fn files_that_come_late_are_waited_for_at_start() {
    let mut files = Files::new(&create_ca());
    files.config.timeout = Duration::from_secs(2);
    let probe = files.probe();
    let (comes, late) = std::sync::mpsc::channel::<()>();
    let before = probe
        .reading
        .call_within(Duration::from_secs(600), move || late.recv().is_err());
    let passes = async {
        for _ in 0..10 {
            tokio::time::advance(probe.timeout()).await;
        }
        drop(comes);
    };
    let (before, checked, ()) = tokio::join!(before, probe.check_files(), passes);
    assert_eq!((before.unwrap(), checked), (true, Ok(())));
}
