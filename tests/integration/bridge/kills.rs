//! Every kill of a bridge.

use super::*;
use crate::kills::{Scene, every_kill};

/// With an etcd of three members.
#[test]
#[ignore = "takes minutes: run by .ci/run kills"]
fn bridge() {
    on_any_node_of(ETCD, |node| {
        let members = etcd_of(node);
        every_kill(2, || Bridged { node, members: members.clone(), before: node.own_pid() });
    });
}

struct Bridged<'a> {
    node: &'a Node,
    members: Arc<std::sync::Mutex<Members>>,
    /// The process of the node's own kube-apiserver, before COMMAND.
    before: i32,
}

impl Scene for Bridged<'_> {
    fn root(&self) -> PathBuf {
        self.node.dir.path().to_owned()
    }

    fn directories(&self) -> Vec<PathBuf> {
        vec![self.node.path("bridge")]
    }

    fn command(&self) -> Command {
        // As an etcd that has gone on without the last bridge.
        self.members.lock().unwrap().leader = 1;
        self.node.fast_bridge("", &args(&self.node.restart()))
    }

    fn is_whole(&mut self) {
        let command = self.node.path("restart").display().to_string();
        // COMMAND goes on without the bridge.
        eventually("the end of COMMAND and of the bridge", || {
            (crate::support::process::processes(&command).is_empty() && !self.node.is_on()).then_some(())
        });
        self.node.nothing_runs();
        self.node.answers();
    }

    fn is_done(&mut self) {
        assert_ne!(self.node.own_pid(), self.before, "COMMAND has not run");
    }

    fn reboots(&mut self) {
        let _ = kill(Pid::from_raw(self.node.own_pid()), Signal::SIGKILL);
        self.node.nothing_runs();
        let _ = std::fs::remove_dir_all(self.node.path("bridge"));
        eventually("the end of the node's own", || std::net::TcpListener::bind("0.0.0.0:6443").ok().map(drop));
        self.node.start_own();
        self.before = self.node.own_pid();
    }

    fn diagnosis(&self) -> String {
        let (_, out, log) = output_of(&mut self.node.part("status"));
        out + &log
    }
}
