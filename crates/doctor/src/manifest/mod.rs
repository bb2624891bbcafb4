//! Checks of the text of a manifest.

mod credentials;
mod volumes;

use super::checks::*;
use super::layout::{Berth, HOST_IP, Layout, ParsedOptions, uid_of};
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
    match Layout::of(case.manifest) {
        None => examiner.without_berth(),
        Some(layout) => examiner.behind_berth(&layout),
    }
    examiner.version();
    examiner.findings
}

/// Collects findings in one file.
struct Examiner<'a> {
    case: &'a Case<'a>,
    findings: Vec<Finding>,
}

impl Examiner<'_> {
    fn found(
        &mut self,
        check: Check,
        line: usize,
        cause: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.findings
            .push(check.at(self.case.line(line), cause, fix));
    }

    /// Reports --peer-ca-file: with this flag, peers identify a kube-apiserver by the name of its
    /// host. No other flag is checked. Without a CA, kube-apiserver asks no peers, and with a CA
    /// but without the feature gate (on since 1.36), kube-apiserver does not start.
    fn peer_proxy(&mut self) {
        let flag = self
            .case
            .manifest
            .flag("peer-ca-file")
            .filter(|flag| !flag.value.is_empty());
        if let Some(flag) = flag {
            self.found(
                PEER_PROXY,
                flag.line,
                "--peer-ca-file turns on the mixed version proxy, which identifies kube-apiservers by host name: during an upgrade \
                 the two of this node look like one, neither forwards requests to the other, and the old one removes the entry of \
                 both when it stops; for up to 10 s, other nodes answer 503 or 404 to requests that only this node can serve",
                "take --peer-ca-file out, unless other control-plane nodes need it more (docs/doctor.md)",
            );
        }
    }

    /// Other nodes and pods dial the address that kube-apiserver advertises, by way of the Service
    /// `kubernetes`.
    fn loopback(&mut self, layout: &Layout<'_>) {
        let berth = options::berth_address(&layout.apiserver.parsed).map(|berth| berth.ip());
        let advertised = self.case.manifest.advertise_address().or(berth);
        if let Some((cause, fix)) = inject::find_loopback(advertised.into_iter().chain(berth)) {
            let flag = self.case.manifest.flag("advertise-address");
            let line = flag.map_or(layout.apiserver.container.node().line, |flag| flag.line);
            self.found(LOOPBACK_ADDRESS, line, cause, fix);
        }
    }

    fn version(&mut self) {
        let (manifest, image) = (self.case.manifest, self.case.manifest.image());
        if manifest.version().is_none() {
            self.found(
                NOT_CHECKED,
                manifest.line_of(&manifest.apiserver_path().key("image")),
                format!("the image {image} names no version of kube-apiserver: not checked are the minimum for native sidecars (v1.29) and \
                         the version skew to the running kube-apiserver"),
                "name it by its tag; a digest may follow (kube-apiserver:v1.36.3@sha256:…)",
            );
        }
    }

    /// Reports the changes that `berth inject` would make, and the obstacles.
    fn without_berth(&mut self) {
        let manifest = self.case.manifest;
        let command = manifest
            .apiserver()
            .get("command")
            .map_or(manifest.apiserver().line, |command| command.line);
        let cause = "kube-apiserver is started without berth, so it holds its port alone and a second one cannot start";
        match inject::plan(manifest, &inject::InjectOptions::default()) {
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
                    "`berth inject FILE --image IMAGE --diff` shows the {} changes that put it behind berth (of {}), \
                     and --write makes them; an upgrade without them is checked by `berth bridge --dry-run`",
                    edits.len(),
                    names.join(", ")
                );
                self.found(NOT_BEHIND_BERTH, command, cause, fix);
            }
            Err(problems) => {
                let fix = "fix what is in the way (inject-refuses), then `berth inject FILE --image IMAGE --diff`";
                self.found(NOT_BEHIND_BERTH, command, cause, fix);
                for problem in problems {
                    let (cause, fix) = problem.parts();
                    self.found(
                        INJECT_REFUSES,
                        problem.line,
                        format!("berth inject: {cause}"),
                        fix,
                    );
                }
            }
        }
        // inject fixes the other checks, but leaves these three to the operator.
        self.rules(Wrapping::default(), |check| {
            [UPDATE_STRATEGY, PROBE_ELSEWHERE, OTHER_CONTAINER].contains(&check)
        });
    }

    fn behind_berth(&mut self, layout: &Layout<'_>) {
        let serving = layout.serving();
        let probe = serving.and_then(|berth| options::probe_args(&berth.parsed));
        let wrapping = Wrapping::default();
        let wrapping = Wrapping {
            binary: layout.binary,
            words: 0,
            // Options that cannot be seen are not judged.
            credentials: probe.is_none_or(is_authenticated),
            drain: serving
                .and_then(|berth| options::drain_timeout(&berth.parsed))
                .unwrap_or(wrapping.drain),
        };
        // A shim for the whole node goes on serving when this apiserver stops, so no preStop hook
        // has to drain it.
        self.rules(wrapping, |check| serving.is_some() || check != PRE_STOP);
        self.options(&layout.apiserver);
        if let Some(shim) = &layout.shim {
            self.options(shim);
            self.same_place(&layout.apiserver, shim);
            self.same_pass(&layout.apiserver, shim);
            self.same_uid(layout, shim);
            self.start(shim);
        } else if serving.is_none() {
            self.found(
                SHIM_MISSING,
                layout.apiserver.container.node().line,
                "no container of the pod runs `berth serve`",
                "add the shim (`berth inject`); with a shim for the whole node (`berth serve --discover`), check that it runs",
            );
        }
        self.peer_proxy();
        self.loopback(layout);
        self.run_dir(layout);
        self.seccomp(&layout.apiserver);
        self.authentication(probe);
        if let Some(serving) = serving {
            self.advertised(serving);
            self.credentials(serving);
        }
    }

    /// Checks for a shim that is an ordinary init container. The kubelet would wait for its end
    /// before starting kube-apiserver, and a shim never ends.
    fn start(&mut self, shim: &Berth<'_>) {
        let (node, name) = (shim.container.node(), shim.container.name());
        let is_init = self
            .case
            .manifest
            .containers("initContainers")
            .any(|container| container.name() == name);
        if is_init && node.text_of("restartPolicy") != Some("Always") {
            self.found(
                SHIM_BLOCKS_START,
                node.line,
                format!(
                    "{name} is an init container that never ends, so kube-apiserver never starts"
                ),
                format!("set restartPolicy: Always in {name}"),
            );
        }
    }

    /// Reports the changes that inject's own rules would still make.
    fn rules(&mut self, wrapping: Wrapping<'_>, wanted: impl Fn(Check) -> bool) {
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
                self.found(check, line, cause, fix);
            }
        }
    }

    /// Reports the errors that berth itself would find in its options.
    fn options(&mut self, berth: &Berth<'_>) {
        let (name, line) = (berth.container.name(), berth.container.node().line);
        if matches!(berth.parsed, ParsedOptions::Unseen) {
            let cause =
                format!("options of berth in the container {name} come from a ConfigMap or Secret");
            self.found(
                NOT_CHECKED,
                line,
                cause,
                "write them into the manifest to have them checked",
            );
            return;
        }
        for mistake in options::list_mistakes(&berth.parsed) {
            let (cause, fix) = split_cause_and_fix(&mistake);
            self.found(
                BERTH_OPTIONS,
                line,
                format!("berth {} in {name}: {cause}", berth.command),
                fix,
            );
        }
        let Some(place) = options::place_args(&berth.parsed) else {
            return;
        };
        let unique = |id: &str| id.contains("metadata.uid") || id.contains("metadata.name");
        if let Some(id) = place.instance.as_deref().filter(|id| !unique(id)) {
            let line = berth
                .container
                .variable("BERTH_INSTANCE")
                .map_or(line, |variable| variable.line);
            self.found(
                INSTANCE_NOT_UNIQUE,
                line,
                format!("the instance in {name} is {id} in every pod, and a second instance of the same name does not start"),
                "take it from the pod: BERTH_INSTANCE with valueFrom: {fieldRef: {fieldPath: metadata.uid}}",
            );
        }
        let from_node = place
            .listen
            .first()
            .is_some_and(|address| address.starts_with(HOST_IP));
        if from_node && berth.command != "serve" && self.case.manifest.kind() == "Pod" {
            let line = berth
                .container
                .variable("BERTH_LISTEN")
                .map_or(line, |variable| variable.line);
            self.found(
                HOST_IP_UNKNOWN,
                line,
                "the address is the pod's status.hostIP, which for a static pod may be empty at first, or differ from \
                 the address that clients use",
                "give the node's address: `berth inject --listen ADDR:PORT`, or in BERTH_LISTEN of both containers",
            );
        }
    }

    fn same_place(&mut self, apiserver: &Berth<'_>, shim: &Berth<'_>) {
        let (Some(own), Some(other)) = (
            options::place_args(&apiserver.parsed),
            options::place_args(&shim.parsed),
        ) else {
            return;
        };
        let run_dir = |place: &PlaceArgs| run_dir_of(place).to_owned();
        let mut differ = Vec::new();
        if own.listen.first() != other.listen.first() {
            differ.push("the berth (the first BERTH_LISTEN)");
        }
        // A shim with --backend or --discover does not look for the instance that BERTH_INSTANCE
        // names, so the two names may differ.
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
                "{own} and {other} do not find each other, since they differ in {}",
                differ.join(", ")
            );
            self.found(
                BERTH_DIFFERS,
                line,
                cause,
                format!("give {other} the same BERTH_ variables as {own}"),
            );
        }
    }

    /// Sockets are passed only if both containers ask for it.
    fn same_pass(&mut self, apiserver: &Berth<'_>, shim: &Berth<'_>) {
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
            let fix = "give both the same BERTH_PASS, as `berth inject --pass …` does";
            self.found(PASS_DIFFERS, shim.container.node().line, cause, fix);
        }
    }

    /// A Localhost seccomp profile has to allow the system calls of a supervisor.
    fn seccomp(&mut self, apiserver: &Berth<'_>) {
        let profile = apiserver.container.security("seccompProfile");
        let profile = profile.filter(|profile| profile.text_of("type") == Some("Localhost"));
        if let Some(profile) =
            profile.filter(|_| options::pass_mode(&apiserver.parsed) != PassMode::Relay)
        {
            let file = profile.text_of("localhostProfile").unwrap_or_default();
            self.found(
                NOT_CHECKED,
                profile.line,
                format!("the seccomp profile {file} is not checked: `berth exec --pass` cannot supervise kube-apiserver if it forbids that"),
                "allow seccomp(2) in it and name no listenerPath, or use RuntimeDefault",
            );
        }
    }

    fn same_uid(&mut self, layout: &Layout<'_>, shim: &Berth<'_>) {
        let (own, other) = (uid_of(layout.apiserver.container), uid_of(shim.container));
        if own != other {
            let security = shim.container.security("runAsUser");
            let line = security.map_or(shim.container.node().line, |user| user.line);
            self.found(
                UID_MISMATCH,
                line,
                format!(
                    "the shim runs as uid {other}, kube-apiserver as uid {own}: only sockets of one uid share a port, and \
                     the run directory is of one uid"
                ),
                format!("set securityContext.runAsUser: {own} in the container {}", shim.container.name()),
            );
        }
    }

    /// Checks that the shim listens on the advertised address, to which the Service `kubernetes`
    /// leads pods.
    fn advertised(&mut self, serving: &Berth<'_>) {
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
                "the shim does not listen on {ip}, to which the Service kubernetes leads: pods are refused"
            );
            let fix = format!(
                "add {ip}:{port} to `berth inject --listen …`; if the address is a router's, there is nothing to do"
            );
            self.found(ADVERTISED, flag.line, cause, fix);
        }
    }

    /// Checks that kube-apiserver authorizes the probe.
    fn authentication(&mut self, probe: Option<&ProbeArgs>) {
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
                    requests to /readyz and /livez (anonymous.conditions in that file)";
        match seen.map(|text| options::allows_anonymous_probes(text)) {
            Some(Ok(true)) => {}
            Some(Ok(false)) => {
                self.found(
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
                self.found(
                    AUTHENTICATION_CONFIG,
                    flag.line,
                    format!("{} cannot be read: {why}", flag.value),
                    fix,
                );
            }
            None => self.found(
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

/// True if the probe has credentials, or needs none.
fn is_authenticated(probe: &ProbeArgs) -> bool {
    probe.probe == ProbeKind::Tcp || probe.probe_cert.is_some() || probe.probe_token_file.is_some()
}
