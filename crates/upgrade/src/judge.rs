//! Judges a new instance beside the old one. Asks both instances for their metrics, reports the new
//! instance's share of the clients, and returns the result. [`berth_judge`] decides the share and
//! the verdict.
//!
//! Nothing is saved: an upgrade that was killed meanwhile judges from the beginning.

pub mod instance;
pub mod options;
mod share;

use super::machine::JudgeResult;
use super::observer::{InstanceDetails, NodeDetails, NodeObserver};
use super::progress::{Progress, format_seconds};
use berth_cluster::Client;
pub use berth_judge::canary::{ALL, INTERVAL, format_percent, parse_shares};
use berth_judge::metrics::find_samples;
use berth_judge::signals::Subject;
use berth_judge::verdict::{Judgement, Row};
use berth_judge::{Canary, Judge, Wanted};
pub use berth_judge::{Outcome, Plan, Signal, Verdict};
use berth_manifest::report::Refusal;
use berth_node::instance_id::InstanceId;
use instance::{Instance, InstancePair, MOST_PATIENCE};
pub use options::{JudgeOptions, Undecided};
pub use share::Shares;
use share::check_shares;
use std::path::Path;
use std::time::{Duration, Instant};

/// The release that an instance must emulate (`wanted`) or must not emulate.
#[derive(Debug, Clone)]
pub struct Emulation {
    pub release: String,
    pub wanted: bool,
}

pub struct Judging {
    options: JudgeOptions,
    canary: Canary,
    judge: Judge,
    both: InstancePair,
    /// `None` once the instance's emulation was checked.
    emulation: Option<Emulation>,
    due: Instant,
    /// When clients could first reach the new instance, counted from the start of the upgrade's
    /// judging.
    clients: Option<Duration>,
}

impl Judging {
    pub fn new(options: &JudgeOptions, client: &Client, emulation: Option<Emulation>) -> Self {
        Self {
            canary: Canary::new(&options.plan),
            judge: Judge::new(options.accepted.iter().copied()),
            options: options.clone(),
            both: InstancePair::new(client),
            emulation,
            due: Instant::now(),
            clients: None,
        }
    }

    /// The new instance's share of the clients, in thousandths.
    pub fn permille(&self) -> u16 {
        self.canary.permille()
    }

    pub fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Takes a sample of both instances. Returns the result once the judging is over.
    pub async fn sample_and_judge(
        &mut self,
        both: [&InstanceDetails; 2],
        progress: &Progress,
    ) -> Option<JudgeResult> {
        self.due = Instant::now() + self.options.interval;
        let [old, new] = self.both.sample(both).await;
        let wrong = new
            .page
            .as_deref()
            .and_then(|page| self.find_wrong_emulation(page, progress));
        if let Some(why) = wrong {
            progress.print_line(&format!("     {why}"));
            return Some(JudgeResult::GoBack(why));
        }
        let now = progress.elapsed();
        self.judge.observe(now, old.sample, new.sample);
        let verdict = self.judge.verdict();
        match self.canary.next(now, verdict.outcome) {
            Wanted::End(outcome) => {
                return Some(self.end_judging(outcome, &verdict, now, progress));
            }
            Wanted::Share {
                permille,
                begins: true,
            } => self.begin_step(permille, &verdict, now, progress),
            Wanted::Share { .. } => {}
        }
        // While the new instance has no clients, berth sends requests to it alone, to warm it up.
        // Later berth sends the same requests to the old instance, too.
        let (warms, lacks) = (self.permille() == 0, verdict.outcome == Outcome::Undecided);
        if let Some(page) = old
            .page
            .filter(|_| warms || (self.options.requests && lacks))
        {
            self.both.send_requests(&page, !warms).await;
        }
        None
    }

    fn begin_step(&mut self, permille: u16, verdict: &Verdict, now: Duration, progress: &Progress) {
        let Plan {
            warm, step, bake, ..
        } = &self.options.plan;
        if permille == 0 {
            let warm = humantime::format_duration(*warm);
            return progress.print_line(&format!(
                "     only berth sends requests to the new instance, and measures the usual behaviour of the old instance ({warm})"
            ));
        }
        if self.clients.is_some() {
            progress.print_detail(&format!("until now: {}", summarize_verdict(verdict)));
        }
        self.clients.get_or_insert(now);
        self.judge.begin_step();
        let (part, time) = match permille {
            ALL => ("all".to_owned(), bake),
            part => (format!("{} of", format_percent(part)), step),
        };
        progress.print_line(&format!(
            "     {part} new connections are for the new instance ({})",
            humantime::format_duration(*time)
        ));
    }

    fn end_judging(
        &self,
        outcome: Outcome,
        verdict: &Verdict,
        now: Duration,
        progress: &Progress,
    ) -> JudgeResult {
        match outcome {
            Outcome::Good => {
                progress.print_line(&format!("     {}", summarize_verdict(verdict)));
                JudgeResult::GoOn
            }
            Outcome::Bad => {
                let when = self.clients.map_or(
                    "before a client came to the new instance".into(),
                    |clients| {
                        format!(
                            "{} after the first clients came to the new instance",
                            format_seconds(now.saturating_sub(clients))
                        )
                    },
                );
                progress.print_line(&format!("the verdict is bad, {when}:"));
                if let (all @ 1.., met @ 1..) = self.judge.requests_that_met_the_fault() {
                    progress.print_detail(&format!(
                        "{met} of the {all} requests to both instances since the first step were affected"
                    ));
                }
                verdict
                    .to_string()
                    .lines()
                    .for_each(|line| progress.print_detail(line));
                progress.print_detail(
                    "docs/upgrade.md explains each signal, and how to accept a signal (--accept)",
                );
                JudgeResult::GoBack(summarize_verdict(verdict))
            }
            Outcome::Undecided => {
                let mut why = format!(
                    "there was not enough data to judge: {}",
                    verdict.lacking.join("; ")
                );
                if let Some(against) = &verdict.against {
                    why = format!("{why}; {against}, so the upgrade does not go on");
                }
                progress.print_line(&format!("     {why}"));
                self.options
                    .undecided
                    .into_judge_result(why, verdict.against.is_some())
            }
        }
    }

    /// Returns why an instance's emulation is wrong, according to its own metrics.
    fn find_wrong_emulation(&mut self, page: &str, progress: &Progress) -> Option<String> {
        let Emulation { release, wanted } = self.emulation.take()?;
        let info = find_samples(page, |name| name == "version_info").next();
        let [binary, emulation] =
            ["binary", "emulation"].map(|label| info.as_ref().map_or("", |info| info.label(label)));
        if emulation.is_empty() {
            progress.print_detail(
                "the new instance's metrics do not say which release this instance emulates",
            );
            return None;
        }
        progress.print_detail(&format!("kube-apiserver {binary} behaves as {emulation}"));
        let should = if wanted { "" } else { " not" };
        let wrong = (emulation == release) != wanted;
        wrong.then(|| {
            format!(
                "the new instance should{should} behave as {release}, and reports that it behaves as {emulation}"
            )
        })
    }
}

/// Checks that the serving instance can be judged, before any change. The new instance's shim is
/// checked when it runs.
///
/// # Errors
/// The reason and the fix.
pub async fn check_judge(
    run_dir: &Path,
    client: Option<&Client>,
    temporary: &InstanceId,
) -> Result<(), Refusal> {
    let refused = |what: String| Err(Refusal::unavailable(&format!("--judge: {what}")));
    let Some(client) = client else {
        return refused(
            "both instances are asked for their metrics as an administrator: give --kubeconfig"
                .into(),
        );
    };
    let seen = NodeObserver::new(run_dir).sample_instances(temporary).await;
    let (_, NodeDetails { canonical, .. }) = seen.map_err(|error| Refusal::unavailable(&error))?;
    if let Err(why) = check_shares(&canonical, temporary).await {
        return refused(format!(
            "the shim of the serving instance cannot give a share of the clients to another instance ({why}): each instance \
             needs a shim of its own, of this version of berth ({}); `berth inject` adds the shim to the manifest, and `berth upgrade` \
             with that manifest and without --judge starts the shim",
            berth_node::VERSION
        ));
    }
    let Some(address) = canonical.address else {
        return refused("the address of the serving instance is not known".into());
    };
    match Instance::new(client)
        .fetch_metrics_page(address, MOST_PATIENCE)
        .await
    {
        Ok(_) => Ok(()),
        Err(error) => refused(format!(
            "the serving instance at {address} does not give its metrics: {error}: let the user of --kubeconfig read \
             /metrics, /api/ and /apis/, and let the new manifest's --probe-ca and --probe-server-name fit the certificate of the instance"
        )),
    }
}

/// Summarizes a verdict in a line.
fn summarize_verdict(verdict: &Verdict) -> String {
    let bad = verdict
        .rows
        .iter()
        .filter(|row| row.judgement == Judgement::Bad);
    let bad: Vec<_> = bad
        .map(|row| format!("{} ({})", row.code, row.subject))
        .collect();
    let all =
        |row: &&Row| row.code == Signal::Errors && row.subject == Subject::default().to_string();
    let compared = verdict.rows.iter().find(all).map_or(0, |row| row.compared);
    match verdict.outcome {
        Outcome::Bad => format!("the verdict is bad: {}", bad.join(", ")),
        Outcome::Good => {
            format!(
                "good: {compared} requests to the new instance did as well as requests to the old instance"
            )
        }
        Outcome::Undecided => format!("not enough to judge yet: {}", verdict.lacking.join("; ")),
    }
}
