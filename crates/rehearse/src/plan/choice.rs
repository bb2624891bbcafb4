//! What can be chosen by name: the ways, the topologies and the faults.

use crate::fault::Fault;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What `--fault` takes: the names of [`Fault`]s, and `none`.
pub fn fault_names() -> PossibleValuesParser {
    let faults = Fault::value_variants().iter().filter_map(Fault::to_possible_value);
    let none = PossibleValue::new("none").help("Nothing goes wrong");
    PossibleValuesParser::new(std::iter::once(none).chain(faults))
}

/// What `--compare` takes: the names of [`Via`]s.
pub fn compared_names() -> PossibleValuesParser {
    PossibleValuesParser::new(Via::value_variants().iter().filter_map(Via::to_possible_value))
}

/// What `--via` takes: the same, but for port sharing, which is only compared with.
pub fn via_names() -> PossibleValuesParser {
    let decides = Via::value_variants().iter().filter(|via| **via != Via::PortSharing);
    PossibleValuesParser::new(decides.filter_map(Via::to_possible_value))
}

/// The way from clients to instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    /// Through shims.
    #[value(help = "berth")]
    Berth,
    /// Through a HAProxy as a sidecar of each instance.
    #[value(help = "HAProxy as a sidecar that shares the port, as Lokomotive had it")]
    Haproxy,
    /// Straight to instances that share the port (`--permit-port-sharing`).
    #[value(help = "The apiservers share the port themselves, by --permit-port-sharing")]
    PortSharing,
    /// Straight to the instances, with neither berth nor a proxy between: the control.
    #[value(help = "Neither berth nor a proxy: one apiserver after the other has the port alone")]
    None,
}

impl Via {
    /// How clients come to an instance.
    pub fn way(self) -> &'static str {
        match self {
            Self::Berth => "through berth",
            Self::Haproxy => "through HAProxy",
            Self::PortSharing => "with port sharing",
            Self::None => "without berth or a proxy",
        }
    }
}

/// Which processes an instance has, and which of them gets SIGTERM when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Topology {
    /// `berth exec` and `berth serve` in one pod: SIGTERM to both at once
    Sidecar,
    /// The same, `berth serve` an init container that restarts: SIGTERM when the apiserver has ended
    NativeSidecar,
    /// One `berth serve --discover` for all instances, and a `berth exec` each
    Node,
    /// `berth run`: one unit, which stops its apiserver itself
    Run,
    /// Nothing of berth: the apiserver has the port alone and is replaced in place, under `berth bridge`
    Bridge,
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
