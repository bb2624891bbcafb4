//! The command line of the benchmark, and the search for relays (peers) on this machine.

use super::peer::{Peer, PeerKind};
use super::work::Work;
use clap::Args;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Args)]
pub(crate) struct BenchOptions {
    /// The peers that take part [default: `none` (no relay), each --berth, inject, and
    /// whichever of haproxy, haproxy-splice, nginx and envoy is installed]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    peers: Vec<String>,
    /// The work of each peer [default: ping, connect, bulk, idle, burst, growth]
    #[arg(long, value_delimiter = ',')]
    work: Vec<Work>,
    /// Times that each peer does each work [default: 5, or 3 with --short]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Length of one measurement [default: 2, or 0.4 with --short]
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    seconds: Option<Duration>,
    /// Path of a berth binary to measure; several binaries are compared under their names
    #[arg(long, value_name = "[NAME=]PATH", required = true)]
    berth: Vec<String>,
    /// Path of the server behind all peers, a program in Go [default: this program's own server,
    /// which cannot serve inject]
    #[arg(long, value_name = "PATH")]
    pub(super) server: Option<PathBuf>,
    /// Path of an envoy binary [default: envoy on PATH]
    #[arg(long, value_name = "PATH")]
    envoy: Option<PathBuf>,
    /// Measure less, and exit with 1 if berth is far worse than the other peers
    #[arg(long)]
    pub(super) short: bool,
    /// The command that the report names
    #[arg(long, hide = true, default_value = "berth-bench bench")]
    pub(super) command: String,
}

/// Name of the peer that is the first given berth, run with `--pass inject`.
const INJECT: &str = "inject";

const NOT_FOUND: &str = "not found";

/// The peers to measure, and the peers that are left out, each with the reason.
type Found = (Vec<Peer>, Vec<(&'static str, String)>);

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number")?;
    if (0.1..=600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("must be 0.1 to 600".to_owned())
    }
}

impl BenchOptions {
    pub(super) fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.short { 3 } else { 5 }) as usize
    }

    pub(super) fn window(&self) -> Duration {
        self.seconds
            .unwrap_or(Duration::from_millis(if self.short { 400 } else { 2_000 }))
    }

    pub(super) fn selected_work(&self) -> Vec<Work> {
        match (self.work.is_empty(), self.short) {
            (false, _) => self.work.clone(),
            (true, false) => vec![
                Work::Ping,
                Work::Connect,
                Work::Bulk,
                Work::Idle,
                Work::Burst,
                Work::Growth,
            ],
            (true, true) => vec![Work::Ping, Work::Connect, Work::Bulk, Work::Idle],
        }
    }

    /// Finds the peers to measure, or returns every mistake in the options. `obstacle` returns the
    /// reason why a berth binary cannot pass sockets on this machine, if there is one.
    pub(super) fn find_peers(
        &self,
        obstacle: impl Fn(&Path) -> Option<String>,
    ) -> Result<Found, Vec<String>> {
        let mut mistakes = Vec::new();
        let mut peers = vec![Peer {
            name: "none".to_owned(),
            kind: PeerKind::None,
            program: PathBuf::new(),
        }];
        for given in &self.berth {
            let (name, path) = given.split_once('=').unwrap_or(("berth", given));
            if !Path::new(path).is_file() {
                mistakes.push(format!(
                    "--berth {given}: there is no program {path}; build one, or correct the path"
                ));
            }
            peers.push(Peer {
                name: name.to_owned(),
                kind: PeerKind::Berth,
                program: make_absolute(path.as_ref()),
            });
        }
        let mut missing = Vec::new();
        let first = peers
            .iter()
            .find(|peer| peer.is_berth())
            .map(|berth| berth.program.clone());
        let server = self
            .server
            .as_deref()
            .ok_or("--pass inject needs a server in Go")
            .map(make_absolute);
        let served = server
            .map_err(str::to_owned)
            .and_then(|server| Ok((server, first.ok_or(NOT_FOUND)?)));
        match served
            .and_then(|(server, program)| obstacle(&program).map_or(Ok((server, program)), Err))
        {
            Ok((server, program)) => {
                peers.push(Peer {
                    name: INJECT.to_owned(),
                    kind: PeerKind::Inject(server),
                    program,
                });
            }
            Err(why) => missing.push((INJECT, why)),
        }
        for (name, kind) in [
            ("haproxy", PeerKind::Haproxy { splice: false }),
            ("haproxy-splice", PeerKind::Haproxy { splice: true }),
            ("nginx", PeerKind::Nginx(find_nginx_stream_module())),
            ("envoy", PeerKind::Envoy),
        ] {
            let given = self.envoy.clone().filter(|_| name == "envoy");
            let found = given.or_else(|| find_program(name.trim_end_matches("-splice")));
            match found.filter(|path| path.is_file()) {
                Some(program) => peers.push(Peer {
                    name: name.to_owned(),
                    kind,
                    program: make_absolute(&program),
                }),
                None => missing.push((name, NOT_FOUND.to_owned())),
            }
        }
        for name in &self.peers {
            let there = peers.iter().map(|peer| peer.name.as_str());
            let known: Vec<_> = there.chain(missing.iter().map(|(name, _)| *name)).collect();
            if !known.contains(&name.as_str()) {
                mistakes.push(format!(
                    "--peers {name}: there is no such peer; there are {}",
                    known.join(", ")
                ));
            }
        }
        let mut seen = HashSet::new();
        if let Some(twice) = peers.iter().find(|peer| !seen.insert(&peer.name)) {
            mistakes.push(format!(
                "two peers are called {}: give --berth a NAME= that no other peer has",
                twice.name
            ));
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let short = ["none", INJECT, "haproxy"];
        let wanted = |name: &str, is_berth: bool| match (self.peers.is_empty(), self.short) {
            (false, _) => self.peers.iter().any(|peer| peer == name),
            (true, true) => is_berth || short.contains(&name),
            (true, false) => true,
        };
        peers.retain(|peer| wanted(&peer.name, peer.kind == PeerKind::Berth));
        missing.retain(|(name, _)| wanted(name, false));
        Ok((peers, missing))
    }
}

/// Makes a path absolute, because peers have working directories of their own.
fn make_absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Finds a program in the directories of PATH and in those for daemons, which often only root has
/// in PATH.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories =
        std::env::split_paths(&path).chain(["/usr/local/sbin".into(), "/usr/sbin".into()]);
    directories
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// Finds nginx's stream module in the directories of distributions that do not build it in.
fn find_nginx_stream_module() -> Option<PathBuf> {
    let places = [
        "/usr/lib/nginx/modules/ngx_stream_module.so",
        "/usr/lib64/nginx/modules/ngx_stream_module.so",
    ];
    places
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: BenchOptions,
    }

    fn list_peers(args: &str) -> Result<Vec<String>, Vec<String>> {
        let cli =
            Cli::try_parse_from(std::iter::once("bench").chain(args.split_ascii_whitespace()))
                .map_err(|error| vec![error.to_string()])?;
        Ok(cli
            .options
            .find_peers(|_| None)?
            .0
            .into_iter()
            .map(|peer| peer.name)
            .collect())
    }

    #[test]
    fn builds_are_peers_by_their_names() {
        let asked = "--berth old=/bin/true --berth new=/bin/true --peers new,none,old";
        assert_eq!(
            list_peers(asked),
            Ok(vec!["none".to_owned(), "old".to_owned(), "new".to_owned()])
        );
        let short = list_peers("--berth /bin/true --envoy /bin/true --short").unwrap();
        assert!(
            short.starts_with(&["none", "berth"].map(str::to_owned))
                && !short.contains(&"envoy".to_owned())
        );
    }

    #[test]
    fn sockets_are_passed_to_a_server_in_go_where_possible() {
        let cli = |args: &str| Cli::parse_from(args.split_ascii_whitespace()).options;
        let (without, with) = (
            cli("bench --berth /bin/true"),
            cli("bench --berth /bin/true --server /bin/true"),
        );
        let why = |options: &BenchOptions, obstacle: Option<&str>| {
            let (peers, missing) = options.find_peers(|_| obstacle.map(str::to_owned)).unwrap();
            let why = missing
                .into_iter()
                .find(|(name, _)| *name == INJECT)
                .map(|(_, why)| why);
            assert_eq!(why.is_none(), peers.iter().any(Peer::is_inject));
            why
        };
        assert_eq!(why(&with, None), None);
        assert_eq!(
            why(&with, Some("an old kernel")).as_deref(),
            Some("an old kernel")
        );
        assert_eq!(
            why(&without, None).as_deref(),
            Some("--pass inject needs a server in Go")
        );
    }

    #[test]
    fn all_mistakes_are_reported() {
        let mistakes =
            list_peers("--berth /no/berth --berth /bin/true --peers traefik").unwrap_err();
        assert_eq!(mistakes.len(), 3, "{mistakes:?}");
    }
}
