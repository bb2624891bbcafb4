//! Checks that need only the text of a manifest.

mod credentials;
mod volumes;

use super::checks::*;
use super::layout::{BerthContainer, HOST_IP, Layout, ParsedOptions, find_uid};
use super::options::{self, is_covered};
use super::{Case, Check, Finding};
use berth_manifest::inject::{self, Lapse, Wrapping, find_lapses};
use berth_manifest::split_cause_and_fix;
use berth_options::PodCommand;
use berth_options::place::PlaceArgs;
use berth_options::probe::ProbeArgs;
use berth_shim::backend::probe::ProbeKind;
use berth_shim::config::PassMode;
use std::net::SocketAddr;

pub(super) use volumes::run_dir_of;

pub(super) fn examine(case: &Case<'_>) -> Vec<Finding> {
    let mut examiner = Examiner {
        case,
        findings: Vec::new(),
    };
    match Layout::from_manifest(case.manifest) {
        None => examiner.examine_without_berth(),
        Some(layout) => examiner.examine_behind_berth(&layout),
    }
    examiner.check_version();
    examiner.findings
}

/// Collects the findings about one manifest.
struct Examiner<'a> {
    case: &'a Case<'a>,
    findings: Vec<Finding>,
}

impl Examiner<'_> {
    fn add_finding(
        &mut self,
        check: Check,
        line: usize,
        cause: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.findings
            .push(check.make_finding(self.case.format_place(line), cause, fix));
    }

    /// Reports --peer-ca-file, with which peers identify a kube-apiserver by the name of its host.
    /// No other flag matters: without a CA, kube-apiserver asks no peers, and with a CA but without
    /// the feature gate (on since 1.36), it does not start.
    fn check_peer_proxy(&mut self) {
        let flag = self
            .case
            .manifest
            .flag("peer-ca-file")
            .filter(|flag| !flag.value.is_empty());
        if let Some(flag) = flag {
            self.add_finding(
                PEER_PROXY,
                flag.line,
                "--peer-ca-file turns on the mixed version proxy, which identifies kube-apiservers by host name: during an upgrade, the \
                 two kube-apiservers of this node look like one; neither forwards requests to the other, and the old kube-apiserver \
                 removes their common entry when it stops; for up to 10 s after this, other nodes answer 503 or 404 to requests that \
                 only this node can serve",
                "remove --peer-ca-file, unless other control-plane nodes need the flag more (docs/doctor.md)",
            );
        }
    }

    /// Reports an advertised address on loopback. kube-apiserver puts this address into the Service
    /// `kubernetes`. Other nodes and pods dial kube-apiserver through this Service.
    fn check_loopback(&mut self, layout: &Layout<'_>) {
        let berth = options::berth_address(&layout.apiserver.parsed).map(|berth| berth.ip());
        let advertised = self.case.manifest.advertise_address().or(berth);
        if let Some((cause, fix)) = inject::find_loopback(advertised.into_iter().chain(berth)) {
            let flag = self.case.manifest.flag("advertise-address");
            let line = flag.map_or(layout.apiserver.container.node().line, |flag| flag.line);
            self.add_finding(LOOPBACK_ADDRESS, line, cause, fix);
        }
    }

    fn check_version(&mut self) {
        let (manifest, image) = (self.case.manifest, self.case.manifest.image());
        if manifest.version().is_none() {
            self.add_finding(
                NOT_CHECKED,
                manifest.line_of(&manifest.apiserver_path().key("image")),
                format!("the image {image} names no version of kube-apiserver: doctor checks neither the minimum version for native \
                         sidecars (v1.29) nor the version skew to the running kube-apiserver"),
                "give the image a tag; a digest may follow (kube-apiserver:v1.36.3@sha256:…)",
            );
        }
    }

    /// Reports that the manifest has no berth, and what `berth inject` would change or why it would
    /// refuse.
    fn examine_without_berth(&mut self) {
        let manifest = self.case.manifest;
        let command = manifest
            .apiserver()
            .get("command")
            .map_or(manifest.apiserver().line, |command| command.line);
        let cause = "nothing of berth is here: kube-apiserver holds its port alone";
        let bridge = "to upgrade under a bridge, nothing has to change: `berth bridge --dry-run -- COMMAND` checks the node";
        match inject::plan_edits(manifest, &inject::InjectOptions::default()) {
            Ok((edits, _)) => {
                let mut names: Vec<_> = edits
                    .iter()
                    .map(|edit| manifest.relative_path(&edit.path))
                    .collect();
                names
                    .iter_mut()
                    .for_each(|name| name.truncate(name.find(['.', '[']).unwrap_or(name.len())));
                names.dedup();
                let fix = format!(
                    "{bridge}; to put kube-apiserver behind berth for good: `berth inject FILE --image IMAGE --diff` shows the {} \
                     changes (of {})",
                    edits.len(),
                    names.join(", ")
                );
                self.add_finding(NOT_BEHIND_BERTH, command, cause, fix);
            }
            Err(problems) => {
                let fix = format!(
                    "{bridge}; to put kube-apiserver behind berth for good, first fix the findings of inject-refuses"
                );
                self.add_finding(NOT_BEHIND_BERTH, command, cause, fix);
                for problem in problems {
                    let (cause, fix) = problem.cause_and_fix();
                    self.add_finding(
                        INJECT_REFUSES,
                        problem.line,
                        format!("berth inject: {cause}"),
                        fix,
                    );
                }
            }
        }
        // `berth inject` fixes what the other checks find, but leaves these three to the operator.
        self.check_inject_rules(Wrapping::default(), |check| {
            [UPDATE_STRATEGY, PROBE_ELSEWHERE, OTHER_CONTAINER].contains(&check)
        });
    }

    fn examine_behind_berth(&mut self, layout: &Layout<'_>) {
        let serving = layout.serving_berth();
        let probe = serving.and_then(|berth| options::probe_args(&berth.parsed));
        let wrapping = Wrapping::default();
        let wrapping = Wrapping {
            binary: layout.binary,
            inserted_arguments: 0,
            // If the probe's options cannot be seen, assume that the probe has credentials.
            credentials: probe.is_none_or(is_authenticated),
            drain: serving
                .and_then(|berth| options::drain_timeout(&berth.parsed))
                .unwrap_or(wrapping.drain),
        };
        // If no container of the pod is a shim, a shim for the whole node serves. It goes on when
        // this apiserver stops, so no preStop hook is needed.
        self.check_inject_rules(wrapping, |check| serving.is_some() || check != PRE_STOP);
        self.check_options(&layout.apiserver);
        if let Some(shim) = &layout.shim {
            self.check_options(shim);
            self.check_same_place_options(&layout.apiserver, shim);
            self.check_pass_values(&layout.apiserver, shim);
            self.check_uid(layout, shim);
            self.check_shim_restart_policy(shim);
        } else if serving.is_none() {
            self.add_finding(
                SHIM_MISSING,
                layout.apiserver.container.node().line,
                "no container of the pod runs `berth serve`",
                "add the shim (`berth inject`), or check that the shim for the whole node (`berth serve --discover`) runs",
            );
        }
        self.check_peer_proxy();
        self.check_loopback(layout);
        self.check_run_dir(layout);
        self.check_seccomp(&layout.apiserver);
        self.check_authentication(probe);
        if let Some(serving) = serving {
            self.check_advertised_address(serving);
            self.check_credentials(serving);
        }
    }

    /// Reports a shim in an ordinary init container. The kubelet would wait for the container's end
    /// before it starts kube-apiserver, and a shim never ends.
    fn check_shim_restart_policy(&mut self, shim: &BerthContainer<'_>) {
        let (node, name) = (shim.container.node(), shim.container.name());
        let is_init = self
            .case
            .manifest
            .containers("initContainers")
            .any(|container| container.name() == name);
        if is_init && node.get_text("restartPolicy") != Some("Always") {
            self.add_finding(
                SHIM_BLOCKS_START,
                node.line,
                format!(
                    "{name} is an init container that never ends, so kube-apiserver never starts"
                ),
                format!("set restartPolicy: Always in {name}"),
            );
        }
    }

    /// Reports what inject's rules would still change in the manifest, for the wanted checks.
    fn check_inject_rules(&mut self, wrapping: Wrapping<'_>, wanted: impl Fn(Check) -> bool) {
        for Lapse {
            check,
            line,
            cause,
            fix,
        } in find_lapses(self.case.manifest, wrapping)
        {
            if let Some(check) = CHECKS
                .iter()
                .copied()
                .find(|known| known.id == check && wanted(*known))
            {
                self.add_finding(check, line, cause, fix);
            }
        }
    }

    /// Reports mistakes in berth's options, as berth itself would report them.
    fn check_options(&mut self, berth: &BerthContainer<'_>) {
        let (name, line) = (berth.container.name(), berth.container.node().line);
        if matches!(berth.parsed, ParsedOptions::Unseen) {
            let cause =
                format!("options of berth in the container {name} come from a ConfigMap or Secret");
            self.add_finding(
                NOT_CHECKED,
                line,
                cause,
                "write the options into the manifest to have them checked",
            );
            return;
        }
        for mistake in options::list_mistakes(&berth.parsed) {
            let (cause, fix) = split_cause_and_fix(&mistake);
            self.add_finding(
                BERTH_OPTIONS,
                line,
                format!("berth {} in {name}: {cause}", berth.command),
                fix,
            );
        }
        let Some(place) = options::place_args(&berth.parsed) else {
            return;
        };
        let line_of = |name: &str| {
            let variable = berth.container.variable(name);
            variable.map_or(line, |variable| variable.line)
        };
        let unique = |id: &str| id.contains("metadata.uid") || id.contains("metadata.name");
        if let Some(id) = place.instance.as_deref().filter(|id| !unique(id)) {
            let line = line_of("BERTH_INSTANCE");
            self.add_finding(
                INSTANCE_NOT_UNIQUE,
                line,
                format!("the instance name in {name} is {id} in every pod, and a second instance of the same name does not start"),
                "take the name from the pod: BERTH_INSTANCE with valueFrom: {fieldRef: {fieldPath: metadata.uid}}",
            );
        }
        let from_node = place
            .listen
            .first()
            .is_some_and(|address| address.starts_with(HOST_IP));
        if from_node && berth.command != "serve" && self.case.manifest.kind() == "Pod" {
            let line = line_of("BERTH_LISTEN");
            self.add_finding(
                HOST_IP_UNKNOWN,
                line,
                "the address is the pod's status.hostIP, which for a static pod may be empty at first, or differ from \
                 the address that clients use",
                "give the node's address: `berth inject --listen ADDR:PORT`, or in BERTH_LISTEN of both containers",
            );
        }
    }

    fn check_same_place_options(
        &mut self,
        apiserver: &BerthContainer<'_>,
        shim: &BerthContainer<'_>,
    ) {
        let (Some(own), Some(other)) = (
            options::place_args(&apiserver.parsed),
            options::place_args(&shim.parsed),
        ) else {
            return;
        };
        let run_dir = |place: &PlaceArgs| run_dir_of(place).to_owned();
        let mut differ = Vec::new();
        if own.listen.first() != other.listen.first() {
            differ.push("the first listen address (BERTH_LISTEN)");
        }
        // With --backend or --discover, a shim does not look for the instance that BERTH_INSTANCE
        // names. Then the two names may differ.
        let named = matches!(shim.parsed.command(), Some(PodCommand::Serve(serve))
            if serve.backend.is_none() && !serve.discover);
        if named && own.instance != other.instance {
            differ.push("the instance (BERTH_INSTANCE)");
        }
        if run_dir(own) != run_dir(other) {
            differ.push("the run directory (BERTH_RUN_DIR)");
        }
        if !differ.is_empty() {
            let line = shim.container.node().line;
            let (own, other) = (apiserver.container.name(), shim.container.name());
            let cause = format!(
                "{own} and {other} do not find each other: they differ in {}",
                differ.join(", ")
            );
            self.add_finding(
                BERTH_DIFFERS,
                line,
                cause,
                format!("give {other} the same BERTH_ variables as {own}"),
            );
        }
    }

    /// Reports containers with different values of --pass. Clients' sockets are passed only if both
    /// the shim and kube-apiserver's container want it.
    fn check_pass_values(&mut self, apiserver: &BerthContainer<'_>, shim: &BerthContainer<'_>) {
        if [apiserver, shim]
            .iter()
            .any(|berth| berth.parsed.command().is_none())
        {
            return;
        }
        let [own, other] = [apiserver, shim].map(|berth| options::pass_mode(&berth.parsed));
        if (own == PassMode::Relay) != (other == PassMode::Relay) {
            let cause = format!(
                "{} has --pass {}, and the shim {} has --pass {}: every connection is relayed",
                apiserver.container.name(),
                own.as_str(),
                shim.container.name(),
                other.as_str()
            );
            let fix = "give both containers the same BERTH_PASS, as `berth inject --pass …` does";
            self.add_finding(PASS_DIFFERS, shim.container.node().line, cause, fix);
        }
    }

    /// Reports a seccomp profile of type Localhost: it has to allow the system calls of a
    /// supervisor, which doctor cannot see.
    fn check_seccomp(&mut self, apiserver: &BerthContainer<'_>) {
        let profile = apiserver.container.security_field("seccompProfile");
        let profile = profile.filter(|profile| profile.get_text("type") == Some("Localhost"));
        if let Some(profile) =
            profile.filter(|_| options::pass_mode(&apiserver.parsed) != PassMode::Relay)
        {
            let file = profile.get_text("localhostProfile").unwrap_or_default();
            self.add_finding(
                NOT_CHECKED,
                profile.line,
                format!("the seccomp profile {file} is not checked: `berth exec --pass` cannot supervise kube-apiserver if the profile forbids seccomp(2)"),
                "allow seccomp(2) in the profile and name no listenerPath, or use RuntimeDefault",
            );
        }
    }

    fn check_uid(&mut self, layout: &Layout<'_>, shim: &BerthContainer<'_>) {
        let (own, other) = (
            find_uid(layout.apiserver.container),
            find_uid(shim.container),
        );
        if own != other {
            let security = shim.container.security_field("runAsUser");
            let line = security.map_or(shim.container.node().line, |user| user.line);
            self.add_finding(
                UID_MISMATCH,
                line,
                format!(
                    "the shim runs as uid {other}, kube-apiserver as uid {own}: only sockets of one uid can share a port, and only one \
                     uid can use the run directory"
                ),
                format!("set securityContext.runAsUser: {own} in the container {}", shim.container.name()),
            );
        }
    }

    /// Reports an advertised address on which the shim does not listen: pods dial that address
    /// through the Service `kubernetes`.
    fn check_advertised_address(&mut self, serving: &BerthContainer<'_>) {
        let manifest = self.case.manifest;
        let listen = options::listen_addresses(&serving.parsed);
        let (Some(flag), Some(ip)) = (
            manifest.flag("advertise-address"),
            manifest.advertise_address(),
        ) else {
            return;
        };
        let Some(port) = listen.first().map(|first| first.addr.port()) else {
            return;
        };
        if !ip.is_loopback() && !is_covered(SocketAddr::new(ip, port), &listen) {
            let cause = format!(
                "the shim does not listen on {ip}, an address of the Service kubernetes: connections from pods are refused"
            );
            let fix = format!(
                "add {ip}:{port} to `berth inject --listen …`; if the address is a router's, there is nothing to do"
            );
            self.add_finding(ADVERTISED, flag.line, cause, fix);
        }
    }

    /// Reports a probe that kube-apiserver would not authorize.
    fn check_authentication(&mut self, probe: Option<&ProbeArgs>) {
        let Some(probe) = probe.filter(|probe| probe.probe == ProbeKind::Https) else {
            return;
        };
        let Some(flag) = self
            .case
            .manifest
            .flag("authentication-config")
            .filter(|_| !is_authenticated(probe))
        else {
            return;
        };
        let seen = self.case.node.and_then(|node| node.authentication.as_ref());
        let fix = "give the probe credentials (--probe-cert and --probe-key, or --probe-token-file), or allow anonymous \
                    requests to /readyz and /livez (anonymous.conditions in the --authentication-config file)";
        match seen.map(|text| options::allows_anonymous_probes(text)) {
            Some(Ok(true)) => {}
            Some(Ok(false)) => {
                self.add_finding(
                    ANONYMOUS_AUTH,
                    flag.line,
                    format!(
                        "{} does not allow the probe's anonymous requests",
                        flag.value
                    ),
                    fix,
                );
            }
            Some(Err(why)) => {
                self.add_finding(
                    AUTHENTICATION_CONFIG,
                    flag.line,
                    format!("{} cannot be read: {why}", flag.value),
                    fix,
                );
            }
            None => self.add_finding(
                AUTHENTICATION_CONFIG,
                flag.line,
                format!(
                    "the manifest does not show whether {} allows the probe's anonymous requests",
                    flag.value
                ),
                format!("{fix}; on the node, --node checks the file"),
            ),
        }
    }
}

/// True if the probe sends credentials, or is a probe that needs none.
fn is_authenticated(probe: &ProbeArgs) -> bool {
    probe.probe == ProbeKind::Tcp || probe.probe_cert.is_some() || probe.probe_token_file.is_some()
}
