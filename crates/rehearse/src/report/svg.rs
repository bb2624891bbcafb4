//! Scales. Lengths are in CSS pixels of the drawing's own width.

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
}
