//! Tables of documents that are made from the code.

use std::fs;
use std::path::Path;

/// Compares the rows of a table, which its head finds, with the rows that the code makes. Writes
/// the rows into the page if `BERTH_TEST_WRITE` is set.
///
/// # Panics
/// The page has no such table, or its rows differ.
pub fn expect_table(page: &str, head: &str, rows: &[String]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(page);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
    let mut lines: Vec<_> = text.lines().collect();
    let head_at = lines.iter().position(|line| *line == head);
    // Below the head is the line that divides the head from the rows.
    let begin = head_at.unwrap_or_else(|| panic!("{page} has no table {head}")) + 2;
    let is_row = |line: &&&str| line.starts_with('|');
    let shown = lines.iter().skip(begin).take_while(is_row).count();
    let removed: Vec<_> = lines
        .splice(begin..begin + shown, rows.iter().map(String::as_str))
        .collect();
    if std::env::var_os("BERTH_TEST_WRITE").is_some() {
        fs::write(&path, lines.join("\n") + "\n").unwrap();
    } else {
        assert_eq!(
            removed, rows,
            "{page}: write the table with BERTH_TEST_WRITE=1"
        );
    }
}
