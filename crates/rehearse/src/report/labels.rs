//! Labels above a plot, so that none covers another one.
//!
//! A label is a round badge on its line and a text to its right or left. Rows are counted upwards from the plot:
//! a label's line goes down through all rows below its own. A text that fits nowhere, or that the line of a
//! badge in a crowd goes through, is left out; a badge never is: the list below the plot has its words.

/// A label that is to be placed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Label {
    /// Where its line is.
    pub(crate) at: f64,
    /// Width of its text.
    pub(crate) text: f64,
}

/// Where a text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Right of its badge.
    Right,
    /// Left of it.
    Left,
    None,
}

/// Where a label is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Placed {
    /// Middle of its badge, and its line.
    pub(crate) at: f64,
    /// Its row, upwards from 0.
    pub(crate) row: usize,
    /// Where its text is.
    pub(crate) side: Side,
    /// From where to where it goes.
    pub(crate) extent: (f64, f64),
    /// The part of that which is text.
    text: (f64, f64),
}

/// The room that labels have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub(crate) left: f64,
    pub(crate) right: f64,
    /// Width of a badge.
    pub(crate) badge: f64,
    /// Rows in which texts may be. Badges take more if they need them.
    pub(crate) rows: usize,
}

/// Space between two labels of a row.
const SPACE: f64 = 4.0;

/// Places labels, in their order.
///
/// From right to left and from the lowest row up: a label's text is then right of its line, and the
/// lines of those that come later pass it on the left.
pub(crate) fn place(labels: &[Label], room: Room) -> Vec<Placed> {
    let mut order: Vec<usize> = (0..labels.len()).collect();
    order.sort_by(|a, b| labels[*b].at.total_cmp(&labels[*a].at));
    let mut placed: Vec<Placed> = Vec::with_capacity(labels.len());
    for index in &order {
        let label = labels[*index];
        let sides = [Side::Right, Side::Left, Side::None].into_iter();
        let mut wanted = sides.flat_map(|side| (0..room.rows).map(move |row| (row, side)));
        let free = |(row, side)| {
            let here = room.place(label, row, side);
            let inside = here.extent.0 >= room.left && here.extent.1 <= room.right;
            (inside && placed.iter().all(|other| here.apart(other) && here.uncrossed(other))).then_some(here)
        };
        // Somewhere above all others is room for a badge in any case.
        let apart = |row| {
            let here = room.place(label, row, Side::None);
            placed.iter().all(|other| here.apart(other)).then_some(here)
        };
        let here = wanted.find_map(free).or_else(|| (0..=labels.len()).find_map(apart));
        for (other, index) in placed.iter_mut().zip(&order) {
            if here.is_some_and(|here| !here.uncrossed(other)) {
                *other = room.place(labels[*index], other.row, Side::None);
            }
        }
        placed.extend(here);
    }
    let mut sorted: Vec<(usize, Placed)> = order.into_iter().zip(placed).collect();
    sorted.sort_by_key(|(index, _)| *index);
    sorted.into_iter().map(|(_, placed)| placed).collect()
}

impl Room {
    fn place(&self, label: Label, row: usize, side: Side) -> Placed {
        let half = self.badge / 2.0;
        // In a room narrower than a badge, there is one place only.
        let at = label.at.min(self.right - half).max(self.left + half);
        let text = match side {
            Side::Right => (at + half, at + half + label.text),
            Side::Left => (at - half - label.text, at - half),
            Side::None => (at, at),
        };
        Placed { at, row, side, extent: (text.0.min(at - half), text.1.max(at + half)), text }
    }
}

impl Placed {
    /// They do not cover each other.
    fn apart(&self, other: &Self) -> bool {
        let (a, b) = (self.extent, other.extent);
        self.row != other.row || a.1 + SPACE <= b.0 || b.1 + SPACE <= a.0
    }

    /// Neither's line goes through the other's text.
    fn uncrossed(&self, other: &Self) -> bool {
        let through =
            |line: &Self, below: &Self| line.row > below.row && below.text.0 < line.at && line.at < below.text.1;
        !through(self, other) && !through(other, self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROOM: Room = Room { left: 0.0, right: 1_000.0, badge: 16.0, rows: 3 };

    fn at(at: &[f64], text: f64) -> Vec<Placed> {
        place(&at.iter().map(|&at| Label { at, text }).collect::<Vec<_>>(), ROOM)
    }

    #[test]
    fn far_apart_is_one_row() {
        let placed = at(&[100.0, 500.0, 300.0], 60.0);
        assert!(placed.iter().all(|p| (p.row, p.side) == (0, Side::Right)), "{placed:?}");
        assert_eq!(placed.iter().map(|p| p.at).collect::<Vec<_>>(), [100.0, 500.0, 300.0]);
    }

    #[test]
    fn close_ones_are_stacked_with_the_first_on_top() {
        let placed = at(&[100.0, 125.0, 150.0], 60.0);
        assert_eq!(placed.iter().map(|p| (p.row, p.side)).collect::<Vec<_>>(), [2, 1, 0].map(|row| (row, Side::Right)));
    }

    #[test]
    fn at_the_edge_the_text_is_on_the_other_side() {
        assert_eq!(at(&[995.0], 60.0)[0].side, Side::Left);
        assert_eq!(at(&[-5.0], 60.0)[0].extent.0, 0.0);
        // Neither side has room for it.
        assert_eq!(at(&[500.0], 600.0)[0].side, Side::None);
    }

    #[test]
    fn a_crowd_keeps_its_badges() {
        let placed = at(&[500.0; 9], 60.0);
        let mut rows: Vec<_> = placed.iter().map(|p| p.row).collect();
        rows.sort_unstable();
        assert_eq!(rows, (0..9).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn labels_never_cover_each_other(
            labels in prop::collection::vec((-50.0..450.0_f64, 0.0..150.0_f64), 0..24),
            right in 20.0..400.0_f64,
            rows in 1..5_usize,
        ) {
            let labels: Vec<_> = labels.into_iter().map(|(at, text)| Label { at, text }).collect();
            let room = Room { left: 0.0, right, badge: 16.0, rows };
            let placed = place(&labels, room);
            prop_assert_eq!(placed.len(), labels.len());
            for (index, a) in placed.iter().enumerate() {
                prop_assert!(a.extent.0 >= room.left && a.extent.1 <= room.right);
                for b in &placed[..index] {
                    prop_assert!(a.row != b.row || a.extent.1 <= b.extent.0 || b.extent.1 <= a.extent.0, "{a:?} {b:?}");
                    prop_assert!(a.uncrossed(b), "{a:?} {b:?}");
                }
            }
        }
    }
}
