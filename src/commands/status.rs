//! Runs `berth status`, which lists the berths and apiservers on this node.

use super::{Exit, block_on, format_json, print, print_stderr, unavailable_error};
use crate::cli::StatusArgs;
use berth_node::ipc;
use berth_node::ipc::wire::{GateStatus, InstanceStatus, LongestQueue, Status};
use berth_node::registry::instance::Record;
use berth_node::snapshot::{KnownInstance, RunDirSnapshot};
use berth_node::terms::{InstanceHealth, Phase};
use nix::unistd::geteuid;
use serde::ser::Error as _;
use serde::{Serialize, Serializer};
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Version of the JSON form of the output.
const JSON_VERSION: u32 = 1;

pub(super) fn run(args: &StatusArgs) -> anyhow::Result<Exit> {
    let node = RunDirSnapshot::read(args.run_dir.run_dir.as_deref()).map_err(unavailable_error)?;
    node.problems.iter().for_each(print_stderr);
    let rows = block_on(async {
        let mut rows = Vec::new();
        for known in node.instances {
            rows.push(Row::ask_shim(known).await);
        }
        rows
    })?;
    let exit = match rows.is_empty() {
        true => Exit::Unavailable,
        false if rows.iter().any(Row::shim_hangs) => Exit::No,
        false => Exit::Ok,
    };
    print(&match args.json {
        true => format_json(&Document {
            version: JSON_VERSION,
            instances: rows,
        })?,
        false if rows.is_empty() => describe_no_berth(&node.path),
        false => format_table(&rows, SystemTime::now()),
    })?;
    Ok(exit)
}

fn describe_no_berth(run_dir: &Path) -> String {
    let root = if geteuid().is_root() {
        ""
    } else {
        "run berth as root, or "
    };
    format!(
        "no berth on this node: the run directory {} has none ({root}--run-dir names another directory)\n",
        run_dir.display()
    )
}

/// A row of the output: an instance, and the status of its shim.
#[derive(Debug, Serialize)]
struct Row {
    berth: SocketAddr,
    instance: String,
    /// The record that `berth exec` wrote for the instance. `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<Record>,
    /// True if the process that the record names is alive.
    running: bool,
    #[serde(
        skip_serializing_if = "Option::is_none",
        serialize_with = "serialize_shim"
    )]
    shim: Option<Status>,
    /// Reason why the shim did not send its status.
    #[serde(skip_serializing_if = "Option::is_none")]
    silent: Option<String>,
    #[serde(skip)]
    socket: bool,
}

fn serialize_shim<S: Serializer>(shim: &Option<Status>, to: S) -> Result<S::Ok, S::Error> {
    shim.as_ref()
        .map(Status::to_public_json)
        .transpose()
        .map_err(S::Error::custom)?
        .serialize(to)
}

impl Row {
    async fn ask_shim(known: KnownInstance) -> Self {
        let asked = match known.berth.socket_path(&known.id) {
            Ok(path) => ipc::request_status(&path, ipc::PATIENCE)
                .await
                .map(|status| *status)
                .map_err(|why| format!("its shim: {why}")),
            Err(error) => Err(error.to_string()),
        };
        let (shim, silent) = match asked {
            Ok(status) => (Some(status), None),
            Err(why) => (None, Some(why)),
        };
        Self {
            berth: known.berth.address(),
            instance: known.id.to_string(),
            running: known.record.as_ref().is_some_and(|listed| listed.alive),
            record: known.record.map(|listed| listed.record),
            shim,
            silent,
            socket: known.socket,
        }
    }

    /// True if the shim's process runs but does not answer. The state of its instance is then
    /// unknown.
    fn shim_hangs(&self) -> bool {
        self.silent
            .as_ref()
            .is_some_and(|why| why.contains(ipc::HANGS))
    }

    fn own_instance_status(&self) -> Option<&InstanceStatus> {
        self.shim
            .as_ref()?
            .instances
            .iter()
            .find(|instance| instance.own)
    }

    fn format_cells(&self, now: SystemTime) -> [String; 10] {
        let none = || "-".to_owned();
        let shim = self.shim.as_ref();
        let own = self.own_instance_status();
        let address = own
            .map(|own| own.address)
            .or(self.record.as_ref().map(|record| record.address));
        let probe = own
            .map(|own| own.last_probe.clone())
            .or_else(|| self.silent.clone());
        let discover = shim.is_some_and(|shim| shim.discover);
        let of_node = |shim: &Status| {
            let ready = shim
                .instances
                .iter()
                .filter(|instance| instance.health == InstanceHealth::Ready)
                .count();
            format!(
                "serves every instance: {ready} of {} ready",
                shim.instances.len()
            )
        };
        let last = match (self.running || own.is_some(), probe) {
            _ if discover => shim.map_or_else(none, of_node),
            (_, Some(why)) if self.shim_hangs() => why,
            (true, Some(_)) if shim.is_none() && !self.socket => "no shim of its own".into(),
            (true, Some(probe)) => probe,
            (true, None) => none(),
            (false, _) if self.record.is_some() => "the apiserver's process ended".into(),
            (false, _) => "waiting for `berth exec`".into(),
        };
        [
            self.berth.to_string(),
            self.instance.clone(),
            shim.map_or_else(none, |shim| shim.state.as_str().to_owned()),
            match own {
                Some(own) => own.health.as_str().to_owned(),
                None if discover || (self.shim_hangs() && self.record.is_none()) => none(),
                None if self.running => "running".into(),
                None => "ended".into(),
            },
            address.map_or_else(none, |address| address.to_string()),
            own.and_then(|own| own.kube_version.clone())
                .unwrap_or_else(none),
            shim.map_or_else(none, |shim| shim.connections_open.to_string()),
            shim.map_or_else(none, |shim| shim.connections_total.to_string()),
            shim.map_or_else(none, |shim| format_age(&shim.since, now)),
            last,
        ]
    }
}

/// The JSON form.
#[derive(Serialize)]
struct Document {
    version: u32,
    instances: Vec<Row>,
}

fn format_table(rows: &[Row], now: SystemTime) -> String {
    const TABLE_HEAD: [&str; 10] = [
        "BERTH",
        "INSTANCE",
        "SHIM",
        "APISERVER",
        "ADDRESS",
        "VERSION",
        "NOW",
        "TOTAL",
        "SINCE",
        "LAST PROBE",
    ];
    let mut text = align_columns(TABLE_HEAD, rows.iter().map(|row| row.format_cells(now)));
    for remark in [
        describe_fail_open,
        describe_foreign_listeners,
        describe_gate_queue,
        describe_relay_mode,
    ] {
        for (row, remark) in rows
            .iter()
            .filter_map(|row| Some((row, remark(row.shim.as_ref()?)?)))
        {
            let _ = writeln!(text, "{} of {}: {remark}", row.instance, row.berth);
        }
    }
    text
}

fn describe_fail_open(shim: &Status) -> Option<String> {
    (shim.fail_open && shim.state == Phase::Joined).then(|| {
        "no apiserver passes its probe; connections go to an apiserver that passed before (fail open)".into()
    })
}

fn describe_foreign_listeners(shim: &Status) -> Option<String> {
    let listeners = match shim.foreign_listeners {
        0 => return None,
        1 => "a listener".to_owned(),
        many => format!("{many} listeners"),
    };
    Some(format!(
        "the port is shared with {listeners} that no responding shim holds and that get a share of new connections: find \
         the processes with `ss -ltnp`, end a shim that hangs, and stop any other program"
    ))
}

fn describe_gate_queue(shim: &Status) -> Option<String> {
    let GateStatus {
        openings,
        limit,
        waiting,
        longest,
    } = shim.gate.as_ref().filter(|gate| gate.waiting > 0)?;
    let mut text = format!(
        "{waiting} clients wait for their turn, {openings} of {limit} TLS handshakes are in flight"
    );
    if let Some(LongestQueue { source, clients }) = longest {
        let _ = write!(
            text,
            "; the source with most waiting clients is {source}: {clients}"
        );
    }
    Some(text)
}

fn describe_relay_mode(shim: &Status) -> Option<String> {
    let own = shim.instances.iter().find(|instance| instance.own)?;
    match &own.relayed {
        _ if own.injected => Some(format!(
            "the apiserver gets clients' sockets; {} of these connections are open",
            shim.connections_injected
        )),
        Some(why) => Some(format!("clients are relayed: {why}")),
        None => None,
    }
}

/// Formats rows as columns that are aligned and two spaces apart.
fn align_columns<const N: usize>(
    head: [&str; N],
    rows: impl Iterator<Item = [String; N]>,
) -> String {
    let lines: Vec<_> = std::iter::once(head.map(ToOwned::to_owned))
        .chain(rows)
        .collect();
    let mut widths = [0; N];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in lines {
        let mut row = String::new();
        for (cell, width) in line.iter().zip(widths) {
            let _ = write!(row, "{cell:width$}  ");
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// Formats the time since `since` in its largest unit.
fn format_age(since: &str, now: SystemTime) -> String {
    let age = humantime::parse_rfc3339(since)
        .ok()
        .and_then(|since| now.duration_since(since).ok());
    format_time(age.unwrap_or_default())
}

/// Formats a time in whole units, such as `90s`, `5m`, `3h` or `2d`.
fn format_time(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7200 => format!("{}m", seconds / 60),
        seconds @ 7200..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a row with the status of a shim. `passing` has further fields of the instance's
    /// status.
    fn test_row(instance: &str, passing: &serde_json::Value) -> Row {
        let mut own = serde_json::json!({
            "instance": instance, "address": "127.14.2.64:6443", "own": true, "standing": "ready",
            "since": "2026-01-03T00:00:00Z", "kube_version": "v1.36.3", "last_probe": "200 in 47 ms",
        });
        own.as_object_mut()
            .unwrap()
            .extend(passing.as_object().unwrap().clone());
        let shim = serde_json::json!({
            "version": 1, "berth": "10.0.0.5:6443", "listen": ["10.0.0.5:6443", "[fd00::5]:6443"], "instance": instance,
            "shim_version": "0.1.0", "pid": 1, "state": "joined", "since": "2026-01-03T00:00:00Z", "connections_open": 3,
            "connections_pending": 0, "connections_total": 7, "held": 0, "fail_open": false, "foreign_listeners": 0, "blocked": false,
            "discover": false, "instances": [own],
        });
        Row {
            berth: "10.0.0.5:6443".parse().unwrap(),
            instance: instance.into(),
            record: None,
            running: true,
            shim: Some(serde_json::from_value(shim).unwrap()),
            silent: None,
            socket: true,
        }
    }

    #[test]
    fn the_table_says_how_each_instance_gets_its_clients() {
        let rows = [
            test_row("a", &serde_json::json!({"injected": true})),
            test_row("b", &serde_json::json!({"relayed": "the kernel is 5.15"})),
            test_row("c", &serde_json::json!({})),
        ];
        let now = humantime::parse_rfc3339("2026-01-03T00:00:06Z").unwrap();
        let expected = "\
BERTH          INSTANCE  SHIM    APISERVER  ADDRESS           VERSION  NOW  TOTAL  SINCE  LAST PROBE
10.0.0.5:6443  a         joined  ready      127.14.2.64:6443  v1.36.3  3    7      6s     200 in 47 ms
10.0.0.5:6443  b         joined  ready      127.14.2.64:6443  v1.36.3  3    7      6s     200 in 47 ms
10.0.0.5:6443  c         joined  ready      127.14.2.64:6443  v1.36.3  3    7      6s     200 in 47 ms
a of 10.0.0.5:6443: the apiserver gets clients' sockets; 0 of these connections are open
b of 10.0.0.5:6443: clients are relayed: the kernel is 5.15
";
        assert_eq!(format_table(&rows, now), expected);
    }

    #[test]
    fn an_age_is_formatted_as_one_number_with_a_unit() {
        let now = humantime::parse_rfc3339("2026-01-03T00:00:00Z").unwrap();
        assert_eq!(format_age("2026-01-02T23:59:01Z", now), "59s");
        assert_eq!(format_age("2026-01-02T23:00:00Z", now), "60m");
        assert_eq!(format_age("2025-12-01T00:00:00Z", now), "33d");
        assert_eq!(format_age("nonsense", now), "0s");
    }
}
