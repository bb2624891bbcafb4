//! What happened to the instances, in order.

use super::Span;
use crate::data::{Mark, MarkKind};
use crate::record::Record;
use crate::verdict::Verdict;
use std::collections::{BTreeMap, BTreeSet};

/// Each once, in order. Where the script told an instance to stop, it need not say so itself.
pub(super) fn judge(record: &Record, judged: &Verdict, span: &Span) -> Vec<Mark> {
    let moments = &record.moments;
    let mut marks: BTreeMap<(i64, &str, MarkKind), String> = BTreeMap::new();
    for moment in &moments.0 {
        let what = match moment.mark {
            MarkKind::Terminating if moments.first(&moment.instance, MarkKind::Sigterm).is_none() => MarkKind::Sigterm,
            MarkKind::Listening | MarkKind::Terminating | MarkKind::Draining => continue,
            mark => mark,
        };
        marks.insert((span.ms(moment.at), &moment.instance, what), moment.text.clone());
    }
    for promised in &judged.promises {
        marks.insert((span.ms(promised.at), &promised.instance, MarkKind::Fault), promised.fault.clone());
    }
    // What both an instance and the script saw is told once, until something happens to the instance.
    let mut told: BTreeSet<(&str, MarkKind)> = BTreeSet::new();
    marks.retain(|(_, instance, what), _| {
        if matches!(what, MarkKind::Started | MarkKind::Exited | MarkKind::Fault) {
            told.retain(|(other, _)| other != instance);
        }
        told.insert((*instance, *what))
    });
    let mark = |((at_ms, instance, what), text): ((i64, &str, MarkKind), String)| Mark {
        at_ms,
        instance: instance.to_owned(),
        what,
        text,
    };
    marks.into_iter().map(mark).collect()
}
