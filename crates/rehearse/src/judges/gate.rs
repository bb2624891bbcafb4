//! The gates of the shims: who waited there. Their plot is `report/plot/gate.rs`.

use crate::data::Ran;
use crate::report::format::{self, count};
use crate::section::Place::{Compared, Page, Table};
use crate::section::{Row, Section};

pub(super) fn section(ran: &Ran) -> Section {
    let Some(gate) = &ran.gate else { return Section::default() };
    let most = &[Table, Compared, Page];
    let mut rows = vec![Row::at(most, "most at a time at the gate", count(gate.most_waiting), format::gate(gate))];
    let waited = gate.waited.iter().map(|(class, n)| (format!("waited and had their turn: class {class}"), n));
    let dropped = gate.dropped.iter().map(|(reason, n)| (format!("waited and had none: {reason}"), n));
    rows.extend(waited.chain(dropped).map(|(name, clients)| Row::page(name, count(*clients))));
    Section { title: "The gate, with all clients, of the storm or not", rows, ..Section::default() }
}
