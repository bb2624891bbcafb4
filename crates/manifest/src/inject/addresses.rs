//! The addresses of the shim, and the variables that set them.

use super::{Addresses, Manifest, PASS_VARIABLE, Planner, Problem, parts};
use crate::pod::parse_address;
use berth_options::check;
use berth_shim::config::{Listen, PassMode};
use serde_json::Value;
use std::net::{IpAddr, SocketAddr};

/// Reads the shim's listen addresses from an earlier injection. Clients may use each of them, so an
/// injection without --listen keeps them.
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
    // A single address that cannot be read is a variable with the node's address. Only the kubelet
    // knows the value.
    if words.len() == 1 {
        return Ok(Addresses::OfManifest);
    }
    Err(Problem::new(
        line,
        format!(
            "the shim listens on {text}, and not all of these addresses can be parsed: give each address as --listen ADDR:PORT"
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
    let cause = "no other node reaches kube-apiserver at this address, and the Service kubernetes rejects such an address";
    let fix = "give the node's address in --advertise-address, and as the first address of `berth inject --listen`";
    Some((
        format!("{ip} is a loopback or link-local address: {cause}"),
        fix.to_owned(),
    ))
}

impl Planner<'_> {
    /// Returns the listen addresses, as far as they are known now, and the variables that
    /// kube-apiserver and the shim both get.
    pub(super) fn find_addresses_and_shared_variables(
        &mut self,
        port: u16,
        ca: Option<&str>,
    ) -> (Vec<SocketAddr>, Vec<Value>) {
        let (host, from_node) = self.find_apiserver_host();
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
            variables.push(parts::make_variable(
                PASS_VARIABLE,
                self.options.pass.as_str(),
            ));
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

    /// Returns the host part of kube-apiserver's address, and true if only the kubelet knows the
    /// address.
    fn find_apiserver_host(&mut self) -> (String, bool) {
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
                        "{} is no IP address: give an address, such as 10.0.0.5",
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
                    "kube-apiserver listened on every address of the node, the shim listens on one address: with --listen, name the node's address first, then the other addresses that clients use (127.0.0.1, a virtual IP)"
                        .into(),
                );
            }
            if from_node {
                self.notes.push(
                    "the shim's address is the pod's status.hostIP: if status.hostIP is IPv6 or empty at first, give --listen".into(),
                );
            }
        }
        if own != port {
            self.notes.push(format!(
                "the apiserver's own port becomes {own}, and the Service kubernetes names this port: control-plane nodes with different secure ports break each other's addresses in the Service, so inject berth on a single control-plane node, or on all control-plane nodes at once; firewalls must allow port {own}"
            ));
        }
    }
}
