//! The two drawings of a run: answered requests over time with the losses, and the instances with
//! their events (marks).
//!
//! All drawings of a page have the same horizontal scale, so that a reader can compare them. On a
//! narrow page the drawings can be scrolled and are not scaled, since scaled text would be too
//! small to read.

use crate::record::{
    data::{Instance, Mark, MarkKind, Ran},
    format::{self, escape_html},
};
use std::fmt::Write;

/// Width of a drawing, and the place where its horizontal scale begins. The names of rows are left
/// of that place.
const WIDTH: f64 = 1040.0;
const LEFT_MARGIN: f64 = 200.0;

/// Heights: of the plot of requests, of each row below the plot, and of the drawing's title.
const PLOT_HEIGHT: f64 = 170.0;
const ROW_HEIGHT: f64 = 17.0;
const TITLE_HEIGHT: f64 = 26.0;

/// Assumed width of a letter: the font is unknown, so a wide font is assumed.
const LETTER_WIDTH: f64 = 6.9;

/// Room for marks before and after the load, as a share of the load's duration. Marks further away
/// are drawn at the edge.
const SIDE_MARGIN: f64 = 0.12;

/// If the highest rate is more than this many times the usual rate, the drawing cuts off the
/// highest steps.
const BURST_RATIO: f64 = 2.5;

/// The greatest number of instances with rows that a reader can tell apart.
const MOST_INSTANCES: usize = 12;

/// The scales that all drawings of a page share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame {
    /// The first and the last moment, in ms.
    from: f64,
    to: f64,
    /// The end of the horizontal scale, with room for the words of the last mark on the right.
    right: f64,
    /// The highest rate of the vertical scale.
    most: f64,
}

impl Frame {
    pub(super) fn of(runs: &[&Ran]) -> Self {
        let ends = runs
            .iter()
            .map(|ran| (ran.timeline.step_ms * count_steps(ran) as u64).max(ran.load_ms) as f64);
        let end = ends.fold(1.0, f64::max);
        let marks = || runs.iter().flat_map(|ran| &ran.marks);
        let at = || marks().map(|mark| mark.at_ms as f64);
        let widest = marks()
            .map(|mark| text_width(&label_text(mark)))
            .fold(0.0, f64::max);
        Self {
            from: at().fold(0.0, f64::min).max(-end * SIDE_MARGIN),
            to: at().fold(end, f64::max).min(end * (1.0 + SIDE_MARGIN)),
            right: WIDTH - widest.min(WIDTH / 3.0),
            most: runs
                .iter()
                .map(|ran| usual_maximum_per_step(ran))
                .fold(1.0, f64::max),
        }
    }

    /// The horizontal place of a moment. A moment outside the drawing gets the nearer edge.
    fn x_position(&self, ms: f64) -> f64 {
        let share = (ms - self.from) / (self.to - self.from);
        LEFT_MARGIN + share.clamp(0.0, 1.0) * (self.right - LEFT_MARGIN)
    }

    /// The horizontal place where a step of a run's timeline begins.
    fn step_position(&self, ran: &Ran, step: usize) -> f64 {
        self.x_position((ran.timeline.step_ms * step as u64) as f64)
    }

    /// A drawing with a title, lines for round seconds, and their numbers below.
    fn render_svg(&self, title: &str, words: &str, bottom: f64, body: &str) -> String {
        let step = round_step((self.to - self.from) / 1e3, 10);
        let (first, last) = (
            (self.from / 1e3 / step).ceil() as i64,
            (self.to / 1e3 / step).floor() as i64,
        );
        let (mut lines, mut numbers) = (String::new(), String::new());
        for second in (first..=last).map(|n| n as f64 * step) {
            let x = self.x_position(second * 1e3);
            let _ = write!(lines, "M{x:.1},{TITLE_HEIGHT}V{bottom}");
            let _ = write!(
                numbers,
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{second} s</text>",
                bottom + 15.0
            );
        }
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\"><title>{title}</title><desc>{}</desc>\
             <path class=\"grid\" d=\"{lines}\"/>{body}<g class=\"quiet\">{numbers}</g><text y=\"14\" class=\"title\">{title}</text></svg>",
            bottom + 24.0,
            escape_html(words)
        )
    }
}

fn text_width(words: &str) -> f64 {
    words.chars().count() as f64 * LETTER_WIDTH + 12.0
}

fn label_text(mark: &Mark) -> String {
    format!(
        "{} {}",
        mark.describe_mark(),
        format::format_moment(mark.at_ms)
    )
}

/// An instance with its version, if known.
pub(super) fn instance_label(Instance { name, version }: &Instance) -> String {
    format!("{name} {version}").trim_end().to_owned()
}

/// Number of steps in a run's timeline.
fn count_steps(ran: &Ran) -> usize {
    ran.timeline.allowed.len()
}

/// Returns the CSS class for the colour of an instance. If there are more instances than colours,
/// colours repeat.
fn instance_class(ran: &Ran, instance: &str) -> String {
    let known = ran
        .instances
        .iter()
        .position(|known| known.name == instance);
    known.map_or("other".to_owned(), |index| format!("i{}", index % 5))
}

/// Answers a second of all instances, by step.
fn sum_by_step(ran: &Ran) -> Vec<f64> {
    let sum = |step| {
        ran.timeline
            .answered
            .values()
            .map(|counts| counts[step])
            .sum::<u64>()
    };
    (0..count_steps(ran))
        .map(|step| count_per_second(ran, sum(step)))
        .collect()
}

fn count_per_second(ran: &Ran, count: u64) -> f64 {
    count as f64 * 1e3 / ran.timeline.step_ms.max(1) as f64
}

/// Returns the highest rate of the vertical scale. A step in which many clients came at once, such
/// as the start of the watches, is cut off, because all other steps would look flat beside it.
fn usual_maximum_per_step(ran: &Ran) -> f64 {
    let mut totals = sum_by_step(ran);
    totals.sort_unstable_by(f64::total_cmp);
    let usual = totals.get(totals.len() * 9 / 10).copied().unwrap_or(0.0);
    let most = totals.last().copied().unwrap_or(0.0);
    if usual > 0.0 && most > BURST_RATIO * usual {
        usual * 1.3
    } else {
        most
    }
}

/// Answered requests a second by instance, stacked, with a row below for each kind of loss.
pub(super) fn draw_requests(frame: &Frame, ran: &Ran) -> String {
    let bottom = TITLE_HEIGHT + PLOT_HEIGHT;
    let step = round_step(frame.most, 4);
    let most = (frame.most / step).ceil() * step;
    let y = |rate: f64| bottom - (rate / most).min(1.0) * PLOT_HEIGHT;
    let mut body = String::new();
    for value in (0..=(most / step) as u64).map(|n| n as f64 * step) {
        let (at, number) = (y(value), format::format_count(value as u64));
        let _ = write!(
            body,
            "<path class=\"grid\" d=\"M{LEFT_MARGIN},{at:.1}H{}\"/>",
            frame.right
        );
        let _ = write!(
            body,
            "<text class=\"quiet\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{number}</text>",
            LEFT_MARGIN - 8.0,
            at + 4.0
        );
    }
    let known = ran.instances.iter().map(|instance| &instance.name);
    let others = ran
        .timeline
        .answered
        .keys()
        .filter(|name| ran.instances.iter().all(|known| known.name != **name));
    let mut below = vec![0.0; count_steps(ran)];
    for name in known.chain(others) {
        let Some(counts) = ran.timeline.answered.get(name) else {
            continue;
        };
        let above: Vec<f64> = below
            .iter()
            .zip(counts)
            .map(|(below, count)| below + count_per_second(ran, *count))
            .collect();
        let mut path = format!("M{:.1},{bottom}", frame.step_position(ran, 0));
        for (step, rate) in above.iter().enumerate() {
            let _ = write!(
                path,
                "V{:.1}H{:.1}",
                y(*rate),
                frame.step_position(ran, step + 1)
            );
        }
        for (step, rate) in below.iter().enumerate().rev() {
            let _ = write!(
                path,
                "V{:.1}H{:.1}",
                y(*rate),
                frame.step_position(ran, step)
            );
        }
        let _ = write!(
            body,
            "<path class=\"{}\" d=\"{path}Z\"><title>{}</title></path>",
            instance_class(ran, name),
            escape_html(name)
        );
        below = above;
    }
    let burst = below
        .iter()
        .copied()
        .enumerate()
        .filter(|(_, rate)| *rate > most)
        .max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((step, rate)) = burst {
        let at = frame.step_position(ran, step + 1) + 3.0;
        let _ = write!(
            body,
            "<text class=\"burst\" x=\"{at:.1}\" y=\"{}\">↑ {}</text>",
            TITLE_HEIGHT + 11.0,
            format::format_count(rate as u64)
        );
    }
    let timeline = &ran.timeline;
    let lost = timeline
        .lost
        .iter()
        .map(|(loss, counts)| ("lost", loss.plural(), counts));
    let apart = [
        ("ended by the instance", &timeline.ended_by_instance),
        ("allowed by a promise", &timeline.allowed),
    ];
    let apart = apart
        .into_iter()
        .map(|(name, counts)| ("apart", name, counts));
    let rows = lost
        .chain(apart)
        .map(|(class, name, counts)| (class, name, counts, counts.iter().sum::<u64>()));
    let (mut top, mut seen) = (bottom + 10.0, Vec::new());
    for (class, name, counts, sum) in rows.filter(|(.., sum)| *sum > 0) {
        seen.push(format!("{} {name}", format::format_count(sum)));
        let _ = write!(
            body,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}: {}</text>",
            LEFT_MARGIN - 8.0,
            top + 11.0,
            name,
            format::format_count(sum)
        );
        for (step, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (from, to) = (
                frame.step_position(ran, step),
                frame.step_position(ran, step + 1),
            );
            // The bar of a loss goes up over the drawn answers, to show that the loss came at that
            // time.
            let above = if class == "lost" { TITLE_HEIGHT } else { top };
            let (width, height) = ((to - from).max(2.0), top + ROW_HEIGHT - 3.0 - above);
            let _ = write!(
                body,
                "<rect class=\"{class}\" x=\"{from:.1}\" y=\"{above}\" width=\"{width:.1}\" height=\"{height}\"><title>{count} {name}</title></rect>"
            );
        }
        top += ROW_HEIGHT;
    }
    let answered: u64 = timeline.answered.values().flatten().sum();
    let words = format!(
        "{} answers in all. {}",
        format::format_count(answered),
        seen.join(", ")
    );
    frame.render_svg(
        "Answered requests a second, by instance, and what was lost",
        &words,
        top,
        &body,
    )
}

/// Draws a row for each instance, from start to end, with its marks below. Returns an empty text if
/// there are too many instances, as in a rehearsal of many rounds. Their marks are in the JSON.
pub(super) fn draw_instances(frame: &Frame, ran: &Ran) -> String {
    if ran.instances.len() > MOST_INSTANCES {
        return String::new();
    }
    let (mut body, mut top) = (String::new(), TITLE_HEIGHT);
    let known = ran
        .instances
        .iter()
        .map(|instance| (instance.name.as_str(), instance_label(instance)));
    let mut names: Vec<(&str, String)> = known.collect();
    for Mark { instance, .. } in &ran.marks {
        if names.iter().all(|(name, _)| name != instance) {
            names.push((instance, instance.clone()));
        }
    }
    for (instance, name) in &names {
        let marks: Vec<&Mark> = ran
            .marks
            .iter()
            .filter(|mark| mark.instance == *instance)
            .collect();
        let _ = write!(
            body,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
            LEFT_MARGIN - 8.0,
            top + 11.0,
            escape_html(name)
        );
        for (from, to) in find_lives(&marks) {
            let (from, to) = (
                frame.x_position(from),
                to.map_or(frame.right, |to| frame.x_position(to)),
            );
            let (look, width) = (instance_class(ran, instance), (to - from).max(2.0));
            let _ = write!(
                body,
                "<rect class=\"{look}\" x=\"{from:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"12\" rx=\"2\"/>"
            );
        }
        let places = place_labels(
            &marks
                .iter()
                .map(|mark| {
                    (
                        frame.x_position(mark.at_ms as f64),
                        text_width(&label_text(mark)),
                    )
                })
                .collect::<Vec<_>>(),
        );
        for (mark, (x, row)) in marks.iter().zip(&places) {
            let class = if mark.what == MarkKind::Fault {
                "fault"
            } else {
                "mark"
            };
            let y = top + ROW_HEIGHT * (*row as f64 + 2.0) - 2.0;
            let _ = write!(
                body,
                "<g class=\"{class}\"><title>{} {}</title><path d=\"M{x:.1},{top}V{y:.1}\"/><text x=\"{:.1}\" y=\"{y:.1}\">{}</text></g>",
                escape_html(&label_text(mark)),
                escape_html(&mark.text),
                x + 4.0,
                escape_html(&label_text(mark)),
            );
        }
        top += ROW_HEIGHT * (places.iter().map(|(_, row)| row + 1).max().unwrap_or(0) as f64 + 1.0)
            + 12.0;
    }
    let words: Vec<String> = ran
        .marks
        .iter()
        .map(|mark| format!("{} {}", mark.instance, label_text(mark)))
        .collect();
    frame.render_svg("Instances", &words.join(", "), top, &body)
}

/// Returns the periods in which an instance ran: several if the instance was restarted. The end of
/// a period is `None` if the end was not seen.
fn find_lives(marks: &[&Mark]) -> Vec<(f64, Option<f64>)> {
    let mut lives: Vec<(f64, Option<f64>)> = Vec::new();
    for Mark { at_ms, what, .. } in marks
        .iter()
        .filter(|mark| matches!(mark.what, MarkKind::Started | MarkKind::Exited))
    {
        // An instance that starts again must have ended before, even if no end was seen, or if the
        // end is in the same millisecond as the new start.
        if let Some((_, to)) = lives.last_mut().filter(|(from, _)| *from < *at_ms as f64) {
            to.get_or_insert(*at_ms as f64);
        }
        if *what == MarkKind::Started {
            lives.push((*at_ms as f64, None));
        }
    }
    lives
}

/// Assigns each label to a row. `labels` are places and widths, in order of place. A label's text
/// is to the right of its line, which goes down to the text's row. From right to left, each label
/// gets the highest row in which it ends before the next text or line, so no line crosses a text.
fn place_labels(labels: &[(f64, f64)]) -> Vec<(f64, usize)> {
    // The leftmost text or line of each row.
    let mut rows: Vec<f64> = Vec::new();
    let mut places: Vec<(f64, usize)> = Vec::new();
    for &(x, width) in labels.iter().rev() {
        let row = rows
            .iter()
            .position(|next| x + width <= *next)
            .unwrap_or(rows.len());
        rows.resize(rows.len().max(row + 1), x);
        rows[..=row].fill(x);
        places.push((x, row));
    }
    places.reverse();
    places
}

/// Returns a round step: 1, 2 or 5 times a power of ten, and at least 1. About `wanted` such steps
/// fill the span.
fn round_step(span: f64, wanted: u32) -> f64 {
    let rough = (span / f64::from(wanted)).max(1.0);
    let power = 10_f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0]
        .map(|n| n * power)
        .into_iter()
        .find(|step| *step >= rough * 0.999)
        .unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_of_an_axis_are_round_numbers() {
        assert_eq!(
            [187.0, 0.0, 3.0, 30.0].map(|span| round_step(span, 4)),
            [50.0, 1.0, 1.0, 10.0]
        );
    }

    /// Marks of the same millisecond are sorted by their kinds, so the second start may come before
    /// the first end.
    #[test]
    fn an_instance_that_is_started_again_at_once_has_two_lives() {
        use MarkKind::{Exited, Started};
        let mark = |(at_ms, what)| Mark {
            at_ms,
            instance: "a".into(),
            what,
            text: String::new(),
        };
        for again in [10, 11] {
            let marks = [(0, Started), (10, Exited), (again, Started), (30, Exited)].map(mark);
            let mut marks: Vec<&Mark> = marks.iter().collect();
            marks.sort_by_key(|mark| (mark.at_ms, mark.what));
            assert_eq!(
                find_lives(&marks),
                [(0.0, Some(10.0)), (again as f64, Some(30.0))]
            );
        }
    }

    #[test]
    fn labels_of_close_marks_are_in_rows_with_the_first_lowest() {
        let rows = |labels: &[(f64, f64)]| {
            place_labels(labels)
                .into_iter()
                .map(|(_, row)| row)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            rows(&[(100.0, 60.0), (300.0, 60.0), (500.0, 60.0)]),
            [0, 0, 0]
        );
        assert_eq!(
            rows(&[(100.0, 60.0), (125.0, 60.0), (150.0, 60.0)]),
            [2, 1, 0]
        );
        // The line of the second label goes through the first row.
        assert_eq!(
            rows(&[(100.0, 40.0), (125.0, 60.0), (150.0, 60.0)]),
            [2, 1, 0]
        );
        assert_eq!(
            rows(&[(100.0, 20.0), (125.0, 60.0), (150.0, 60.0)]),
            [0, 1, 0]
        );
    }
}
