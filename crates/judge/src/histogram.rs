//! Prometheus histograms: the number of requests up to each bound. The difference of two readings
//! is again a histogram.

/// Ascending bounds, the last of them infinite, and the number of requests up to each bound.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Histogram(Vec<(f64, f64)>);

impl Histogram {
    /// Adds a count of requests up to `bound`. A page can have several series of one histogram,
    /// because of labels that the judge ignores. Their counts are added.
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

    /// Returns the requests that were counted since an earlier reading. If a count has fallen, the
    /// process is new or the page is broken, and the count's increment is 0.
    #[must_use]
    pub fn increments_since(&self, earlier: &Self) -> Self {
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

    /// Scales all counts down, if necessary, so that the total is at most `most` requests.
    pub fn scale_down(&mut self, most: f64) {
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

    /// Number of requests that surely took longer than `value`. Requests in the bucket around
    /// `value` are left out: their times are not known exactly.
    pub fn count_above(&self, value: f64) -> f64 {
        self.find_first_bucket(|bound, _| bound >= value)
            .map_or(0.0, |at| (self.total() - self.0[at].1).max(0.0))
    }

    /// The smallest finite bound that is not below `value`.
    pub fn find_bound(&self, value: f64) -> Option<f64> {
        self.find_first_bucket(|bound, _| bound >= value)
            .map(|at| self.0[at].0)
            .filter(|bound| bound.is_finite())
    }

    /// The quantile, interpolated inside a bucket as in Prometheus. If the quantile is above all
    /// finite bounds, the largest finite bound is returned.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.total();
        let at = self
            .find_first_bucket(|_, count| count >= rank)
            .filter(|_| self.total() > 0.0)?;
        let (below, before) = at.checked_sub(1).map_or((0.0, 0.0), |at| self.0[at]);
        let (bound, count) = self.0[at];
        if bound.is_infinite() || count <= before {
            return Some(if bound.is_infinite() { below } else { bound });
        }
        Some(below + (bound - below) * ((rank - before) / (count - before)).clamp(0.0, 1.0))
    }

    fn find_first_bucket(&self, is: impl Fn(f64, f64) -> bool) -> Option<usize> {
        self.0.iter().position(|(bound, count)| is(*bound, *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn make_histogram(values: &[f64]) -> Histogram {
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
        let histogram = make_histogram(&[0.05, 0.15, 0.15, 0.3]);
        assert_eq!(histogram.quantile(0.5), Some(0.15000000000000002));
        assert_eq!(histogram.quantile(1.0), Some(0.4));
        assert_eq!(make_histogram(&[7.0]).quantile(0.5), Some(1.0));
        assert_eq!(Histogram::default().quantile(0.5), None);
        assert_eq!(
            (
                histogram.count_above(0.2),
                histogram.count_above(0.15),
                histogram.count_above(9.0)
            ),
            (1.0, 1.0, 0.0)
        );
        assert_eq!(
            (histogram.find_bound(0.25), histogram.find_bound(2.0)),
            (Some(0.4), None)
        );
    }

    proptest! {
        #[test]
        fn increments_lie_between_two_readings(
            first in prop::collection::vec(0.0..2.0f64, 0..20),
            more in prop::collection::vec(0.0..2.0f64, 0..20),
        ) {
            let all: Vec<f64> = first.iter().chain(&more).copied().collect();
            prop_assert_eq!(make_histogram(&all).increments_since(&make_histogram(&first)), make_histogram(&more));
            prop_assert_eq!(make_histogram(&first).increments_since(&make_histogram(&all)).total(), 0.0);
            let mut sum = make_histogram(&first);
            sum.merge(&make_histogram(&more));
            prop_assert_eq!(&sum, &make_histogram(&all));
            let ranks = [0.1, 0.5, 0.9].map(|share| sum.quantile(share));
            prop_assert!(ranks[0] <= ranks[1] && ranks[1] <= ranks[2]);
            sum.scale_down(5.0);
            prop_assert!(sum.total() <= 5.0);
        }
    }
}
