//! Several nodes: what clients saw at each address, and when the Service forgot a node that went away.

use super::service::Service;
use super::{Case, Judge};
use crate::data::{Away, ByAddress, Ran, Tally};
use crate::event::{Answer, Attempt, ConnectionKind};
use crate::network::SERVICE;
use crate::record::{Injected, Record};
use crate::report::format::{count, moment, named, wait};
use crate::section::{Grid, Row, Section};
use crate::stamp::{Stamp, millis};
use std::net::SocketAddr;

pub(super) const NODES: Judge = Judge { judge, section };

/// What clients dialed, if there are several nodes: the Service, then each node. What was lost there is added as it is found.
pub(super) fn by_address(record: &Record) -> Vec<ByAddress> {
    let at = |name: &str, address: SocketAddr, attempts: &[Attempt]| ByAddress {
        name: name.to_owned(),
        address: address.to_string(),
        requests: attempts.len() as u64,
        new_connections: attempts.iter().filter(|attempt| attempt.kind == ConnectionKind::New).count() as u64,
        wait_max_ms: attempts.iter().map(|attempt| millis(attempt.done.since(attempt.due))).fold(0.0, f64::max),
        ..ByAddress::default()
    };
    let service = (!record.nodes.is_empty()).then(|| at("Service kubernetes", SERVICE, &record.attempts));
    service.into_iter().chain(record.nodes.iter().map(|node| at(&node.name, node.address, &node.attempts))).collect()
}

fn judge(case: &mut Case<'_>, ran: &mut Ran) {
    let Case { record, span, .. } = case;
    let service = Service::of(record);
    let one = |injected: &Injected| {
        let Injected { fault, node, at, over, .. } = injected;
        let node = node.as_ref().filter(|_| fault.is_of_a_node())?;
        let seen = service.forgot(*at, node.address.ip());
        let after = |moment: Stamp| millis(moment.since(*at));
        let failed = |a: &&Attempt| a.kind == ConnectionKind::New && matches!(a.answer, Answer::Failed(_));
        let meanwhile = |a: &&Attempt| a.due >= *at && over.is_none_or(|over| a.due < over);
        Some(Away {
            fault: fault.to_string(),
            node: node.name.clone(),
            from_ms: span.ms(*at),
            reconciled_ms: seen.reconciled.map(after),
            named_ms: seen.named.map(after),
            lost_ms: record.attempts.iter().filter(failed).filter(meanwhile).map(|a| a.due).max().map(after),
            back_ms: over.map(after),
        })
    };
    ran.away = record.injected.iter().filter_map(one).collect();
}

fn section(ran: &Ran) -> Section {
    let after = |ms: Option<f64>, never: &str| ms.map_or_else(|| never.to_owned(), wait);
    let sum = |lost: &[Tally]| count(lost.iter().map(|tally| tally.count).sum());
    let (mut rows, mut at, mut away) = (Vec::new(), Vec::new(), Vec::new());
    for ByAddress { name, address, requests, new_connections, lost, allowed, wait_max_ms } in &ran.by_address {
        let (lost, longest) = (sum(lost), wait(*wait_max_ms));
        let [requests, new, allowed] = [requests, new_connections, allowed].map(|n| count(*n));
        let note = format!("of {requests} ({new} new), {allowed} more allowed, longest wait {longest}");
        rows.push(Row::table(format!("lost at {name}"), lost.clone(), note));
        at.push((name.clone(), vec![address.clone(), requests, new, lost, allowed, longest]));
    }
    for Away { fault, node, from_ms, reconciled_ms, named_ms, lost_ms, back_ms } in &ran.away {
        let [own, out] = [reconciled_ms, named_ms].map(|ms| after(*ms, "never"));
        let lost = lost_ms.map_or_else(|| "nothing lost".to_owned(), |ms| format!("last lost after {}", wait(ms)));
        let note = format!("{fault}; by kube-apiserver's own reconciler {own}; {lost}");
        rows.push(Row::table(format!("{node} out of the Service after"), out.clone(), note));
        let cells = [fault.clone(), moment(*from_ms), own, out, after(*lost_ms, "none"), after(*back_ms, "never")];
        away.push((node.clone(), cells.into()));
    }
    if !ran.away.is_empty() {
        rows.push(Row::compared("a node out of the Service after", named(ran.longest_named())));
    }
    let grids = vec![
        Grid {
            title: "By address",
            columns: &["Dialed", "Address", "Requests", "New connections", "Lost", "Allowed", "Longest wait"],
            rows: at,
            note: "",
        },
        Grid {
            title: "When the Service forgot a node",
            columns: &[
                "Node",
                "Fault",
                "At",
                "Taken out by kube-apiserver",
                "In no slice",
                "Last connection lost",
                "As before",
            ],
            rows: away,
            note: "Times after it went away. The last connection lost is one that the Service's clients began.",
        },
    ];
    Section { rows, grids, ..Section::default() }
}
