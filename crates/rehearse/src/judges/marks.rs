//! Lists the events of the instances (marks) in order of time, for the report.

use super::Case;
use crate::record::data::{Mark, MarkKind, Ran};
use std::collections::{BTreeMap, BTreeSet};

/// Adds each event of an instance to the report once, in order. An instance's own report that it
/// terminates is used only if the script logged no SIGTERM.
pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let (moments, span) = (&case.record.moments, &case.span);
    let mut marks: BTreeMap<(i64, &str, MarkKind), String> = BTreeMap::new();
    for moment in &moments.0 {
        let what = match moment.mark {
            MarkKind::Terminating
                if moments
                    .first_time(&moment.instance, MarkKind::Sigterm)
                    .is_none() =>
            {
                MarkKind::Sigterm
            }
            MarkKind::Listening | MarkKind::Terminating | MarkKind::Draining => continue,
            mark => mark,
        };
        marks.insert(
            (
                span.millis_since_load_began(moment.at),
                &moment.instance,
                what,
            ),
            moment.text.clone(),
        );
    }
    for promise in &ran.promises {
        marks.insert(
            (promise.from_ms, &promise.instance, MarkKind::Fault),
            promise.fault.clone(),
        );
    }
    // The instance and the script may both have logged an event. Only the first mark is drawn,
    // until the instance is started again, ends or is harmed.
    let mut drawn: BTreeSet<(&str, MarkKind)> = BTreeSet::new();
    marks.retain(|(_, instance, what), _| {
        if matches!(what, MarkKind::Started | MarkKind::Exited | MarkKind::Fault) {
            drawn.retain(|(other, _)| other != instance);
        }
        drawn.insert((*instance, *what))
    });
    let mark = |((at_ms, instance, what), text): ((i64, &str, MarkKind), String)| Mark {
        at_ms,
        instance: instance.to_owned(),
        what,
        text,
    };
    ran.marks = marks.into_iter().map(mark).collect();
}
