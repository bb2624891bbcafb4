//! The addresses of the shim, and the variables that set them.

use super::{Addresses, Manifest, PASS, Planner, Problem, parts};
use crate::pod::parse_address;
use berth_options::check;
use berth_shim::config::{Listen, PassMode};
use serde_json::Value;
use std::net::{IpAddr, SocketAddr};

/// The addresses of the shim of an earlier injection. Clients use every address of this list, so an
/// injection without --listen keeps the list.
pub(super) fn inherit_addresses(manifest: &Manifest) -> Result<Addresses, Problem> {
    let variable = manifest.container().variable("BERTH_LISTEN");
    let Some((text, line)) = variable.and_then(|it| Some((it.get("value")?.text()?, it.line)))
    else {
        return Ok(Addresses::OfManifest);
    };
    let words: Vec<_> = text.split_whitespace().collect();
    let read: Vec<Listen> = words
        .iter()
        .filter_map(|word| check::parse_listen(word).ok())
        .collect();
    if read.len() == words.len() {
        return Ok(Addresses::Given(read));
    }
    // Only the kubelet knows this address.
    if words.len() == 1 {
        return Ok(Addresses::OfManifest);
    }
    Err(Problem::new(
        line,
        format!(
            "the shim listens on {text}, and not all of these addresses can be read: give each as --listen ADDR:PORT"
        ),
    ))
}

/// Checks the advertised address and the first listen address. Returns cause and fix if an address
/// is loopback or link-local.
pub fn find_loopback(addresses: impl IntoIterator<Item = IpAddr>) -> Option<(String, String)> {
    let ip = addresses.into_iter().find(|ip| match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
    })?;
    let cause = "no other node reaches kube-apiserver there, and the Service kubernetes rejects such an address";
    let fix = "give the node's address in --advertise-address, and to `berth inject --listen` as the first";
    Some((
        format!("{ip} is an address of this node or its link alone: {cause}"),
        fix.to_owned(),
    ))
}

impl Planner<'_> {
    /// The addresses, as far as known, and the variables that the apiserver and the shim share.
    pub(super) fn variables(
        &mut self,
        port: u16,
        ca: Option<&str>,
    ) -> (Vec<SocketAddr>, Vec<Value>) {
        let (host, from_node) = self.host();
        let (listen, addresses): (String, Vec<SocketAddr>) = match &self.options.addresses {
            Addresses::Given(given) => {
                let text = |listen: &Listen| {
                    format!(
                        "{}{}",
                        listen.addr,
                        if listen.freebind { ",freebind" } else { "" }
                    )
                };
                (
                    given.iter().map(text).collect::<Vec<_>>().join(" "),
                    given.iter().map(|listen| listen.addr).collect(),
                )
            }
            Addresses::OfManifest => (
                format!("{host}:{port}"),
                vec![SocketAddr::from(([0; 4], port))],
            ),
        };
        let own = addresses.first().map_or(port, SocketAddr::port);
        self.add_address_notes(port, own, from_node);
        let mut variables = Vec::new();
        if from_node && !matches!(self.options.addresses, Addresses::Given(_)) {
            variables.push(parts::make_field_variable("BERTH_HOST_IP", "status.hostIP"));
        }
        variables.push(parts::make_field_variable("BERTH_INSTANCE", "metadata.uid"));
        variables.push(parts::make_variable("BERTH_LISTEN", &listen));
        if self.options.run_dir != "/run/berth" {
            variables.push(parts::make_variable("BERTH_RUN_DIR", &self.options.run_dir));
        }
        if self.options.pass != PassMode::Relay {
            variables.push(parts::make_variable(PASS, self.options.pass.as_str()));
        }
        variables.extend(ca.map(|ca| parts::make_variable("BERTH_PROBE_CA", ca)));
        variables.extend(
            self.options
                .probing
                .variables
                .iter()
                .map(|(name, value)| parts::make_variable(name, value)),
        );
        (addresses, variables)
    }

    /// The host part of the apiserver's address. True if only the kubelet knows the address.
    fn host(&mut self) -> (String, bool) {
        match self
            .manifest
            .bind_address()
            .or_else(|| self.manifest.advertise_address())
        {
            Some(IpAddr::V4(ip)) => (ip.to_string(), false),
            Some(IpAddr::V6(ip)) => (format!("[{ip}]"), false),
            None => ("$(BERTH_HOST_IP)".into(), true),
        }
    }

    fn add_address_notes(&mut self, port: u16, own: u16, from_node: bool) {
        let berth = match &self.options.addresses {
            Addresses::Given(given) => given.first().map(|listen| listen.addr.ip()),
            Addresses::OfManifest => self
                .manifest
                .bind_address()
                .or_else(|| self.manifest.advertise_address()),
        };
        for flag in ["bind-address", "advertise-address"]
            .into_iter()
            .filter_map(|flag| self.manifest.flag(flag))
        {
            let known = !flag.value.is_empty() && !flag.value.contains("$(");
            if known && parse_address(flag.value).is_none() {
                self.add_problem(
                    flag.line,
                    format!(
                        "{} is no IP address: give one, such as 10.0.0.5",
                        flag.value
                    ),
                );
            }
        }
        let told = find_loopback(self.manifest.advertise_address().into_iter().chain(berth));
        self.notes
            .extend(told.map(|(cause, fix)| format!("{cause}: {fix}")));
        if self.options.addresses == Addresses::OfManifest {
            if self.manifest.bind_address().is_none() {
                self.notes.push(
                    "kube-apiserver listened on every address of the node, the shim listens on one: with --listen, name the \
                     node's address and then others that clients use (127.0.0.1, a virtual IP)"
                        .into(),
                );
            }
            if from_node {
                self.notes.push(
                    "the address is the pod's status.hostIP: if that is IPv6 or empty at first, give --listen".into(),
                );
            }
        }
        if own != port {
            self.notes.push(format!(
                "the apiserver's own port becomes {own}, and the Service kubernetes names it: control-plane nodes with different secure \
                 ports break each other's addresses there, so do this on a single control-plane node, or on all of them at once; \
                 firewalls must let {own} through"
            ));
        }
    }
}
