//! The command line, and which peers are there.

use super::peer::{Peer, PeerKind};
use super::work::Work;
use clap::Args;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Debug, Args)]
pub(crate) struct BenchOptions {
    /// The peers that take part [default: none, each --berth, and those of haproxy, haproxy-splice,
    /// nginx and envoy that are installed]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    peers: Vec<String>,
    /// The work that they do [default: ping, connect, bulk, idle, burst, growth]
    #[arg(long, value_delimiter = ',')]
    work: Vec<Work>,
    /// Times that each peer does each work [default: 5, or 3 with --short]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Length of one measurement [default: 2, or 0.4 with --short]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<Duration>,
    /// A berth; several are compared under their names
    #[arg(long, value_name = "[NAME=]PATH", required = true)]
    berth: Vec<String>,
    /// An envoy [default: the one on PATH]
    #[arg(long, value_name = "PATH")]
    envoy: Option<PathBuf>,
    /// Measure less, and exit with 1 if berth is far off the others
    #[arg(long)]
    pub(super) short: bool,
    /// The command that the report names
    #[arg(long, hide = true, default_value = "berth-bench bench")]
    pub(super) command: String,
}

/// The first berth, with a direct path.
const DIRECT_PATH: &str = "direct-path";

fn seconds(text: &str) -> Result<Duration, String> {
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
        self.seconds.unwrap_or(Duration::from_millis(if self.short { 400 } else { 2_000 }))
    }

    pub(super) fn work(&self) -> Vec<Work> {
        match (self.work.is_empty(), self.short) {
            (false, _) => self.work.clone(),
            (true, false) => vec![Work::Ping, Work::Connect, Work::Bulk, Work::Idle, Work::Burst, Work::Growth],
            (true, true) => vec![Work::Ping, Work::Connect, Work::Bulk, Work::Idle],
        }
    }

    /// The peers that take part, one of them with a direct path if the kernel steers here, and the names of those that are not installed;
    /// or all mistakes.
    pub(super) fn peers(&self, steers: bool) -> Result<(Vec<Peer>, Vec<&'static str>), Vec<String>> {
        let mut mistakes = Vec::new();
        let mut peers = vec![Peer { name: "none".to_owned(), kind: PeerKind::None, program: PathBuf::new() }];
        for given in &self.berth {
            let (name, path) = given.split_once('=').unwrap_or(("berth", given));
            if !Path::new(path).is_file() {
                mistakes.push(format!("--berth {given}: there is no program {path}; build one, or correct the path"));
            }
            peers.push(Peer { name: name.to_owned(), kind: PeerKind::Berth, program: absolute(path.as_ref()) });
        }
        let mut missing = Vec::new();
        let first = peers.iter().find(|peer| peer.is_berth()).map(|berth| berth.program.clone());
        match first.filter(|_| steers) {
            Some(program) => peers.push(Peer { name: DIRECT_PATH.to_owned(), kind: PeerKind::DirectPath, program }),
            None => missing.push(DIRECT_PATH),
        }
        for (name, kind) in [
            ("haproxy", PeerKind::Haproxy { splice: false }),
            ("haproxy-splice", PeerKind::Haproxy { splice: true }),
            ("nginx", PeerKind::Nginx(nginx_stream())),
            ("envoy", PeerKind::Envoy),
        ] {
            let given = self.envoy.clone().filter(|_| name == "envoy");
            let found = given.or_else(|| on_path(name.trim_end_matches("-splice")));
            match found.filter(|path| path.is_file()) {
                Some(program) => peers.push(Peer { name: name.to_owned(), kind, program: absolute(&program) }),
                None => missing.push(name),
            }
        }
        for name in &self.peers {
            if !peers.iter().any(|peer| peer.name == *name) && !missing.contains(&name.as_str()) {
                let known: Vec<_> =
                    peers.iter().map(|peer| peer.name.as_str()).chain(missing.iter().copied()).collect();
                mistakes.push(format!("--peers {name}: there is no such peer; there are {}", known.join(", ")));
            }
        }
        let mut seen = HashSet::new();
        if let Some(twice) = peers.iter().find(|peer| !seen.insert(&peer.name)) {
            mistakes.push(format!("two peers are called {}: give --berth a NAME= that no other has", twice.name));
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let short = ["none", DIRECT_PATH, "haproxy"];
        let wanted = |name: &str, is_berth: bool| match (self.peers.is_empty(), self.short) {
            (false, _) => self.peers.iter().any(|peer| peer == name),
            (true, true) => is_berth || short.contains(&name),
            (true, false) => true,
        };
        peers.retain(|peer| wanted(&peer.name, peer.kind == PeerKind::Berth));
        missing.retain(|name| wanted(name, false));
        Ok((peers, missing))
    }
}

/// Peers have working directories of their own.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Daemons are in directories that only root's PATH has.
fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path).chain(["/usr/local/sbin".into(), "/usr/sbin".into()]);
    directories.map(|directory| directory.join(name)).find(|path| path.is_file())
}

/// Where distributions put nginx's stream module if it is not built in.
fn nginx_stream() -> Option<PathBuf> {
    let places = ["/usr/lib/nginx/modules/ngx_stream_module.so", "/usr/lib64/nginx/modules/ngx_stream_module.so"];
    places.into_iter().map(PathBuf::from).find(|path| path.is_file())
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

    fn peers(args: &str) -> Result<Vec<String>, Vec<String>> {
        let cli = Cli::try_parse_from(std::iter::once("bench").chain(args.split_ascii_whitespace()))
            .map_err(|error| vec![error.to_string()])?;
        Ok(cli.options.peers(false)?.0.into_iter().map(|peer| peer.name).collect())
    }

    #[test]
    fn builds_are_peers_by_their_names() {
        let asked = "--berth old=/bin/true --berth new=/bin/true --peers new,none,old";
        assert_eq!(peers(asked), Ok(vec!["none".to_owned(), "old".to_owned(), "new".to_owned()]));
        let short = peers("--berth /bin/true --envoy /bin/true --short").unwrap();
        assert!(short.starts_with(&["none", "berth"].map(str::to_owned)) && !short.contains(&"envoy".to_owned()));
    }

    #[test]
    fn all_mistakes_are_reported() {
        let mistakes = peers("--berth /no/berth --berth /bin/true --peers traefik").unwrap_err();
        assert_eq!(mistakes.len(), 3, "{mistakes:?}");
    }
}
