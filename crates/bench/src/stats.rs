//! Statistics of a handful of samples.

/// Median and range of several samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) count: usize,
    /// For an even number of samples, the mean of the middle two.
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Summary {
    /// `None` without samples.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&least, &most) = (sorted.first()?, sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        Some(Self {
            count: sorted.len(),
            median,
            least,
            most,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(
            Summary::of(&[3.0, 1.0, 2.0]),
            Some(Summary {
                count: 3,
                median: 2.0,
                least: 1.0,
                most: 3.0
            })
        );
        assert_eq!(
            Summary::of(&[4.0, 1.0, 2.0, 3.0]).map(|summary| summary.median),
            Some(2.5)
        );
        assert_eq!(
            Summary::of(&[f64::INFINITY; 2]).map(|summary| summary.median),
            Some(f64::INFINITY)
        );
        assert_eq!(Summary::of(&[]), None);
    }
}
