//! Describes the machine and the conditions of a run, for the report.

use super::load::Pace;
use super::peer::Peer;
use berth_rehearse::record::{
    data::{Environment, Program},
    format,
};
use berth_rehearse::report::environment;

/// The machine and the conditions of a run, for the report.
#[derive(Debug)]
pub(super) struct BenchSetting {
    pub(super) date: String,
    pub(super) command: String,
    /// The machine, as in the report of a rehearsal, and the versions of the peers' programs.
    pub(super) environment: Environment,
    /// The Go version that built the server. Empty if this program itself is the server.
    pub(super) server: String,
    pub(super) rounds: usize,
    pub(super) warm_up_seconds: f64,
    pub(super) window_seconds: f64,
}

impl BenchSetting {
    pub(super) fn new(
        command: &str,
        peers: &[Peer],
        server: String,
        rounds: usize,
        pace: Pace,
    ) -> Self {
        let program = |peer: &Peer| Program {
            role: peer.name.clone(),
            version: peer.version(),
        };
        Self {
            date: environment::now(),
            command: command.to_owned(),
            environment: environment::read(peers.iter().map(program).collect()),
            server,
            rounds,
            warm_up_seconds: pace.warm_up.as_secs_f64(),
            window_seconds: pace.window.as_secs_f64(),
        }
    }

    /// Describes the machine in one line.
    pub(super) fn machine(&self) -> String {
        let Environment {
            cpu_model,
            cpus,
            memory_bytes,
            kernel,
            ..
        } = &self.environment;
        format!(
            "{cpu_model}, {cpus} CPUs, {}, {kernel}",
            format::format_bytes(*memory_bytes)
        )
    }
}
