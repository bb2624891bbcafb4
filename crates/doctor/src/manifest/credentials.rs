//! Checks how the shim's credentials for the cluster's API get into its container.

use super::super::checks::{CLUSTER_ACCOUNT, CLUSTER_MOUNT, NODE_NAME};
use super::super::layout::Berth;
use super::super::options;
use super::Examiner;
use berth_cluster::yaml::YamlNode;

/// Directory in which a pod finds the token of its service account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The value that [`options`] substitutes for a variable that refers to `spec.nodeName`.
const NODE_NAME_FIELD: &str = "spec.nodeName";

const GRANT: &str =
    "`berth grant --out FILE` on the node, its directory mounted, and --cluster FILE";

impl Examiner<'_> {
    pub(super) fn credentials(&mut self, shim: &Berth<'_>) {
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
            self.account(shim, variable("BERTH_CLUSTER"));
        } else {
            self.mount(shim, cluster, variable("BERTH_CLUSTER"));
        }
        // A static pod belongs to one node, so its manifest may give the node's name as literal
        // text.
        let of_one = self.case.manifest.kind() == "Pod"
            && container
                .variable("BERTH_NODE_NAME")
                .is_none_or(|variable| variable.get("valueFrom").is_none());
        let cause = match node_name {
            Some(NODE_NAME_FIELD) => return,
            Some(_) if of_one => return,
            Some(name) => format!("the node's name is given as {name}, on every node"),
            None => "the node's name is not given, and the host's name may differ from it".into(),
        };
        self.found(
            NODE_NAME,
            variable("BERTH_NODE_NAME"),
            cause,
            "take it from the pod: BERTH_NODE_NAME with valueFrom: {fieldRef: {fieldPath: spec.nodeName}}",
        );
    }

    fn account(&mut self, shim: &Berth<'_>, line: usize) {
        let pod = self.case.manifest.pod();
        let automount =
            pod.get("automountServiceAccountToken").map(YamlNode::value) != Some(false.into());
        if self.case.manifest.kind() == "Pod" {
            let cause =
                "--cluster in-cluster needs a service account, and a static pod cannot have one";
            self.found(CLUSTER_ACCOUNT, line, cause, GRANT);
        } else if !automount
            && shim
                .container
                .mount_of(&format!("{ACCOUNT}/token"))
                .is_none()
        {
            self.found(
                CLUSTER_ACCOUNT,
                line,
                format!("{} has no token at {ACCOUNT}: automountServiceAccountToken is false", shim.container.name()),
                "mount a projected volume with serviceAccountToken and kube-root-ca.crt there, as examples/kustomize/cluster does",
            );
        }
    }

    fn mount(&mut self, shim: &Berth<'_>, kubeconfig: &str, line: usize) {
        let container = shim.container;
        let name = container.name();
        let Some(mount) = container.mount_of(kubeconfig) else {
            let cause = format!("{kubeconfig} is in no volumeMount of {name}");
            self.found(
                CLUSTER_MOUNT,
                line,
                cause,
                "mount its directory from the node, writable",
            );
            return;
        };
        let single = mount
            .text_of("mountPath")
            .is_some_and(|path| path.trim_end_matches('/') == kubeconfig);
        let (cause, fix) = if single || mount.text_of("subPath").is_some() {
            (
                "is mounted as a file or a subPath, so a renewed file is never seen",
                "mount its directory as a whole",
            )
        } else if mount.is_true("readOnly") {
            (
                "is mounted read-only, and the shim renews the token next to it",
                "remove readOnly",
            )
        } else if container.on_node(kubeconfig).is_none() {
            (
                "is in no hostPath, so a renewed token is lost with the pod",
                GRANT,
            )
        } else {
            return;
        };
        self.found(
            CLUSTER_MOUNT,
            mount.line,
            format!("{kubeconfig} in {name} {cause}"),
            fix,
        );
    }
}
