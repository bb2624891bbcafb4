//! What can be chosen by name: the ways, the topologies and the faults.

use crate::fault::Fault;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser};
use serde::Serialize;
use std::fmt;

/// What `--fault` takes: the names of [`Fault`]s, and `none`.
pub fn fault_names() -> PossibleValuesParser {
    let faults = Fault::value_variants().iter().filter_map(Fault::to_possible_value);
    let none = PossibleValue::new("none").help("Nothing goes wrong");
    PossibleValuesParser::new(std::iter::once(none).chain(faults))
}

/// What clients go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    /// berth
    Berth,
    /// HAProxy as a side-container that shares the port, as Lokomotive had it
    Haproxy,
    /// The apiservers share the port themselves, by --permit-port-sharing
    PortSharing,
    /// Nothing: one apiserver after the other has the port alone
    Direct,
}

/// Which processes an instance has, and who of them is told to stop when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Topology {
    /// `berth exec` and `berth serve` in one pod: SIGTERM to both at once
    SideContainer,
    /// The same, `berth serve` an init container that restarts: SIGTERM when the apiserver has ended
    NativeSideContainer,
    /// One `berth serve --discover` for all instances, and a `berth exec` each
    Node,
    /// `berth run`: one unit, which stops its apiserver itself
    Run,
}

/// An enum's name on the command line.
fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(self))
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(self))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(self))
    }
}
