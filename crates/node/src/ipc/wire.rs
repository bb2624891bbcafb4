//! The messages on a shim's socket: one JSON object each, and after a line feed further bytes. No I/O.
//!
//! A request names the lowest version that it needs, so that version N−1 grants what it knows: at every upgrade two versions
//! meet. Fields that a reader does not know are ignored, fields that may come later have defaults, and a shim in a
//! phase that it does not know does nothing for others.

use crate::instance::InstanceId;
use crate::terms::{Announce, Cookie, InstanceHealth, Phase, ShimId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::net::SocketAddr;

/// The last version of a request.
pub const VERSION: u32 = 2;

/// Of what a shim sends of its state: [`Update`] and [`Status`]. What came later has a default.
pub const STATE_VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub version: u32,
    pub ask: Ask,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    Status,
    Metrics,
    /// Leave the group, and let connections end.
    Drain,
    /// The same, if a sibling is joined when the shim reads the request.
    DrainIfSibling,
    /// From a sibling: take a client's connection, which comes with the message. What the client sent so
    /// far follows the line feed.
    Pass,
    /// From a sibling: from here on both send [`Update`]s.
    Join {
        holder: ShimId,
    },
    /// Both shims get the same one.
    Share(Share),
}

/// Which part of the node's new connections each of two instances gets, while the shims of both are joined. Without it,
/// an instance gets what the kernel gives to its shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub old: InstanceId,
    pub new: InstanceId,
    /// The new instance's part, in thousandths; the old one gets the rest. 0 is the way back.
    pub permille: u16,
    /// While it is the same, clients keep their sides, and a larger part takes some from the old instance only.
    pub salt: u64,
    /// How long it is in force if it is not sent again, in milliseconds: when the sender dies, it ends by itself. 0
    /// ends it.
    pub lease_ms: u64,
    /// Whether clients on the node itself are distributed, too. Otherwise they are on the old side, and the part is one
    /// of all other clients: kubelet, controller-manager and scheduler of the node are needed for the way back, and
    /// must not depend on a newer server before the verdict.
    #[serde(default)]
    pub local: bool,
}

/// One of the two instances of a [`Share`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Old,
    New,
}

impl From<Ask> for Request {
    fn from(ask: Ask) -> Self {
        Self {
            version: ask.since(),
            ask,
        }
    }
}

impl Ask {
    /// The first version that knows it.
    fn since(&self) -> u32 {
        match self {
            Self::Status
            | Self::Metrics
            | Self::Drain
            | Self::DrainIfSibling
            | Self::Pass
            | Self::Join { .. } => 1,
            Self::Share(_) => 2,
        }
    }

    /// Whether only siblings may send it: listeners and connections go with it.
    pub fn is_of_siblings(&self) -> bool {
        matches!(self, Self::Join { .. } | Self::Pass)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Update {
    pub version: u32,
    pub announce: Announce,
    /// The listeners of which duplicates come with the message, in their order.
    pub guards: Vec<(Cookie, SocketAddr)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// To [`Ask::Status`].
    Status(Box<Status>),
    /// To [`Ask::Metrics`], in OpenMetrics' text form.
    Metrics(String),
    /// To [`Ask::Drain`], [`Ask::DrainIfSibling`], [`Ask::Pass`] and [`Ask::Share`].
    Done,
    /// To [`Ask::DrainIfSibling`]: no sibling is joined, so the shim serves on.
    Alone,
    /// To [`Ask::Join`]: the shim that replies.
    Joined { holder: ShimId },
    /// The request was not understood or not granted, and why.
    Refused(String),
}

/// The status of a shim. [`Status::shown`] makes the JSON of `/status` and `berth status --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub version: u32,
    pub berth: SocketAddr,
    pub listen: Vec<SocketAddr>,
    pub instance: InstanceId,
    /// A node shim: it serves every instance of the berth.
    pub discover: bool,
    pub shim_version: String,
    /// Its process, in its own PID namespace.
    pub pid: u32,
    pub state: Phase,
    /// Since when, RFC 3339.
    pub since: String,
    pub connections_open: u64,
    /// Those of them whose client has sent something and has no answer yet.
    pub connections_pending: u64,
    /// Connections whose sockets this shim has passed to instances, and that are open.
    #[serde(default)]
    pub connections_injected: u64,
    pub connections_total: u64,
    /// Clients that are held until an instance is ready.
    pub held: u64,
    /// Whether no instance is ready, and connections go to one that fails its probe.
    pub fail_open: bool,
    /// Listeners on its addresses that no shim of the berth holds: they get a share of new connections.
    pub foreign_listeners: u64,
    /// Its own instance first.
    pub instances: Vec<InstanceStatus>,
    /// The gate before its instances, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<GateStatus>,
    /// The share of new connections that is in force, if one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<ShareStatus>,
    /// Live siblings that have had no connection to it for longer than a lease.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unconnected: Vec<InstanceId>,
    /// Whether a relaying thread does not respond.
    pub blocked: bool,
    /// What the shim does in the cluster's API, with `--cluster`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterStatus>,
}

/// A share of new connections as one of the two shims sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStatus {
    #[serde(flatten)]
    pub share: Share,
    /// That of the shim's own instance.
    pub side: Side,
    /// New connections of this shim under this salt whose side went by the client's address, and those that were taken
    /// one by one, by address and port, since the address has too many.
    pub by_address: u64,
    pub by_connection: u64,
    /// Until when it is in force, RFC 3339.
    pub until: String,
}

/// TLS handshakes in flight at the gate, and the clients that wait.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GateStatus {
    /// Clients whose first bytes an instance has not answered.
    pub openings: u64,
    /// Most that there may be.
    pub limit: u64,
    pub waiting: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest: Option<LongestQueue>,
}

/// The source with the most waiting clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongestQueue {
    /// An address, or a /64 of IPv6.
    pub source: String,
    pub clients: u64,
}

/// What a shim does in the cluster's API.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Its EndpointSlices that are in the Service `kubernetes`.
    pub slices: Vec<String>,
    /// When it last renewed a Lease, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_renewed: Option<String>,
    /// When its token expires, RFC 3339, if that is known and the shim renews it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_expires: Option<String>,
    /// The requests that fail, each with its reason and the fix.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// An instance as a shim sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceStatus {
    pub instance: InstanceId,
    pub address: SocketAddr,
    pub own: bool,
    #[serde(rename = "standing")]
    pub health: InstanceHealth,
    /// Since when, RFC 3339.
    pub since: String,
    /// Whether it gets clients' sockets, and not their bytes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub injected: bool,
    /// Why its clients are relayed, if sockets are wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relayed: Option<String>,
    /// The version that it reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kube_version: Option<String>,
    /// The result of the last probe, as text that may change with the next version.
    pub last_probe: String,
    /// It will be the same until something is changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub probe_rejected: bool,
}

impl Status {
    /// With the words of metrics and log: version 1 of the messages has `dry` and `standing` for what these call `refusing` and
    /// `health`.
    ///
    /// # Errors
    /// None that is known: no map in it has keys that are not text.
    pub fn shown(&self) -> serde_json::Result<Value> {
        let mut json = serde_json::to_value(self)?;
        json["state"] = self.state.as_str().into();
        let instances = json["instances"]
            .as_array_mut()
            .into_iter()
            .flatten()
            .filter_map(Value::as_object_mut);
        for (instance, of) in instances.zip(&self.instances) {
            instance.remove("standing");
            instance.insert("health".into(), of.health.as_str().into());
        }
        Ok(json)
    }

    /// Whether the own instance is ready and the shim listens, or why not, in one line.
    pub fn ready(&self) -> Result<(), String> {
        let own = self.instances.iter().find(|instance| instance.own);
        if self.blocked {
            return Err(format!(
                "a relaying thread of the shim of instance {} does not answer",
                self.instance
            ));
        }
        let any = self.discover
            && self
                .instances
                .iter()
                .any(|instance| instance.health == InstanceHealth::Ready);
        match (own, self.state) {
            (_, Phase::Joined) if any => Ok(()),
            (None, _) if self.discover => Err(format!(
                "none of {} instances is ready",
                self.instances.len()
            )),
            (None, _) => Err(format!(
                "instance {} is not running: `berth exec` has recorded none",
                self.instance
            )),
            (Some(own), _) if own.health != InstanceHealth::Ready => Err(format!(
                "instance {} is {}: {}",
                self.instance,
                own.health.as_str(),
                own.last_probe
            )),
            (Some(_), Phase::Joined) => Ok(()),
            (Some(_), state) => Err(format!(
                "the shim of instance {} is {}",
                self.instance,
                state.as_str()
            )),
        }
    }
}

/// Reads a request.
///
/// # Errors
/// It is no request, or one of an unknown version. The text goes to the sender.
pub fn parse_request(message: &[u8]) -> Result<Request, String> {
    parse_request_as(VERSION, message)
}

/// Reads a request as a version does.
fn parse_request_as(known: u32, message: &[u8]) -> Result<Request, String> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let Versioned { version } =
        serde_json::from_slice(message).map_err(|error| format!("not a request: {error}"))?;
    if version == 0 || version > known {
        return Err(format!(
            "version {version} is not known, this is berth {} with version {known}",
            crate::VERSION
        ));
    }
    serde_json::from_slice(message)
        .map_err(|error| format!("not a request of version {version}: {error}"))
}

/// The JSON of a message, and the bytes after it.
pub fn split(message: &[u8]) -> (&[u8], &[u8]) {
    match message.iter().position(|byte| *byte == b'\n') {
        Some(at) => (&message[..at], &message[at + 1..]),
        None => (message, &[]),
    }
}

/// # Errors
/// It is no update, or one of version 0.
pub fn parse_update(message: &[u8]) -> Result<Update, String> {
    let update: Update =
        serde_json::from_slice(message).map_err(|error| format!("not an update: {error}"))?;
    if update.version == 0 {
        Err("an update of version 0".into())
    } else {
        Ok(update)
    }
}

pub fn parse_reply(message: &[u8]) -> Result<Reply, String> {
    serde_json::from_slice(message).map_err(|error| format!("not a reply: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share() -> Share {
        let [old, new] = ["a", "b"].map(|id| id.parse().unwrap());
        Share {
            old,
            new,
            permille: 50,
            salt: 7,
            lease_ms: 10_000,
            local: false,
        }
    }

    /// The update of version 1: it must be understood for as long as N−1 is.
    #[test]
    fn updates_requests_and_replies_keep_their_form() {
        let bytes = include_bytes!("../../../../tests/golden/update-v1.json");
        let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
        let update = Update {
            version: 1,
            announce: Announce {
                phase: Phase::Joined,
                ready: true,
                reachable: true,
                leaving: false,
                owns: [Cookie(7)].into(),
                accepts: [Cookie(7), Cookie(9)].into(),
            },
            guards: vec![(Cookie(7), "10.0.0.5:6443".parse().unwrap())],
        };
        assert_eq!(
            String::from_utf8(serde_json::to_vec(&update).unwrap()).unwrap(),
            String::from_utf8_lossy(bytes)
        );
        assert_eq!(parse_update(bytes).as_ref(), Ok(&update));
        for (ask, json) in [
            (Ask::Status, r#"{"version":1,"ask":"status"}"#),
            (Ask::Metrics, r#"{"version":1,"ask":"metrics"}"#),
            (Ask::Drain, r#"{"version":1,"ask":"drain"}"#),
            (
                Ask::DrainIfSibling,
                r#"{"version":1,"ask":"drain_if_sibling"}"#,
            ),
            (Ask::Pass, r#"{"version":1,"ask":"pass"}"#),
            (
                Ask::Join { holder: ShimId(5) },
                r#"{"version":1,"ask":{"join":{"holder":5}}}"#,
            ),
            (
                Ask::Share(share()),
                r#"{"version":2,"ask":{"share":{"old":"a","new":"b","permille":50,"salt":7,"lease_ms":10000,"local":false}}}"#,
            ),
        ] {
            let request = Request::from(ask);
            assert_eq!(serde_json::to_string(&request).unwrap(), json);
            assert_eq!(parse_request(json.as_bytes()).as_ref(), Ok(&request));
            let later = json.replace(r#""ask""#, r#""later":[],"ask""#);
            assert_eq!(parse_request(later.as_bytes()), Ok(request));
        }
        assert_eq!(
            serde_json::to_string(&Reply::Joined { holder: ShimId(5) }).unwrap(),
            r#"{"joined":{"holder":5}}"#
        );
        assert_eq!(serde_json::to_string(&Reply::Done).unwrap(), r#""done""#);
        assert_eq!(serde_json::to_string(&Reply::Alone).unwrap(), r#""alone""#);
    }

    #[test]
    fn the_version_before_grants_what_it_knows() {
        let drains = [Ask::Drain, Ask::DrainIfSibling];
        for ask in [
            Ask::Status,
            Ask::Metrics,
            Ask::Pass,
            Ask::Join { holder: ShimId(5) },
        ]
        .into_iter()
        .chain(drains)
        {
            let request = Request::from(ask);
            for known in request.version..=VERSION {
                assert_eq!(
                    parse_request_as(known, &serde_json::to_vec(&request).unwrap()),
                    Ok(request.clone())
                );
            }
            assert_eq!(request.version, 1, "version 1 knew {request:?}");
        }
        let share = serde_json::to_vec(&Request::from(Ask::Share(share()))).unwrap();
        assert!(
            parse_request_as(1, &share)
                .unwrap_err()
                .contains("version 2 is not known")
        );
    }

    #[test]
    fn a_state_that_is_not_known_is_one_that_does_nothing() {
        assert_eq!(
            serde_json::from_str::<InstanceHealth>(r#""elsewhere""#).unwrap(),
            InstanceHealth::Unready
        );
        let update = include_str!("../../../../tests/golden/update-v1.json");
        let later = update.replace(r#""phase":"joined""#, r#""phase":"elsewhere""#);
        assert_ne!(update, later);
        let [now, later] = [update, &later].map(|update| parse_update(update.as_bytes()).unwrap());
        let announce = Announce {
            phase: Phase::Waiting,
            ..now.announce
        };
        assert_eq!(later, Update { announce, ..now });
    }

    #[test]
    fn a_status_is_shown_in_the_words_of_the_metrics() {
        let wire = r#"{"version":1,"berth":"10.0.0.5:6443","listen":[],"instance":"a","discover":false,"shim_version":"0.1.0",
            "pid":1,"state":"dry","since":"","connections_open":0,"connections_pending":0,"connections_injected":0,"connections_total":0,"held":0,
            "fail_open":false,"foreign_listeners":0,"blocked":false,"instances":[{"instance":"a","address":"127.1.2.3:6443",
            "own":true,"standing":"failing","since":"","last_probe":""}]}"#;
        let status: Status = serde_json::from_str(wire).unwrap();
        let sent: Value = serde_json::from_str(wire).unwrap();
        assert_eq!(
            serde_json::to_value(&status).unwrap(),
            sent,
            "version 1 stays as it is"
        );
        let shown = wire
            .replace("dry", "refusing")
            .replace("standing", "health");
        assert_eq!(
            status.shown().unwrap(),
            serde_json::from_str::<Value>(&shown).unwrap()
        );
    }

    #[test]
    fn another_version_is_named() {
        assert!(
            parse_request(br#"{"version":99,"ask":"fly"}"#)
                .unwrap_err()
                .contains("version 99")
        );
        assert!(
            parse_request(br#"{"version":1,"ask":"fly"}"#)
                .unwrap_err()
                .contains("fly")
        );
    }
}
