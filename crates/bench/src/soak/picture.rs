//! A run as a picture: plots below each other, with one axis of time.

use super::figures::{Figures, SERIES};
use super::judge::Timeline;
use berth_rehearse::report::format::count;
use berth_rehearse::report::svg::{Scale, px, ticks};
use berth_rehearse::stats::percentile;
use maud::{Markup, PreEscaped, html};

/// Intervals into which the run is divided.
const BINS: usize = 240;

/// In pixels: the drawing, where its axis of time begins and ends, a plot, and a plot with its title.
const WIDTH: f64 = 1012.0;
const TIME: (f64, f64) = (70.0, 985.0);
const PLOT: f64 = 100.0;
const ROW: f64 = 150.0;

const STYLE: &str = "svg{color-scheme:light dark}text{font:12px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600}\
    .g{stroke:#d1d9e0}.l{fill:none;stroke-width:1.3}.l0{stroke:#2f6db3}.l1{stroke:#b3730c}.l2{stroke:#c22a1e}rect{fill:#fff}\
    @media(prefers-color-scheme:dark){text{fill:#e6edf3}.g{stroke:#3d444d}rect{fill:#0d1117}.l0{stroke:#6fa8ea}\
    .l1{stroke:#e0a53c}.l2{stroke:#ff8a7d}}";

/// Its name, and seconds with a value each.
type Line<'a> = (&'a str, Vec<(f64, f64)>);

struct Plot<'a> {
    title: String,
    log: bool,
    lines: Vec<Line<'a>>,
}

/// The whole file, of a run of so many seconds.
pub(super) fn draw(seconds: f64, timeline: &Timeline, figures: &Figures) -> String {
    let bin = seconds / BINS as f64;
    let index = |at: f64| ((at / bin) as usize).min(BINS - 1);
    let mut waits = vec![Vec::new(); BINS];
    for (at, wait) in &timeline.served {
        waits[index(*at)].push(*wait);
    }
    waits.iter_mut().for_each(|waits| waits.sort_by(f64::total_cmp));
    let middle = |index: usize| (index as f64 + 0.5) * bin;
    let wait = |share| {
        let of = |(bin, waits): (usize, &Vec<f64>)| Some((middle(bin), percentile(waits, share)?));
        waits.iter().enumerate().filter_map(of).collect()
    };
    let counted = |times: &[f64]| {
        let mut counts = vec![0.0; BINS];
        times.iter().for_each(|at| counts[index(*at)] += 1.0);
        counts.into_iter().enumerate().map(|(index, count)| (middle(index), count)).collect()
    };
    let rate = waits.iter().enumerate().map(|(index, waits)| (middle(index), waits.len() as f64 / bin)).collect();
    let series = |index: usize| figures.0.iter().map(|sample| (sample.at, sample.values[index])).collect();
    let linear = |title: String, lines| Plot { title, log: false, lines };
    let [(memory, unit, ..), others @ ..] = SERIES;
    let plots = [
        linear("New connections served, per second".into(), vec![("served", rate)]),
        linear(
            format!("Connections that failed, in each {} s", px(bin)),
            vec![
                ("of what was killed", counted(&timeline.allowed)),
                ("", Vec::new()),
                ("lost", counted(&timeline.lost)),
            ],
        ),
        Plot {
            title: "New connections: time until the answer, in ms".into(),
            log: true,
            lines: vec![("median", wait(0.5)), ("99th percentile", wait(0.99)), ("slowest", wait(1.0))],
        },
        linear(format!("The shim that stays: {memory}, in {unit}"), vec![("", series(0))]),
        linear(
            "The shim that stays".into(),
            others.into_iter().enumerate().map(|(index, (name, ..))| (name, series(index + 1))).collect(),
        ),
    ];
    let x = Scale::linear((0.0, seconds / 60.0), TIME);
    let height = ROW * plots.len() as f64 + 24.0;
    let drawn = html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (WIDTH) " " (px(height)) } role="img" aria-labelledby="title" {
            title id="title" { "A soak of " (format!("{:.0}", seconds / 60.0)) " minutes: served, failed, time until the answer, memory, descriptors" }
            style { (PreEscaped(STYLE)) }
            rect width=(WIDTH) height=(px(height)) {}
            @for (index, plot) in plots.iter().enumerate() { (plot.draw(index as f64 * ROW + 34.0, x)) }
            @for minute in ticks(seconds / 60.0, 12) {
                @if minute <= seconds / 60.0 {
                    text x=(px(x.at(minute))) y=(px(height - 8.0)) text-anchor="middle" { (minute) " min" }
                }
            }
        }
    };
    drawn.into_string()
}

impl Plot<'_> {
    fn draw(&self, top: f64, x: Scale) -> Markup {
        let values = || self.lines.iter().flat_map(|(_, points)| points).map(|(_, value)| *value);
        let most = values().fold(1.0, f64::max);
        let bottom = top + PLOT;
        let (ticks, y) = if self.log {
            let lowest = values().fold(1.0, f64::min).max(0.01).log10().floor() as i32;
            let powers: Vec<_> = (lowest..=most.log10().ceil() as i32).map(|power| 10_f64.powi(power)).collect();
            let y = Scale::log((powers[0], powers[powers.len() - 1].max(powers[0] * 10.0)), (bottom, top));
            (powers, y)
        } else {
            let ticks = ticks(most, 4);
            let y = Scale::linear((0.0, ticks[ticks.len() - 1]), (bottom, top));
            (ticks, y)
        };
        let of = |tick: f64| if tick < 1.0 { tick.to_string() } else { count(tick as u64) };
        let path = |points: &[(f64, f64)]| {
            let point = |(index, (at, value)): (usize, &(f64, f64))| {
                format!("{}{},{}", if index == 0 { "M" } else { "L" }, px(x.at(at / 60.0)), px(y.at(*value)))
            };
            points.iter().enumerate().map(point).collect::<String>()
        };
        html! {
            text.t x="8" y=(px(top - 12.0)) { (self.title) }
            @for tick in ticks {
                path.g d={ "M" (px(TIME.0)) "," (px(y.at(tick))) "H" (px(TIME.1)) } {}
                text x=(px(TIME.0 - 6.0)) y=(px(y.at(tick) + 4.0)) text-anchor="end" { (of(tick)) }
            }
            @for (index, (name, points)) in self.lines.iter().enumerate() {
                path.l.{ "l" (index) } d=(path(points)) {}
                @if !name.is_empty() {
                    @let left = 350.0 + 215.0 * index as f64;
                    path.l.{ "l" (index) } d={ "M" (px(left)) "," (px(top - 16.0)) "h20" } {}
                    text x=(px(left + 26.0)) y=(px(top - 12.0)) { (name) }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Sample;
    use super::*;

    #[test]
    fn what_was_lost_is_drawn_where_it_was_lost() {
        let mut timeline = Timeline { served: vec![(1.0, 0.5), (59.0, 900.0)], ..Timeline::default() };
        let sample = |at| Sample { at, values: [3000.0, 33.0, 4.0, 2.0] };
        let figures = Figures(vec![sample(10.0), sample(50.0)]);
        let line = |drawn: &str| drawn.split("l l2").nth(1).unwrap().split("d=\"").nth(1).unwrap().to_owned();
        let flat = line(&draw(60.0, &timeline, &figures));
        timeline.lost.push(30.0);
        let drawn = draw(60.0, &timeline, &figures);
        assert!(drawn.contains("3,000") && !drawn.contains("NaN") && line(&drawn) != flat, "{drawn}");
        let x = Scale::linear((0.0, 60.0), TIME).at(30.125);
        assert!(line(&drawn).contains(&format!("L{},", px(x))), "{drawn}");
        assert!(!draw(1.0, &Timeline::default(), &Figures::default()).contains("NaN"));
    }
}
