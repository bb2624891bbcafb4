//! Turns the options of `berth rehearse` into a [`Plan`]. All mistakes are reported at once, each
//! with its option and its fix.

use crate::cli::RehearseArgs;
use berth_options::check::{Checks, Mistakes};
use berth_rehearse::config::{
    LoadPlan, Output, Plan, REAL_READY_TIMEOUT, SHUTDOWN_GRACE, Timing, Topology, Via,
    apiserver::{Apiserver, has_flag},
    find_program,
};
use berth_shim::config::PassMode;
use std::path::PathBuf;

/// Flags of the apiservers that the rehearsal sets itself, so that clients can verify the servers,
/// and servers can verify the clients.
const OWN_FLAGS: [&str; 4] = [
    "client-ca-file",
    "tls-cert-file",
    "tls-private-key-file",
    "tls-sni-cert-key",
];

/// Checks the options. Leaves out the programs that only a comparison needs, because they may
/// change before the comparison begins.
pub(super) fn check_options(args: &RehearseArgs) -> Result<Plan, Mistakes> {
    let mut checks = Checks::default();
    let (old, new) = (args.old.clone(), args.new.clone());
    check_apiserver("--old", &old, &mut checks);
    check_apiserver("--new", &new, &mut checks);
    if old.is_simulated() != new.is_simulated() {
        checks.report(
            "--old and --new: a simulated and a real apiserver have no common store; give both or neither",
        );
    }
    let etcd = check_etcd(args.netns, [&old, &new], &mut checks);
    let berth = args.berth.as_deref().and_then(|path| {
        let fix = |why| {
            format!(
                "--berth {}: {why}; give the path of a berth binary",
                path.display()
            )
        };
        checks.ok_or_report(find_program(path.as_os_str()).map_err(fix))
    });
    let mut timing = Timing {
        phase: args.phase,
        settle: args.settle.unwrap_or(args.phase),
        start_delay: args.start_delay,
        grace: SHUTDOWN_GRACE + old.shutdown_delay().max(new.shutdown_delay()),
        speedup: args.speedup,
        ..Timing::default()
    };
    if !(old.is_simulated() && new.is_simulated()) {
        timing.ready_within = REAL_READY_TIMEOUT;
    }
    timing.ready_within += timing.start_delay;
    let load = LoadPlan {
        rate: args.rate,
        watches: args.watches,
        storm: args.storm,
        seed: args
            .seed
            .unwrap_or_else(|| getrandom::u64().unwrap_or_default()),
        ..LoadPlan::default()
    };
    for (option, path) in [("--json", &args.json), ("--report", &args.report)] {
        let Some(path) = path else { continue };
        checks.ok_or_report(
            berth_rehearse::report::check_writable(path)
                .map_err(|error| format!("{option}: {error}")),
        );
    }
    let plan = Plan {
        old,
        new,
        versions: Plan::default().versions,
        etcd,
        berth,
        netns: args.netns,
        topology: args.topology,
        pass: args.pass,
        upgrades: args.upgrades,
        lasts: args.lasts,
        faults: args.fault.iter().copied().collect(),
        timing,
        load,
        via: args.via,
        runs: order_runs(args.via, &args.compare),
        output: Output {
            json: args.json.clone(),
            report: args.report.clone(),
        },
    };
    for fault in &plan.faults {
        for why in plan.find_objections(*fault) {
            checks.report(format!("--fault {fault}: {why}"));
        }
    }
    if plan.topology == Topology::Bridge {
        check_bridge(&plan, &mut checks);
    }
    checks.finish(Some(plan))
}

fn check_apiserver(option: &str, apiserver: &Apiserver, checks: &mut Checks) {
    let Apiserver::Command { program, flags } = apiserver else {
        return;
    };
    let fix = |why| {
        format!(
            "{option}: {why}; give an apiserver's command, or stand-in for a simulated apiserver"
        )
    };
    checks.ok_or_report(find_program(program).map_err(fix));
    for flag in OWN_FLAGS.iter().filter(|flag| has_flag(flags, flag)) {
        checks.report(format!(
            "{option}: --{flag} is set by the rehearsal, so that clients and servers can verify each other; leave the flag out"
        ));
    }
}

/// Finds the etcd that the rehearsal has to start. Returns `None` if the apiservers need none.
fn check_etcd(netns: bool, apiservers: [&Apiserver; 2], checks: &mut Checks) -> Option<PathBuf> {
    let named = apiservers.map(|apiserver| match apiserver {
        Apiserver::Simulated { .. } => None,
        Apiserver::Command { flags, .. } => Some(has_flag(flags, "etcd-servers")),
    });
    match named {
        [Some(old), Some(new)] if old != new => {
            checks.report(
                "--old and --new: only one apiserver has --etcd-servers; give both or neither",
            );
            None
        }
        [Some(true), Some(_)] if netns => {
            checks
                .report("--netns: the network namespace cannot reach an etcd outside; leave out --etcd-servers");
            None
        }
        [Some(false), Some(_)] => {
            let fix = |why| {
                format!(
                    "etcd: {why}; put the directory of etcd in PATH, or give both apiservers --etcd-servers"
                )
            };
            checks.ok_or_report(find_program("etcd".as_ref()).map_err(fix))
        }
        _ => None,
    }
}

/// Checks that the options allow a rehearsal of a bridge.
fn check_bridge(plan: &Plan, checks: &mut Checks) {
    if plan.pass != PassMode::Relay {
        let pass = plan.pass.as_str();
        checks.report(format!(
            "--pass {pass}: a bridge relays the bytes of connections; leave out --pass, or give another --topology"
        ));
    }
    if !plan.netns {
        checks
            .report("--topology bridge: clients in 127.0.0.0/8 are not steered; give --netns, too");
    }
    if !cfg!(feature = "operate") && plan.berth.is_none() {
        checks.report(
            "--topology bridge: this build has no `berth bridge`; give a build with the feature operate (--berth)",
        );
    }
}

/// Returns the ways from the clients to the apiservers, one for each run, in the order of the
/// command line and without repetition. The last run decides the exit status.
fn order_runs(via: Via, compare: &[Via]) -> Vec<Via> {
    let mut runs = Vec::new();
    for other in compare.iter().chain([&via]) {
        if !runs.contains(other) {
            runs.push(*other);
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use berth_rehearse::config::fault::Fault;
    use clap::Parser;
    use std::time::Duration;

    fn parse_and_check(args: &[&str]) -> Result<Plan, Mistakes> {
        let cli = Cli::try_parse_from(["berth", "rehearse"].iter().chain(args)).unwrap();
        let Command::Rehearse(args) = cli.command else {
            panic!("another command")
        };
        check_options(&args)
    }

    #[test]
    fn every_mistake_is_reported_with_its_option() {
        let wrong = [
            ("--old", "/nonexistent/kube-apiserver"),
            ("--berth", "/nonexistent/berth"),
            ("--json", "/nonexistent/file"),
            ("--report", "/"),
        ];
        let args: Vec<String> = wrong
            .iter()
            .map(|(option, value)| format!("{option}={value}"))
            .collect();
        let errors = parse_and_check(&args.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap_err()
            .0;
        for (option, _) in wrong {
            let of_option = |error: &&String| {
                error
                    .strip_prefix(option)
                    .is_some_and(|rest| rest.starts_with(": ") || rest.starts_with(" /"))
            };
            let found: Vec<_> = errors.iter().filter(of_option).collect();
            assert_eq!(found.len(), 1, "{option}: {errors:#?}");
        }
    }

    #[test]
    fn options_become_the_plan() {
        let plan = parse_and_check(&[
            "--rate=20",
            "--watches=7",
            "--new=stand-in --shutdown_delay_duration=1s500ms",
        ])
        .unwrap();
        assert_eq!((plan.load.rate, plan.load.watches), (20, 7));
        assert_eq!(plan.timing.grace, Duration::from_millis(31_500));
        assert_eq!(plan.timing.settle, plan.timing.phase);
        assert_eq!(
            parse_and_check(&["--settle=75s"]).unwrap().timing.settle,
            Duration::from_secs(75)
        );
        assert_eq!(
            (plan.topology, plan.runs),
            (Topology::Sidecar, vec![Via::None, Via::Berth])
        );
        assert_eq!(
            parse_and_check(&["--compare=berth"]).unwrap().runs,
            [Via::Berth]
        );

        let plan = parse_and_check(&[
            "--compare=haproxy,none,haproxy",
            "--fault=hang,bad-flag",
            "--seed=7",
        ])
        .unwrap();
        assert_eq!(plan.runs, [Via::Haproxy, Via::None, Via::Berth]);
        assert_eq!(Vec::from_iter(plan.faults), [Fault::BadFlag, Fault::Hang]);
        assert_eq!(plan.load.seed, 7);
    }

    #[test]
    fn real_apiservers_get_an_etcd_unless_they_name_one() {
        let plan = parse_and_check(&["--old=true", "--new=true --etcd_servers=x"])
            .unwrap_err()
            .0;
        assert!(plan[0].contains("give both or neither"), "{plan:?}");
        match find_program("etcd".as_ref()) {
            Ok(etcd) => assert_eq!(
                parse_and_check(&["--old=true", "--new=true"]).unwrap().etcd,
                Some(etcd)
            ),
            Err(_) => assert!(
                parse_and_check(&["--old=true", "--new=true"])
                    .unwrap_err()
                    .0[0]
                    .starts_with("etcd: ")
            ),
        }
        let named = "true --etcd-servers=http://127.0.0.1:2379";
        let plan = parse_and_check(&["--old", named, "--new", named]).unwrap();
        assert_eq!(plan.etcd, None);
        assert_eq!(parse_and_check(&[]).unwrap().etcd, None);
        let with_own = format!("--old={named} --tls-cert-file=x");
        let mistakes = parse_and_check(&[&with_own, "--new", named]).unwrap_err().0;
        assert!(
            mistakes.len() == 1 && mistakes[0].contains("--old: --tls-cert-file"),
            "{mistakes:?}"
        );
    }

    #[test]
    fn a_bridge_needs_a_namespace_and_has_faults_of_its_own() {
        let errors = |args: &[&str]| parse_and_check(args).map_or_else(|e| e.0, |_| Vec::new());
        let has = |errors: &[String], what: &str| errors.len() == 1 && errors[0].contains(what);
        assert!(has(&errors(&["--topology=bridge"]), "give --netns"));
        assert!(has(
            &errors(&["--fault=kill-temporary"]),
            "there is no bridge"
        ));
        assert!(has(
            &errors(&["--topology=bridge", "--netns", "--pass=auto"]),
            "--pass auto: a bridge relays"
        ));
        let bridge = ["--topology=bridge", "--netns"];
        let with = |more: &str| errors(&[&bridge[..], &[more]].concat());
        assert!(has(
            &errors(&[
                "--topology=bridge",
                "--netns",
                "--via=none",
                "--fault=kill-old"
            ]),
            "there is no bridge"
        ));
        if cfg!(feature = "operate") {
            let all = "--fault=bad-flag,never-ready,crash-after-ready,hang,kill-shim,hang-shim,kill-temporary,kill-old";
            assert_eq!(with(all), [""; 0]);
        }
    }

    #[test]
    fn a_shim_cannot_be_harmed_where_there_is_none() {
        let errors = |args: &[&str]| parse_and_check(args).map_or_else(|e| e.0, |_| Vec::new());
        assert_eq!(errors(&["--fault=clock-jump", "--via=none"]).len(), 1);
        assert_eq!(
            errors(&["--fault=no-descriptors", "--via=haproxy"]).len(),
            1
        );
        let unit = errors(&["--fault=no-descriptors", "--topology=run"]);
        assert_eq!(unit.len(), 1, "{unit:?}");
        for (via, wrong) in [("none", 1), ("haproxy", 0)] {
            let errors = parse_and_check(&["--fault=hang,kill-shim", "--via", via])
                .map_or_else(|e| e.0, |_| Vec::new());
            assert_eq!(errors.len(), wrong, "{errors:?}");
        }
    }
}
