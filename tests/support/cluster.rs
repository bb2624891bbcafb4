//! The part of a cluster's API that berth uses: objects in memory, served by TLS.

use berth_cluster::service::{SERVICE_PATH, SLICES_PATH, slice_path};
use berth_testing::{Objects, create_ca, format_answer, issue_certificate, serve_at};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use tempfile::TempDir;

const KUBECONFIG: &str = "admin.conf";

/// A cluster with a kubeconfig of its administrator.
pub(crate) struct Cluster {
    temp: TempDir,
    /// A certificate for an instance, signed by the cluster's CA, and the certificate's key.
    pub(crate) instance: (String, String),
    pub(crate) objects: Objects,
    /// The status of every answer to a request for Leases. `None` if the objects answer.
    pub(crate) no_leases: Arc<Mutex<Option<&'static str>>>,
}

impl Cluster {
    /// Starts a cluster with control-plane nodes at the given addresses.
    pub(crate) fn of(nodes: &[IpAddr]) -> Self {
        let (temp, objects) = (tempfile::tempdir().unwrap(), Objects::default());
        let addresses: Vec<_> = nodes
            .iter()
            .map(|node| json!({"addresses": [node]}))
            .collect();
        let slice = json!({"metadata": {"name": "kubernetes"}, "addressType": "IPv4", "endpoints": addresses});
        objects.set(&slice_path("kubernetes"), Some(slice.clone()));
        objects.set(SLICES_PATH, Some(json!({"items": [slice]})));
        objects.set(
            SERVICE_PATH,
            Some(json!({"spec": {"ports": [{"name": "https"}]}})),
        );
        let (answers, (tell, told)) = (objects.clone(), mpsc::channel());
        let ca = create_ca();
        let instance = issue_certificate(&ca, &["kubernetes"]);
        let no_leases = Arc::<Mutex<Option<&str>>>::default();
        let refuses = no_leases.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let at = ([127, 0, 0, 1], 0).into();
                let server = serve_at(&ca, at, "127.0.0.1", move |request| {
                    match *refuses.lock().unwrap() {
                        Some(status) if request.contains("/leases") => format_answer(status, "{}"),
                        _ => answers.answer(request),
                    }
                });
                let mut server = server.await;
                tell.send(server.access).unwrap();
                while server.asked.recv().await.is_some() {}
            });
        });
        let access = told.recv().unwrap();
        fs::write(temp.path().join("ca.crt"), access.ca).unwrap();
        let text = format!(
            "current-context: a\ncontexts: [{{name: a, context: {{cluster: a, user: a}}}}]\nusers: [{{name: a, user: {{token: t}}}}]\n\
             clusters: [{{name: a, cluster: {{server: '{}/k', certificate-authority: ca.crt}}}}]\n",
            access.server
        );
        fs::write(temp.path().join(KUBECONFIG), text).unwrap();
        Self {
            temp,
            instance,
            objects,
            no_leases,
        }
    }

    pub(crate) fn ca(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.temp.path().join("ca.crt")).unwrap()
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.temp.path().join(KUBECONFIG)
    }

    /// True if an upgrade may have changed the locked node. `None` if the lock is free.
    pub(crate) fn locked(&self) -> Option<bool> {
        let lease = self
            .objects
            .get("/apis/coordination.k8s.io/v1/namespaces/berth-upgrade/leases/upgrade")?;
        Some(lease["metadata"]["annotations"]["berth/changed"] == "true")
    }
}
