//! berth lets two kube-apiservers share one node and one secure port, so that a control plane
//! upgrade loses nothing.
//!
//! A *shim* (`berth serve`) listens on the node's public API address, the *berth*, and relays to an
//! *instance*: one kube-apiserver, bound to a 127.x address of its own by `berth exec`. During an
//! upgrade there are two of each. Both shims listen on the same address with `SO_REUSEPORT`, so the
//! kernel deals new connections out among them.
//!
//! # The way of a connection
//!
//! 1. The kernel puts it into the accept queue of one shim's listener ([`os::socket`]).
//! 2. [`accept`] takes it out and deals it to the relaying thread that has the fewest ([`workers`]). It
//!    stays there: its sockets never change threads, and mostly that thread alone writes its counters.
//! 3. [`relay`] asks [`backend::Table::pick`] which instance gets it: the own one if it is ready, else a
//!    ready sibling's, else one that was ready and never refused since. If there is none, the client
//!    is held.
//! 4. It connects, from a source address that names the client, and keeps what the client said until
//!    the instance's first byte; a leg that ends before that is said again to the next instance.
//! 5. [`relay::copy`] moves bytes both ways until an end closes or resets it; TLS is never opened. A direction
//!    that moves a lot goes through a pipe of the kernel ([`relay::bulk`]).
//! 6. Its end is counted ([`metrics`]) and logged. After SIGTERM, [`drain`](mod@drain) waits for it.
//!
//! # Control plane and data plane
//!
//! The control plane is one current-thread runtime, on the main thread: probes, instance records, the
//! shim's socket, the admin port, signals, and the [phase](terms::Phase) of the shim. The data plane
//! is one current-thread runtime per core (at most eight), and does steps 2 to 5. So no probe waits behind bytes and
//! no byte behind a scrape. Between the two there are a snapshot of the instances (a watch channel of
//! [`backend::Table`]) one way, and counters and refused connects the other way.
//!
//! # Map of the code
//!
//! In the order in which data flows. [`app`] is the only place where these are wired together.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`cli`] | options and help texts as clap types, no logic |
//! | [`config`] | what was typed to checked types; every mistake is reported at once |
//! | [`commands`] | one file a subcommand: options to an exit status |
//! | [`app`] | `build` takes what a shim needs, `Bound::run` serves until it is told to stop |
//! | [`terms`] | what all share: the states of a shim (waiting, joined, left, dry) and of an instance, what shims tell one another |
//! | [`handover`] | a shim among its siblings: `machine` decides who accepts from what (pure), `peers` talks to them |
//! | [`accept`] | accept loop, cap on connections, back-off |
//! | [`limits`] | how many threads and connections there may be |
//! | [`workers`] | the relaying threads |
//! | [`relay`] | one connection: pick, connect, replay, hold, copy, how it ended |
//! | [`backend`] | table of instances; `probe` is one question, `health` rise and fall, `prober` asks on |
//! | [`drain`](mod@drain) | after leaving: wait for connections, deadline, force |
//! | [`instance`] | an instance's ID, its 127.x address, the rewriting of its arguments |
//! | [`registry`] | the run directory: records of instances, leases of shims, who lives, notice of changes |
//! | [`control`] | the shim's Unix socket: what commands and siblings ask it, and the wire format |
//! | [`view`] | what can be said of a running shim and its siblings |
//! | [`node`] | a run directory looked at from outside, for `ready`, `live`, `drain` and `status` |
//! | `manifest` | edits of Kubernetes manifests that keep comments and order: `berth inject`, `berth eject` (feature `manifest`) |
//! | `kubernetes` | a kubeconfig, and JSON to and from an apiserver as an admin (feature `manifest`) |
//! | `doctor` | what stands between a manifest, its node and an upgrade that loses nothing: `berth doctor` (feature `manifest`) |
//! | `upgrade` | `berth upgrade`: a static pod replaced by way of a temporary one, as a pure machine and what it sees and does (feature `manifest`) |
//! | [`http`] | one question by HTTP over a connection, for probes and `kubernetes` |
//! | [`log`] | where lines of a shim's log wait for a standard error that takes none |
//! | [`metrics`] | every metric family and the counters behind them |
//! | [`admin`] | /metrics, /livez, /readyz and /status by HTTP |
//! | [`os`] | all `unsafe`, and the system calls that need more than a line; who holds a port |
//! | `rehearse` | an upgrade of stand-ins or real apiservers under load and faults, and a verdict (feature `rehearse`) |
//! | `report` | what a rehearsal saw as data, and the page that shows it (feature `rehearse`) |
//!
//! # Invariants
//!
//! A change may find a better way to keep one, but may not weaken it.
//!
//! | invariant | kept by |
//! | --- | --- |
//! | A shim listens only after its own instance passed its probe `--rise` times in a row. A version that never gets ready never gets a connection | [`backend::health`], [`handover::machine`] |
//! | No listener with queued connections is closed while a live sibling could accept them | [`handover`]: every shim holds duplicates of its siblings' listeners (guards), and accepts from those whose owner left, died or hangs |
//! | Until the instance's first byte, nothing that a TLS client said is lost: it is said again to the next instance, or the client is held up to `--hold` | [`relay`] (`opening`) |
//! | A shim does not cut an established connection for its age, idleness or a slow reader | [`relay::copy`] (no timers on bytes), [`os::socket`] (`TCP_USER_TIMEOUT` off), [`drain`](mod@drain) (the deadline) |
//! | Each end sees what the other did: FIN becomes FIN, RST becomes RST | [`relay::copy`] |
//! | When no instance passes its probe, one that did before and never refused since still gets connections; one that never passed does not | [`backend::health`], [`backend::Table::pick`] |
//! | Who is there is known from what lives, not from a configured number | [`registry::instance`]: an instance lives while its record is locked or, if a shim that is gone had written that again, while its address is listened on; [`registry::lease`]: a shim lives while its lease is renewed, which it is only if every one of its threads gave a sign of life |
//! | The shim outlives its apiserver: after it left, its deadline begins when the instance stopped listening; what it accepted and its instance cannot serve goes to a sibling as a socket | [`drain`](mod@drain), [`handover`] (`pass`) |
//! | Two versions that meet understand each other: messages and files carry a version, unknown fields are passed over | [`control::wire`], [`registry::instance`] |
//!
//! When nothing has been reachable for longer than `--hold`, a shim ends listening (the state *dry*), so
//! that clients are refused at once ([`handover::machine`]).

pub mod accept;
pub mod admin;
pub mod app;
pub mod backend;
pub mod cli;
pub mod commands;
pub mod config;
pub mod control;
#[cfg(feature = "manifest")]
pub mod doctor;
pub mod drain;
pub mod handover;
pub mod http;
pub mod instance;
#[cfg(feature = "manifest")]
pub mod kubernetes;
pub mod limits;
pub mod log;
#[cfg(feature = "manifest")]
pub mod manifest;
pub mod metrics;
pub mod node;
pub mod os;
pub mod registry;
#[cfg(feature = "rehearse")]
pub mod rehearse;
pub mod relay;
#[cfg(feature = "rehearse")]
pub mod report;
pub mod terms;
#[cfg(feature = "manifest")]
pub mod upgrade;
pub mod view;
pub mod workers;

/// Version of this berth.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
