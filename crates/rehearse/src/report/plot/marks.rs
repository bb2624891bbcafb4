//! The marks above all plots.

use super::{FONT, Frame, WIDTH, format};
use crate::data::{Mark, MarkKind};
use crate::report::labels::{self, Label, Placed, Room, Side};
use crate::report::svg::{px, text_width};
use maud::{Markup, html};

/// Height of a row of labels, and of the space below the lowest.
const ROW: f64 = 20.0;
const BELOW: f64 = 6.0;

/// Rows in which a mark may have words.
const ROWS: usize = 4;

/// Width of a badge.
const BADGE: f64 = 17.0;

/// The labels, and where their lines are.
pub(super) fn header(frame: &Frame, marks: &[Mark]) -> (Markup, Vec<Placed>) {
    let placed = place(frame, marks);
    if marks.is_empty() {
        return (html! {}, placed);
    }
    let rows = placed.iter().map(|mark| mark.row + 1).max().unwrap_or(0);
    let height = rows as f64 * ROW + BELOW;
    let body = html! {
        path.mark-line d=(placed.iter().map(|m| format!("M{},{}V{}", px(m.at), px(middle(m, height)), px(height))).collect::<String>()) {}
        @for (index, (mark, place)) in marks.iter().zip(&placed).enumerate() {
            (badge(index, mark, place, middle(place, height)))
        }
    };
    let words: Vec<String> = marks.iter().map(|m| format!("{} at {}", m.words(), format::moment(m.at_ms))).collect();
    (frame.svg(height, "Marks", &(words.join(", ") + "."), &body), placed)
}

/// Whether a mark is worth its words where there is little room.
pub(super) fn matters(mark: &Mark) -> bool {
    use MarkKind::{Exited, Fault, Ready, Sigterm};
    matches!(mark.what, Ready | Sigterm | Exited | Fault)
}

fn place(frame: &Frame, marks: &[Mark]) -> Vec<Placed> {
    let label = |mark: &Mark| Label { at: frame.x(mark.at_ms as f64), text: text_width(&mark.words(), FONT) + 8.0 };
    let room = Room { left: 0.0, right: WIDTH, badge: BADGE, rows: ROWS };
    labels::place(&marks.iter().map(label).collect::<Vec<_>>(), room)
}

fn middle(place: &Placed, height: f64) -> f64 {
    height - BELOW - ROW * (place.row as f64 + 0.5)
}

fn badge(index: usize, mark: &Mark, place: &Placed, y: f64) -> Markup {
    let away = BADGE / 2.0 + 4.0;
    let (x, anchor) = match place.side {
        Side::Left => (place.at - away, "end"),
        _ => (place.at + away, "start"),
    };
    let baseline = px(y + FONT * 0.36);
    html! {
        g.mark.fault[mark.what == MarkKind::Fault].sigterm[mark.what == MarkKind::Sigterm] {
            title {
                (mark.words()) " at " (format::moment(mark.at_ms))
                @if !mark.more().is_empty() { ": " (mark.more()) }
            }
            rect x=(px(place.at - BADGE / 2.0)) y=(px(y - BADGE / 2.0)) width=(BADGE) height=(BADGE)
                rx=(if mark.what == MarkKind::Fault { 2.0 } else { BADGE / 2.0 }) {}
            text.number x=(px(place.at)) y=(px(y + 3.6)) text-anchor="middle" font-size="10.5" { (index + 1) }
            @if place.side != Side::None {
                text.mark-words x=(px(x)) y=(baseline) text-anchor=(anchor) { (mark.words()) }
            }
        }
    }
}
