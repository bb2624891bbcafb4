//! What a judge reports of a run, in a form that the table, the comparison and the page draw without knowing which judge it was.

use Place::{Compared, Page, Table, Tile};

/// Where a row is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the whole table on standard output (`--verbose`).
    Table,
    /// What matters most: large at the head of a page, and in the short table on standard output.
    Tile,
    /// Where runs are compared, in a column each.
    Compared,
    /// In a table of the page.
    Page,
}

/// A name, a value, and more of it in words.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    places: &'static [Place],
    pub(crate) name: String,
    pub(crate) value: String,
    /// Not drawn where runs are compared.
    pub(crate) note: String,
}

impl Row {
    pub(crate) fn at(
        places: &'static [Place],
        name: impl Into<String>,
        value: impl Into<String>,
        note: impl Into<String>,
    ) -> Self {
        Self { places, name: name.into(), value: value.into(), note: note.into() }
    }

    pub(crate) fn table(name: impl Into<String>, value: impl Into<String>, note: impl Into<String>) -> Self {
        Self::at(&[Table], name, value, note)
    }

    pub(crate) fn page(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self::at(&[Page], name, value, "")
    }

    pub(crate) fn compared(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self::at(&[Compared], name, value, "")
    }

    /// In the table and where runs are compared.
    pub(crate) fn both(name: impl Into<String>, value: impl Into<String>, note: impl Into<String>) -> Self {
        Self::at(&[Table, Compared], name, value, note)
    }

    /// What matters most.
    pub(crate) fn main(name: impl Into<String>, value: impl Into<String>, note: impl Into<String>) -> Self {
        Self::at(&[Table, Tile, Compared], name, value, note)
    }

    pub(crate) fn is_in(&self, place: Place) -> bool {
        self.places.contains(&place)
    }
}

/// A table with more than one value a row.
#[derive(Debug, Clone)]
pub(crate) struct Grid {
    pub(crate) title: &'static str,
    /// Names of the columns; the first is that of the rows' names.
    pub(crate) columns: &'static [&'static str],
    pub(crate) rows: Vec<(String, Vec<String>)>,
    /// What a reader has to know.
    pub(crate) note: &'static str,
}

/// Lines of a plot.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    pub(crate) title: String,
    /// For those who cannot see it.
    pub(crate) words: String,
    pub(crate) lines: Vec<Line>,
}

#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) name: &'static str,
    /// Class of its style: `p50`, `p99` or `max`. They differ by more than colour.
    pub(crate) look: &'static str,
    /// By steps of the timeline.
    pub(crate) counts: Vec<u64>,
}

/// The numbers behind plots: columns by steps of the timeline.
#[derive(Debug, Clone)]
pub(crate) struct Numbers {
    /// End of its anchor on the page.
    pub(crate) id: &'static str,
    pub(crate) title: &'static str,
    pub(crate) columns: Vec<(String, Vec<u64>)>,
}

/// What one judge reports.
#[derive(Debug, Clone, Default)]
pub(crate) struct Section {
    /// Heading of its rows on a page; empty: it has none of its own.
    pub(crate) title: &'static str,
    pub(crate) rows: Vec<Row>,
    pub(crate) grids: Vec<Grid>,
    pub(crate) series: Vec<Series>,
    pub(crate) numbers: Option<Numbers>,
}

impl Section {
    /// Its rows that are drawn in one place.
    pub(crate) fn rows(&self, place: Place) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(move |row| row.is_in(place))
    }
}
