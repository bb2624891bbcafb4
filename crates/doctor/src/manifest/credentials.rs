//! Checks how the shim's container gets the credentials for the cluster's API.

use super::super::checks::{CLUSTER_ACCOUNT, CLUSTER_MOUNT, NODE_NAME};
use super::super::layout::BerthContainer;
use super::super::options;
use super::Examiner;
use berth_cluster::yaml::YamlNode;

/// Directory in a container with the token of the pod's service account.
const ACCOUNT_DIRECTORY: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Text that doctor's [`options`] put in place of a variable that the kubelet takes from
/// `spec.nodeName`.
const NODE_NAME_FIELD: &str = "spec.nodeName";

const GRANT_FIX: &str = "run `berth grant --out FILE` on the node, mount the directory of FILE, and give --cluster FILE";

impl Examiner<'_> {
    pub(super) fn check_credentials(&mut self, shim: &BerthContainer<'_>) {
        let Some((cluster, node_name)) = options::cluster_args(&shim.parsed) else {
            return;
        };
        let container = shim.container;
        let variable = |name: &str| {
            container
                .variable(name)
                .map_or(container.node().line, |variable| variable.line)
        };
        if cluster == options::IN_CLUSTER {
            self.check_account(shim, variable("BERTH_CLUSTER"));
        } else {
            self.check_mount(shim, cluster, variable("BERTH_CLUSTER"));
        }
        // A static pod runs on one node only, so its manifest may contain that node's name.
        let of_one = self.case.manifest.kind() == "Pod"
            && container
                .variable("BERTH_NODE_NAME")
                .is_none_or(|variable| variable.get("valueFrom").is_none());
        let cause = match node_name {
            Some(NODE_NAME_FIELD) => return,
            Some(_) if of_one => return,
            Some(name) => {
                format!("the node's name is given as {name}, and so is the same on every node")
            }
            None => {
                "the node's name is not given, and the host's name may differ from the node's name"
                    .into()
            }
        };
        self.add_finding(
            NODE_NAME,
            variable("BERTH_NODE_NAME"),
            cause,
            "take the name from the pod: BERTH_NODE_NAME with valueFrom: {fieldRef: {fieldPath: spec.nodeName}}",
        );
    }

    fn check_account(&mut self, shim: &BerthContainer<'_>, line: usize) {
        let pod = self.case.manifest.pod();
        let automount =
            pod.get("automountServiceAccountToken").map(YamlNode::value) != Some(false.into());
        if self.case.manifest.kind() == "Pod" {
            let cause =
                "--cluster in-cluster needs a service account, and a static pod cannot have one";
            self.add_finding(CLUSTER_ACCOUNT, line, cause, GRANT_FIX);
        } else if !automount
            && shim
                .container
                .find_mount(&format!("{ACCOUNT_DIRECTORY}/token"))
                .is_none()
        {
            self.add_finding(
                CLUSTER_ACCOUNT,
                line,
                format!("{} has no token at {ACCOUNT_DIRECTORY}: automountServiceAccountToken is false", shim.container.name()),
                "mount a projected volume with serviceAccountToken and kube-root-ca.crt there, as examples/kustomize/cluster does",
            );
        }
    }

    fn check_mount(&mut self, shim: &BerthContainer<'_>, kubeconfig: &str, line: usize) {
        let container = shim.container;
        let name = container.name();
        let Some(mount) = container.find_mount(kubeconfig) else {
            let cause = format!("{kubeconfig} is in no volumeMount of {name}");
            self.add_finding(
                CLUSTER_MOUNT,
                line,
                cause,
                "mount the directory of that file from the node, writable",
            );
            return;
        };
        let single = mount
            .get_text("mountPath")
            .is_some_and(|path| path.trim_end_matches('/') == kubeconfig);
        let (cause, fix) = if single || mount.get_text("subPath").is_some() {
            (
                "is mounted as a file or a subPath, so the shim never sees a renewed file",
                "mount the whole directory of that file",
            )
        } else if mount.is_true("readOnly") {
            (
                "is mounted read-only, and the shim must write renewed tokens there",
                "remove readOnly",
            )
        } else if container.path_on_node(kubeconfig).is_none() {
            (
                "is in no hostPath, so a renewed token is lost with the pod",
                GRANT_FIX,
            )
        } else {
            return;
        };
        self.add_finding(
            CLUSTER_MOUNT,
            mount.line,
            format!("{kubeconfig} in {name} {cause}"),
            fix,
        );
    }
}
