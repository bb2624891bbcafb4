//! Scales and paths. Lengths are in CSS pixels of the drawing's own width.

use std::fmt::Write;

/// From values to places.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    from: (f64, f64),
    to: (f64, f64),
    log: bool,
}

impl Scale {
    pub fn linear(from: (f64, f64), to: (f64, f64)) -> Self {
        Self { from, to, log: false }
    }

    /// By powers of ten; `from` is above zero.
    pub fn log(from: (f64, f64), to: (f64, f64)) -> Self {
        Self { from: (from.0.log10(), from.1.log10()), to, log: true }
    }

    /// The last value of a linear scale.
    pub fn end(&self) -> f64 {
        self.from.1
    }

    /// The place of a value; the nearer end for one that is beyond.
    pub fn at(&self, value: f64) -> f64 {
        let value = if self.log { value.max(f64::MIN_POSITIVE).log10() } else { value };
        let share = (value - self.from.0) / (self.from.1 - self.from.0);
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        self.to.0 + share * (self.to.1 - self.to.0)
    }
}

/// Round values from 0 to at least `max`, about `wanted` of them.
pub fn ticks(max: f64, wanted: usize) -> Vec<f64> {
    let step = nice_step(max.max(f64::MIN_POSITIVE), wanted);
    let count = (max / step).ceil().max(1.0) as usize;
    (0..=count).map(|n| n as f64 * step).collect()
}

/// 1, 2 or 5 times a power of ten, never below 1.
pub fn nice_step(span: f64, wanted: usize) -> f64 {
    let rough = (span / wanted.max(1) as f64).max(1.0);
    let power = 10_f64.powf(rough.log10().floor());
    let nice = [1.0, 2.0, 5.0, 10.0].into_iter().find(|n| n * power >= rough * 0.999);
    nice.unwrap_or(10.0) * power
}

/// A number with one decimal at most.
pub fn px(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// The area between two lines of steps: `edges` has one place more than either line.
pub fn area(edges: &[f64], top: &[f64], bottom: &[f64]) -> String {
    let mut path = String::new();
    let steps: Vec<_> = edges.windows(2).zip(top.iter().zip(bottom)).collect();
    let Some((first, _)) = steps.first() else { return path };
    let _ = write!(path, "M{}", px(first[0]));
    let mut lead = ",";
    let mut last = f64::NAN;
    for (edge, (top, _)) in &steps {
        line_to(&mut path, &mut lead, &mut last, **top, edge[1]);
    }
    for (edge, (_, bottom)) in steps.iter().rev() {
        line_to(&mut path, &mut lead, &mut last, **bottom, edge[0]);
    }
    path.push('Z');
    path
}

fn line_to(path: &mut String, lead: &mut &str, last: &mut f64, y: f64, x: f64) {
    if (*last - y).abs() < 0.05 {
        // The same height goes on: one stroke instead of two.
        if let Some(stroke) = path.rfind('H') {
            path.truncate(stroke);
        }
    } else {
        let _ = write!(path, "{lead}{}", px(y));
    }
    let _ = write!(path, "H{}", px(x));
    (*lead, *last) = ("V", y);
}

/// A line of steps; it is broken where there is no value.
pub fn steps(edges: &[f64], values: &[Option<f64>]) -> String {
    let mut path = String::new();
    let mut drawn = false;
    for (edge, value) in edges.windows(2).zip(values) {
        if let Some(y) = value {
            let _ = if drawn { write!(path, "V{}", px(*y)) } else { write!(path, "M{},{}", px(edge[0]), px(*y)) };
            let _ = write!(path, "H{}", px(edge[1]));
        }
        drawn = value.is_some();
    }
    path
}

/// A dash a step.
pub fn dashes(edges: &[f64], values: &[Option<f64>]) -> String {
    let dash = |(edge, y): (&[f64], f64)| format!("M{},{}H{}", px(edge[0]), px(y), px(edge[1]));
    edges.windows(2).zip(values).filter_map(|(edge, value)| Some(dash((edge, (*value)?)))).collect()
}

/// About how wide a text is: no font is known here, so a wide one is assumed.
pub fn text_width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_top() {
        assert_eq!(ticks(187.0, 4), [0.0, 50.0, 100.0, 150.0, 200.0]);
        assert_eq!(ticks(0.0, 4), [0.0, 1.0]);
        assert_eq!(ticks(3.0, 4), [0.0, 1.0, 2.0, 3.0]);
    }

    #[test]
    fn scales_keep_to_their_ends() {
        let linear = Scale::linear((0.0, 10.0), (100.0, 0.0));
        assert_eq!([-1.0, 0.0, 5.0, 11.0, f64::NAN].map(|v| linear.at(v)), [100.0, 100.0, 50.0, 0.0, 100.0]);
        let log = Scale::log((0.1, 1000.0), (0.0, 4.0));
        assert_eq!([0.0, 0.1, 1.0, 1000.0].map(|v| log.at(v).round()), [0.0, 0.0, 1.0, 4.0]);
        assert_eq!(Scale::linear((0.0, 0.0), (0.0, 9.0)).at(0.0), 0.0);
    }

    #[test]
    fn paths() {
        let edges = [0.0, 1.0, 2.0, 3.0];
        assert_eq!(area(&edges, &[5.0, 5.0, 2.0], &[9.0; 3]), "M0,5H2V2H3V9H0Z");
        assert_eq!(area(&[0.0], &[], &[]), "");
        let line = [Some(1.0), None, Some(2.5)];
        assert_eq!((steps(&edges, &line), dashes(&edges, &line)), ("M0,1H1M2,2.5H3".into(), "M0,1H1M2,2.5H3".into()));
        assert_eq!(steps(&edges, &[Some(1.0), Some(2.0)]), "M0,1H1V2H2");
    }
}
