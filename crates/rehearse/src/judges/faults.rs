//! berth's promises under faults, and whether berth kept them.
//!
//! A promise may allow losses. A fault then excuses the loss of a connection that was accepted
//! before the fault, was on the harmed process, and ended when the fault was injected. Every other
//! loss counts. Excused losses are counted under the fault.

use super::busy::BusyPeriods;
use super::{Case, Span, describe_outcome};
use crate::config::{
    LEASE_DURATION,
    fault::{Fault, Standby},
};
use crate::record::{
    InjectedFault, Record,
    data::{Losses, MarkKind, Promise, Ran},
    event::{Answer, Attempt, ConnectionKind},
    loss::Loss,
    stamp::Stamp,
};
use std::collections::BTreeSet;
use std::time::Duration;

/// Checks every promise under a fault, in order. `losses` adds the excused losses.
pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    ran.promises = check_promises(case.record, &case.span);
}

/// Time after a kill within which the clients notice the kill.
const NOTICE_TIME: Duration = Duration::from_secs(1);

/// Tolerance for a busy machine: an answer may be this much later than promised.
const JITTER: Duration = Duration::from_secs(3);

/// A new connection that is due this long after a fault cannot have got a part of its answer before
/// the fault.
const OVERLAP: Duration = Duration::from_millis(500);

/// Longest time from the end of a hanging shim's lease until a sibling accepts from that shim's
/// listener.
const TAKE_OVER_TIME: Duration = Duration::from_secs(1);

fn check_promises(record: &Record, span: &Span) -> Vec<Promise> {
    let (slack, busy) = (measure_slack(record), BusyPeriods::of(record));
    let check = |injected| {
        let (broken, seen) = (Vec::new(), Vec::new());
        Check {
            record,
            injected,
            slack,
            busy: &busy,
            broken,
            seen,
        }
        .check_promise(span)
    };
    record.injected.iter().map(check).collect()
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Lost<'a> {
    pub(super) loss: Loss,
    /// When the request was due. `None` for the end of a stream.
    pub(super) due: Option<Stamp>,
    /// When the client saw the loss.
    pub(super) seen: Stamp,
    /// The instance behind the connection, if known.
    pub(super) instance: Option<&'a str>,
}

/// Finds a fault with a promise that allows a loss. Returns the fault's index in
/// [`Record::injected`]. If the promises of several faults allow the loss, returns the last of
/// these faults.
pub(super) fn find_excuse(
    injected: &[InjectedFault],
    lost: &Lost<'_>,
    slack: Duration,
) -> Option<usize> {
    injected
        .iter()
        .rposition(|fault| allows_loss(fault, lost, slack))
}

/// Returns how much longer everything may take than on an idle machine: the clients' delay behind
/// their timetable, plus the longest wait before the first fault.
pub(super) fn measure_slack(record: &Record) -> Duration {
    let Some(first) = record.injected.iter().map(|injected| injected.at).min() else {
        return Duration::ZERO;
    };
    let before = record
        .attempts
        .iter()
        .filter(|a| a.done < first && matches!(a.answer, Answer::Good { .. }));
    record.behind
        + before
            .map(|a| a.done.since(a.due))
            .max()
            .unwrap_or_default()
}

fn allows_loss(injected: &InjectedFault, lost: &Lost<'_>, slack: Duration) -> bool {
    let InjectedFault { fault, at, .. } = injected;
    if lost.seen < *at {
        return false;
    }
    // Connections that a bridge's process accepts while it is being killed are lost with the
    // process, because no other process holds a duplicate of its listener.
    let killed = injected
        .noticed
        .filter(|_| injected.standby == Standby::Bridge)
        .unwrap_or(*at);
    let begun = lost.due.is_none_or(|due| due <= killed);
    match fault {
        Fault::KillShim | Fault::CrashAfterReady if injected.standby == Standby::Nothing => {
            // A request that was due before the end of the outage may fail shortly after that end.
            let over = injected.over.unwrap_or(Stamp(u64::MAX));
            lost.seen <= over.plus(NOTICE_TIME + slack) && lost.due.is_none_or(|due| due <= over)
        }
        Fault::KillShim | Fault::CrashAfterReady | Fault::KillTemporary | Fault::KillOld => {
            let ended = matches!(lost.loss, Loss::Reset | Loss::Closed | Loss::StreamEnded);
            let there = lost
                .instance
                .is_none_or(|instance| instance == injected.instance);
            ended && there && begun && lost.seen <= killed.plus(NOTICE_TIME + slack)
        }
        _ => false,
    }
}

struct Check<'a> {
    record: &'a Record,
    injected: &'a InjectedFault,
    /// See [`measure_slack`].
    slack: Duration,
    busy: &'a BusyPeriods,
    broken: Vec<String>,
    seen: Vec<String>,
}

impl Check<'_> {
    fn check_promise(mut self, span: &Span) -> Promise {
        let InjectedFault {
            fault,
            instance,
            at,
            over,
            standby,
            seen,
            ..
        } = self.injected;
        self.seen.extend(seen.iter().cloned());
        if over.is_none() {
            self.broken.push("the end of the fault was not seen".into());
        }
        match fault {
            Fault::BadFlag | Fault::NeverReady => self.check_never_served(),
            Fault::CrashAfterReady | Fault::KillShim | Fault::KillTemporary | Fault::KillOld => {
                self.check_recovery();
            }
            Fault::Hang if *standby == Standby::Bridge => self.check_bridge_noticed(),
            Fault::Hang | Fault::HangShim | Fault::NoDescriptors | Fault::ClockJump => {
                self.check_waits();
            }
        }
        Promise {
            fault: fault.to_string(),
            instance: instance.clone(),
            from_ms: span.millis_since_load_began(*at),
            to_ms: over.map(|over| span.millis_since_load_began(over)),
            promise: fault.promise(*standby).to_owned(),
            held: self.broken.is_empty(),
            what_happened: describe_outcome(self.broken, self.seen),
            allowed: Losses::new(),
        }
    }

    fn check_never_served(&mut self) {
        let name = &self.injected.instance;
        let by = |a: &&Attempt| matches!(&a.answer, Answer::Good { instance } | Answer::Bad { instance, .. } if instance == name);
        let answers = self.record.attempts.iter().filter(by).count();
        if answers > 0 {
            self.broken
                .push(format!("the faulty instance answered {answers} requests"));
        }
        if self
            .record
            .moments
            .first_time(name, MarkKind::Joined)
            .is_some()
        {
            self.broken.push("the faulty instance joined".into());
        }
        if self.injected.seen.is_empty() {
            self.broken
                .push("no reason was seen why the instance does not get ready".into());
        }
    }

    /// Checks that a new connection got a good answer after the fault was injected. Losses after
    /// the fault's end count as usual, so they are not looked at here.
    fn check_recovery(&mut self) {
        let InjectedFault { at, over, .. } = *self.injected;
        let Some(over) = over else { return };
        let good =
            |a: &&Attempt| a.kind == ConnectionKind::New && matches!(a.answer, Answer::Good { .. });
        let first = self
            .record
            .attempts
            .iter()
            .filter(good)
            .filter(|a| a.due > at)
            .map(|a| a.due)
            .min();
        let failed = self
            .record
            .attempts
            .iter()
            .filter(|a| a.kind == ConnectionKind::New && a.due > at && a.due <= over);
        let refused = failed
            .filter(|a| matches!(a.answer, Answer::Failed(_)))
            .count();
        match first {
            Some(first) if refused > 0 => {
                self.seen.push(format!(
                    "the API was unavailable for {:.2?}: {refused} new connections failed",
                    first.since(at)
                ));
            }
            Some(_) => self.seen.push("the API was never unavailable".into()),
            None => self
                .broken
                .push("no new connection was answered after the fault".into()),
        }
        self.seen.push(format!(
            "clients were served as before after {:.1?}",
            over.since(at)
        ));
    }

    /// Checks that the bridge noticed a hang. Waits are not checked, because no client is connected
    /// to the hanging instance.
    fn check_bridge_noticed(&mut self) {
        match self.injected.noticed {
            Some(noticed) => {
                self.seen.push(format!(
                    "the bridge noticed after {:.1?}",
                    noticed.since(self.injected.at)
                ));
            }
            None => self
                .broken
                .push("the bridge did not notice the fault".into()),
        }
    }

    /// Checks that requests waited during the fault only where the promise allows it, and not for
    /// too long.
    fn check_waits(&mut self) {
        let InjectedFault {
            fault,
            at,
            over,
            standby,
            noticed,
            has,
            ..
        } = *self.injected;
        let Some(over) = over else { return };
        let meanwhile = || {
            self.record
                .attempts
                .iter()
                .filter(|a| a.due >= at && a.due < over)
        };
        let longest = meanwhile()
            .map(|a| a.done.since(a.due))
            .max()
            .unwrap_or_default();
        self.seen.push(format!(
            "the fault lasted {:.1?}; the longest wait meanwhile was {longest:.1?}",
            over.since(at)
        ));
        let (jitter, hung) = (JITTER + self.slack, over.since(at));
        if fault == Fault::ClockJump {
            let waited = meanwhile()
                .filter(|a| a.done > a.due.plus(jitter) && !self.busy.explains(a))
                .count();
            if waited > 0 {
                self.broken.push(format!(
                    "{waited} requests waited for more than {jitter:.1?}"
                ));
            }
            return;
        }
        // A kept connection sends one request after another, and while a request waits, further
        // requests become due.
        let kept = jitter + hung;
        let patience = |a: &Attempt| {
            if a.kind == ConnectionKind::New {
                jitter
            } else {
                kept
            }
        };
        let late = meanwhile()
            .filter(|a| a.done > over.plus(patience(a)) && !self.busy.explains(a))
            .count();
        if late > 0 {
            self.broken.push(format!(
                "{late} requests still waited after the fault was over: on new connections for more than {jitter:.1?}, on kept connections for more than {kept:.1?}"
            ));
        }
        // Only connections that the shim relays may wait. The sockets of all others were passed to
        // their instances.
        if let Some(has) = has {
            let late = |a: &&Attempt| a.done > a.due.plus(jitter) && !self.busy.explains(a);
            let waits = |a: &&Attempt| a.kind == ConnectionKind::Kept && late(a);
            let all: BTreeSet<_> = meanwhile().filter(waits).map(|a| &a.stream).collect();
            if all.len() as u64 > has {
                let count = all.len();
                self.broken
                    .push(format!("{count} kept connections waited for more than {jitter:.1?}, although the number of the shim's connections was only {has}"));
            }
        }
        let passed = match fault {
            Fault::NoDescriptors => return,
            _ if standby == Standby::Nothing => return,
            Fault::Hang => noticed,
            _ => Some(at.plus(LEASE_DURATION + TAKE_OVER_TIME + self.slack)),
        };
        let Some(passed) = passed else {
            self.broken.push("the shim did not notice the fault".into());
            return;
        };
        if fault == Fault::Hang {
            self.check_other_instance_answers(passed);
        }
        let after = || meanwhile().filter(|a| a.kind == ConnectionKind::New && a.due > passed);
        let longest = after().map(|a| a.done.since(a.due)).max();
        match longest {
            None if over.since(passed) < OVERLAP => {
                self.seen.push("the fault ended too soon to show that the other instance serves".into());
            }
            None => self.broken.push("there was no new connection after the fault was noticed".into()),
            Some(longest) if longest > jitter => {
                self.broken.push(format!("a new connection waited {longest:.1?} although the other instance served"));
            }
            Some(longest) => self.seen.push(format!(
                "from {:.1?} on, new connections went to the other instance; the longest wait was {longest:.1?}",
                passed.since(at)
            )),
        }
    }

    /// Checks that the other instance answers requests that were due after the fault and before the
    /// shim noticed the fault.
    fn check_other_instance_answers(&mut self, noticed: Stamp) {
        let InjectedFault { instance, at, .. } = self.injected;
        let jitter = JITTER + self.slack;
        let waited = |a: &&Attempt| {
            a.kind == ConnectionKind::New
                && a.due > at.plus(OVERLAP + self.slack)
                && a.due < noticed
        };
        let its_own =
            |a: &Attempt| matches!(&a.answer, Answer::Good { instance: by } if by == instance);
        let waited: Vec<_> = self
            .record
            .attempts
            .iter()
            .filter(waited)
            .filter(|a| a.done > noticed)
            .collect();
        let stayed = waited
            .iter()
            .filter(|a| its_own(a) || a.done > noticed.plus(jitter))
            .count();
        if stayed > 0 {
            self.broken.push(format!(
                "{stayed} new connections that waited were not answered by the other instance within {jitter:?} after the fault was noticed"
            ));
        }
        if let Some(last) = waited.iter().map(|a| a.done).max() {
            let (count, last) = (waited.len(), last.since(noticed));
            self.seen
                .push(format!("{count} new connections waited when the fault was noticed; the last answer came {last:.1?} later"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{self, attempt, good_answer, stamp_at};
    use super::*;
    use crate::record::{
        event::Failure,
        verdict::{NEW, OLD},
    };

    /// [`find_excuse`] without slack, as on an idle machine.
    fn find_excuse_without_slack(injected: &[InjectedFault], lost: &Lost<'_>) -> Option<usize> {
        find_excuse(injected, lost, Duration::ZERO)
    }

    fn check_only_promise(record: &Record) -> Promise {
        check_promises(record, &Span::of(record)).remove(0)
    }

    /// A fault of the instance `new`, from 1 s to 10 s.
    fn injected(fault: Fault) -> InjectedFault {
        tests::injected(fault, NEW, 1_000, Some(10_000))
    }

    /// An attempt that the instance `by` answered. If `by` is `None`, the attempt was refused.
    fn make_attempt(due: i64, done: i64, by: Option<&str>) -> Attempt {
        attempt(
            "new-0",
            due,
            done,
            by.map_or(Answer::Failed(Failure::Refused), good_answer),
        )
    }

    fn make_lost(loss: Loss, due: Option<i64>, seen: i64) -> Lost<'static> {
        Lost {
            loss,
            due: due.map(stamp_at),
            seen: stamp_at(seen),
            instance: Some(NEW),
        }
    }

    /// Asserts for each case (loss, due, seen) whether a fault excuses the loss of a connection to
    /// the harmed instance.
    fn assert_excused(fault: &InjectedFault, cases: &[(Loss, Option<i64>, i64, bool)]) {
        for (loss, due, seen, is_excused) in cases {
            let excused = find_excuse_without_slack(
                std::slice::from_ref(fault),
                &make_lost(*loss, *due, *seen),
            )
            .is_some();
            assert_eq!(
                excused, *is_excused,
                "{fault:?}: {loss:?} due {due:?}, seen {seen}"
            );
        }
    }

    /// Judges these attempts under a fault, and returns the reasons why the promise is broken.
    fn find_broken(fault: InjectedFault, attempts: Vec<Attempt>) -> Vec<String> {
        broken_promises_in(&Record {
            injected: vec![fault],
            attempts,
            ..Record::default()
        })
    }

    fn broken_promises_in(record: &Record) -> Vec<String> {
        let promise = check_only_promise(record);
        let broken = promise
            .what_happened
            .iter()
            .filter_map(|line| line.strip_prefix("broken: "));
        let broken: Vec<String> = broken.map(str::to_owned).collect();
        assert_eq!(promise.held, broken.is_empty(), "{promise:?}");
        broken
    }

    #[test]
    fn a_kill_excuses_what_was_on_the_one_that_died() {
        for fault in [Fault::KillShim, Fault::CrashAfterReady] {
            let fault = injected(fault);
            assert_excused(
                &fault,
                &[
                    (Loss::StreamEnded, None, 1_001, true),
                    (Loss::Reset, Some(990), 1_001, true),
                    // Not excused, in this order: a connection that no shim accepted, a connection
                    // begun after the kill, and streams that ended before the kill or long after
                    // the kill.
                    (Loss::Refused, Some(990), 1_001, false),
                    (Loss::Reset, Some(1_001), 1_010, false),
                    (Loss::StreamEnded, None, 999, false),
                    (Loss::StreamEnded, None, 2_500, false),
                ],
            );
            let elsewhere = Lost {
                instance: Some(OLD),
                ..make_lost(Loss::StreamEnded, None, 1_001)
            };
            assert_eq!(find_excuse_without_slack(&[fault], &elsewhere), None);
        }
    }

    /// No other process holds the bridge's listener: accepted connections are lost until the
    /// process is gone.
    #[test]
    fn a_kill_under_a_bridge_excuses_what_was_on_the_one_that_died_until_it_was_gone() {
        let killed = |fault| InjectedFault {
            standby: Standby::Bridge,
            noticed: Some(stamp_at(1_020)),
            ..injected(fault)
        };
        for fault in [Fault::KillShim, Fault::KillTemporary, Fault::KillOld] {
            assert_excused(
                &killed(fault),
                &[
                    (Loss::StreamEnded, None, 1_001, true),
                    (Loss::Reset, Some(1_015), 1_030, true),
                    (Loss::Reset, Some(1_021), 1_030, false),
                    (Loss::Refused, Some(1_015), 1_030, false),
                ],
            );
        }
        assert_excused(
            &killed(Fault::BadFlag),
            &[(Loss::Reset, Some(1_015), 1_030, false)],
        );
    }

    #[test]
    fn an_outage_excuses_until_its_end_and_no_longer() {
        for fault in [Fault::KillShim, Fault::CrashAfterReady] {
            assert_excused(
                &InjectedFault {
                    standby: Standby::Nothing,
                    ..injected(fault)
                },
                &[
                    (Loss::Refused, Some(9_990), 10_001, true),
                    (Loss::StreamEnded, None, 1_000, true),
                    (Loss::Refused, Some(10_001), 10_002, false),
                    (Loss::Refused, Some(500), 999, false),
                ],
            );
        }
    }

    #[test]
    fn of_two_faults_the_later_one_is_to_blame() {
        let second = InjectedFault {
            at: stamp_at(12_000),
            over: None,
            ..injected(Fault::KillShim)
        };
        let cut = make_lost(Loss::StreamEnded, None, 12_500);
        assert_eq!(
            find_excuse_without_slack(&[injected(Fault::KillShim), second], &cut),
            Some(1)
        );
    }

    /// The clients were 300 ms behind their timetable, and waited for 200 ms before the fault.
    #[test]
    fn on_a_busy_machine_all_may_take_as_much_longer_as_it_did_before() {
        let record = Record {
            behind: Duration::from_millis(300),
            injected: vec![injected(Fault::KillShim)],
            attempts: vec![
                make_attempt(500, 700, Some(NEW)),
                make_attempt(400, 999, None),
                make_attempt(990, 5_000, Some(NEW)),
            ],
            ..Record::default()
        };
        let slack = measure_slack(&record);
        assert_eq!(slack, Duration::from_millis(500));
        let cut = |seen| {
            find_excuse(
                &record.injected,
                &make_lost(Loss::StreamEnded, None, seen),
                slack,
            )
            .is_some()
        };
        assert!(cut(2_500) && !cut(2_501));

        for (behind_ms, done, is_broken) in
            [(0, 11_100, true), (100, 11_100, false), (100, 11_101, true)]
        {
            let broken = broken_promises_in(&Record {
                behind: Duration::from_millis(behind_ms),
                injected: vec![injected(Fault::HangShim)],
                attempts: vec![make_attempt(8_000, done, Some(NEW))],
                ..Record::default()
            });
            assert_eq!(
                !broken.is_empty(),
                is_broken,
                "{behind_ms} {done}: {broken:?}"
            );
        }
    }

    #[test]
    fn requests_of_a_kept_connection_wait_for_each_other() {
        for (done, is_late) in [(11_001, false), (20_000, false), (22_001, true)] {
            let kept = Attempt {
                kind: ConnectionKind::Kept,
                ..make_attempt(8_000, done, Some(NEW))
            };
            let broken = find_broken(
                injected(Fault::HangShim),
                vec![kept, make_attempt(8_000, 8_010, Some(NEW))],
            );
            assert_eq!(!broken.is_empty(), is_late, "{done}: {broken:?}");
        }
    }

    #[test]
    fn only_as_many_kept_connections_may_wait_as_the_shim_had() {
        let kept = |stream, done| Attempt {
            kind: ConnectionKind::Kept,
            ..attempt(stream, 2_000, done, good_answer(NEW))
        };
        let more = &[
            "2 kept connections waited for more than 3.0s, although the number of the shim's connections was only 1",
        ][..];
        for (has, wanted) in [(None, &[][..]), (Some(2), &[]), (Some(1), more)] {
            let mut attempts = [("a", 9_000), ("b", 9_000), ("b", 9_100), ("c", 2_010)]
                .map(|(s, done)| kept(s, done))
                .to_vec();
            attempts.push(make_attempt(8_000, 8_010, Some(OLD)));
            assert_eq!(
                find_broken(
                    InjectedFault {
                        has,
                        ..injected(Fault::HangShim)
                    },
                    attempts
                ),
                wanted,
                "{has:?}"
            );
        }
    }

    #[test]
    fn no_request_waits_longer_after_a_clock_jump() {
        for kind in [ConnectionKind::New, ConnectionKind::Kept] {
            // A request that waits for 6 s breaks the promise, unless late timers show that this
            // machine was busy while the request waited.
            for (late, wanted) in [
                (Vec::new(), &["1 requests waited for more than 3.0s"][..]),
                (vec![(stamp_at(2_000), stamp_at(6_000))], &[]),
            ] {
                let long = Attempt {
                    kind,
                    ..make_attempt(2_000, 8_000, Some(NEW))
                };
                let attempts = vec![long, make_attempt(3_000, 5_900, Some(NEW))];
                let injected = vec![injected(Fault::ClockJump)];
                assert_eq!(
                    broken_promises_in(&Record {
                        injected,
                        attempts,
                        late,
                        ..Record::default()
                    }),
                    wanted
                );
            }
        }
    }

    #[test]
    fn a_fault_that_cuts_no_connection_excuses_no_loss() {
        for fault in [
            Fault::BadFlag,
            Fault::NeverReady,
            Fault::Hang,
            Fault::HangShim,
        ] {
            let losses = [Loss::Refused, Loss::StreamEnded, Loss::Unanswered];
            assert_excused(
                &injected(fault),
                &losses.map(|loss| (loss, None, 1_001, false)),
            );
        }
    }

    #[test]
    fn an_instance_that_cannot_serve_must_not_answer() {
        for fault in [Fault::BadFlag, Fault::NeverReady] {
            let sound = || injected(fault);
            assert_eq!(find_broken(sound(), Vec::new()), [""; 0]);
            let answered = find_broken(sound(), vec![make_attempt(2_000, 2_001, Some(NEW))]);
            assert_eq!(answered.len(), 1, "{answered:?}");
            let mut joined = Record {
                injected: vec![sound()],
                ..Record::default()
            };
            joined.moments.add(NEW, MarkKind::Joined, stamp_at(2_000));
            assert_eq!(broken_promises_in(&joined), ["the faulty instance joined"]);
            let [unseen, endless] = [
                InjectedFault {
                    seen: Vec::new(),
                    ..sound()
                },
                InjectedFault {
                    over: None,
                    ..sound()
                },
            ]
            .map(|injected| find_broken(injected, Vec::new()));
            assert!(unseen.len() == 1 && endless.len() == 1 && unseen != endless);
        }
    }

    #[test]
    fn the_duration_of_an_outage_is_reported() {
        let mut record = Record {
            injected: vec![injected(Fault::KillShim)],
            ..Record::default()
        };
        record.attempts = vec![
            make_attempt(1_010, 1_011, None),
            make_attempt(3_500, 3_501, Some(NEW)),
        ];
        let promise = check_only_promise(&record);
        assert!(promise.held, "{promise:?}");
        assert_eq!(
            promise.what_happened[1],
            "the API was unavailable for 2.50s: 1 new connections failed"
        );
        record.attempts.pop();
        assert!(!check_only_promise(&record).held);
    }

    #[test]
    fn clients_wait_for_the_lease_or_the_probe_and_no_longer() {
        let hang = || InjectedFault {
            noticed: Some(stamp_at(7_000)),
            ..injected(Fault::Hang)
        };
        let later = || make_attempt(8_000, 8_010, Some(OLD));
        for fault in [hang(), injected(Fault::HangShim)] {
            for (attempts, why) in [
                (
                    vec![make_attempt(8_000, 11_500, Some(OLD))],
                    "although the other instance served",
                ),
                (
                    vec![make_attempt(1_500, 13_500, Some(OLD)), later()],
                    "still waited",
                ),
                (
                    vec![make_attempt(1_500, 1_510, Some(OLD))],
                    "no new connection after",
                ),
            ] {
                assert!(
                    find_broken(fault.clone(), attempts)[0].contains(why),
                    "{why}"
                );
            }
            assert_eq!(
                find_broken(fault, vec![make_attempt(1_500, 10_100, Some(OLD)), later()])[..],
                [""; 0]
            );
        }
        // A request that is due within 0.5 s after the fault may have got a part of its answer
        // before the fault. The other instance need not answer such a request.
        let in_time = "1 new connections that waited were not answered by the other instance within 3s after the fault was noticed";
        for (by, due, done, wanted) in [
            (NEW, 1_400, 9_000, &[][..]),
            (NEW, 1_600, 9_000, &[in_time]),
            (OLD, 1_600, 10_000, &[]),
            (OLD, 1_600, 10_100, &[in_time]),
        ] {
            assert_eq!(
                find_broken(hang(), vec![make_attempt(due, done, Some(by)), later()]),
                wanted,
                "{by} {due} {done}"
            );
        }
        let bridged = InjectedFault {
            standby: Standby::Bridge,
            ..injected(Fault::Hang)
        };
        let noticed = InjectedFault {
            noticed: Some(stamp_at(4_000)),
            ..bridged.clone()
        };
        for (fault, wanted) in [
            (
                injected(Fault::Hang),
                &["the shim did not notice the fault"][..],
            ),
            (bridged, &["the bridge did not notice the fault"]),
            (noticed, &[]),
        ] {
            assert_eq!(find_broken(fault, Vec::new()), wanted);
        }
        let alone = InjectedFault {
            standby: Standby::Nothing,
            ..injected(Fault::HangShim)
        };
        assert_eq!(
            find_broken(alone, vec![make_attempt(8_000, 12_000, Some(NEW))]),
            [""; 0]
        );
    }
}
