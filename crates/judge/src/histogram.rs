//! Histograms of Prometheus: requests up to each bound. Two readings of one are subtracted, and what lies between is a
//! histogram as well.

/// Bounds in ascending order, the last of which is infinite, and how many were at most that.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Histogram(Vec<(f64, f64)>);

impl Histogram {
    /// Adds to what was at most `bound`. Series of one histogram (one for each value of a label that does not matter)
    /// add up.
    pub fn add(&mut self, bound: f64, count: f64) {
        if bound.is_nan() || !(count.is_finite() && count >= 0.0) {
            return;
        }
        match self
            .0
            .binary_search_by(|(other, _)| other.total_cmp(&bound))
        {
            Ok(at) => self.0[at].1 += count,
            Err(at) => self.0.insert(at, (bound, count)),
        }
    }

    pub fn merge(&mut self, other: &Self) {
        for (bound, count) in &other.0 {
            self.add(*bound, *count);
        }
    }

    /// What came since an earlier reading. A count that fell is of a new process or a broken page, and nothing came.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let before = |bound: f64| match earlier
            .0
            .binary_search_by(|(other, _)| other.total_cmp(&bound))
        {
            Ok(at) => earlier.0[at].1,
            Err(_) => 0.0,
        };
        Self(
            self.0
                .iter()
                .map(|(bound, count)| (*bound, (count - before(*bound)).max(0.0)))
                .collect(),
        )
    }

    /// The same shape, of at most so many.
    pub fn limit(&mut self, most: f64) {
        let total = self.total();
        if total > most {
            self.0
                .iter_mut()
                .for_each(|(_, count)| *count *= most / total);
        }
    }

    pub fn total(&self) -> f64 {
        self.0.last().map_or(0.0, |(_, count)| *count)
    }

    /// How many were surely above: buckets of another version may have other bounds.
    pub fn above(&self, value: f64) -> f64 {
        self.first(|bound, _| bound >= value)
            .map_or(0.0, |at| (self.total() - self.0[at].1).max(0.0))
    }

    /// The smallest finite bound that is at least this.
    pub fn bound(&self, value: f64) -> Option<f64> {
        self.first(|bound, _| bound >= value)
            .map(|at| self.0[at].0)
            .filter(|bound| bound.is_finite())
    }

    /// Interpolated inside a bucket, as Prometheus does it; the last finite bound if it lies above all of them.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.total();
        let at = self
            .first(|_, count| count >= rank)
            .filter(|_| self.total() > 0.0)?;
        let (below, before) = at.checked_sub(1).map_or((0.0, 0.0), |at| self.0[at]);
        let (bound, count) = self.0[at];
        if bound.is_infinite() || count <= before {
            return Some(if bound.is_infinite() { below } else { bound });
        }
        Some(below + (bound - below) * ((rank - before) / (count - before)).clamp(0.0, 1.0))
    }

    fn first(&self, is: impl Fn(f64, f64) -> bool) -> Option<usize> {
        self.0.iter().position(|(bound, count)| is(*bound, *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(values: &[f64]) -> Histogram {
        let mut histogram = Histogram::default();
        for bound in [f64::INFINITY, 0.1, 0.2, 0.4, 1.0] {
            histogram.add(
                bound,
                values.iter().filter(|value| **value <= bound).count() as f64,
            );
        }
        histogram
    }

    #[test]
    fn quantiles_are_those_of_prometheus() {
        let histogram = of(&[0.05, 0.15, 0.15, 0.3]);
        assert_eq!(histogram.quantile(0.5), Some(0.15000000000000002));
        assert_eq!(histogram.quantile(1.0), Some(0.4));
        assert_eq!(of(&[7.0]).quantile(0.5), Some(1.0));
        assert_eq!(Histogram::default().quantile(0.5), None);
        assert_eq!(
            (
                histogram.above(0.2),
                histogram.above(0.15),
                histogram.above(9.0)
            ),
            (1.0, 1.0, 0.0)
        );
        assert_eq!(
            (histogram.bound(0.25), histogram.bound(2.0)),
            (Some(0.4), None)
        );
    }

    proptest! {
        #[test]
        fn what_came_between_two_readings(
            first in prop::collection::vec(0.0..2.0f64, 0..20),
            more in prop::collection::vec(0.0..2.0f64, 0..20),
        ) {
            let all: Vec<f64> = first.iter().chain(&more).copied().collect();
            prop_assert_eq!(of(&all).since(&of(&first)), of(&more));
            prop_assert_eq!(of(&first).since(&of(&all)).total(), 0.0);
            let mut sum = of(&first);
            sum.merge(&of(&more));
            prop_assert_eq!(&sum, &of(&all));
            let ranks = [0.1, 0.5, 0.9].map(|share| sum.quantile(share));
            prop_assert!(ranks[0] <= ranks[1] && ranks[1] <= ranks[2]);
            sum.limit(5.0);
            prop_assert!(sum.total() <= 5.0);
        }
    }
}
