//! Choices on the command line by name: ways, topologies and faults.

use super::fault::Fault;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Returns the parser of `--via`: every way except port sharing, which is only compared with
/// others.
pub fn via_names() -> impl TypedValueParser<Value = Via> {
    let decides = Via::value_variants()
        .iter()
        .filter(|via| **via != Via::PortSharing);
    let names = PossibleValuesParser::new(decides.filter_map(Via::to_possible_value));
    names.try_map(|name| Via::from_str(&name, false))
}

/// The way from clients to instances.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    /// Through berth's shims.
    #[value(help = "berth")]
    Berth,
    /// Through HAProxy, as a sidecar of each instance.
    #[value(help = "HAProxy as a sidecar that shares the port, as in Lokomotive")]
    Haproxy,
    /// Straight to instances that share the port (`--permit-port-sharing`).
    #[value(help = "The apiservers share the port themselves, by --permit-port-sharing")]
    PortSharing,
    /// Straight to the instances, without berth or a proxy between: the control.
    #[value(help = "Neither berth nor a proxy: one apiserver after the other has the port alone")]
    None,
}

impl Via {
    /// Returns the way to the instances in words, for messages.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Berth => "through berth",
            Self::Haproxy => "through HAProxy",
            Self::PortSharing => "with port sharing",
            Self::None => "without berth or a proxy",
        }
    }
}

/// The processes that an instance consists of, and the order in which they get SIGTERM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Topology {
    /// `berth exec` and `berth serve` in one pod: SIGTERM to both at once
    Sidecar,
    /// Like sidecar, with `berth serve` as a restartable init container: SIGTERM after the
    /// apiserver has ended
    NativeSidecar,
    /// A single `berth serve --discover` for all instances, and a `berth exec` each
    Node,
    /// `berth run`: a single unit, which stops its apiserver itself
    Run,
    /// No berth on the node: the apiserver has the port alone and is replaced in place, under
    /// `berth bridge`
    Bridge,
}

/// Returns the name of a value on the command line.
fn value_name(value: &impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&value_name(self))
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&value_name(self))
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&value_name(self))
    }
}
