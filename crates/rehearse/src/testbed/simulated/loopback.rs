//! The loopback client, which kube-apiserver's post-start hooks need. The client dials the address
//! that the apiserver listens on, and trusts a single certificate. On a shared port the kernel may
//! give the connection to another instance.

use berth_cluster::tls;
use rustls::pki_types::{CertificateDer, ServerName};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Time between two tries, as in client-go's reflectors.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Waits until a connection to this address (0.0.0.0 is this host) reaches the instance with this
/// certificate. A connection to another instance is printed in kube-apiserver's words.
pub(super) async fn wait_until_reaching_itself(address: SocketAddr, own: &CertificateDer<'_>) {
    loop {
        match reaches_itself(address, own).await {
            Ok(true) => return,
            Ok(false) => crate::record::progress::print(&format!(
                "the loopback client dialled {address}: tls: failed to verify certificate: x509: certificate signed by \
                 unknown authority"
            )),
            Err(error) => tracing::debug!(%error, "the loopback client"),
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

async fn reaches_itself(address: SocketAddr, own: &CertificateDer<'_>) -> io::Result<bool> {
    let config = tls::build_config(None, None).map_err(io::Error::other)?;
    let tcp = TcpStream::connect(address).await?;
    let tls = TlsConnector::from(Arc::new(config))
        .connect(ServerName::IpAddress(address.ip().into()), tcp)
        .await?;
    Ok(tls
        .get_ref()
        .1
        .peer_certificates()
        .and_then(|chain| chain.first())
        == Some(own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::{
        certs,
        simulated::{flags::Flags, listener},
    };
    use rustls::pki_types::pem::PemObject;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn another_instance_is_not_itself() {
        let dir = tempfile::tempdir().unwrap();
        let certs = certs::make_certs(dir.path(), &[]).unwrap();
        let [own, other] = ["own", "other"].map(|name| {
            certs.issue_certificate(name).unwrap();
            let flags = Flags::parse(&[
                "--etcd-servers=unix:///s".to_owned(),
                format!("--tls-cert-file={}", certs.cert_file(name).display()),
                format!("--tls-private-key-file={}", certs.key_file(name).display()),
            ]);
            listener::load_tls(&flags.unwrap()).unwrap()
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let cert = CertificateDer::from_pem_file(certs.cert_file("own")).unwrap();
        for (serves, expected) in [(other, false), (own, true)] {
            let (reached, _) = tokio::join!(reaches_itself(address, &cert), async {
                serves
                    .accept(listener.accept().await.unwrap().0)
                    .await
                    .unwrap()
            });
            assert_eq!(reached.unwrap(), expected);
        }
    }
}
