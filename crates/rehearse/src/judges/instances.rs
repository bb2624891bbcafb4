//! What is known of the instances: what each served, and what they logged of certificates.

use crate::data::{ControlStreams, Instance, Ran};
use crate::record::{Player, Record};
use crate::report::format::count;
use crate::section::{Row, Section};
use std::collections::BTreeMap;

pub(super) fn judge(player: &Player) -> Instance {
    Instance { name: player.name.clone(), version: player.version.clone().unwrap_or_default() }
}

/// Connections to the instances themselves, and how many of them ended.
pub(super) fn control(record: &Record) -> BTreeMap<String, ControlStreams> {
    let mut streams: BTreeMap<String, ControlStreams> = BTreeMap::new();
    for (instance, opened) in &record.control.streams {
        streams.entry(instance.clone()).or_default().opened = *opened;
    }
    for end in &record.control.ends {
        streams.entry(end.instance.clone()).or_default().ended += 1;
    }
    streams
}

pub(super) fn section(ran: &Ran) -> Section {
    let served = |Instance { name, version }: &Instance| {
        let served = ran.figures.new_connections_by_instance.get(name).copied().unwrap_or(0);
        Row::table(format!("connections on {name}"), count(served), version.clone())
    };
    let mut rows: Vec<Row> = ran.instances.iter().map(served).collect();
    if let Some(errors) = ran.figures.logged_x509_errors {
        let note = "in their logs: one met another's certificate";
        rows.push(Row::table("x509 errors of apiservers", count(errors), note));
        rows.push(Row::page("certificate errors in the apiservers' logs", count(errors)));
    }
    for (instance, control) in &ran.control_streams {
        rows.push(Row::page(format!("connections straight to {instance}"), count(control.opened)));
        rows.push(Row::page("of those ended, which only the instance can have done", count(control.ended)));
    }
    Section { rows, ..Section::default() }
}
