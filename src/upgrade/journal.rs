//! Why the kubelet cannot start a pod, from its journal: while an apiserver's image is missing there is nobody else to ask.

use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::process::Command;

/// Longest time that journalctl may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Lines of the journal that are looked through; the kubelet says it again every few seconds.
const LINES: &str = "500";

/// What the kubelet says of an image of this static pod (`NAMESPACE/NAME`, to which it adds the node's name) that it
/// cannot get, since then. None also if it cannot be asked.
pub async fn image_trouble(pod: &str, since: SystemTime) -> Option<String> {
    let since = since.duration_since(UNIX_EPOCH).ok()?.as_secs();
    let mut command = Command::new("journalctl");
    command.args(["-u", "kubelet", "-o", "cat", "--no-pager", "-n", LINES, &format!("--since=@{since}")]);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(PATIENCE, output).await.ok()?.ok()?;
    find(&String::from_utf8_lossy(&output.stdout), pod)
}

/// The kubelet's own words: the reason and what follows it.
fn find(journal: &str, pod: &str) -> Option<String> {
    let named = format!("pod=\"{pod}-");
    journal.lines().rev().filter(|line| line.contains(&named)).find_map(|line| {
        let at = ["ErrImagePull:", "ImagePullBackOff:", "ErrImageNeverPull:", "InvalidImageName:"]
            .iter()
            .filter_map(|reason| line.find(reason))
            .min()?;
        let words = line[at..].split(&named).next().unwrap_or_default();
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
I1122 00:29:54.123456     812 kubelet.go:1] "SyncLoop ADD" pods=["kube-system/etcd-node"]
"#;
        let of = |pod| find(journal, pod);
        assert_eq!(
            of("kube-system/kube-apiserver").as_deref(),
            Some(r#"ErrImagePull: "failed to resolve reference: not found""#)
        );
        assert_eq!(of("kube-system/berth-kube-apiserver").as_deref(), Some(r#"ImagePullBackOff: "Back-off""#));
        assert_eq!(of("kube-system/etcd"), None);
    }
}
