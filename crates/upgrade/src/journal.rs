//! Finds out from the kubelet's journal why the kubelet cannot start a pod. While an apiserver's
//! image is missing, no API can be asked.

use super::logs::LoggedPod;
use berth_manifest::command::read_output;
use std::fs::{self, DirEntry};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Time limit of journalctl.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Number of journal lines to search. The kubelet repeats the message every few seconds.
const MAX_LINES: &str = "500";

/// Finds out why the kubelet has been unable to start the pod since `since`: an image that cannot
/// be pulled, or a node without room. `None` also if the journal cannot be read.
pub async fn find_kubelet_trouble(pod: &LoggedPod<'_>, since: SystemTime) -> Option<String> {
    let named = match pod {
        LoggedPod::Uid(uid) => format!("podUID=\"{uid}\""),
        LoggedPod::Name(namespace, name) => format!(
            "pod=\"{namespace}/{name}-{}\"",
            read_node_name(Path::new("/proc"))?
        ),
    };
    let since = since.duration_since(UNIX_EPOCH).ok()?.as_secs();
    let since = format!("--since=@{since}");
    let arguments = [
        "-u",
        "kubelet",
        "-o",
        "cat",
        "--no-pager",
        "-n",
        MAX_LINES,
        &since,
    ];
    let output = read_output("journalctl", &arguments, JOURNAL_TIMEOUT)
        .await
        .ok()?;
    find_message(&String::from_utf8_lossy(&output.stdout), &named)
}

/// The node's name, which the kubelet appends to the name of a static pod. The name comes from the
/// kubelet's --hostname-override, or else from the machine. `proc` is /proc.
pub fn read_node_name(proc: &Path) -> Option<String> {
    let is_kubelet = |entry: &DirEntry| {
        fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim_end() == "kubelet")
    };
    let mut kubelets = fs::read_dir(proc).ok()?.flatten().filter(is_kubelet);
    let overridden = kubelets.find_map(|entry| {
        let arguments = fs::read_to_string(entry.path().join("cmdline")).ok()?;
        let mut after = arguments
            .split('\0')
            .skip_while(|word| !word.starts_with("--hostname-override"));
        match after.next()?.split_once('=') {
            Some((_, name)) => Some(name.to_owned()),
            None => after.next().map(ToOwned::to_owned),
        }
    });
    let name = overridden.or_else(|| fs::read_to_string(proc.join("sys/kernel/hostname")).ok())?;
    Some(name.trim().to_lowercase())
}

/// Finds the kubelet's last message about `named`: the reason and the text after it.
fn find_message(journal: &str, named: &str) -> Option<String> {
    journal
        .lines()
        .rev()
        .filter(|line| line.contains(named))
        .find_map(|line| {
            // A denied pod never starts, because the kubelet does not retry it.
            if let Some((_, why)) = line
                .split_once("\"Pod admission denied\"")
                .and_then(|(_, rest)| rest.split_once(" reason="))
            {
                return Some(format!("Pod admission denied: {why}"));
            }
            let at = [
                "ErrImagePull:",
                "ImagePullBackOff:",
                "ErrImageNeverPull:",
                "InvalidImageName:",
            ]
            .iter()
            .filter_map(|reason| line.find(reason))
            .min()?;
            let words = line[at..].split(" pod=\"").next().unwrap_or_default();
            let words = words.replace('\\', "");
            let words = words.trim_end();
            Some(words.strip_suffix('"').unwrap_or(words).to_owned())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kubelets_words_on_an_image_of_this_pod_are_found() {
        let journal = r#"
E1122 00:29:52.123456     812 pod_workers.go:1324] "Error syncing pod, skipping" err="failed to \"StartContainer\" for \"kube-apiserver\" with ErrImagePull: \"failed to resolve reference: not found\"" pod="kube-system/kube-apiserver-node" podUID="7"
E1122 00:29:53.123456     812 pod_workers.go:1324] "Error syncing pod, skipping" err="failed to \"StartContainer\" for \"berth\" with ImagePullBackOff: \"Back-off\"" pod="kube-system/berth-kube-apiserver-node" podUID="8"
I1122 00:29:53.912713     812 kubelet.go:2357] "Pod admission denied" podUID="9" pod="kube-system/berth-kube-apiserver-full" reason="UnexpectedAdmissionError" message="preemption: no set of running pods found to reclaim resources: [(res: cpu, q: 2550), ]"
I1122 00:29:54.123456     812 kubelet.go:1] "SyncLoop ADD" pods=["kube-system/etcd-node"]
"#;
        let of = |named| find_message(journal, named);
        let named = r#"pod="kube-system/kube-apiserver-node""#;
        assert_eq!(
            of(named).as_deref(),
            Some(r#"ErrImagePull: "failed to resolve reference: not found""#)
        );
        assert_eq!(
            of(r#"podUID="8""#).as_deref(),
            Some(r#"ImagePullBackOff: "Back-off""#)
        );
        assert_eq!(of(r#"pod="kube-system/etcd-node""#), None);
        let denied = of(r#"podUID="9""#);
        assert_eq!(
            denied.as_deref(),
            Some(
                r#"Pod admission denied: "UnexpectedAdmissionError" message="preemption: no set of running pods found to reclaim resources: [(res: cpu, q: 2550), ]""#
            )
        );
        let other = journal.replace("kube-apiserver-node", "kube-apiserver-proxy-x7k2p");
        assert_eq!(find_message(&other, named), None);
    }

    #[test]
    fn the_kubelet_knows_the_nodes_name() {
        let proc = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = proc.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sys/kernel/hostname", "Node-1\n");
        write("7/comm", "other\n");
        write("7/cmdline", "other\0--hostname-override=no\0");
        assert_eq!(read_node_name(proc.path()).as_deref(), Some("node-1"));
        write("8/comm", "kubelet\n");
        for (arguments, name) in [
            ("kubelet\0--v=2\0", "node-1"),
            (
                "kubelet\0--hostname-override=A.example\0--v=2\0",
                "a.example",
            ),
            ("kubelet\0--hostname-override\0b\0", "b"),
        ] {
            write("8/cmdline", arguments);
            assert_eq!(read_node_name(proc.path()).as_deref(), Some(name));
        }
    }
}
