//! Writes Markdown tables that can also be read on a terminal.

use std::fmt::Write;

/// Returns a table with aligned columns. The first row contains the heads of the columns.
pub(crate) fn align_table(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|at| {
            rows.iter()
                .map(|row| row[at].chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        for (at, width) in widths.iter().copied().enumerate() {
            let _ = if at == 0 {
                write!(text, "| {:<width$} ", row[at])
            } else {
                write!(text, "| {:>width$} ", row[at])
            };
        }
        text.push_str("|\n");
        if number == 0 {
            for (at, width) in widths.iter().enumerate() {
                let dashes = "-".repeat(*width);
                let _ = if at == 0 {
                    write!(text, "| {dashes} ")
                } else {
                    write!(text, "| {dashes}:")
                };
            }
            text.push_str("|\n");
        }
    }
    text
}
