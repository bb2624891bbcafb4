//! `--judge`: what COMMAND put in place of the node's own kube-apiserver, compared with the temporary one, which is as that was.
//!
//! It looks and reports, in the process that runs COMMAND; nothing is steered by what it finds, since the files are COMMAND's. While the bridge
//! waits for the node's own to settle, new connections go to that, and the temporary one has those that it had: both serve. What is usual
//! is known from the temporary one's life, which saw the node's clients while COMMAND ran.

use super::plan::own_source;
use berth_cluster::Client;
use berth_judge::{Judge, Sample, Signal, Verdict};
use berth_node::ipc::bridge::{BridgeStatus, OwnStatus};
use berth_upgrade::judge::instance::Both;
use berth_upgrade::observer::InstanceDetails;
use std::time::{Duration, Instant};

pub use berth_upgrade::judge::INTERVAL;

/// Samples in which berth alone asks for what is used, so that the first clients do not meet a cold instance.
const WARMED: u32 = 5;

pub struct BridgeJudge {
    client: Client,
    accepted: Vec<Signal>,
    looking: Option<Looking>,
}

/// At one process of the node's own.
struct Looking {
    listener: Option<u64>,
    began: Instant,
    samples: u32,
    judge: Judge,
    both: Both,
}

impl BridgeJudge {
    /// Asks both as this client.
    pub fn new(client: Client, accepted: Vec<Signal>) -> Self {
        Self { client, accepted, looking: None }
    }

    /// Takes a sample of both, if both serve by the bridge's status.
    pub async fn look(&mut self, status: &BridgeStatus) {
        let OwnStatus { address: Some(own), listener, preferred: true, .. } = status.own else { return };
        let before = self.looking.take().filter(|looking| looking.listener == listener);
        let looking = self.looking.insert(before.unwrap_or_else(|| {
            // Past the steering, as the bridge's own probe.
            let client = self.client.clone().from(own_source(own.ip()));
            let (mut judge, both) = (Judge::new(self.accepted.iter().copied()), Both::new(&client));
            // So that all that the temporary one was asked for counts as asked for now.
            judge.observe(Duration::ZERO, Sample::new(Some("")), Sample::new(None));
            Looking { listener, began: Instant::now(), samples: 0, judge, both }
        }));
        let [old, new] =
            [status.temporary.address, Some(own)].map(|address| InstanceDetails { address, ..Default::default() });
        let [old, new] = looking.both.sample([&old, &new]).await;
        looking.judge.observe(looking.began.elapsed(), old.sample, new.sample);
        looking.samples += 1;
        match old.page {
            Some(page) if looking.samples < WARMED => looking.both.ask(&page, false).await,
            _ if looking.samples == WARMED => looking.judge.begin_step(),
            _ => {}
        }
    }

    /// On the process of the node's own that serves; none: there was no other one beside the temporary one.
    pub fn verdict(&self) -> Option<Verdict> {
        self.looking.as_ref().map(|looking| looking.judge.verdict())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_judge::Outcome;
    use berth_node::ipc::bridge::TemporaryStatus;
    use berth_testing::{Server, answer, authority, serve_as};
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

    /// The temporary one, whose clients are gone, and the node's own, which had ten more lists of pods each time that it is looked at.
    struct Instances {
        temporary: Server,
        own: Server,
        breaks: Arc<AtomicBool>,
        /// It does not serve `v1` any more.
        lacks: Arc<AtomicBool>,
    }

    impl Instances {
        async fn start() -> Self {
            let (ca, at) = (authority(), SocketAddr::from(([127, 0, 0, 1], 0)));
            let [breaks, lacks] = <[Arc<AtomicBool>; 2]>::default();
            let (broken, lacking, count) = (breaks.clone(), lacks.clone(), AtomicU32::new(0));
            let api = |request: &str, page: String| {
                let path = request.split([' ', '?']).nth(1).unwrap_or_default();
                match path {
                    "/metrics" => answer("200 OK", &page),
                    _ => answer("200 OK", r#"{"kind": "PodList", "apiVersion": "v1", "items": []}"#),
                }
            };
            let temporary = serve_as(&ca, at, "kubernetes", move |request| api(request, page(200, 500))).await;
            let own = serve_as(&ca, at, "kubernetes", move |request| {
                let more = if request.starts_with("GET /metrics") { 10 } else { 0 };
                let requests = count.fetch_add(more, Relaxed) + more;
                if lacking.load(Relaxed) && request.starts_with("GET /api/v1 ") {
                    return answer("404 Not Found", "{}");
                }
                api(request, page(if broken.load(Relaxed) { 500 } else { 200 }, requests))
            });
            Self { temporary, own: own.await, breaks, lacks }
        }

        fn judge(&self, accepted: &[Signal]) -> BridgeJudge {
            BridgeJudge::new(Client::new(&self.temporary.access).unwrap(), accepted.to_vec())
        }

        fn status(&self, listener: u64, preferred: bool) -> BridgeStatus {
            let [temporary, own] = [&self.temporary, &self.own]
                .map(|server| server.access.server.strip_prefix("https://").unwrap().parse().ok());
            BridgeStatus {
                temporary: TemporaryStatus { address: temporary, ..Default::default() },
                own: OwnStatus { address: own, listener: Some(listener), preferred, ..Default::default() },
                ..Default::default()
            }
        }
    }

    fn page(code: u32, requests: u32) -> String {
        let labels = r#"group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1""#;
        let bucket = |le| format!("apiserver_request_duration_seconds_bucket{{{labels},le=\"{le}\"}} {requests}\n");
        let [quick, all] = ["0.005", "+Inf"].map(bucket);
        format!(
            "apiserver_request_total{{code=\"{code}\",{labels}}} {requests}\n{quick}{all}process_start_time_seconds 1\n"
        )
    }

    #[tokio::test]
    async fn what_command_put_there_is_judged_by_what_was_there() {
        let instances = Instances::start().await;
        let mut judge = instances.judge(&[]);
        judge.look(&instances.status(1, false)).await;
        assert!(judge.verdict().is_none(), "nothing new serves");
        for _ in 0..3 * WARMED {
            judge.look(&instances.status(1, true)).await;
        }
        let verdict = judge.verdict().unwrap();
        assert_eq!(verdict.outcome, Outcome::Good, "{verdict}");
        let mut accepting = instances.judge(&[Signal::Errors]);
        instances.breaks.store(true, Relaxed);
        // Another process is judged anew.
        for _ in 0..4 * WARMED {
            judge.look(&instances.status(2, true)).await;
            accepting.look(&instances.status(2, true)).await;
        }
        let verdict = judge.verdict().unwrap();
        assert_eq!(verdict.outcome, Outcome::Bad, "{verdict}");
        assert!(verdict.to_string().contains("LIST pods"), "{verdict}");
        assert_ne!(accepting.verdict().unwrap().outcome, Outcome::Bad);
        // What clients asked the temporary one for, and this one does not have.
        instances.breaks.store(false, Relaxed);
        instances.lacks.store(true, Relaxed);
        judge.look(&instances.status(3, true)).await;
        let verdict = judge.verdict().unwrap();
        assert!(verdict.outcome == Outcome::Bad && verdict.to_string().contains("missing-api "), "{verdict}");
    }
}
