//! Reports as a rehearsal would make them, from a few numbers.

use berth_rehearse::data::*;
use berth_rehearse::report::format;
use std::collections::BTreeMap;

const STEP_MS: u64 = 100;

/// What a run was like.
pub(crate) struct Model {
    pub(crate) via: Via,
    pub(crate) load_ms: u64,
    pub(crate) watches: usize,
    /// From when to when both serve, and when old is gone.
    pub(crate) handover: (u64, u64),
    /// Losses a step from this moment on: kind, count, number of steps.
    pub(crate) losses: Vec<(u64, &'static str, u64, usize)>,
    /// Of this many watches one is cut, not ended by its instance.
    pub(crate) cut_one_of: Option<usize>,
}

impl Model {
    pub(crate) fn clean(via: Via) -> Self {
        Self { via, load_ms: 11_930, watches: 8, handover: (4_800, 8_040), losses: Vec::new(), cut_one_of: None }
    }

    pub(crate) fn lossy(via: Via) -> Self {
        let losses =
            vec![(5_200, "tls", 1, 4), (8_000, "reset", 9, 3), (8_100, "refused", 4, 5), (8_200, "stream_ended", 3, 1)];
        Self { losses, cut_one_of: Some(3), ..Self::clean(via) }
    }
}

/// Numbers that look like noise and are the same each time.
fn noise(index: usize, salt: u64) -> f64 {
    let mut x = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 31;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 29;
    (x % 10_000) as f64 / 10_000.0
}

pub(crate) fn run(model: &Model) -> Run {
    let steps = (model.load_ms / STEP_MS) as usize + 1;
    let timeline = timeline(model, steps);
    let watches: Vec<Watch> = (0..model.watches).map(|index| watch(model, index)).collect();
    let sums = |counts: &BTreeMap<String, Vec<u64>>| counts.values().flatten().sum::<u64>();
    let text = |kind: &str| match kind {
        "reset" => "connections reset",
        "refused" => "connections refused",
        "stream_ended" => "streams cut",
        "tls" => "TLS errors",
        _ => "other losses",
    };
    let tally = |(kind, counts): (&String, &Vec<u64>)| Tally {
        kind: kind.clone(),
        text: text(kind).into(),
        count: counts.iter().sum(),
    };
    let mut lost: Vec<Tally> = timeline.lost.iter().map(tally).collect();
    let missed = watches.iter().map(|w| w.missed).sum();
    if missed > 0 {
        lost.push(Tally { kind: "event_missed".into(), text: "watch events missed".into(), count: missed });
    }
    let requests = sums(&timeline.answered) + sums(&timeline.lost);
    let longest = |line: &[Option<f64>]| line.iter().flatten().copied().fold(0.0, f64::max);
    let held = lost.is_empty();
    let share = |name: &str| timeline.answered[name].iter().sum::<u64>() * 100 / 187;
    let ran = Ran {
        load_ms: model.load_ms,
        simulated: true,
        instances: ["old", "new"].map(|name| Instance { name: name.into(), version: version(name).into() }).into(),
        verdict: Verdict {
            held,
            inconclusive: false,
            too_busy: false,
            summary: if held {
                format!(
                    "All of {} requests were answered, {} of them on a new connection; the longest took {}. {} watches saw every write once.",
                    format::count(requests),
                    format::count(model.load_ms / 10),
                    format::wait(longest(&timeline.wait_max_ms)),
                    watches.len()
                )
            } else {
                let kinds: Vec<String> = lost.iter().map(|t| format!("{} {}", t.count, t.text)).collect();
                format!(
                    "Of {} requests, {} of them on a new connection: {}.",
                    format::count(requests),
                    format::count(model.load_ms / 10),
                    kinds.join(", ")
                )
            },
            examples: lost.iter().map(|t| format!("new-{}: {} after 1.2ms", 700 + t.count, t.kind)).collect(),
            lost,
            apart: apart(timeline.ended_by_instance.iter().sum()),
            control: (model.via == Via::Berth).then(|| apart(16)),
            objections: Vec::new(),
            notes: Vec::new(),
        },
        promises: Vec::new(),
        figures: Figures {
            requests,
            new_connections: model.load_ms / 10,
            new_connections_by_instance: ["old", "new"].map(|name| (name.to_owned(), share(name))).into(),
            wait_p50_ms: 4.1,
            wait_p99_ms: 61.0,
            wait_max_ms: longest(&timeline.wait_max_ms),
            longest_silence_ms: if held { 24.0 } else { 1_240.0 },
            silent_s: u64::from(!held),
            watch_events: watches.iter().map(|w| w.events).sum(),
            x509_errors: timeline.lost.get("tls").map_or(0, |counts| counts.iter().sum()),
            relists: 0,
            expired: 0,
            slow_reads: 0,
            logged_x509_errors: None,
            endpoint_gap_ms: None,
        },
        marks: marks(model),
        timeline,
        watches,
        informers: Vec::new(),
        control_streams: BTreeMap::new(),
        endpoint_gaps: None,
        storm: None,
        gate: None,
        direct: None,
    };
    Run { via: model.via, topology: "sidecar".into(), outcome: RunOutcome::Ran(Box::new(ran)) }
}

pub(crate) fn skipped(via: Via) -> Run {
    let reason = "there is no haproxy in PATH: install it, or leave haproxy out of --compare".to_owned();
    Run { via, topology: "sidecar".into(), outcome: RunOutcome::Skipped(reason) }
}

pub(crate) fn report(runs: Vec<Run>) -> Report {
    let argv =
        ["berth", "rehearse", "--old", "kube-apiserver-1.33 --v=2", "--rate=100", "--seed=7", "--report=report.html"];
    Report {
        version: VERSION,
        berth_version: "0.1.0".into(),
        made_at: "2026-05-04T03:02:01Z".into(),
        command: Command::new(argv.map(String::from).into()),
        seed: Some(7),
        environment: Environment {
            kernel: "Linux 6.12.8 x86_64".into(),
            cpu_model: "AMD EPYC 7B13".into(),
            cpus: 4,
            memory_bytes: 16 << 30,
            open_files_limit: 1_048_576,
            sysctls: [
                ("net.ipv4.tcp_migrate_req", "0"),
                ("net.ipv4.ip_local_port_range", "32768 60999"),
                ("net.core.somaxconn", "4096"),
            ]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
            programs: ["old", "new"].map(|role| Program { role: role.into(), version: version(role).into() }).into(),
        },
        aborted: None,
        runs,
    }
}

pub(crate) fn promises() -> Vec<Promise> {
    let promise = |fault: &str, from_ms, promise: &str, held, what: &str| Promise {
        fault: fault.into(),
        instance: "new".into(),
        from_ms,
        to_ms: Some(from_ms + 1_200),
        promise: promise.into(),
        held,
        what_happened: what.split("; ").map(String::from).collect(),
        allowed: Vec::new(),
    };
    let never = "the new version never gets a connection, the old one serves on, nothing is lost, and it is said why";
    let kill = "only what the shim had accepted is lost; no connection is refused, and new ones go to the sibling";
    let allowed = vec![Tally { kind: "reset".into(), text: "connections reset".into(), count: 3 }];
    vec![
        promise("never-ready", 1_000, never, true, "it answered no request; berth status said why"),
        Promise {
            allowed,
            ..promise(
                "kill-shim",
                6_000,
                kill,
                false,
                "broken: no new connection was answered after it; all as before after 1.2s",
            )
        },
    ]
}

/// A storm when old is gone: all wait at once, and are let in one after the other.
pub(crate) fn storm(run: &mut Run) {
    let RunOutcome::Ran(ran) = &mut run.outcome else { return };
    let at = ran.marks.iter().find(|mark| mark.what == MarkKind::Exited).unwrap().at_ms + 10;
    let (steps, clients) = (ran.timeline.wait_max_ms.len(), 2_000);
    let waiting = |left: u64| {
        (0..steps as u64).map(move |step| match (step * STEP_MS).checked_sub(at as u64) {
            Some(since) => left.saturating_sub(since),
            None => 0,
        })
    };
    let others: Vec<u64> = waiting(clients).collect();
    let first = waiting(40).collect();
    ran.gate = Some(Gate {
        waited: [("first", 38), ("others", 1_987), ("late", 0)].map(|(class, count)| (class.to_owned(), count)).into(),
        dropped: [("full", 0), ("expired", 0), ("left", 13)].map(|(why, count)| (why.to_owned(), count)).into(),
        most_waiting: others.iter().copied().max().unwrap(),
        openings: others.iter().map(|waiting| if *waiting > 0 { 8 } else { 1 }).collect(),
        limit: (0..steps).map(|step| 4 + step as u64 / 20).collect(),
        waiting: [("first", first), ("others", others), ("late", vec![0; steps])]
            .map(|(class, counts)| (class.to_owned(), counts))
            .into(),
    });
    let all = Some(clients as f64);
    let failed = vec![Tally { kind: "reset".into(), text: "connections reset".into(), count: 3 }];
    ran.storm = Some(Storm {
        from_ms: at,
        clients,
        served: clients,
        half_served_ms: Some(980.0),
        all_served_ms: all,
        gave_up: 13,
        failed,
    });
    ran.promises.push(Promise {
        fault: "storm".into(),
        instance: "storm".into(),
        from_ms: at,
        to_ms: Some(at + clients as i64),
        promise: "each of its clients is served, if it retries until it is".into(),
        held: true,
        what_happened: vec!["all 2000 were served within 2.0s".into()],
        allowed: Vec::new(),
    });
    ran.marks.push(Mark { at_ms: at, instance: "storm".into(), what: MarkKind::Fault, text: "storm".into() });
    ran.marks.sort_by_key(|mark| mark.at_ms);
}

fn version(name: &str) -> &'static str {
    if name == "old" { "v1.33.4" } else { "v1.34.1" }
}

fn apart(count: u64) -> Vec<Tally> {
    vec![
        Tally { kind: "ended_by_instance".into(), text: "streams that their instance ended".into(), count },
        Tally { kind: "rejected".into(), text: "requests that their instance rejected".into(), count: 0 },
    ]
}

fn timeline(model: &Model, steps: usize) -> Timeline {
    let (together, gone) = (model.handover.0 / STEP_MS, model.handover.1 / STEP_MS);
    let mut t = Timeline {
        step_ms: STEP_MS,
        allowed: vec![0; steps],
        ended_by_instance: vec![0; steps],
        ..Timeline::default()
    };
    for name in ["old", "new"] {
        t.answered.insert(name.into(), vec![0; steps]);
        t.open_connections.insert(name.into(), vec![0; steps]);
    }
    for (from, kind, count, many) in &model.losses {
        let losses = t.lost.entry((*kind).into()).or_insert_with(|| vec![0; steps]);
        let from = (from / STEP_MS) as usize;
        losses.iter_mut().skip(from).take(*many).for_each(|loss| *loss += count);
    }
    let streams = model.watches as u64 + 8;
    for step in 0..steps {
        let lost: u64 = t.lost.values().map(|losses| losses[step]).sum();
        let full = if step + 1 == steps { model.load_ms % STEP_MS } else { STEP_MS };
        let all = ((16.0 + 4.0 * noise(step, 1)) * full as f64 / 100.0) as u64;
        let all = all.saturating_sub(lost);
        let on_old = match step as u64 {
            step if step < together => all,
            step if step < gone => (all as f64 * (0.62 + 0.1 * noise(step as usize, 2))) as u64,
            _ => 0,
        };
        t.answered.get_mut("old").unwrap()[step] = on_old;
        t.answered.get_mut("new").unwrap()[step] = all - on_old;
        let left = if (step as u64) < gone { streams } else { 0 };
        t.open_connections.get_mut("old").unwrap()[step] = left;
        t.open_connections.get_mut("new").unwrap()[step] = streams - left;
        let slow = if step as u64 == gone {
            30.0
        } else if step as u64 == together - 4 {
            9.0
        } else {
            1.0
        };
        let p50 = 2.2 + 2.5 * noise(step, 3);
        let p99 = p50 * (2.0 + 2.0 * noise(step, 4)) * slow;
        let [p50, p99, longest] = [p50, p99, p99 * (1.0 + 0.6 * noise(step, 5))].map(|ms| (ms * 1e3).round() / 1e3);
        t.wait_p50_ms.push(Some(p50));
        t.wait_p99_ms.push(Some(p99));
        t.wait_max_ms.push(Some(longest));
    }
    t.ended_by_instance[gone as usize] = streams;
    t
}

fn watch(model: &Model, index: usize) -> Watch {
    let end = (model.handover.1 + (noise(index, 6) * 40.0) as u64) as i64;
    let cut = model.cut_one_of.is_some_and(|one_of| index % one_of == 1);
    let again = end + if cut { 1_000 + (noise(index, 7) * 300.0) as i64 } else { 4 + (noise(index, 7) * 20.0) as i64 };
    Watch {
        id: format!("watch-{index}"),
        events: 119 - if cut { 9 } else { 0 },
        missed: if cut { 9 } else { 0 },
        duplicated: 0,
        relists: 0,
        expired: 0,
        segments: vec![
            Segment { from_ms: 12, to_ms: end, instance: "old".into() },
            Segment { from_ms: again, to_ms: model.load_ms as i64, instance: "new".into() },
        ],
        gaps: vec![Gap {
            from_ms: end,
            to_ms: again,
            by_instance: !cut,
            allowed: false,
            reason: if cut { "reset" } else { "closed" }.into(),
        }],
        flaws: if cut { vec![Flaw { at_ms: again, missed: 9, duplicated: 0 }] } else { Vec::new() },
    }
}

fn marks(model: &Model) -> Vec<Mark> {
    let (joined, gone) = (model.handover.0 as i64, model.handover.1 as i64);
    let end = model.load_ms as i64;
    let mark = |(at_ms, instance, what): (i64, &str, MarkKind)| Mark {
        at_ms,
        instance: instance.into(),
        what,
        text: if what == MarkKind::Exited { "exit status: 0".into() } else { String::new() },
    };
    [
        (-1_130, "old", MarkKind::Started),
        (-90, "old", MarkKind::Ready),
        (-10, "old", MarkKind::Joined),
        (joined - 1_790, "new", MarkKind::Started),
        (joined - 110, "new", MarkKind::Ready),
        (joined, "new", MarkKind::Joined),
        (gone - 40, "old", MarkKind::Sigterm),
        (gone - 35, "old", MarkKind::Left),
        (gone + 18, "old", MarkKind::Drained),
        (gone + 22, "old", MarkKind::Exited),
        (end + 20, "new", MarkKind::Sigterm),
        (end + 30, "new", MarkKind::Exited),
    ]
    .map(mark)
    .into()
}

pub(crate) fn informer() -> Informer {
    Informer {
        id: "informer-0".into(),
        written: 1_190,
        held: 1_190,
        missing: 0,
        stale: 0,
        duplicated: 0,
        relists: 1,
        expired: 1,
    }
}
