//! Checks that a shim that lives through many rounds does not use more memory, descriptors and
//! threads from round to round.

use super::Case;
use crate::record::{
    data::Ran,
    event::{Event, EventKind, Footprint},
};
use std::collections::BTreeMap;

/// Fewest footprints (a shim's resources after a round) from which growth can be judged.
const MIN_FOOTPRINTS: usize = 8;

/// Divisor of the number of footprints: the first quarter is left out. Buffers still grow to their
/// final size during that quarter.
const WARM_UP_DIVISOR: usize = 4;

/// A figure of a shim's resources, and how much of a rise does not count as growth.
struct Series {
    name: &'static str,
    of: fn(&Footprint) -> u64,
    /// Greatest rise of the fitted line from the begin to the end of the run that does not count as
    /// growth, however long the run is. A line through a single step rises by up to 1.5 times the
    /// step. A single additional thread is no growth, and the number of descriptors varies by four
    /// (pipes, guards, requests for the status).
    most: f64,
    /// Greatest height of a single step up that does not count as growth. Memory has such a step
    /// when an apiserver hangs: the allocator keeps up to 16 KiB for each client that waited.
    step: f64,
}

const SERIES: [Series; 3] = [
    Series {
        name: "KiB of memory (RssAnon)",
        of: |f| f.memory_kib,
        most: 1500.0,
        step: 8000.0,
    },
    Series {
        name: "descriptors that belong to no connection",
        of: |f| f.descriptors,
        most: 8.0,
        step: 0.0,
    },
    Series {
        name: "threads",
        of: |f| f.threads,
        most: 1.6,
        step: 0.0,
    },
];

pub(super) fn judge(case: &Case<'_>, ran: &mut Ran) {
    let mut shims: BTreeMap<(&str, u32), Vec<&Footprint>> = BTreeMap::new();
    for Event { subject, what, .. } in &case.record.events {
        if let EventKind::Footprint(footprint) = what {
            shims
                .entry((subject, footprint.pid))
                .or_default()
                .push(footprint);
        }
    }
    if !shims.is_empty()
        && shims
            .values()
            .all(|footprints| footprints.len() < MIN_FOOTPRINTS)
    {
        ran.notes.push(format!(
            "no shim ran during {MIN_FOOTPRINTS} rounds, so the growth of shims was not judged"
        ));
    }
    for ((shim, _), footprints) in shims
        .iter()
        .filter(|(_, footprints)| footprints.len() >= MIN_FOOTPRINTS)
    {
        for Series {
            name,
            of,
            most,
            step,
        } in SERIES
        {
            let values: Vec<f64> = footprints[footprints.len() / WARM_UP_DIVISOR..]
                .iter()
                .map(|f| of(f) as f64)
                .collect();
            let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), value| {
                (l.min(*value), h.max(*value))
            });
            let rise = compute_rise(&subtract_greatest_step(&values, step));
            let seen = format!(
                "the shim {shim} had {low} to {high} {name} in {} rounds",
                values.len()
            );
            match rise > most {
                true => ran.add_objection(format!(
                    "{seen}, and the number grew from round to round: {rise:+.1} in all"
                )),
                false => ran.notes.push(seen),
            }
        }
    }
}

/// Returns the values without their greatest step up, of which at most `most` is taken away: a
/// single step is no growth, whereas a leak has many steps.
fn subtract_greatest_step(values: &[f64], most: f64) -> Vec<f64> {
    let steps = values.windows(2).map(|pair| pair[1] - pair[0]).enumerate();
    let (before, step) = steps
        .max_by(|(_, a), (_, b)| a.total_cmp(b))
        .unwrap_or_default();
    let less = |index| {
        if index > before {
            step.clamp(0.0, most)
        } else {
            0.0
        }
    };
    values
        .iter()
        .enumerate()
        .map(|(index, value)| value - less(index))
        .collect()
}

/// Returns by how much the best line (least squares) rises from the first value to the last.
fn compute_rise(values: &[f64]) -> f64 {
    let last = values.len().saturating_sub(1) as f64;
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let from_middle = |index: usize| index as f64 - last / 2.0;
    let varies: f64 = (0..values.len())
        .map(|index| from_middle(index).powi(2))
        .sum();
    let together: f64 = values
        .iter()
        .enumerate()
        .map(|(index, value)| from_middle(index) * (value - mean))
        .sum();
    if varies > 0.0 {
        together / varies * last
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of 30 rounds without the first quarter, which is left out.
    #[test]
    fn a_leak_in_every_second_round_is_growth_and_noise_is_not() {
        let leak = |one_in: u32| {
            (0..22)
                .map(|round| 33.0 + f64::from(round * 7 % 5) + f64::from(round / one_in))
                .collect::<Vec<_>>()
        };
        let most = SERIES[1].most;
        assert!(
            compute_rise(&leak(1)) > most
                && compute_rise(&leak(2)) > most
                && compute_rise(&leak(u32::MAX)) < most
        );
        assert_eq!((compute_rise(&[]), compute_rise(&[3.0])), (0.0, 0.0));
    }

    #[test]
    fn one_step_is_no_growth_and_many_are() {
        let steps = |at: &[usize]| {
            (0..30)
                .map(|x| at.iter().filter(|at| x >= **at).count() as f64)
                .collect::<Vec<_>>()
        };
        assert!((0..30).all(|at| compute_rise(&steps(&[at])) < SERIES[2].most));
        assert!(compute_rise(&steps(&[5, 10, 15, 20, 25])) > SERIES[2].most);
    }

    /// The first values are from a real run, in which an instance hung for 8 s.
    #[test]
    fn one_step_of_memory_is_no_growth_but_a_greater_one_and_a_leak_are() {
        let grows = |values: &[f64]| {
            compute_rise(&subtract_greatest_step(values, SERIES[0].step)) > SERIES[0].most
        };
        let run = [
            3812.0, 3824.0, 3924.0, 3932.0, 3868.0, 5588.0, 5588.0, 5584.0, 5584.0, 5944.0, 5944.0,
            6064.0,
        ];
        assert!(!grows(&run));
        assert!(grows(&run.map(|value| if value > 5000.0 {
            value + 9000.0
        } else {
            value
        })));
        assert!(grows(
            &(0..30)
                .map(|round| f64::from(round) * 60.0)
                .collect::<Vec<_>>()
        ));
        assert_eq!(subtract_greatest_step(&[], 9.0), [0.0; 0]);
    }
}
