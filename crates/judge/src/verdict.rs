//! The result of the judge: an outcome, and a table of the comparisons.

use crate::signals::Signal;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Good,
    Bad,
    /// There were too few requests for a verdict.
    Undecided,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    pub outcome: Outcome,
    pub rows: Vec<Row>,
    /// The requirements for the outcome "good" that are not met, in words.
    pub lacking: Vec<String>,
    /// Evidence against the new instance that is too weak for "bad".
    pub against: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub code: Signal,
    pub subject: String,
    /// `compared` is the number of the new instance's requests (or connections, or samples). `old`
    /// and `new` are each instance's bad share; `old` is for the new instance's mix of requests.
    /// `limit` is the allowed share.
    pub compared: u64,
    pub old: f64,
    pub new: f64,
    pub limit: f64,
    pub judgement: Judgement,
    pub note: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    Good,
    Bad,
    /// The row is bad, but its signal was accepted beforehand.
    Accepted,
    NotCompared,
}

/// A table for people: bad rows first, then other compared rows, then the rows without a
/// comparison, and why.
impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |[code, subject, compared, old, new, limit, verdict]: [&str; 7]| {
            writeln!(
                f,
                "{code:<18} {subject:<32} {compared:>9} {old:>8} {new:>8} {limit:>8}  {verdict}"
            )
        };
        line(["signal", "of", "compared", "old", "new", "limit", "verdict"])?;
        let is_bad = |row: &&Row| row.judgement == Judgement::Bad;
        let is_compared = |row: &&Row| row.judgement != Judgement::NotCompared;
        let rows = self.rows.iter().filter(is_bad).chain(
            self.rows
                .iter()
                .filter(|row| is_compared(row) && !is_bad(row)),
        );
        for row in rows {
            let [old, new, limit] =
                [row.old, row.new, row.limit].map(|share| format!("{:.1} %", share * 100.0));
            let judgement = match row.judgement {
                Judgement::Good => "good",
                Judgement::Bad => "bad",
                Judgement::Accepted => "bad, accepted",
                Judgement::NotCompared => "not compared",
            };
            let (code, compared) = (row.code.to_string(), row.compared.to_string());
            let verdict = if row.note.is_empty() {
                judgement.to_owned()
            } else {
                format!("{judgement}: {}", row.note)
            };
            line([&code, &row.subject, &compared, &old, &new, &limit, &verdict])?;
        }
        let others: Vec<_> = self.rows.iter().filter(|row| !is_compared(row)).collect();
        let others: Vec<_> = others
            .iter()
            .map(|row| format!("{} ({})", row.code, row.note))
            .collect();
        if others.is_empty() {
            Ok(())
        } else {
            writeln!(f, "not compared: {}", others.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_begins_with_bad_rows() {
        let row = |code, subject: &str, judgement, note: &str| Row {
            code,
            subject: subject.to_owned(),
            compared: 120,
            old: 0.0,
            new: 0.5,
            limit: 0.021,
            judgement,
            note: note.to_owned(),
        };
        let rows = vec![
            row(
                Signal::Latency,
                "all",
                Judgement::Good,
                "95th percentile 0.010 s, old 0.009 s",
            ),
            row(
                Signal::Aborts,
                "all",
                Judgement::NotCompared,
                "nothing that both instances had",
            ),
            row(Signal::Errors, "LIST pods", Judgement::Bad, ""),
        ];
        let verdict = Verdict {
            outcome: Outcome::Bad,
            rows,
            lacking: Vec::new(),
            against: None,
        };
        let table = verdict.to_string();
        let words = table
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        let wanted = [
            "signal of compared old new limit verdict",
            "errors LIST pods 120 0.0 % 50.0 % 2.1 % bad",
            "latency all 120 0.0 % 50.0 % 2.1 % good: 95th percentile 0.010 s, old 0.009 s",
            "not compared: aborts (nothing that both instances had)",
        ];
        assert_eq!(words.collect::<Vec<_>>(), wanted);
        assert!(
            table.lines().take(3).all(|line| line.len() >= 90),
            "{table}"
        );
    }
}
