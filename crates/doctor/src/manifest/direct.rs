//! The direct path: whether a shim that is to have it can.

use super::super::checks::{DIRECT_ADDRESS, DIRECT_CAPABILITIES};
use super::super::layout::{Berth, uid};
use super::super::{Check, options};
use super::Examiner;
use berth_cluster::yaml::YamlNode;
use berth_manifest::names::STEERING;
use berth_shim::config::{DirectMode, is_steered};

impl Examiner<'_> {
    pub(super) fn direct(&mut self, shim: &Berth<'_>) {
        let mode = options::direct(&shim.parsed);
        if mode == DirectMode::Off {
            return;
        }
        let (container, name) = (shim.container, shim.container.name());
        let line = container.variable("BERTH_DIRECT").map_or(container.node().line, |variable| variable.line);
        let mut found = |check: Check, cause: String, fix: String| {
            self.findings.push(options::of_direct(check.at(self.case.line(line), cause, fix), mode));
        };
        let (uid, lacks) = (uid(container), lacks(shim));
        if uid != 0 {
            found(
                DIRECT_CAPABILITIES,
                format!("{name} runs as uid {uid}, and the capabilities that a pod adds count for root only"),
                "remove --direct (BERTH_DIRECT), or run kube-apiserver and the shim as root".into(),
            );
        } else if !lacks.is_empty() {
            let cause =
                format!("{name} has --direct {} and lacks the capability {}", mode.as_str(), lacks.join(" and "));
            let fix = format!("add {} to securityContext.capabilities.add of {name}", lacks.join(" and "));
            found(DIRECT_CAPABILITIES, cause, fix);
        }
        let addresses: Vec<_> = options::listen(&shim.parsed).into_iter().map(|listen| listen.addr).collect();
        if !addresses.is_empty() && !addresses.iter().any(is_steered) {
            let said: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            found(
                DIRECT_ADDRESS,
                format!("{name} listens on {}, and none of these is steered", said.join(" and ")),
                "give an address of IPv4 outside of 127.0.0.0/8, or remove --direct (BERTH_DIRECT)".into(),
            );
        }
    }
}

/// Which capabilities for steering are not added.
fn lacks(shim: &Berth<'_>) -> Vec<&'static str> {
    let security = |keys: &[&str]| shim.container.node().at(&[&["securityContext"], keys].concat());
    if security(&["privileged"]).map(YamlNode::value) == Some(true.into()) {
        return Vec::new();
    }
    let added = security(&["capabilities", "add"]).map(YamlNode::items).unwrap_or_default();
    let has = |names: &[&str]| {
        let is = |name: &str| names.contains(&name.strip_prefix("CAP_").unwrap_or(name));
        added.iter().filter_map(YamlNode::text).any(is)
    };
    // CAP_SYS_ADMIN holds what CAP_BPF does.
    let is_there = |name: &&str| has(&["ALL", name]) || (*name == "BPF" && has(&["SYS_ADMIN"]));
    STEERING.into_iter().filter(|name| !is_there(name)).collect()
}
