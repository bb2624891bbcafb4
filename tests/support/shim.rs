//! A shim in this process: the library, on a thread of its own, on port 0.

use super::net::Backend;
use super::{PATIENCE, eventually, net, process};
use berth_node::instance_id::InstanceId;
use berth_node::ipc::{self, wire};
use berth_node::registry::BerthDir;
use berth_node::registry::instance::{Claimant, InstanceClaim, claim};
use berth_node::terms::Phase;
use berth_options::{InPod, PodCommand, check};
use berth_shim::app::{self, ShimEnd};
use berth_shim::config::Config;
use berth_shim::state::{ShimState, Stop};
use clap::Parser;
use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Instant;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::time::timeout;

/// Numbers of relaying threads with which every test runs.
pub(crate) const THREADS: [&str; 2] = ["1", "2"];

/// Runs a test with each number of threads at the same time: for tests that mostly wait.
pub(crate) fn with_threads(test: impl Fn(&'static str) + Sync) {
    std::thread::scope(|scope| {
        let test = &test;
        for threads in THREADS {
            scope.spawn(move || test(threads));
        }
    });
}

/// A running shim. Dropping it stops the shim at once.
pub(crate) struct Shim {
    pub(crate) address: SocketAddr,
    pub(crate) berth: BerthDir,
    instance: InstanceId,
    state: watch::Receiver<ShimState>,
    stop: watch::Sender<Stop>,
    thread: Option<JoinHandle<ShimEnd>>,
    runtime: Runtime,
    _temp: TempDir,
}

fn make_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Sends a request to a shim's socket. `ipc::ask` waits for a second at most, and a busy machine
/// may take longer, so it is repeated.
pub(crate) fn send_ask(runtime: &Runtime, path: &Path, ask: &wire::Ask) -> io::Result<wire::Reply> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match runtime.block_on(ipc::ask_shim(path, ask.clone(), ipc::PATIENCE)) {
            Err(error) if error.kind() == ErrorKind::TimedOut && Instant::now() < deadline => {}
            answer => return answer,
        }
    }
}

/// Parses options as `berth serve` does.
#[track_caller]
fn parse_config(args: &[&str]) -> Config {
    let cli = InPod::try_parse_from([&["berth", "serve"], args].concat())
        .unwrap_or_else(|error| panic!("{error}"));
    let PodCommand::Serve(args) = cli.command else {
        unreachable!()
    };
    check::check_serve(&args).unwrap_or_else(|mistakes| panic!("{mistakes}"))
}

impl Shim {
    /// Starts a shim for a running backend, and waits until the shim listens.
    #[track_caller]
    pub(crate) fn start(backend: SocketAddr, threads: &str, options: &[&str]) -> Self {
        let shim = Self::launch("127.0.0.1:0", backend, threads, options);
        shim.until_phase(Phase::Joined);
        shim
    }

    /// Starts a shim for the first of two instances, with the second one as a sibling's instance.
    /// Both instances are ready.
    #[track_caller]
    pub(crate) fn start_of_two(
        [own, other]: [&Backend; 2],
        threads: &str,
        options: &[&str],
    ) -> (Self, InstanceClaim) {
        let shim = Self::start(own.address(), threads, options);
        let record = shim.sibling("other", other.address());
        shim.until_health(other.address(), "ready");
        (shim, record)
    }

    /// Launches a shim without waiting for its listener. By default, one TCP probe at the start
    /// decides about health, and later changes come from connections alone. The gate is off, since
    /// clients here send their first bytes late, and instances answer late.
    #[track_caller]
    pub(crate) fn launch(
        listen: &str,
        backend: SocketAddr,
        threads: &str,
        options: &[&str],
    ) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let (run_dir, backend) = (temp.path().join("run"), backend.to_string());
        let place = [
            "--listen",
            listen,
            "--backend",
            &backend,
            "--run-dir",
            run_dir.to_str().unwrap(),
        ];
        let mut args = [&place[..], &["--threads", threads], options].concat();
        let defaults = [
            ["--probe", "tcp"],
            ["--fall", "1"],
            ["--probe-interval", "1h"],
            ["--max-openings", "off"],
            ["--probe-timeout", "60s"],
        ];
        for [option, value] in defaults {
            if !options.contains(&option) {
                args.extend([option, value]);
            }
        }
        let pass = process::pass_option();
        if let Some(pass) = pass.as_deref().filter(|_| !options.contains(&"--pass")) {
            args.extend(["--pass", pass]);
        }
        let config = parse_config(&args);
        let (stop, told) = watch::channel(Stop::No);
        let (tell, built) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            make_runtime().block_on(async {
                let bound = app::build_shim(config)
                    .await
                    .unwrap_or_else(|error| panic!("cannot build: {error}"));
                let about = (
                    bound.addresses().next().unwrap(),
                    bound.berth().clone(),
                    bound.instance().clone(),
                    bound.state(),
                );
                tell.send(about).unwrap();
                bound.run(told).await
            })
        });
        let (address, berth, instance, state) =
            built.recv_timeout(PATIENCE).expect("a shim that is built");
        Self {
            address,
            berth,
            instance,
            state,
            stop,
            thread: Some(thread),
            runtime: make_runtime(),
            _temp: temp,
        }
    }

    #[track_caller]
    pub(crate) fn until_phase(&self, wanted: Phase) {
        let mut state = self.state.clone();
        let reached = state.wait_for(|state| state.phase == wanted);
        let reached = self
            .runtime
            .block_on(async { timeout(PATIENCE, reached).await.is_ok() });
        assert!(
            reached,
            "the shim did not come to {wanted:?} but {:?}",
            self.status()
        );
    }

    #[track_caller]
    fn ask(&self, question: &wire::Ask) -> wire::Reply {
        let path = self.berth.socket_path(&self.instance).unwrap();
        send_ask(&self.runtime, &path, question)
            .unwrap_or_else(|error| panic!("no answer of the shim: {error}"))
    }

    /// Returns the status that the shim reports.
    #[track_caller]
    pub(crate) fn status(&self) -> wire::Status {
        match self.ask(&wire::Ask::Status) {
            wire::Reply::Status(status) => *status,
            other => panic!("no status: {other:?}"),
        }
    }

    /// Returns a metric's value, summed over all labels.
    #[track_caller]
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let page = match self.ask(&wire::Ask::Metrics) {
            wire::Reply::Metrics(page) => page,
            other => panic!("no metrics: {other:?}"),
        };
        let lines = page.lines().filter(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('{'))
        });
        let values: Vec<u64> = lines
            .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
            .collect();
        assert!(!values.is_empty(), "no {name} in:\n{page}");
        values.iter().sum()
    }

    /// Waits until the shim's status satisfies `wanted`.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, wanted: impl Fn(&wire::Status) -> bool) -> wire::Status {
        eventually(what, || Some(self.status()).filter(&wanted))
    }

    /// Waits until an instance has a health.
    #[track_caller]
    pub(crate) fn until_health(&self, address: SocketAddr, health: &str) {
        self.until(&format!("{address} is {health}"), |status| {
            status
                .instances
                .iter()
                .any(|i| i.address == address && i.health.as_str() == health)
        });
    }

    /// Records a second instance, which is alive as long as the returned claim.
    pub(crate) fn sibling(&self, id: &str, address: SocketAddr) -> InstanceClaim {
        let id = InstanceId::parse(id).unwrap();
        let claimant = Claimant {
            instance: &id,
            advertise: self.address.ip(),
            supervisor: None,
            pid: None,
        };
        claim(&self.berth, &claimant, |_, _| Ok(address)).unwrap()
    }

    #[track_caller]
    pub(crate) fn client(&self) -> TcpStream {
        net::connect(self.address)
    }

    /// Connects a client, and sends `text`.
    #[track_caller]
    pub(crate) fn client_with(&self, text: &[u8]) -> TcpStream {
        let mut client = self.client();
        client.write_all(text).unwrap();
        client
    }

    pub(crate) fn request(&self, stop: Stop) {
        self.stop.send_replace(stop);
    }

    /// Waits until the shim has ended.
    pub(crate) fn ended(mut self) -> ShimEnd {
        let thread = self.thread.take().unwrap();
        eventually("the end of the shim", || thread.is_finished().then_some(()));
        thread.join().unwrap()
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        self.stop.send_replace(Stop::Now);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
