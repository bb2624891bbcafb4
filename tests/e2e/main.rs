//! End-to-end tests with real programs:
//!
//! - upgrades of real kube-apiservers behind this build of berth (`berth rehearse` from one minor
//!   version to the next)
//! - `scripts/manifests.sh`: a real kubeadm and kube-apiserver accept the output of `berth inject`
//!   and of the Helm chart
//! - `scripts/cluster.sh`: upgrades of a whole kubeadm cluster under `berth bridge`, by
//!   `berth upgrade`, and without berth
//! - `scripts/service.sh`: the Service `kubernetes` behind a real kube-proxy, while instances
//!   change
//! - `scripts/inject.sh`: clients' sockets passed to real kube-apiservers
//! - the members of an etcd, `berth grant`, the lock of `berth upgrade`, and bridges on nodes with
//!   IPv6
//! - the files of a release on a node without a compiler, and certificates with Go's TLS
//!
//! The tests take minutes, so run them on request: `cargo test --test e2e -- --ignored [NAME]`,
//! as in `.ci/run`. A test without its prerequisites (root, some tools, built binaries) counts as
//! ignored and prints the reason. Rust's harness decides that at compile time, so this target has a
//! harness of its own.

mod certificates;
#[cfg(feature = "operate")]
mod etcd_members;
#[cfg(feature = "operate")]
mod grant;
#[cfg(all(feature = "operate", feature = "rehearse"))]
mod install;
#[cfg(feature = "operate")]
mod ipv6;
#[cfg(feature = "operate")]
mod lock;
#[path = "../support/mod.rs"]
mod support;

#[cfg(feature = "operate")]
use berth_steering::self_test;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
#[cfg(feature = "operate")]
use nix::sched::{CloneFlags, unshare};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// Tools that the scripts need in addition to the binaries.
const TOOLS: [&str; 4] = ["ip", "openssl", "jq", "unshare"];

const BERTH: &str = env!("CARGO_BIN_EXE_berth");

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Each test needs the whole machine.
    arguments.test_threads = Some(1);
    let scripted = |name: &str, script: &'static str, tools: &'static [&'static str]| {
        Trial::ignorable_test(name, move || match find_obstacle(tools) {
            Some(why) => Ok(Completion::ignored_with(why)),
            None => run_script(script, &[]).map(|()| Completion::Completed),
        })
    };
    // These scripts report missing prerequisites themselves.
    let checked = |name: &str, script: &'static str, arguments: &'static [&'static str]| {
        Trial::ignorable_test(name, move || {
            match run_command(
                Command::new(root().join(script))
                    .arg("--check")
                    .args(arguments)
                    .env("BERTH", BERTH),
            ) {
                Err(why) => Ok(Completion::ignored_with(why)),
                Ok(_) => run_script(script, arguments).map(|()| Completion::Completed),
            }
        })
    };
    let rehearsal = make_trial(
        "rehearsal_with_two_real_versions",
        find_binaries,
        |binaries| run_rehearsal(&binaries),
    );
    let go = || {
        run_command(Command::new("go").arg("version")).map_err(|why| format!("it needs go: {why}"))
    };
    let sources = root().join("crates/cluster/tests/certificates");
    let mut trials = vec![make_trial(
        "certificates_and_keys_as_in_go",
        go,
        move |_| certificates::as_in_go(&sources),
    )];
    trials.push(checked(
        "failures_of_real_kube_apiservers",
        "scripts/inject.sh",
        &["failures"],
    ));
    let whole = &["--times", "4", "sources", "upgrade", "failures"];
    trials.push(checked(
        "sockets_passed_to_real_kube_apiservers",
        "scripts/inject.sh",
        whole,
    ));
    #[cfg(feature = "operate")]
    trials.push(make_trial(
        "members_of_a_real_etcd",
        find_newest,
        |(_, etcd)| etcd_members::members_of_a_real_etcd(&etcd),
    ));
    #[cfg(feature = "operate")]
    trials.push(make_trial(
        "rbac_of_a_real_kube_apiserver",
        find_newest,
        |(new, etcd)| grant::run_grant(&new.path, &etcd),
    ));
    #[cfg(feature = "operate")]
    trials.push(make_trial(
        "lock_of_a_real_cluster",
        find_newest,
        |(new, etcd)| lock::lock_of_a_cluster(&new.path, &etcd),
    ));
    #[cfg(feature = "operate")]
    trials.push(make_trial(
        "bridges_of_nodes_of_ipv6",
        || obstacle_to_steering().map_or_else(find_newest, Err),
        |(new, etcd)| ipv6::run_bridges(&new.path, &etcd),
    ));
    if cfg!(feature = "operate") {
        trials.push(scripted(
            "manifests_for_a_real_kubeadm_and_kube_apiserver",
            "scripts/manifests.sh",
            &[],
        ));
        trials.push(scripted(
            "the_service_kubernetes_never_empties",
            "scripts/service.sh",
            &["nft"],
        ));
        // Two clusters share two processors. At a rate of 20, kube-apiserver itself began to end
        // connections.
        let upgrade = &["--together", "--rate", "8", "--bridge", BERTH, "upgrade"];
        trials.push(checked(
            "a_real_cluster_is_upgraded_under_a_bridge",
            "scripts/cluster.sh",
            upgrade,
        ));
        let interrupted = &[
            "--together",
            "--rate",
            "8",
            "--bridge",
            BERTH,
            "interrupted",
        ];
        trials.push(checked(
            "an_interrupted_upgrade_of_a_real_cluster",
            "scripts/cluster.sh",
            interrupted,
        ));
    }
    if cfg!(feature = "rehearse") {
        trials.push(rehearsal);
    }
    #[cfg(all(feature = "operate", feature = "rehearse"))]
    trials.push(make_trial(
        "a_node_without_a_compiler_installs_a_release",
        || obstacle_of_machine(install::TOOLS).map_or_else(install::find_release, Err),
        |release| install::on_a_node_without_a_compiler(&release),
    ));
    if !arguments.ignored && !arguments.include_ignored {
        println!("with real programs, some minutes each: cargo test --test e2e -- --ignored");
    }
    let asked_for = |trial: Trial| trial.with_kind("real").with_ignored_flag(true);
    libtest_mimic::run(&arguments, trials.into_iter().map(asked_for).collect()).exit_code()
}

/// Returns a test that is ignored if its prerequisites are missing.
fn make_trial<T>(
    name: &str,
    needs: impl FnOnce() -> Result<T, String> + Send + 'static,
    test: impl FnOnce(T) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    Trial::ignorable_test(name, move || match needs() {
        Err(why) => Ok(Completion::ignored_with(why)),
        Ok(it) => test(it).map(|()| Completion::Completed),
    })
}

fn run_script(script: &str, arguments: &[&str]) -> Result<(), Failed> {
    let status = Command::new(root().join(script))
        .args(arguments)
        .env("BERTH", BERTH)
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("cannot run {script}: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{script}: {status}; what failed is above").into())
    }
}

/// Returns the reason why the scripts cannot run here, if any.
fn find_obstacle(tools: &[&str]) -> Option<String> {
    let check =
        || run_command(Command::new(root().join("scripts/kube-apiserver.sh")).arg("--check")).err();
    obstacle_of_machine(tools).or_else(check)
}

/// Returns the obstacle for tests that need no kube-apiserver, if any.
fn obstacle_of_machine(tools: &[&str]) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("it needs root, for network namespaces".into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = |tool: &&&str| std::env::split_paths(&path).any(|dir| dir.join(tool).is_file());
    let missing: Vec<_> = TOOLS
        .iter()
        .chain(tools)
        .filter(|tool| !found(tool))
        .copied()
        .collect();
    if !missing.is_empty() {
        return Some(format!("it needs {}", missing.join(", ")));
    }
    // Root in a container may lack the right to create a network namespace.
    let probe = format!("berth-e2e-{}-probe", std::process::id());
    if let Err(why) = run_command(Command::new("ip").args(["netns", "add", &probe])) {
        return Some(format!("no network namespace can be made: {why}"));
    }
    let _ = run_command(Command::new("ip").args(["netns", "del", &probe]));
    None
}

/// Returns the reason why the kernel cannot steer connections here, or why no test can run here.
/// `None` if there is no such reason.
#[cfg(feature = "operate")]
fn obstacle_to_steering() -> Option<String> {
    find_obstacle(&["nft", "curl"]).or_else(|| {
        let tested = std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)
                .map_err(|error| format!("no network namespace can be made: {error}"))?;
            for command in ["link set lo up", "addr add 192.0.2.2/32 dev lo"] {
                run_command(Command::new("ip").args(command.split(' ')))?;
            }
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let runtime = runtime.map_err(|error| error.to_string())?;
            runtime
                .block_on(self_test())
                .map(drop)
                .map_err(|error| error.to_string())
        });
        tested
            .join()
            .unwrap_or_else(|_| Err("the self-test panicked".into()))
            .err()
    })
}

/// Programs of a rehearsal with real apiservers.
struct Binaries {
    old: Binary,
    new: Binary,
    etcd: String,
}

struct Binary {
    path: String,
    version: String,
    /// Output of scripts/kube-apiserver.sh: the version's paths.
    paths: String,
}

/// Returns the kube-apiservers of the two newest pinned versions.
fn find_binaries() -> Result<Binaries, String> {
    let [.., old, _] = list_minors()?[..] else {
        return Err("it needs two versions in tests/kube-apiserver".into());
    };
    let (old, (new, etcd)) = (find_binary(old)?, find_newest()?);
    Ok(Binaries { old, new, etcd })
}

/// Returns the kube-apiserver of the newest version, and its etcd.
fn find_newest() -> Result<(Binary, String), String> {
    let new = find_binary(
        list_minors()?
            .pop()
            .ok_or("it needs a version in tests/kube-apiserver")?,
    )?;
    let etcd = find_program(&new.paths, "ETCD")?;
    Ok((new, etcd))
}

/// Returns the pinned minor versions.
fn list_minors() -> Result<Vec<u32>, String> {
    let pins = std::fs::read_dir(root().join("tests/kube-apiserver"))
        .map_err(|error| error.to_string())?;
    let names = pins
        .flatten()
        .map(|pin| pin.file_name().to_string_lossy().into_owned());
    let mut minors: Vec<u32> = names
        .filter_map(|name| name.strip_prefix("v1.")?.parse().ok())
        .collect();
    minors.sort_unstable();
    Ok(minors)
}

/// Returns the built kube-apiserver of a minor version.
fn find_binary(minor: u32) -> Result<Binary, String> {
    let mut script = Command::new(root().join("scripts/kube-apiserver.sh"));
    script.args(["--check", &format!("v1.{minor}")]);
    let paths = run_command(&mut script)?;
    let path = find_program(&paths, "KUBE_APISERVER")?;
    let said = run_command(Command::new(&path).arg("--version"))?;
    let version = said
        .trim()
        .strip_prefix("Kubernetes ")
        .ok_or(format!("{path} --version says {said}"))?
        .to_owned();
    Ok(Binary {
        path,
        version,
        paths,
    })
}

/// Returns the path of a program in the output of scripts/kube-apiserver.sh.
fn find_program(paths: &str, name: &str) -> Result<String, String> {
    let path = paths
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    path.map(str::to_owned)
        .ok_or(format!("scripts/kube-apiserver.sh says no {name}"))
}

/// Returns the command line of a kube-apiserver that ends its watches when it stops.
fn ends_watches(kube_apiserver: &str) -> String {
    format!("{kube_apiserver} --shutdown-watch-termination-grace-period=10s")
}

/// Rehearses an upgrade to the next minor version in a network namespace. Nothing is lost, and each
/// version answers the connections that are counted for it.
fn run_rehearsal(binaries: &Binaries) -> Result<(), Failed> {
    let Binaries { old, new, etcd } = binaries;
    let directory = Path::new(etcd).parent().unwrap_or(Path::new("/"));
    let path = format!(
        "{}:{}",
        directory.display(),
        std::env::var("PATH").unwrap_or_default()
    );
    let output = Command::new(env!("CARGO_BIN_EXE_berth"))
        .args([
            "rehearse",
            "--verbose",
            "--netns",
            "--rate=100",
            "--watches=200",
            "--compare=berth",
        ])
        .args([
            "--old",
            &ends_watches(&old.path),
            "--new",
            &ends_watches(&new.path),
        ])
        .env("PATH", path)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot run berth rehearse: {error}"))?;
    let (table, progress) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    println!("{progress}{table}");
    let row = |name: &str| {
        let row = table
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .ok_or(format!("the table has no {name:?}"));
        row.map(|row| row.split_whitespace().collect::<Vec<_>>())
    };
    if !output.status.success() {
        return Err(format!("berth rehearse: {}", output.status).into());
    }
    for (name, binary) in [("old", old), ("new", new)] {
        let row = row(&format!("connections on {name} "))?;
        if row[0] == "0" || row.get(1) != Some(&binary.version.as_str()) {
            return Err(format!(
                "connections on {name}: {row:?}, not some on {}",
                binary.version
            )
            .into());
        }
    }
    let informers = row("informers ")?;
    let [whole, "of", all, ..] = informers[..] else {
        return Err(format!("informers: {informers:?}").into());
    };
    if whole != all {
        return Err(
            format!("not every informer holds exactly what was written: {informers:?}").into(),
        );
    }
    if row("lost ")? != ["0"] || row("Service kubernetes was empty for ").is_err() {
        return Err("something was lost, or the Service kubernetes was not looked at".into());
    }
    Ok(())
}

/// Runs a command, and returns its output. If the command fails, returns its error messages in one
/// line.
fn run_command(command: &mut Command) -> Result<String, String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(String::from_utf8_lossy(&output.stderr)
        .trim()
        .replace('\n', "; "))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}
