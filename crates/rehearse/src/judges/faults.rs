//! What berth promises under faults, and what came of it.
//!
//! A loss is excused by a fault only if the promise names it: what was accepted before, ends at that
//! moment, and was on the one that was harmed. What is excused is counted under the fault.

use super::busy::Busy;
use super::{Case, Span, what_happened};
use crate::data::{Losses, MarkKind, Promise, Ran};
use crate::event::{Answer, Attempt, ConnectionKind};
use crate::fault::{Fault, Standby};
use crate::loss::Loss;
use crate::plan::LEASE;
use crate::record::{Injected, Record};
use crate::stamp::Stamp;
use std::time::Duration;

/// Checks every promise under a fault, in their order. Losses are added by their judge, as it excuses them.
pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    ran.promises = check(case.record, &case.span);
}

/// How long after a kill its clients may see it.
const NOTICE: Duration = Duration::from_secs(1);

/// What an answer may take beyond what is promised, on a busy machine.
const JITTER: Duration = Duration::from_secs(3);

/// How long after a fault a connection is surely none that was answered in part before it.
const AFTER: Duration = Duration::from_millis(500);

/// How long after the end of its lease a sibling may begin to accept from a shim that hangs.
const TAKE_OVER: Duration = Duration::from_secs(1);

fn check(record: &Record, span: &Span) -> Vec<Promise> {
    let (slack, busy) = (slack(record), Busy::of(record));
    let check = |injected| {
        let (broken, seen) = (Vec::new(), Vec::new());
        Check { record, injected, slack, busy: &busy, broken, seen }.run(span)
    };
    record.injected.iter().map(check).collect()
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Lost<'a> {
    pub(super) loss: Loss,
    /// When the request was due; none for the end of a stream.
    pub(super) due: Option<Stamp>,
    /// When the client saw it.
    pub(super) seen: Stamp,
    /// The instance that it was on, if that is known.
    pub(super) instance: Option<&'a str>,
}

/// The fault whose promise allows a loss, the last one if there are several: its place in [`Record::injected`].
pub(super) fn excuse(injected: &[Injected], lost: &Lost<'_>, slack: Duration) -> Option<usize> {
    injected.iter().rposition(|fault| allows(fault, lost, slack))
}

/// What everything may take longer than on an idle machine: as long as clients were behind their timetable, and as long as they
/// waited at most before the first fault.
pub(super) fn slack(record: &Record) -> Duration {
    let Some(first) = record.injected.iter().map(|injected| injected.at).min() else { return Duration::ZERO };
    let before = record.attempts.iter().filter(|a| a.done < first && matches!(a.answer, Answer::Good { .. }));
    record.behind + before.map(|a| a.done.since(a.due)).max().unwrap_or_default()
}

fn allows(injected: &Injected, lost: &Lost<'_>, slack: Duration) -> bool {
    let Injected { fault, at, .. } = injected;
    if lost.seen < *at {
        return false;
    }
    // What a bridge's process accepts while it is being killed is lost with it: no other process has a guard of its listener.
    let killed = injected.noticed.filter(|_| injected.standby == Standby::Bridge).unwrap_or(*at);
    let begun = lost.due.is_none_or(|due| due <= killed);
    match fault {
        Fault::KillShim | Fault::CrashAfterReady if injected.standby == Standby::Nothing => {
            // A request that was due before its end may fail a little later.
            let over = injected.over.unwrap_or(Stamp(u64::MAX));
            lost.seen <= over.plus(NOTICE + slack) && lost.due.is_none_or(|due| due <= over)
        }
        Fault::KillShim | Fault::CrashAfterReady | Fault::KillTemporary | Fault::KillOld => {
            let ended = matches!(lost.loss, Loss::Reset | Loss::Closed | Loss::StreamEnded);
            let there = lost.instance.is_none_or(|instance| instance == injected.instance);
            ended && there && begun && lost.seen <= killed.plus(NOTICE + slack)
        }
        _ => false,
    }
}

struct Check<'a> {
    record: &'a Record,
    injected: &'a Injected,
    /// See [`slack`].
    slack: Duration,
    busy: &'a Busy,
    broken: Vec<String>,
    seen: Vec<String>,
}

impl Check<'_> {
    fn run(mut self, span: &Span) -> Promise {
        let Injected { fault, instance, at, over, standby, seen, .. } = self.injected;
        self.seen.extend(seen.iter().cloned());
        if over.is_none() {
            self.broken.push("its end was not seen".into());
        }
        match fault {
            Fault::BadFlag | Fault::NeverReady => self.never_served(),
            Fault::CrashAfterReady | Fault::KillShim | Fault::KillTemporary | Fault::KillOld => self.comes_back(),
            Fault::Hang if *standby == Standby::Bridge => self.is_noticed(),
            Fault::Hang | Fault::HangShim | Fault::NoDescriptors | Fault::ClockJump => self.waits(),
        }
        Promise {
            fault: fault.to_string(),
            instance: instance.clone(),
            from_ms: span.ms(*at),
            to_ms: over.map(|over| span.ms(over)),
            promise: fault.promise(*standby).to_owned(),
            held: self.broken.is_empty(),
            what_happened: what_happened(self.broken, self.seen),
            allowed: Losses::new(),
        }
    }

    fn never_served(&mut self) {
        let name = &self.injected.instance;
        let by = |a: &&Attempt| matches!(&a.answer, Answer::Good { instance } | Answer::Bad { instance, .. } if instance == name);
        let answers = self.record.attempts.iter().filter(by).count();
        if answers > 0 {
            self.broken.push(format!("it answered {answers} requests"));
        }
        if self.record.moments.first(name, MarkKind::Joined).is_some() {
            self.broken.push("it joined".into());
        }
        if self.injected.seen.is_empty() {
            self.broken.push("no reason was seen why it does not get ready".into());
        }
    }

    /// New connections after its end are judged as all others are; here, whether there were any.
    fn comes_back(&mut self) {
        let Injected { at, over, .. } = *self.injected;
        let Some(over) = over else { return };
        let good = |a: &&Attempt| a.kind == ConnectionKind::New && matches!(a.answer, Answer::Good { .. });
        let first = self.record.attempts.iter().filter(good).filter(|a| a.due > at).map(|a| a.due).min();
        let failed =
            self.record.attempts.iter().filter(|a| a.kind == ConnectionKind::New && a.due > at && a.due <= over);
        let refused = failed.filter(|a| matches!(a.answer, Answer::Failed(_))).count();
        match first {
            Some(first) if refused > 0 => {
                self.seen.push(format!("the API was away for {:.2?}, {refused} new connections", first.since(at)));
            }
            Some(_) => self.seen.push("the API was never away".into()),
            None => self.broken.push("no new connection was answered after it".into()),
        }
        self.seen.push(format!("all as before after {:.1?}", over.since(at)));
    }

    /// No client is on the one that hangs.
    fn is_noticed(&mut self) {
        match self.injected.noticed {
            Some(noticed) => {
                self.seen.push(format!("the bridge noticed after {:.1?}", noticed.since(self.injected.at)));
            }
            None => self.broken.push("the bridge did not notice".into()),
        }
    }

    /// Which requests wait, and for how long.
    fn waits(&mut self) {
        let Injected { fault, at, over, standby, noticed, .. } = *self.injected;
        let Some(over) = over else { return };
        let meanwhile = || self.record.attempts.iter().filter(|a| a.due >= at && a.due < over);
        let longest = meanwhile().map(|a| a.done.since(a.due)).max().unwrap_or_default();
        self.seen.push(format!("it lasted {:.1?}; the longest wait meanwhile was {longest:.1?}", over.since(at)));
        let (jitter, hung) = (JITTER + self.slack, over.since(at));
        if fault == Fault::ClockJump {
            let waited = meanwhile().filter(|a| a.done > a.due.plus(jitter) && !self.busy.explains(a)).count();
            if waited > 0 {
                self.broken.push(format!("{waited} requests waited for more than {jitter:.1?}"));
            }
            return;
        }
        // A kept connection has its requests one after the other, and those that become due meanwhile.
        let kept = jitter + hung;
        let patience = |a: &Attempt| if a.kind == ConnectionKind::New { jitter } else { kept };
        let late = meanwhile().filter(|a| a.done > over.plus(patience(a)) && !self.busy.explains(a)).count();
        if late > 0 {
            self.broken.push(format!(
                "{late} requests waited on after it was over: new connections for more than {jitter:.1?}, kept ones for more than {kept:.1?}"
            ));
        }
        let passed = match fault {
            Fault::NoDescriptors => return,
            _ if standby == Standby::Nothing => return,
            Fault::Hang => noticed,
            _ => Some(at.plus(LEASE + TAKE_OVER + self.slack)),
        };
        let Some(passed) = passed else {
            self.broken.push("its shim did not notice".into());
            return;
        };
        if fault == Fault::Hang {
            self.moves(passed);
        }
        let after = || meanwhile().filter(|a| a.kind == ConnectionKind::New && a.due > passed);
        let longest = after().map(|a| a.done.since(a.due)).max();
        match longest {
            None if over.since(passed) < AFTER => {
                self.seen.push("it went on before another could be seen to serve".into());
            }
            None => self.broken.push("there was no new connection after it was noticed".into()),
            Some(longest) if longest > jitter => {
                self.broken.push(format!("a new connection waited {longest:.1?} although the other one served"));
            }
            Some(longest) => self.seen.push(format!(
                "from {:.1?} on, new connections went to the other one; the longest wait was {longest:.1?}",
                passed.since(at)
            )),
        }
    }

    /// The other instance answers requests that were due after the fault and before its shim noticed it.
    fn moves(&mut self, noticed: Stamp) {
        let Injected { instance, at, .. } = self.injected;
        let jitter = JITTER + self.slack;
        let waited =
            |a: &&Attempt| a.kind == ConnectionKind::New && a.due > at.plus(AFTER + self.slack) && a.due < noticed;
        let its_own = |a: &Attempt| matches!(&a.answer, Answer::Good { instance: by } if by == instance);
        let waited: Vec<_> = self.record.attempts.iter().filter(waited).filter(|a| a.done > noticed).collect();
        let stayed = waited.iter().filter(|a| its_own(a) || a.done > noticed.plus(jitter)).count();
        if stayed > 0 {
            self.broken.push(format!(
                "{stayed} new connections that waited were not answered by the other one within {jitter:?} after it was noticed"
            ));
        }
        if let Some(last) = waited.iter().map(|a| a.done).max() {
            let (count, last) = (waited.len(), last.since(noticed));
            self.seen
                .push(format!("{count} new connections waited when it was noticed, the last one for {last:.1?} more"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Failure;

    /// As it is on an idle machine.
    fn excuse(injected: &[Injected], lost: &Lost<'_>) -> Option<usize> {
        super::excuse(injected, lost, Duration::ZERO)
    }

    fn check(record: &Record) -> Vec<Promise> {
        super::check(record, &Span::of(record))
    }

    /// A moment, in milliseconds.
    fn ms(ms: u64) -> Stamp {
        Stamp(ms * 1_000_000)
    }

    fn injected(fault: Fault) -> Injected {
        Injected {
            fault,
            instance: "new".into(),
            standby: Standby::Sibling,
            at: ms(1_000),
            noticed: None,
            over: Some(ms(10_000)),
            seen: vec!["why".into()],
        }
    }

    fn attempt(due: u64, done: u64, good: bool) -> Attempt {
        let answer = if good { Answer::Good { instance: "new".into() } } else { Answer::Failed(Failure::Refused) };
        Attempt {
            kind: ConnectionKind::New,
            writes: false,
            stream: format!("new-{due}"),
            due: ms(due),
            done: ms(done),
            answer,
        }
    }

    fn lost(loss: Loss, due: Option<u64>, seen: u64) -> Lost<'static> {
        Lost { loss, due: due.map(ms), seen: ms(seen), instance: Some("new") }
    }

    /// What breaks the promise of a fault, in a record that `write` made.
    fn broken(fault: Injected, write: impl FnOnce(&mut Record)) -> Vec<String> {
        let mut record = Record { injected: vec![fault], ..Record::default() };
        write(&mut record);
        let promise = check(&record).remove(0);
        let broken = promise.what_happened.iter().filter_map(|line| line.strip_prefix("broken: "));
        let broken: Vec<String> = broken.map(str::to_owned).collect();
        assert_eq!(promise.held, broken.is_empty(), "{promise:?}");
        broken
    }

    #[test]
    fn a_kill_excuses_what_was_on_the_one_that_died() {
        for fault in [Fault::KillShim, Fault::CrashAfterReady] {
            let excused = |lost| excuse(&[injected(fault)], &lost).is_some();
            assert!(excused(lost(Loss::StreamEnded, None, 1_001)));
            assert!(excused(lost(Loss::Reset, Some(990), 1_001)));
            // Not accepted by any shim, begun later, seen before or much later, elsewhere.
            assert!(!excused(lost(Loss::Refused, Some(990), 1_001)));
            assert!(!excused(lost(Loss::Reset, Some(1_001), 1_010)));
            assert!(!excused(lost(Loss::StreamEnded, None, 999)));
            assert!(!excused(lost(Loss::StreamEnded, None, 2_500)));
            assert!(!excused(Lost { instance: Some("old"), ..lost(Loss::StreamEnded, None, 1_001) }));
        }
    }

    /// No other process holds the bridge's listener: what it accepted until it was gone is lost.
    #[test]
    fn a_kill_under_a_bridge_excuses_what_was_on_the_one_that_died_until_it_was_gone() {
        for fault in [Fault::KillShim, Fault::KillTemporary, Fault::KillOld] {
            let killed = Injected { standby: Standby::Bridge, noticed: Some(ms(1_020)), ..injected(fault) };
            let excused = |lost| excuse(std::slice::from_ref(&killed), &lost).is_some();
            assert!(excused(lost(Loss::StreamEnded, None, 1_001)));
            assert!(excused(lost(Loss::Reset, Some(1_015), 1_030)));
            assert!(!excused(lost(Loss::Reset, Some(1_021), 1_030)));
            assert!(!excused(lost(Loss::Refused, Some(1_015), 1_030)));
            assert!(!excused(Lost { instance: Some("old"), ..lost(Loss::StreamEnded, None, 1_001) }));
        }
        let crashed = Injected { standby: Standby::Bridge, noticed: Some(ms(1_020)), ..injected(Fault::BadFlag) };
        assert!(excuse(&[crashed], &lost(Loss::Reset, Some(1_015), 1_030)).is_none());
    }

    #[test]
    fn an_outage_excuses_until_its_end_and_no_longer() {
        for fault in [Fault::KillShim, Fault::CrashAfterReady] {
            let fault = Injected { standby: Standby::Nothing, ..injected(fault) };
            let excused = |lost| excuse(std::slice::from_ref(&fault), &lost).is_some();
            assert!(excused(lost(Loss::Refused, Some(9_990), 10_001)));
            assert!(excused(lost(Loss::StreamEnded, None, 1_000)));
            assert!(!excused(lost(Loss::Refused, Some(10_001), 10_002)));
            assert!(!excused(lost(Loss::Refused, Some(500), 999)));
        }
    }

    #[test]
    fn of_two_faults_the_later_one_is_to_blame() {
        let second = Injected { at: ms(12_000), over: None, ..injected(Fault::KillShim) };
        let cut = lost(Loss::StreamEnded, None, 12_500);
        assert_eq!(excuse(&[injected(Fault::KillShim), second], &cut), Some(1));
    }

    /// The clients were 300 ms behind their timetable, and waited for 200 ms before anything was done.
    #[test]
    fn on_a_busy_machine_all_may_take_as_much_longer_as_it_did_before() {
        let mut record = Record { behind: Duration::from_millis(300), ..Record::default() };
        record.injected = vec![injected(Fault::KillShim)];
        record.attempts = vec![attempt(500, 700, true), attempt(400, 999, false), attempt(990, 5_000, true)];
        let slack = slack(&record);
        assert_eq!(slack, Duration::from_millis(500));
        let cut = |seen| super::excuse(&record.injected, &lost(Loss::StreamEnded, None, seen), slack).is_some();
        assert!(cut(2_500) && !cut(2_501));

        let hung = |behind, done| {
            broken(injected(Fault::HangShim), |r| {
                r.behind = Duration::from_millis(behind);
                r.attempts = vec![attempt(8_000, done, true)];
            })
        };
        assert!(!hung(0, 11_100).is_empty() && hung(100, 11_100).is_empty() && !hung(100, 11_101).is_empty());
    }

    #[test]
    fn requests_of_a_kept_connection_wait_for_each_other() {
        let late = |done| {
            let kept = Attempt { kind: ConnectionKind::Kept, ..attempt(8_000, done, true) };
            let broken = broken(injected(Fault::HangShim), |r| r.attempts = vec![kept, attempt(8_000, 8_010, true)]);
            broken.iter().any(|line| line.contains("waited on"))
        };
        assert!(!late(11_001) && !late(20_000) && late(22_001));
    }

    #[test]
    fn nobody_waits_for_a_clock_that_jumped() {
        let waited = |kind, late: &[(u64, u64)]| {
            let attempts = vec![Attempt { kind, ..attempt(2_000, 8_000, true) }, attempt(3_000, 5_900, true)];
            broken(injected(Fault::ClockJump), |r| {
                (r.attempts, r.late) = (attempts, late.iter().map(|(from, to)| (ms(*from), ms(*to))).collect());
            })
        };
        for kind in [ConnectionKind::New, ConnectionKind::Kept] {
            assert_eq!(waited(kind, &[]), ["1 requests waited for more than 3.0s"]);
            assert_eq!(waited(kind, &[(2_000, 6_000)]), [""; 0], "this machine was busy");
        }
    }

    #[test]
    fn other_faults_excuse_nothing() {
        for fault in [Fault::BadFlag, Fault::NeverReady, Fault::Hang, Fault::HangShim] {
            for loss in [Loss::Refused, Loss::StreamEnded, Loss::Unanswered] {
                assert_eq!(excuse(&[injected(fault)], &lost(loss, None, 1_001)), None);
            }
        }
    }

    #[test]
    fn one_that_cannot_serve_must_not() {
        for fault in [Fault::BadFlag, Fault::NeverReady] {
            assert_eq!(broken(injected(fault), |_| {}), [""; 0]);
            assert!(
                broken(injected(fault), |r| r.attempts.push(attempt(2_000, 2_001, true)))[0].contains("answered 1")
            );
            assert_eq!(broken(injected(fault), |r| r.moments.add("new", MarkKind::Joined, ms(2_000))), ["it joined"]);
            assert!(broken(injected(fault), |r| r.injected[0].seen.clear())[0].contains("no reason was seen why"));
            assert!(broken(Injected { over: None, ..injected(fault) }, |_| {})[0].contains("end was not seen"));
        }
    }

    #[test]
    fn an_outage_is_measured() {
        let mut record = Record { injected: vec![injected(Fault::KillShim)], ..Record::default() };
        record.attempts = vec![attempt(1_010, 1_011, false), attempt(3_500, 3_501, true)];
        let promise = check(&record).remove(0);
        assert!(promise.held, "{promise:?}");
        assert_eq!(promise.what_happened[1], "the API was away for 2.50s, 1 new connections");
        record.attempts.pop();
        assert!(!check(&record).remove(0).held);
    }

    #[test]
    fn clients_wait_for_the_lease_or_the_probe_and_no_longer() {
        let hang = || Injected { noticed: Some(ms(7_000)), ..injected(Fault::Hang) };
        for fault in [hang(), injected(Fault::HangShim)] {
            let waited = |attempts: &[(u64, u64)]| {
                let by_other = |&(due, done)| Attempt {
                    answer: Answer::Good { instance: "old".into() },
                    ..attempt(due, done, true)
                };
                let attempts = attempts.iter().map(by_other).collect();
                broken(fault.clone(), |r| r.attempts = attempts)
            };
            assert_eq!(waited(&[(1_500, 10_100), (8_000, 8_010)]), [""; 0]);
            assert!(waited(&[(8_000, 11_500)])[0].contains("although the other one served"));
            assert!(waited(&[(1_500, 13_500), (8_000, 8_010)])[0].contains("waited on"));
            assert!(waited(&[(1_500, 1_510)])[0].contains("no new connection after"));
        }
        let by = |name: &str, due, done| {
            let answer = Answer::Good { instance: name.into() };
            let attempts = vec![Attempt { answer, ..attempt(due, done, true) }, attempt(8_000, 8_010, true)];
            broken(hang(), |r| r.attempts = attempts)
        };
        assert_eq!(by("new", 1_400, 9_000), [""; 0], "it may have been answered in part before");
        assert!(
            by("new", 1_600, 9_000)[0].contains("1 new connections that waited were not answered by the other one")
        );
        assert_eq!(by("old", 1_600, 10_000), [""; 0]);
        assert!(by("old", 1_600, 10_100)[0].contains("within 3s after it was noticed"));
        assert_eq!(broken(injected(Fault::Hang), |_| {}), ["its shim did not notice"]);
        let bridged = Injected { standby: Standby::Bridge, ..injected(Fault::Hang) };
        assert_eq!(broken(bridged.clone(), |_| {}), ["the bridge did not notice"]);
        assert_eq!(broken(Injected { noticed: Some(ms(4_000)), ..bridged }, |_| {}), [""; 0]);
        let alone = Injected { standby: Standby::Nothing, ..injected(Fault::HangShim) };
        assert_eq!(broken(alone, |r| r.attempts.push(attempt(8_000, 12_000, true))), [""; 0]);
    }
}
