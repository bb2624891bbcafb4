//! From the options of `berth rehearse` to a [`Plan`]: every mistake at once, each with its option and the fix.

use crate::cli::RehearseArgs;
use berth_options::check::{Checks, Mistakes};
use berth_os::process::cpus;
use berth_rehearse::apiserver::{Apiserver, Shutdown, has};
use berth_rehearse::fault::Fault;
use berth_rehearse::plan::{
    CLIENTS, GRACE, LONGEST_DELAY, LoadPlan, Output, Plan, RATE, REAL_READY_WITHIN, SHORTEST_PHASE, SLOW_READERS,
    STORM, Timing, Topology, UPGRADES, Via, WATCHES, find_program,
};
use berth_shim::config::{CROWD, DirectMode};
use clap::ValueEnum;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Flags that the rehearsal sets itself: clients verify servers by them, and servers clients.
const OWN_FLAGS: [&str; 4] = ["client-ca-file", "tls-cert-file", "tls-private-key-file", "tls-sni-cert-key"];

/// Checks everything but what may change until it is needed: the programs of ways other than `--via`.
pub(super) fn check(args: &RehearseArgs) -> Result<Plan, Mistakes> {
    let mut checks = Checks::default();
    let (old, new) = (apiserver("--old", &args.old, &mut checks), apiserver("--new", &args.new, &mut checks));
    let (old, new) = (old.unwrap_or_default(), new.unwrap_or_default());
    if old.is_simulated() != new.is_simulated() {
        checks.wrong(
            "--old and --new: a simulated apiserver and a real one have no store in common; give both or neither",
        );
    }
    let etcd = etcd(args, [&old, &new], &mut checks);
    let berth = args.berth.as_deref().and_then(|path| program("--berth", path, "a berth", &mut checks));
    let faults = faults(&args.fault, &mut checks);
    let shutdown = Shutdown {
        delay: delay("--shutdown-delay-duration", &args.shutdown_delay_duration, &mut checks),
        send_retry_after: args.shutdown_send_retry_after,
        watch_grace: delay(
            "--shutdown-watch-termination-grace-period",
            &args.shutdown_watch_termination_grace_period,
            &mut checks,
        ),
    };
    let grace = args.stop_grace.as_deref();
    let phase = checks.duration("--phase", &args.phase, SHORTEST_PHASE);
    let settle = args.settle.as_deref().map(|text| checks.duration("--settle", text, SHORTEST_PHASE));
    let mut timing = Timing {
        phase,
        settle: settle.unwrap_or(phase),
        start_delay: checks.duration("--start-delay", &args.start_delay, Duration::ZERO),
        grace: grace.map_or(GRACE + shutdown.delay, |text| checks.duration("--stop-grace", text, Duration::ZERO)),
        hold: checks.duration("--hold", &args.hold, Duration::ZERO),
        speedup: args.speedup,
        ..Timing::default()
    };
    if !(old.is_simulated() && new.is_simulated()) {
        timing.ready_within = REAL_READY_WITHIN;
    }
    timing.ready_within += timing.start_delay;
    let seed = args.seed.as_deref().map(|text| checks.number("--seed", text, 0..=u64::MAX));
    let load = LoadPlan {
        rate: checks.number("--rate", &args.rate, RATE),
        clients: checks.number("--clients", &args.clients, CLIENTS),
        watches: checks.number("--watches", &args.watches, WATCHES),
        slow_readers: checks.number("--slow-readers", &args.slow_readers, SLOW_READERS),
        storm: checks.number("--storm", &args.storm, STORM),
        seed: seed.unwrap_or_else(|| getrandom::u64().unwrap_or_default()),
        ..LoadPlan::default()
    };
    for (option, path) in [("--json", &args.json), ("--report", &args.report)] {
        let Some(path) = path else { continue };
        checks.ok(berth_rehearse::report::check_writable(path).map_err(|error| format!("{option}: {error}")));
    }
    let decides = via(&args.via);
    let compared: Vec<Via> = args.compare.iter().map(|name| via(name)).collect();
    let mut plan = Plan {
        old,
        new,
        versions: Plan::default().versions,
        etcd,
        berth,
        netns: args.netns,
        direct: args.direct,
        no_direct: None,
        topology: args.topology,
        upgrades: checks.number("--upgrades", &args.upgrades, UPGRADES),
        lasts: args.lasts.as_deref().map(|text| checks.duration("--for", text, SHORTEST_PHASE)),
        faults,
        shutdown,
        timing,
        load,
        via: decides,
        runs: runs(decides, &compared),
        output: Output { json: args.json.clone(), report: args.report.clone() },
    };
    for fault in &plan.faults {
        for why in plan.misplaced(*fault) {
            checks.wrong(format!("--fault {fault}: {why}"));
        }
    }
    if plan.topology == Topology::Bridge {
        bridge(&plan, &mut checks);
    }
    direct(&mut plan, &mut checks);
    checks.finish(Some(plan))
}

/// Finds the program of an option.
fn program(option: &str, path: &Path, what: &str, checks: &mut Checks) -> Option<PathBuf> {
    let fix = |why| format!("{option} {}: {why}; give the path of {what} binary", path.display());
    checks.ok(find_program(path.as_os_str()).map_err(fix))
}

fn apiserver(option: &str, text: &str, checks: &mut Checks) -> Option<Apiserver> {
    let fix = |why| format!("{option} {text:?}: {why}; give an apiserver's command, or stand-in for a simulated one");
    let apiserver = checks.ok(Apiserver::parse(text).map_err(fix))?;
    if let Apiserver::Command { program, flags } = &apiserver {
        checks.ok(find_program(program).map_err(fix))?;
        for flag in OWN_FLAGS.iter().filter(|flag| has(flags, flag)) {
            checks.wrong(format!(
                "{option}: --{flag} is the rehearsal's own, whose clients have to know and be known; leave it out"
            ));
        }
    }
    Some(apiserver)
}

/// Whether the command of a real apiserver has a flag.
fn names(apiserver: &Apiserver, flag: &str) -> bool {
    matches!(apiserver, Apiserver::Command { flags, .. } if has(flags, flag))
}

/// The etcd to be started, if one is needed.
fn etcd(args: &RehearseArgs, apiservers: [&Apiserver; 2], checks: &mut Checks) -> Option<PathBuf> {
    let named = apiservers.map(|apiserver| match apiserver {
        Apiserver::Simulated { .. } => None,
        Apiserver::Command { flags, .. } => Some(has(flags, "etcd-servers")),
    });
    let wanted = match named {
        [Some(old), Some(new)] if old != new => {
            checks.wrong("--old and --new: one names --etcd-servers and the other does not; give both or neither");
            return None;
        }
        [Some(named), Some(_)] => !named,
        _ => false,
    };
    if args.netns && named.contains(&Some(true)) {
        checks.wrong("--netns: an etcd outside cannot be reached from a network namespace; leave out --etcd-servers");
    }
    match (wanted, &args.etcd) {
        (false, None) => None,
        (_, path) => {
            let path = path.as_deref().unwrap_or(Path::new("etcd"));
            program("--etcd", path, "an etcd", checks).filter(|_| wanted)
        }
    }
}

/// Requirements of a bridge.
fn bridge(plan: &Plan, checks: &mut Checks) {
    if !plan.netns {
        checks.wrong("--topology bridge: clients of 127.0.0.0/8 are not steered; give --netns, too");
    }
    if !cfg!(feature = "operate") && plan.berth.is_none() {
        checks.wrong(
            "--topology bridge: it needs `berth bridge`, which this build lacks; give a build with the feature operate",
        );
    }
}

/// Requirements of the direct path. `auto` continues without it.
fn direct(plan: &mut Plan, checks: &mut Checks) {
    let calm = CROWD / 2 * u32::try_from(cpus()).unwrap_or(u32::MAX / CROWD);
    let crowd = format!(
        "for the CPUs of this machine, --rate {} is a crowd, which goes to the shims; give {calm} or less",
        plan.load.rate
    );
    let why = match plan.topology {
        _ if plan.direct == DirectMode::Off => return,
        Topology::Bridge => "a bridge's shim steers already; leave out --topology bridge",
        _ if plan.load.rate > calm => &crowd,
        _ if !plan.runs.contains(&Via::Berth) || plan.via != Via::Berth => {
            "only a berth has a direct path; give --via berth"
        }
        _ if names(&plan.old, "etcd-servers") || names(&plan.new, "etcd-servers") => {
            "it is rehearsed in a network namespace, from which an etcd outside cannot be reached; leave out --etcd-servers"
        }
        _ => return,
    };
    match plan.direct {
        DirectMode::On => checks.wrong(format!("--direct on: {why}")),
        _ => plan.without_direct(why),
    }
}

fn faults(typed: &[String], checks: &mut Checks) -> BTreeSet<Fault> {
    if typed.len() > 1 && typed.iter().any(|name| name == "none") {
        checks.wrong("--fault: none goes with no other; leave it out");
    }
    // Clap knows the names.
    typed.iter().filter_map(|name| Fault::from_str(name, false).ok()).collect()
}

fn via(name: &str) -> Via {
    // Clap knows the names.
    Via::from_str(name, false).unwrap_or(Via::None)
}

fn delay(option: &str, text: &str, checks: &mut Checks) -> Duration {
    let delay = checks.duration(option, text, Duration::ZERO);
    if delay > LONGEST_DELAY {
        checks.wrong(format!("{option} {text}: give {} or less", humantime::format_duration(LONGEST_DELAY)));
    }
    delay
}

/// Each once, in the order in which they were typed, the one that decides among them.
fn runs(via: Via, compare: &[Via]) -> Vec<Via> {
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
    use clap::Parser;

    fn typed(args: &[&str]) -> Result<Plan, Mistakes> {
        let cli = Cli::try_parse_from(["berth", "rehearse"].iter().chain(args)).unwrap();
        let Command::Rehearse(args) = cli.command else { panic!("another command") };
        check(&args)
    }

    #[test]
    fn every_mistake_is_reported_with_its_option() {
        let wrong = [
            ("--new", "'"),
            ("--old", "/nonexistent/kube-apiserver"),
            ("--etcd", "/nonexistent/etcd"),
            ("--berth", "/nonexistent/berth"),
            ("--fault", "none,hang"),
            ("--shutdown-delay-duration", "soon"),
            ("--shutdown-watch-termination-grace-period", "2m"),
            ("--phase", "x"),
            ("--settle", "x"),
            ("--start-delay", "x"),
            ("--stop-grace", "x"),
            ("--hold", "-1s"),
            ("--rate", "0"),
            ("--clients", "many"),
            ("--watches", "-1"),
            ("--slow-readers", "1000"),
            ("--storm", "20001"),
            ("--seed", "x"),
            ("--json", "/nonexistent/file"),
            ("--report", "/"),
            ("--upgrades", "0"),
        ];
        let args: Vec<String> = wrong.iter().map(|(option, value)| format!("{option}={value}")).collect();
        let errors = typed(&args.iter().map(String::as_str).collect::<Vec<_>>()).unwrap_err().0;
        for (option, _) in wrong {
            let found: Vec<_> = errors.iter().filter(|e| e.starts_with(option) && !e.contains("yet")).collect();
            assert!(found.len() == 1 && found[0].contains("give") || option == "--fault", "{option}: {errors:#?}");
        }
    }

    #[test]
    fn what_is_typed_becomes_the_plan() {
        let plan = typed(&["--rate=20", "--clients=2", "--watches=7", "--shutdown-delay-duration=1s 500ms"]).unwrap();
        assert_eq!((plan.load.rate, plan.load.clients, plan.load.watches), (20, 2, 7));
        assert_eq!(plan.shutdown.delay, Duration::from_millis(1500));
        assert_eq!(plan.timing.grace, Duration::from_millis(31_500));
        assert_eq!(plan.timing.settle, plan.timing.phase);
        assert_eq!(typed(&["--settle=75s"]).unwrap().timing.settle, Duration::from_secs(75));
        assert_eq!((plan.topology, plan.runs), (Topology::Sidecar, vec![Via::None, Via::Berth]));
        assert_eq!(typed(&["--compare=berth"]).unwrap().runs, [Via::Berth]);

        let plan = typed(&["--compare=haproxy,none,haproxy", "--fault=hang,bad-flag", "--seed=7"]).unwrap();
        assert_eq!(plan.runs, [Via::Haproxy, Via::None, Via::Berth]);
        assert_eq!(Vec::from_iter(plan.faults), [Fault::BadFlag, Fault::Hang]);
        assert_eq!(plan.load.seed, 7);
    }

    #[test]
    fn real_apiservers_get_an_etcd_unless_they_name_one() {
        let plan = typed(&["--old=true", "--new=true --etcd_servers=x"]).unwrap_err().0;
        assert!(plan[0].contains("give both or neither"), "{plan:?}");
        let plan = typed(&["--old=true", "--new=true", "--etcd=/bin/true"]).unwrap();
        assert_eq!(plan.etcd, Some("/bin/true".into()));
        let named = "true --etcd-servers=http://127.0.0.1:2379";
        let plan = typed(&["--old", named, "--new", named]).unwrap();
        assert_eq!(plan.etcd, None);
        assert_eq!(typed(&["--etcd=/bin/true"]).unwrap().etcd, None);
        let mistakes = typed(&["--old=true --tls-cert-file=x", "--new=true", "--etcd=/nonexistent"]).unwrap_err().0;
        assert!(mistakes.len() == 2 && mistakes[0].contains("--old: --tls-cert-file"), "{mistakes:?}");
    }

    #[test]
    fn a_bridge_needs_a_namespace_and_has_faults_of_its_own() {
        let errors = |args: &[&str]| typed(args).map_or_else(|e| e.0, |_| Vec::new());
        let has = |errors: &[String], what: &str| errors.len() == 1 && errors[0].contains(what);
        assert!(has(&errors(&["--topology=bridge"]), "give --netns"));
        assert!(has(&errors(&["--fault=kill-temporary"]), "there is no bridge"));
        let bridge = ["--topology=bridge", "--netns"];
        let with = |more: &str| errors(&[&bridge[..], &[more]].concat());
        assert!(has(
            &errors(&["--topology=bridge", "--netns", "--via=none", "--fault=kill-old"]),
            "there is no bridge"
        ));
        if cfg!(feature = "operate") {
            let all = "--fault=bad-flag,never-ready,crash-after-ready,hang,kill-shim,hang-shim,kill-temporary,kill-old";
            assert_eq!(with(all), [""; 0]);
        }
    }

    #[test]
    fn a_direct_path_needs_a_berth_on_one_node() {
        let etcd = "true --etcd-servers=http://127.0.0.1:2379";
        for (args, why) in [
            (&["--via=none", "--compare=berth"][..], "give --via berth"),
            (&["--via=haproxy"], "give --via berth"),
            (&["--topology=bridge", "--netns"], "leave out --topology bridge"),
            (&["--old", etcd, "--new", etcd], "leave out --etcd-servers"),
        ] {
            let with = |direct| typed(&[args, &["--rate=20", direct]].concat());
            let errors = with("--direct=on").unwrap_err().0;
            assert!(
                errors.iter().any(|error| error.starts_with("--direct on: ") && error.ends_with(why)),
                "{errors:?}"
            );
            // A bridge has other needs, too.
            let Ok(plan) = with("--direct=auto") else { continue };
            assert_eq!(plan.direct, DirectMode::Off);
            assert!(plan.no_direct.unwrap().ends_with(why));
        }
        // With more than 19 CPUs, no rate that can be given is a crowd.
        if let Some(rate) = Some(cpus() * 50 + 1).filter(|rate| *rate <= 1_000) {
            let crowd = format!("--rate={rate}");
            let errors = typed(&["--direct=on", &crowd]).unwrap_err().0;
            assert!(
                errors.len() == 1 && errors[0].contains("is a crowd") && errors[0].contains("; give "),
                "{errors:?}"
            );
            assert!(typed(&["--direct=auto", &crowd]).unwrap().no_direct.unwrap().contains("is a crowd"));
        }
        let plan = typed(&["--direct=on", "--rate=50", "--compare=haproxy,none"]).unwrap();
        assert_eq!((plan.direct, plan.no_direct), (DirectMode::On, None));
        assert_eq!(typed(&[]).unwrap().direct, DirectMode::Off);
    }

    #[test]
    fn a_shim_cannot_be_harmed_where_there_is_none() {
        let errors = |args: &[&str]| typed(args).map_or_else(|e| e.0, |_| Vec::new());
        assert!(errors(&["--fault=clock-jump", "--via=none"])[0].contains("nothing that relays"));
        assert!(errors(&["--fault=no-descriptors", "--via=haproxy"])[0].contains("no such shim"));
        let unit = errors(&["--fault=no-descriptors", "--topology=run"]);
        assert!(unit[0].contains("a process of its own"), "{unit:?}");
        for (via, wrong) in [("none", 1), ("haproxy", 0)] {
            let errors = typed(&["--fault=hang,kill-shim", "--via", via]).map_or_else(|e| e.0, |_| Vec::new());
            assert_eq!(errors.len(), wrong, "{errors:?}");
        }
    }
}
