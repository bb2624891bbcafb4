//! Statistics of a handful of samples.

/// Median and range of several samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) count: usize,
    /// Of an even number: the mean of the two in the middle.
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Summary {
    /// None without samples.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&least, &most) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Some(Self { count: sorted.len(), median, least, most })
    }
}

/// The value that `share` of the sorted ones do not exceed (nearest rank).
pub(crate) fn percentile<T: Copy>(sorted: &[T], share: f64) -> Option<T> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(Summary::of(&[3.0, 1.0, 2.0]), Some(Summary { count: 3, median: 2.0, least: 1.0, most: 3.0 }));
        assert_eq!(Summary::of(&[4.0, 1.0, 2.0, 3.0]).map(|summary| summary.median), Some(2.5));
        assert_eq!(Summary::of(&[f64::INFINITY; 2]).map(|summary| summary.median), Some(f64::INFINITY));
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn percentiles_are_values_that_were_there() {
        let sorted: Vec<u32> = (1..=1000).collect();
        assert_eq!(percentile(&sorted, 0.5), Some(500));
        assert_eq!(percentile(&sorted, 0.99), Some(990));
        assert_eq!(percentile(&sorted, 0.999), Some(999));
        assert_eq!(percentile(&sorted, 1.0), Some(1000));
        assert_eq!(percentile(&[7], 0.5), Some(7));
        assert_eq!(percentile::<u32>(&[], 0.5), None);
    }
}
