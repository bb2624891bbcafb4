//! A fresh run directory and berth.

use crate::support::eventually;
use crate::support::net::{Backend, client_hello, connect, free_address, read};
use crate::support::process::{Running, berth_command, output_of};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use tempfile::TempDir;

/// A fresh run directory and berth.
pub(super) struct Node {
    pub(super) temp: TempDir,
    pub(super) listen: SocketAddr,
}

impl Node {
    pub(super) fn new() -> Self {
        Self {
            temp: tempfile::tempdir().unwrap(),
            listen: free_address(),
        }
    }

    pub(super) fn run_dir(&self) -> String {
        self.temp.path().join("run").display().to_string()
    }

    /// Writes a file and returns its path.
    pub(super) fn file(&self, name: &str, text: &str) -> String {
        let path = self.temp.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    }

    pub(super) fn command(&self, backend: SocketAddr, options: &[&str]) -> Command {
        let mut command = berth_command([
            "serve",
            "--listen",
            &self.listen.to_string(),
            "--backend",
            &backend.to_string(),
        ]);
        command.args(["--run-dir", &self.run_dir(), "--probe-interval", "20ms"]);
        if !options.iter().any(|option| option.starts_with("--probe-")) {
            command.args(["--probe", "tcp"]);
        }
        command.args(options);
        command
    }

    pub(super) fn serve(&self, backend: SocketAddr, options: &[&str]) -> Running {
        Running::start(&mut self.command(backend, options))
    }

    /// Starts a shim, and waits until it listens.
    pub(super) fn joined(&self, backend: SocketAddr, options: &[&str]) -> Running {
        let shim = self.serve(backend, options);
        shim.logs("joined");
        shim
    }

    /// Returns a client that has sent something and has no answer yet, and the instance's end of
    /// the connection.
    pub(super) fn unanswered(&self, backend: &Backend) -> (TcpStream, TcpStream) {
        let mut client = connect(self.listen);
        client.write_all(&client_hello(300)).unwrap();
        let mut instance = backend.accept();
        read(&mut instance, 300);
        (client, instance)
    }

    /// Returns the result of a command. A command waits a second for the shim, so the command is
    /// repeated while a busy shim does not answer.
    #[track_caller]
    pub(super) fn ask(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let mut command = berth_command(args);
        command.args(["--run-dir", &self.run_dir()]);
        eventually("an answer of the shim", || {
            let (status, out, err) = output_of(&mut command);
            (![&out, &err]
                .iter()
                .any(|text| text.contains("does not answer")))
            .then_some((status, out, err))
        })
    }

    /// Returns the instances of `berth status --json`.
    #[track_caller]
    pub(super) fn instances(&self) -> Vec<serde_json::Value> {
        let mut all: serde_json::Value =
            serde_json::from_str(&self.ask(&["status", "--json"]).1).unwrap();
        serde_json::from_value(all["instances"].take()).unwrap()
    }
}
