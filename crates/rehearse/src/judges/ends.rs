//! Decides who ended a stream: the stream's instance, or something between the instance and the
//! client. Pure.
//!
//! There are three kinds of evidence, the strongest first:
//!
//! 1. The instance's own report, which only simulated apiservers make. A report decides.
//! 2. An announcement of the instance inside TLS ([`Signed`](crate::record::event::Signed)), which
//!    nothing in between can forge. An announcement counts only if the instance was stopping,
//!    because a server also announces the end if something in between half closed the connection.
//! 3. The control: connections that were dialled to the instance without a shim between. A process
//!    that is killed, or ends with connections open, announces nothing, but all of its connections
//!    end at once. So the instance caused an end without an announcement if a connection of the
//!    control, of the same kind, had ended by then.
//!
//! Every other stream was ended by something in between.

use crate::record::{
    Record,
    data::MarkKind,
    event::{EndReport, EndedBy, Protocol, StreamEnd, StreamKind},
    stamp::Stamp,
};
use std::collections::HashMap;
use std::time::Duration;

/// Two clients may see the same event at times that differ by this much, because all clients share
/// a thread. [`Record::behind`] is added.
const LAG: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct EndJudge<'a> {
    record: &'a Record,
    reports: HashMap<&'a str, &'a EndReport>,
    lag: Duration,
}

impl<'a> EndJudge<'a> {
    pub(crate) fn new(record: &'a Record) -> Self {
        let reports = record
            .reports
            .iter()
            .map(|(_, report)| (report.stream.as_str(), report))
            .collect();
        Self {
            record,
            reports,
            lag: LAG + record.behind,
        }
    }

    /// Returns `Ok` if the stream's own instance ended the stream, and otherwise the evidence
    /// against that.
    pub(crate) fn check_ended_by_instance(&self, end: &StreamEnd) -> Result<(), &'static str> {
        match self.reports.get(end.stream.as_str()) {
            Some(report) if report.by != EndedBy::Instance => {
                Err("the instance saw the other side end the stream")
            }
            Some(report) if report.at > end.at => {
                Err("the instance ended the stream only after the client saw the end")
            }
            Some(_) => Ok(()),
            None if !self.is_stopping(&end.instance, end.at) => Err("the instance did not stop"),
            None if end.signed.is_some() || self.ended_like_control(end) => Ok(()),
            None => Err(
                "the instance announced no end of the stream, and connections without berth stayed open",
            ),
        }
    }

    /// True if an instance had got SIGTERM, or had exited, at this time.
    pub(crate) fn is_stopping(&self, instance: &str, at: Stamp) -> bool {
        let began = self.find_start(instance, at);
        let stops = [MarkKind::Sigterm, MarkKind::Terminating, MarkKind::Exited];
        let mut moments = self
            .record
            .moments
            .0
            .iter()
            .filter(|m| m.instance == instance && stops.contains(&m.mark));
        moments.any(|m| m.at >= began && m.at <= at.plus(self.lag))
    }

    /// True if the control shows that the instance ended the stream: a connection of the same kind,
    /// which a client had dialled to the same instance directly, had ended by then.
    fn ended_like_control(&self, end: &StreamEnd) -> bool {
        let began = self.find_start(&end.instance, end.at);
        let mut ends = self
            .record
            .control
            .ends
            .iter()
            .filter(|c| c.instance == end.instance && kind_of(c) == kind_of(end));
        ends.any(|control| control.at >= began && control.at <= end.at.plus(self.lag))
    }

    /// Returns the start time of the process that an instance had at the time `at`. A restarted
    /// instance has had several processes.
    fn find_start(&self, instance: &str, at: Stamp) -> Stamp {
        let moments = self.record.moments.0.iter();
        let started =
            moments.filter(|m| m.instance == instance && m.mark == MarkKind::Started && m.at <= at);
        started.map(|m| m.at).max().unwrap_or(Stamp(0))
    }
}

/// Returns the kind of a connection. A stopping instance treats all connections of one kind alike.
fn kind_of(end: &StreamEnd) -> (bool, Protocol) {
    (end.what == StreamKind::Watch, end.protocol)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{self, report, stamp_at};
    use super::*;
    use crate::record::{
        Control,
        event::Signed,
        verdict::{NEW, OLD},
    };

    fn end(what: StreamKind, ms: i64) -> StreamEnd {
        tests::end(what, "stream", ms)
    }

    /// Old gets SIGTERM at 1000 ms. Its kept connections end at 1200 ms, and its watches at 2000
    /// ms.
    fn make_record_of_stop() -> Record {
        let mut record = Record::default();
        record.moments.add(OLD, MarkKind::Started, stamp_at(0));
        record.moments.add(OLD, MarkKind::Sigterm, stamp_at(1000));
        record.control = Control {
            ends: vec![end(StreamKind::Kept, 1200), end(StreamKind::Watch, 2000)],
            ..Control::default()
        };
        record
    }

    #[test]
    fn an_end_without_an_announcement_is_compared_with_the_control() {
        let record = make_record_of_stop();
        for (end, is_its_own) in [
            // An end up to 50 ms before the control's end counts as simultaneous.
            (end(StreamKind::Kept, 1150), true),
            (end(StreamKind::Kept, 5000), true),
            (end(StreamKind::Kept, 1149), false),
            (end(StreamKind::Watch, 2000), true),
            (end(StreamKind::Watch, 1500), false),
            // Of another kind.
            (
                StreamEnd {
                    protocol: Protocol::Http1,
                    ..end(StreamKind::Kept, 1300)
                },
                false,
            ),
            (
                StreamEnd {
                    instance: NEW.into(),
                    ..end(StreamKind::Kept, 1300)
                },
                false,
            ),
        ] {
            assert_eq!(
                EndJudge::new(&record).check_ended_by_instance(&end).is_ok(),
                is_its_own,
                "{end:?}"
            );
        }
        // Clients that are behind their timetable see an end later.
        let lagging = Record {
            behind: Duration::from_millis(200),
            ..record
        };
        assert_eq!(
            EndJudge::new(&lagging).check_ended_by_instance(&end(StreamKind::Kept, 1000)),
            Ok(())
        );
    }

    #[test]
    fn an_announcement_counts_once_the_instance_was_sent_sigterm() {
        let record = make_record_of_stop();
        let ends = EndJudge::new(&record);
        for signed in [
            Signed::EndOfAnswer,
            Signed::LastAnswer,
            Signed::GoAway,
            Signed::CloseNotify,
        ] {
            let signed = |at| StreamEnd {
                signed: Some(signed),
                ..end(StreamKind::Watch, at)
            };
            assert_eq!(ends.check_ended_by_instance(&signed(1001)), Ok(()));
            assert_eq!(
                ends.check_ended_by_instance(&signed(900)),
                Err("the instance did not stop")
            );
        }
    }

    #[test]
    fn a_report_of_the_instance_decides_who_ended_the_stream() {
        let not_its_own = Err("the instance saw the other side end the stream");
        for (by, reported_at, wanted) in [
            (EndedBy::Instance, 3000, Ok(())),
            (
                EndedBy::Instance,
                3001,
                Err("the instance ended the stream only after the client saw the end"),
            ),
            (EndedBy::Peer, 2000, not_its_own),
            (EndedBy::PeerEarly, 2000, not_its_own),
        ] {
            let record = Record {
                reports: vec![report("stream", by, reported_at)],
                ..make_record_of_stop()
            };
            let end = StreamEnd {
                signed: Some(Signed::CloseNotify),
                ..end(StreamKind::Watch, 3000)
            };
            assert_eq!(EndJudge::new(&record).check_ended_by_instance(&end), wanted);
        }
        // A report about another stream is no evidence for this stream.
        let record = Record {
            reports: vec![report("other", EndedBy::Instance, 500)],
            ..make_record_of_stop()
        };
        assert!(
            EndJudge::new(&record)
                .check_ended_by_instance(&end(StreamKind::Kept, 900))
                .is_err()
        );
    }

    #[test]
    fn a_stop_before_a_restart_excuses_no_later_end() {
        let mut record = make_record_of_stop();
        record.moments.add(OLD, MarkKind::Exited, stamp_at(2000));
        record.moments.add(OLD, MarkKind::Started, stamp_at(3000));
        let killed = end(StreamKind::Kept, 5000);
        assert!(
            EndJudge::new(&record)
                .check_ended_by_instance(&killed)
                .is_err()
        );
        record.moments.add(OLD, MarkKind::Exited, stamp_at(5000));
        assert!(
            EndJudge::new(&record)
                .check_ended_by_instance(&killed)
                .is_err()
        );
        record.control.ends.push(end(StreamKind::Kept, 5010));
        assert_eq!(
            EndJudge::new(&record).check_ended_by_instance(&killed),
            Ok(())
        );
    }
}
