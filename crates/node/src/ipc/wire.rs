//! Messages on a shim's socket: a JSON object each, optionally followed by a line feed and further
//! bytes. No I/O.
//!
//! A request names the lowest version that it needs, so that version N−1 grants every known
//! request: at every upgrade two versions meet. Readers ignore unknown fields, fields that may come
//! later have defaults, and a shim in an unknown phase does nothing for others.

use crate::instance_id::InstanceId;
use crate::terms::{Announce, Cookie, InstanceHealth, Phase, ShimId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::net::SocketAddr;

/// The latest version of requests that this shim knows.
pub const VERSION: u32 = 2;

/// Version of a shim's state in messages: [`Update`] and [`Status`]. Fields added later have a
/// default.
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
    /// Leave the group of siblings, and let open connections end.
    Drain,
    /// Like `Drain`, but only if a sibling has joined the group when the shim reads the request.
    DrainIfSibling,
    /// From a sibling: take over a client's connection. The descriptor comes with the message, and
    /// the client's bytes so far follow the line feed.
    Pass,
    /// From a sibling: join this shim. From then on, both shims send [`Update`]s on the connection.
    Join {
        holder: ShimId,
    },
    /// Distribute new connections between two instances. The shims of both get the same share.
    Share(Share),
}

/// Distribution of the node's new connections between two instances, while the shims of both are
/// joined. Without a share, an instance gets the connections that the kernel gives to its shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    pub old: InstanceId,
    pub new: InstanceId,
    /// The part of new connections that the new instance gets, in thousandths. The old instance
    /// gets the rest. With 0, the old instance gets all new connections again.
    pub permille: u16,
    /// Seed of the distribution. As long as the salt is unchanged, a client stays with its
    /// instance. If the new instance's part grows, clients only move from the old instance to the
    /// new one.
    pub salt: u64,
    /// Time for which the share is in force after each message, in milliseconds. If the sender
    /// dies, the share thus ends by itself. 0 ends the share at once.
    pub lease_ms: u64,
    /// True if clients on the node itself are distributed, too. If false, these clients stay with
    /// the old instance, and `permille` is a part of the remote clients only. The node's kubelet,
    /// controller-manager and scheduler are needed to return to the old instance, so they must not
    /// depend on a newer server before it is judged.
    #[serde(default)]
    pub local: bool,
}

/// The old or the new instance of a [`Share`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Old,
    New,
}

impl From<Ask> for Request {
    fn from(ask: Ask) -> Self {
        Self {
            version: ask.since_version(),
            ask,
        }
    }
}

impl Ask {
    /// Returns the first version of the messages that has this request.
    fn since_version(&self) -> u32 {
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

    /// True if only siblings may send the request, because it hands over listeners or connections.
    pub fn is_reserved_for_siblings(&self) -> bool {
        matches!(self, Self::Join { .. } | Self::Pass)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Update {
    pub version: u32,
    pub announce: Announce,
    /// The listeners' cookies and addresses, in the order of the descriptors that come with the
    /// message.
    pub guards: Vec<(Cookie, SocketAddr)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Reply to [`Ask::Status`].
    Status(Box<Status>),
    /// Reply to [`Ask::Metrics`], in the OpenMetrics text format.
    Metrics(String),
    /// Reply to [`Ask::Drain`], [`Ask::DrainIfSibling`], [`Ask::Pass`] and [`Ask::Share`].
    Done,
    /// Reply to [`Ask::DrainIfSibling`]: no sibling is joined, so the shim continues to serve.
    Alone,
    /// Reply to [`Ask::Join`]: the ID of the shim that replies.
    Joined { holder: ShimId },
    /// The shim did not understand or not grant the request. Contains the reason.
    Refused(String),
}

/// The status of a shim. [`Status::to_public_json`] returns the JSON of `/status` and `berth status
/// --json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub version: u32,
    pub berth: SocketAddr,
    pub listen: Vec<SocketAddr>,
    pub instance: InstanceId,
    /// True for a node shim, which serves every instance of the berth.
    pub discover: bool,
    pub shim_version: String,
    /// Process ID of the shim in its PID namespace.
    pub pid: u32,
    pub state: Phase,
    /// Time at which the shim entered its state, RFC 3339.
    pub since: String,
    pub connections_open: u64,
    /// Number of open connections on which the client has sent something and the instance has not
    /// answered yet.
    pub connections_pending: u64,
    /// Number of open connections that this shim has passed to instances as sockets.
    #[serde(default)]
    pub connections_injected: u64,
    pub connections_total: u64,
    /// Number of clients that are held until an instance is ready.
    pub held: u64,
    /// True if no instance is ready, and connections go to an instance that fails its probe.
    pub fail_open: bool,
    /// Number of listeners on the shim's addresses that belong to no shim of the berth. They get a
    /// share of new connections, too.
    pub foreign_listeners: u64,
    /// The instances, the shim's own first.
    pub instances: Vec<InstanceStatus>,
    /// The state of the gate, which limits TLS handshakes in flight. `None` if the shim has no
    /// gate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate: Option<GateStatus>,
    /// The share of new connections that is in force. `None` if there is no share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<ShareStatus>,
    /// Siblings that are alive, but have not been connected to this shim for longer than a lease.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unconnected: Vec<InstanceId>,
    /// True if one of the shim's threads that relay connections does not respond.
    pub blocked: bool,
    /// State of the requests to the cluster's API. `None` without `--cluster`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<ClusterStatus>,
}

/// The status of a [`Share`] in the shim of one of its two instances.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareStatus {
    #[serde(flatten)]
    pub share: Share,
    /// The side of the share on which the shim's own instance is.
    pub side: Side,
    /// Numbers of new connections that this shim has distributed under this salt. The side was
    /// chosen by the client's address (`by_address`), or by its address and port if the address has
    /// too many connections.
    pub by_address: u64,
    pub by_connection: u64,
    /// Time at which the share ends, RFC 3339.
    pub until: String,
}

/// The state of the gate: TLS handshakes in flight, and waiting clients.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct GateStatus {
    /// Number of clients that have begun and have not received an instance's first byte.
    pub openings: u64,
    /// Maximum of `openings`.
    pub limit: u64,
    pub waiting: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest: Option<LongestQueue>,
}

/// The source with the most waiting clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongestQueue {
    /// The address of the clients: an IPv4 address, or a /64 of IPv6.
    pub source: String,
    pub clients: u64,
}

/// Status of a shim's requests to the cluster's API.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// The shim's EndpointSlices in the Service `kubernetes`.
    pub slices: Vec<String>,
    /// Time of the last renewal of a Lease, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_renewed: Option<String>,
    /// Time at which the shim's token expires, RFC 3339. Present if the shim renews the token and
    /// knows the time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_expires: Option<String>,
    /// Requests that fail at present, each with its reason and the fix.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// The status of an instance, as a shim sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceStatus {
    pub instance: InstanceId,
    pub address: SocketAddr,
    pub own: bool,
    #[serde(rename = "standing")]
    pub health: InstanceHealth,
    /// Time at which the instance entered its health state, RFC 3339.
    pub since: String,
    /// True if the shim passes the sockets of clients to the instance, instead of relaying their
    /// bytes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub injected: bool,
    /// Reason why the shim relays the instance's clients, although it should pass their sockets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relayed: Option<String>,
    /// The version that the instance reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kube_version: Option<String>,
    /// Result of the last probe. The text may change with the next version of berth.
    pub last_probe: String,
    /// True if every further probe will fail in the same way until an operator changes something.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub probe_rejected: bool,
}

impl Status {
    /// Returns the status as JSON, with the words of metrics and log. Where version 1 of the
    /// messages says `dry` and `standing`, metrics and log say `refusing` and `health`.
    ///
    /// # Errors
    /// No error is known: no map in the status has keys that are not text.
    pub fn to_public_json(&self) -> serde_json::Result<Value> {
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

    /// Checks that the shim's own instance is ready and the shim listens. An error gives the reason
    /// in one line.
    pub fn check_ready(&self) -> Result<(), String> {
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
                "instance {} is not running: `berth exec` has recorded no such instance",
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

/// Parses a request.
///
/// # Errors
/// The message is not a request, or has an unknown version. The error's text is for the sender.
pub fn parse_request(message: &[u8]) -> Result<Request, String> {
    parse_request_as(VERSION, message)
}

/// Parses a request in the way of a shim that knows the versions up to `known`.
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

/// Splits a message into its JSON and the bytes after it.
pub fn split_message(message: &[u8]) -> (&[u8], &[u8]) {
    match message.iter().position(|byte| *byte == b'\n') {
        Some(at) => (&message[..at], &message[at + 1..]),
        None => (message, &[]),
    }
}

/// Parses an update.
///
/// # Errors
/// The message is not an update, or has version 0.
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

    fn test_share() -> Share {
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

    /// An update of version 1 must be understood as long as a sibling may still send version 1.
    #[test]
    fn updates_requests_and_replies_keep_their_format() {
        let bytes = include_bytes!("../../../../tests/data/golden/update-v1.json");
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
                Ask::Share(test_share()),
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
    fn the_previous_version_grants_known_requests() {
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
        let share = serde_json::to_vec(&Request::from(Ask::Share(test_share()))).unwrap();
        assert_eq!(
            [1, 2].map(|known| parse_request_as(known, &share).is_ok()),
            [false, true]
        );
    }

    #[test]
    fn an_unknown_state_is_read_as_passive() {
        assert_eq!(
            serde_json::from_str::<InstanceHealth>(r#""elsewhere""#).unwrap(),
            InstanceHealth::Unready
        );
        let update = include_str!("../../../../tests/data/golden/update-v1.json");
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
    fn a_status_is_shown_with_the_words_of_the_metrics() {
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
            status.to_public_json().unwrap(),
            serde_json::from_str::<Value>(&shown).unwrap()
        );
    }

    #[test]
    fn an_unknown_version_is_named_in_the_error() {
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
