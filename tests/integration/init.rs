//! Tests of berth as the first process of a PID namespace, like a container's command. The kernel
//! drops a signal to such a process unless it has a handler.

use crate::support::eventually;
use crate::support::net::free_address;
use crate::support::process::{Running, berth_command};
use berth_testing::namespace;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{DirBuilder, File};
use std::net::TcpListener;
use std::os::unix::fs::DirBuilderExt;
use std::process::Command;

const UNSHARE: [&str; 4] = ["--pid", "--fork", "--kill-child", "--"];

/// True if a PID namespace can be made here. If not, the test runs where it can, or is skipped.
fn has_pid_namespaces() -> bool {
    let made = Command::new("unshare").args(UNSHARE).arg("true").output();
    let log = match made {
        Ok(output) if output.status.success() => return true,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    namespace::rerun_in_user_namespace(&format!("no PID namespace can be had: {log}"));
    false
}

/// Starts berth as the first process of a PID namespace.
fn start_init(args: &[&str]) -> Running {
    let command = berth_command(args);
    Running::start(
        Command::new("unshare")
            .args(UNSHARE)
            .arg(command.get_program())
            .args(args),
    )
}

/// Returns the first process of the namespace.
#[track_caller]
fn first_process(run: &Running) -> Pid {
    let children = format!("/proc/{0}/task/{0}/children", run.pid());
    let child = || {
        std::fs::read_to_string(&children)
            .unwrap()
            .trim()
            .parse()
            .ok()
    };
    Pid::from_raw(eventually("the first process of a namespace", child))
}

#[test]
fn sigterm_while_the_port_is_held() {
    if !has_pid_namespaces() {
        return;
    }
    let (temp, listen) = (tempfile::tempdir().unwrap(), free_address());
    let _held = TcpListener::bind(listen).unwrap();
    let (listen, run_dir) = (listen.to_string(), temp.path().join("run"));
    let run_dir = run_dir.to_str().unwrap();
    for command in [&["serve", "--instance", "a"][..], &["run"]] {
        let options = [
            "--listen",
            &listen,
            "--run-dir",
            run_dir,
            "--probe",
            "tcp",
            "--bind-wait",
            "1h",
        ];
        let mut args = [command, &options].concat();
        if command == ["run"] {
            args.extend(["--", "kube-apiserver"]);
        }
        let mut shim = start_init(&args);
        shim.logs("trying again");
        kill(first_process(&shim), Signal::SIGTERM).unwrap();
        shim.ends(0);
    }
}

/// `berth exec` waits for other processes that start an apiserver.
#[test]
fn sigterm_while_another_apiserver_starts() {
    if !has_pid_namespaces() {
        return;
    }
    let (temp, listen) = (tempfile::tempdir().unwrap(), free_address());
    let run_dir = temp.path().join("run");
    let instances = run_dir.join(listen.to_string()).join("instances");
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&instances)
        .unwrap();
    let lock = File::create(instances.join(".lock")).unwrap();
    let lock = Flock::lock(lock, FlockArg::LockExclusive).unwrap();
    let (listen, run_dir) = (listen.to_string(), run_dir.to_str().unwrap().to_owned());
    loop {
        let args = [
            "exec",
            "--listen",
            &listen,
            "--instance",
            "a",
            "--run-dir",
            &run_dir,
            "--",
            "sleep",
            "60",
        ];
        let mut exec = start_init(&args);
        let pid = first_process(&exec);
        eventually("a process that waits for the lock", || {
            let open = std::fs::read_dir(format!("/proc/{pid}/fd"))
                .into_iter()
                .flatten()
                .flatten();
            let mut files = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
            (files.any(|file| file.ends_with("instances/.lock")) || !exec.is_running())
                .then_some(())
        });
        let _ = kill(pid, Signal::SIGTERM);
        let code = exec.ended().code();
        // berth waits for 5 s. A machine may stall for longer.
        if code == Some(69) && exec.log().contains("another process has held") {
            continue;
        }
        assert_eq!(code, Some(128 + Signal::SIGTERM as i32), "{}", exec.log());
        break;
    }
    drop(lock);
}
