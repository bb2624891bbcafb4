//! File descriptors and pipes that run out, and readers that stall.

use super::node::Node;
use crate::support::MOMENT;
use crate::support::net::{
    Backend, client_hello, connect, echo, expect_silence, ping, read, served_client,
};
use crate::support::process::Running;
use berth_os::explained;
use nix::sys::signal::Signal;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::process::Command;
use std::time::Instant;

/// Sets the soft limit of open files of a running process.
fn limit_files(pid: u32, soft: &str) {
    let status = Command::new("prlimit")
        .args(["--pid", &pid.to_string(), &format!("--nofile={soft}:")])
        .status();
    assert!(status.expect("prlimit of util-linux").success());
}

#[test]
fn running_out_of_descriptors_pauses_and_recovers() {
    let node = Node::new();
    let mut shim = node.joined(Backend::new().serve(echo), &["--threads", "1"]);
    let pid = shim.child.id();
    let mut client = served_client(node.listen);
    // The limit is the lowest free descriptor number, so the shim cannot open any connection.
    limit_files(pid, &lowest_free_descriptor(pid).to_string());
    let mut waiting: Vec<_> = (0..20).map(|_| connect(node.listen)).collect();
    for client in &mut waiting {
        client.write_all(&client_hello(100)).unwrap();
    }
    shim.logs(explained::CANNOT_ACCEPT);
    expect_silence(&mut waiting[0]);
    ping(&mut client, b"those who are there are served");
    let (before, began) = (cpu_ticks(pid), Instant::now());
    std::thread::sleep(MOMENT * 4);
    let (ticks, slept) = (cpu_ticks(pid) - before, began.elapsed());
    assert!(
        u128::from(ticks) * 10 < slept.as_millis() / 2,
        "it spins: {ticks} ticks of 10 ms in {slept:?}"
    );

    limit_files(pid, "1000");
    for client in &mut waiting {
        assert!(read(client, 100) == client_hello(100));
    }
    let log = shim.log();
    assert_eq!(log.matches("cannot accept").count(), 1, "told once: {log}");
    drop((client, waiting));
    shim.signal(Signal::SIGTERM);
    shim.ends(0);
}

/// Returns the lowest number that a process has for a new descriptor, whether or not a probe uses
/// it now.
fn lowest_free_descriptor(pid: u32) -> u32 {
    let used = || -> BTreeSet<u32> {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))
            .unwrap()
            .flatten();
        fds.filter_map(|fd| fd.file_name().to_str()?.parse().ok())
            .collect()
    };
    // A descriptor of a probe or of a lease's write is missing in one of these polls, because it is
    // soon closed.
    let kept = (0..20).fold(used(), |kept, _| {
        std::thread::sleep(MOMENT / 10);
        &kept & &used()
    });
    (0..).find(|number| !kept.contains(number)).unwrap()
}

/// Returns the CPU time of a process, in the clock ticks of /proc.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<_> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_ascii_whitespace()
        .collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// An accepted client needs a second descriptor, for the connection to the instance. Without that
/// descriptor the shim would reset the client.
#[test]
fn more_connections_than_descriptors_are_not_taken() {
    let node = Node::new();
    let command = node.command(
        Backend::new().serve(echo),
        &["--threads", "1", "--max-connections", "1000"],
    );
    let mut limited = Command::new("sh");
    limited
        .args(["-c", r#"ulimit -n 500; exec "$0" "$@""#])
        .arg(command.get_program())
        .args(command.get_args());
    let shim = Running::start(&mut limited);
    shim.logs(explained::TOO_MANY_CONNECTIONS);
    shim.logs("joined");
    let mut clients: Vec<_> = (0..150).map(|_| connect(node.listen)).collect();
    for client in &mut clients {
        client.write_all(&client_hello(100)).unwrap();
    }
    shim.logs("--max-connections is reached");
    for mut client in clients {
        assert!(read(&mut client, 100) == client_hello(100));
    }
}

/// Returns the number of pipe descriptors, without standard input and output.
fn count_pipes(pid: u32) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten();
    let own = fds.filter(|fd| {
        fd.file_name()
            .to_str()
            .and_then(|fd| fd.parse().ok())
            .is_some_and(|fd: u32| fd > 2)
    });
    own.filter(|fd| {
        std::fs::read_link(fd.path()).is_ok_and(|to| to.to_string_lossy().starts_with("pipe:"))
    })
    .count()
}

/// For a reader of a large answer that stalls, the shim must hold no bytes, and no pipe, since the
/// number of pipes is limited for each uid.
#[test]
fn readers_that_stall_hold_no_pipe_and_no_memory() {
    const READERS: usize = 100;
    let node = Node::new();
    let backend = Backend::new().serve(|mut instance| {
        // A probe sends nothing, and is closed. To a client, which sends something, the instance
        // writes until the client is gone.
        if matches!(instance.read(&mut [0; 100]), Ok(1..)) {
            while instance.write_all(&[7; 65536]).is_ok() {}
        }
    });
    let shim = node.joined(backend, &["--threads", "1"]);
    let reader = |_| {
        let mut client = connect(node.listen);
        client.write_all(&client_hello(100)).unwrap();
        read(&mut client, 4_000_000);
        client
    };
    let inherited = count_pipes(shim.child.id());
    let mut first = reader(0);
    let resident = || {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", shim.child.id())).unwrap();
        statm
            .split_ascii_whitespace()
            .nth(1)
            .unwrap()
            .parse::<usize>()
            .unwrap()
            * 4096
    };
    let before = resident();
    let stalled: Vec<_> = (0..READERS).map(reader).collect();
    read(&mut first, 4_000_000);
    let (pipes, grown) = (
        count_pipes(shim.child.id()) - inherited,
        resident().saturating_sub(before) / READERS,
    );
    println!("{pipes} descriptors of pipes, {grown} bytes a reader");
    assert!(pipes <= 2, "{pipes} descriptors of pipes");
    assert!(grown < 20_000, "{grown} bytes a reader");
    drop(stalled);
}
