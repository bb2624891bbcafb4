//! Describes the machine of a report, from `/proc`, and the programs, by the versions that they
//! print.

use crate::config::{Plan, Via};
use crate::record::data::{Environment, Instance, Program, Run};
use nix::sys::resource::{Resource, getrlimit};
use procfs::{CpuInfo, Current as _, Meminfo};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::process::{Command, Stdio};
use std::time::SystemTime;

/// Kernel settings that decide which queued connections move when a listener closes, how many
/// connections may be queued, and how many can be opened.
const SYSCTLS: [&str; 8] = [
    "net.core.somaxconn",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_abort_on_overflow",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_max_syn_backlog",
    "net.ipv4.tcp_migrate_req",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_tw_reuse",
];

/// Reads the environment. A value that the machine does not have stays empty.
pub fn read(programs: Vec<Program>) -> Environment {
    let sysctl = |name: &&str| {
        let value = fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/"))).ok()?;
        Some((
            (*name).to_owned(),
            value.split_whitespace().collect::<Vec<_>>().join(" "),
        ))
    };
    let cpu_model = CpuInfo::current()
        .ok()
        .and_then(|cpus| cpus.model_name(0).map(str::to_owned));
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    Environment {
        kernel: read_kernel().unwrap_or_default(),
        cpu_model: cpu_model.unwrap_or_default(),
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory_bytes: Meminfo::current().map_or(0, |memory| memory.mem_total),
        open_files_limit: getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft),
        sysctls: SYSCTLS.iter().filter_map(sysctl).collect(),
        programs,
    }
}

/// Returns the apiservers, each once, and the other programs of the runs: HAProxy, etcd and another
/// berth.
pub(super) fn list_programs(plan: &Plan, runs: &[Run]) -> Vec<Program> {
    let mut seen = BTreeSet::new();
    let known = runs
        .iter()
        .filter_map(Run::ran)
        .flat_map(|ran| &ran.instances)
        .filter(|i| !i.version.is_empty());
    let new = known.filter(|instance| seen.insert(instance.name.as_str()));
    let kind = if plan.old.is_simulated() {
        " (simulated)"
    } else {
        ""
    };
    let version = |instance: &Instance| instance.version.clone() + kind;
    let apiservers = new.map(|instance| Program {
        role: instance.name.clone(),
        version: version(instance),
    });
    let etcd = plan
        .etcd
        .as_ref()
        .and_then(|program| ask_version("etcd", program.as_os_str(), "--version"));
    let haproxy = runs
        .iter()
        .find(|run| run.via == Via::Haproxy && run.ran().is_some());
    let haproxy = haproxy.and_then(|_| ask_version("haproxy", "haproxy".as_ref(), "-v"));
    // Only another berth is listed: the version of this program is in the report already.
    let berth = plan
        .berth
        .as_ref()
        .and_then(|program| ask_version("berth", program.as_os_str(), "--version"));
    apiservers.chain(etcd).chain(haproxy).chain(berth).collect()
}

/// Asks a program for its version. `None` if the program prints no version.
fn ask_version(role: &str, program: &OsStr, option: &str) -> Option<Program> {
    let output = Command::new(program)
        .arg(option)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    let output = String::from_utf8_lossy(&output.stdout);
    Some(Program {
        role: role.to_owned(),
        version: parse_version(&output)?.to_owned(),
    })
}

/// Returns the word after `version` or `berth` in a program's output.
fn parse_version(output: &str) -> Option<&str> {
    let is_before = |word: &&str| {
        ["version", "berth"].contains(&&*word.trim_end_matches(':').to_ascii_lowercase())
    };
    let mut words = output.split_whitespace();
    words.find(is_before)?;
    words.next()
}

/// The present time in a report's format.
pub fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

fn read_kernel() -> nix::Result<String> {
    let name = nix::sys::utsname::uname()?;
    let words = [name.sysname(), name.release(), name.machine()];
    Ok(words
        .map(|word| word.to_string_lossy().into_owned())
        .join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_print_their_version_in_their_own_way() {
        let haproxy =
            "HAProxy version 2.6.12-1+deb12u1 2023/12/16 - https://haproxy.org/\nStatus: stable";
        assert_eq!(parse_version(haproxy), Some("2.6.12-1+deb12u1"));
        assert_eq!(
            parse_version("etcd Version: 3.5.17\nGit SHA: 507c0de\n"),
            Some("3.5.17")
        );
        assert_eq!(parse_version("berth 0.1.0\n"), Some("0.1.0"));
        assert_eq!(
            (parse_version("no such option"), parse_version("version")),
            (None, None)
        );
        assert_eq!(
            ask_version("etcd", "echo".as_ref(), "Version: 3")
                .unwrap()
                .version,
            "3"
        );
        assert_eq!(
            ask_version("etcd", "/no/such/program".as_ref(), "--version"),
            None
        );
    }

    #[test]
    fn a_linux_machine_shows_what_matters() {
        let seen = read(vec![Program {
            role: "old".into(),
            version: "v1.33.0".into(),
        }]);
        assert!(seen.kernel.starts_with("Linux "), "{}", seen.kernel);
        assert!(
            seen.cpus > 0 && seen.memory_bytes > 1 << 20 && seen.open_files_limit > 0,
            "{seen:?}"
        );
        let range = &seen.sysctls["net.ipv4.ip_local_port_range"];
        assert_eq!(
            range
                .split(' ')
                .filter(|port| port.parse::<u16>().is_ok())
                .count(),
            2,
            "{range}"
        );
        assert!(now().ends_with('Z'));
    }
}
