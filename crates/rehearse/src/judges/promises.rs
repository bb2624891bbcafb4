//! What was promised under each fault, and what came of it; judged in [`crate::promise`].

use super::Span;
use crate::data::Promise;
use crate::promise::Promise as Judged;
use crate::report::format;

pub(super) fn judge(promised: &Judged, span: &Span) -> Promise {
    let broken = promised.broken.iter().map(|why| format!("broken: {why}"));
    let direct = promised.on_direct.then(|| {
        let lost = format::of(promised.lost_on_direct(), "new connection", "new connections");
        format!("{lost} lost on the direct path when the instance was killed")
    });
    Promise {
        fault: promised.fault.clone(),
        instance: promised.instance.clone(),
        from_ms: span.ms(promised.at),
        to_ms: promised.over.map(|over| span.ms(over)),
        promise: promised.text.to_owned(),
        held: promised.held(),
        what_happened: broken.chain(promised.seen.iter().cloned()).chain(direct).collect(),
        allowed: promised.allowed_by_kind().into_iter().map(|(loss, count)| loss.tally(count)).collect(),
    }
}
