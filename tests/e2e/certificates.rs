//! Checks the certificates of the tests of crates/cluster with Go's crypto/x509 and crypto/tls,
//! which kube-apiserver and its clients use. Also probes servers in Go, with keys of every kind at
//! both ends.

use berth_shim::backend::probe::{Probe, ProbeConfig, ProbeKind};
use libtest_mimic::Failed;
use rustls::pki_types::ServerName;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A client's key with which the library ring cannot sign: `berth` reports such a key at start. A
/// server may have such a key.
const TOO_LONG: &str = "rsa-8192";

pub(crate) fn as_in_go(sources: &Path) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let program = temp.path().join("program");
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(&program)
        .arg(sources.join("main.go"))
        .status()?;
    assert!(built.success(), "go build: {built}");
    let checked = Command::new(&program)
        .arg("check")
        .arg(sources.join("certificates.txt"))
        .status()?;
    assert!(checked.success(), "what changed is above");

    let mut serving = Command::new(&program)
        .arg("serve")
        .arg(temp.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut probed = 0;
    for line in BufReader::new(serving.stdout.take().unwrap()).lines() {
        let line = line?;
        let Some((label, address)) = line.split_once(' ') else {
            break;
        };
        let file = |end: &str| temp.path().join(format!("{label}{end}"));
        let ask = |client| {
            let config = ProbeConfig {
                kind: ProbeKind::Https,
                path: "/readyz".into(),
                ca: Some(file(".crt")),
                client,
                token: None,
                server_name: ServerName::try_from("kubernetes").unwrap(),
                timeout: Duration::from_secs(60),
            };
            runtime.block_on(Probe::new(config).probe_ready(address.parse().unwrap()))
        };
        assert_eq!(
            ask(None).result,
            "unauthorized",
            "{line}: {}",
            ask(None).words
        );
        for key in [file(".key"), file(".old.key")]
            .into_iter()
            .filter(|key| key.exists())
        {
            let answer = ask(Some((file(".crt"), key.clone())));
            let wanted = if label == TOO_LONG { "config" } else { "ok" };
            assert_eq!(
                answer.result,
                wanted,
                "{line}, {}: {}",
                key.display(),
                answer.words
            );
            probed += 1;
        }
    }
    drop(serving.stdin.take());
    serving.wait()?;
    assert_eq!(probed, 2 * (2 * 7 + 1));
    Ok(())
}
