//! Computes median and range of a few samples.

/// The median and the range of several samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) count: usize,
    /// The median. For an even number of samples, the mean of the middle two.
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Summary {
    /// `None` without samples.
    pub(crate) fn from_samples(samples: &[f64]) -> Option<Self> {
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
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(
            Summary::from_samples(&[3.0, 1.0, 2.0]),
            Some(Summary {
                count: 3,
                median: 2.0,
                least: 1.0,
                most: 3.0
            })
        );
        assert_eq!(
            Summary::from_samples(&[4.0, 1.0, 2.0, 3.0]).map(|summary| summary.median),
            Some(2.5)
        );
        assert_eq!(
            Summary::from_samples(&[f64::INFINITY; 2]).map(|summary| summary.median),
            Some(f64::INFINITY)
        );
        assert_eq!(Summary::from_samples(&[]), None);
    }
}
