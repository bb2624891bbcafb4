//! `berth rehearse`.

use super::{parse_duration, parse_seconds};
use berth_node::terms::Speedup;
use berth_options::shim::pass_mode_parser;
use berth_rehearse::config::{
    RATE, STORM, UPGRADES, WATCHES,
    apiserver::Apiserver,
    choice::{Topology, Via, via_names},
    fault::Fault,
};
use berth_shim::config::PassMode;
use clap::builder::RangedI64ValueParser;
use clap::{Args, value_parser};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

const SETUP_HEADING: &str = "Setup";

const TIMES_HEADING: &str = "Times";

const LOAD_HEADING: &str = "Load";

const COMPARISON_HEADING: &str = "Comparison";

const OUTPUT_HEADING: &str = "Output";

/// Options of `berth rehearse`.
#[derive(Debug, Clone, Args)]
pub struct RehearseArgs {
    /// Command of the apiserver that is replaced, split as in a shell; missing flags are added, and
    /// without --etcd-servers the etcd in PATH is started. `stand-in FLAGS`: the simulated
    /// apiserver in berth
    #[arg(long, env = "BERTH_REHEARSE_OLD", default_value = "stand-in", value_name = "CMD", value_parser = Apiserver::parse, help_heading = SETUP_HEADING)]
    pub old: Apiserver,
    /// Command of the apiserver that replaces --old
    #[arg(long, env = "BERTH_REHEARSE_NEW", default_value = "stand-in", value_name = "CMD", value_parser = Apiserver::parse, help_heading = SETUP_HEADING)]
    pub new: Apiserver,
    /// Path of the berth binary that is rehearsed, for example the binary of an image [default:
    /// this program]
    #[arg(long, env = "BERTH_REHEARSE_BERTH", value_name = "PATH", help_heading = SETUP_HEADING)]
    pub berth: Option<PathBuf>,
    /// Rehearse in a network namespace of its own, where kube-apiserver can advertise an address
    #[arg(long, env = "BERTH_REHEARSE_NETNS", help_heading = SETUP_HEADING)]
    pub netns: bool,
    /// The processes of an instance, and the order in which they get SIGTERM
    #[arg(long, env = "BERTH_REHEARSE_TOPOLOGY", default_value = "sidecar", value_name = "TOPOLOGY", value_enum, help_heading = SETUP_HEADING)]
    pub topology: Topology,
    /// How the shims pass clients to the apiservers
    #[arg(long, env = "BERTH_REHEARSE_PASS", default_value = "relay", value_name = "HOW", value_parser = pass_mode_parser(), help_heading = SETUP_HEADING)]
    pub pass: PassMode,
    /// Consecutive upgrades, from old to new and back
    #[arg(long, env = "BERTH_REHEARSE_UPGRADES", default_value = "1", value_name = "N", value_parser = range_parser(UPGRADES), help_heading = SETUP_HEADING)]
    pub upgrades: u32,
    /// Upgrade from old to new and back for this long, instead of --upgrades times, each time with
    /// one fault that --seed chooses (from --fault, else from all faults). A shim that runs for
    /// eight upgrades or more must not use more and more memory, descriptors or threads
    #[arg(long = "for", env = "BERTH_REHEARSE_FOR", value_name = "DURATION", value_parser = parse_seconds, conflicts_with = "upgrades", help_heading = SETUP_HEADING)]
    pub lasts: Option<Duration>,
    /// Faults to inject during the upgrades, separated by commas; several faults run one after
    /// another
    #[arg(long, env = "BERTH_REHEARSE_FAULT", value_name = "LIST", value_delimiter = ',', value_enum, help_heading = SETUP_HEADING)]
    pub fault: Vec<Fault>,
    /// Duration of the load in each phase: before an upgrade, while both apiservers serve, and
    /// after the upgrade
    #[arg(long, hide = true, default_value = "3s", value_parser = parse_seconds)]
    pub phase: Duration,
    /// Time for which both apiservers serve before the old one stops, as `berth upgrade --settle`
    /// [default: 3s]
    #[arg(long, env = "BERTH_REHEARSE_SETTLE", value_name = "DURATION", value_parser = parse_seconds, help_heading = TIMES_HEADING)]
    pub settle: Option<Duration>,
    /// Time for which a new simulated apiserver listens before it is ready; a real apiserver takes
    /// 8 to 10 s
    #[arg(long, env = "BERTH_REHEARSE_START_DELAY", hide = true, default_value = "8s", value_parser = parse_duration)]
    pub start_delay: Duration,
    /// Divide the times that no option of shims, bridges and faults sets
    #[arg(long, hide = true, default_value_t)]
    pub speedup: Speedup,
    /// New TLS connections a second
    #[arg(long, env = "BERTH_REHEARSE_RATE", default_value = "100", value_name = "N", value_parser = range_parser(RATE), help_heading = LOAD_HEADING)]
    pub rate: u32,
    /// Watches of ConfigMaps
    #[arg(long, env = "BERTH_REHEARSE_WATCHES", default_value = "8", value_name = "N", value_parser = range_parser(WATCHES), help_heading = LOAD_HEADING)]
    pub watches: u32,
    /// Clients that connect all at once after the first switch, each from its own address, and
    /// retry until they are served
    #[arg(long, env = "BERTH_REHEARSE_STORM", default_value = "0", value_name = "N", value_parser = range_parser(STORM), help_heading = LOAD_HEADING)]
    pub storm: u32,
    /// Seed of the clients' random choices, to repeat a run [default: a random seed, printed]
    #[arg(long, env = "BERTH_REHEARSE_SEED", value_name = "N", help_heading = LOAD_HEADING)]
    pub seed: Option<u64>,
    /// Path of the clients in the rehearsal that decides the exit status
    #[arg(long, hide = true, default_value = "berth", value_parser = via_names())]
    pub via: Via,
    /// Rehearse also through each of these alternatives to berth, in this order; the last rehearsal
    /// is through berth and decides the exit status
    #[arg(long, env = "BERTH_REHEARSE_COMPARE", default_value = "none", value_name = "LIST", value_delimiter = ',', value_enum, help_heading = COMPARISON_HEADING)]
    pub compare: Vec<Via>,
    /// Print all figures, not only the most important figures
    #[arg(long, short, env = "BERTH_REHEARSE_VERBOSE", help_heading = OUTPUT_HEADING)]
    pub verbose: bool,
    /// Write all results to this file, as JSON
    #[arg(long, env = "BERTH_REHEARSE_JSON", value_name = "FILE", help_heading = OUTPUT_HEADING)]
    pub json: Option<PathBuf>,
    /// Write a report for a browser to this file, as HTML
    #[arg(long, env = "BERTH_REHEARSE_REPORT", value_name = "FILE", help_heading = OUTPUT_HEADING)]
    pub report: Option<PathBuf>,
}

/// Returns a parser that accepts whole numbers in a range.
fn range_parser(range: RangeInclusive<u32>) -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(i64::from(*range.start())..=i64::from(*range.end()))
}

/// Arguments of the simulated apiserver.
#[derive(Debug, Clone, Args)]
pub struct StandInArgs {
    /// kube-apiserver's flags
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "FLAGS"
    )]
    pub flags: Vec<String>,
}
