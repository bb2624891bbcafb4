//! Every kill of an upgrade that is judged.

use super::*;
use crate::kills::{Scene, every_kill};

const NEW: &str = "v1.36.3-judged";

/// Time between two requests. A verdict needs 100 requests, which take most of the time of a run.
const PERIOD: Duration = Duration::from_millis(15);

#[test]
#[ignore = "takes minutes: run by .ci/run kills"]
fn upgrade() {
    every_kill(2, 550, || {
        let judged = Judged::new();
        let manifest = judged.node.new_manifest(NEW);
        let texts = [OLD, NEW].map(|tag| judged.node.manifest(tag));
        Upgraded {
            texts,
            load: Some(judged.load_each(PERIOD)),
            judged,
            manifest,
        }
    });
}

struct Upgraded {
    /// The old and the new manifest.
    texts: [String; 2],
    /// `None` while the node is down.
    load: Option<Load>,
    judged: Judged,
    manifest: PathBuf,
}

impl Scene for Upgraded {
    const AT_ONCE: usize = 6;

    /// An upgrade that goes back ends with a failure first.
    const AGAIN: usize = 2;

    const MISSED: usize = 5;

    fn root(&self) -> PathBuf {
        self.judged.node.temp.path().to_owned()
    }

    fn memory(&self) -> Vec<PathBuf> {
        vec![self.judged.node.path("run")]
    }

    fn directories(&self) -> Vec<PathBuf> {
        vec![self.judged.node.directory(), self.judged.node.path("kept")]
    }

    fn command(&self) -> Command {
        let mut upgrade =
            self.judged
                .resume(&["--canary", "50%", "--canary-time", "1s", "--speedup", "80"]);
        upgrade.env("BERTH_SETTLE", "100ms").arg(&self.manifest);
        upgrade
    }

    fn is_whole(&mut self) {
        let node = &self.judged.node;
        let files = read_files(&node.directory());
        assert!(!files.is_empty(), "no manifest is left");
        for (name, text) in files {
            // The temporary pod has names and a UID of its own.
            let plain = text
                .replace(": berth-kube-apiserver", ": kube-apiserver")
                .replace("    - --emulated-version=1.35\n", "");
            let is_of_both = |line: &&str| !line.starts_with("  uid: ");
            let is_whole = |known: &String| plain.lines().filter(is_of_both).eq(known.lines());
            assert!(
                self.texts.iter().any(is_whole) && text.ends_with('\n'),
                "half a manifest of {name}: {text}"
            );
        }
        if node.path("kept").exists() {
            for (tag, text) in node.befores() {
                let known = &self.texts[usize::from(tag == NEW)];
                assert_eq!(&text, known, "the kept manifest of {tag}");
            }
        }
    }

    fn is_done(&mut self) {
        self.judged.node.is_whole(NEW);
        if let Some(load) = self.load.take() {
            load.end_without_loss();
            self.load = Some(self.judged.load_each(PERIOD));
        }
    }

    fn reboots(&mut self) {
        drop(self.load.take());
        let node = &self.judged.node;
        self.judged.kubelet = None;
        let _ = fs::remove_dir_all(node.path("run"));
        self.judged.kubelet = Some(Kubelet::start(node));
        let ca = self.judged.cluster.ca();
        eventually("an answer", || {
            let stream = std::net::TcpStream::connect(node.listen).ok()?;
            std::panic::catch_unwind(|| tls::request_page(&ca, stream, "/api/v1/pods")).ok()
        });
        self.load = Some(self.judged.load_each(PERIOD));
    }
}
