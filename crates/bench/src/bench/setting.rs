//! The machine and how it was measured.

use crate::load::Pace;
use serde::Serialize;
use std::fs;
use std::time::SystemTime;

/// Where and how it was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Setting {
    pub(crate) date: String,
    pub(crate) command: String,
    processor: String,
    cores: usize,
    memory_mib: u64,
    kernel: String,
    pub(crate) rounds: usize,
    pub(crate) warm_up_seconds: f64,
    pub(crate) window_seconds: f64,
    short: bool,
}

impl Setting {
    pub(crate) fn new(command: &str, rounds: usize, pace: Pace, short: bool) -> Self {
        let field = |file: &str, name: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let line =
                text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':').map(str::trim));
            line.unwrap_or_default().to_owned()
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            command: command.to_owned(),
            processor: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: memory.split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024,
            kernel: kernel.trim().to_owned(),
            rounds,
            warm_up_seconds: pace.warm_up.as_secs_f64(),
            window_seconds: pace.window.as_secs_f64(),
            short,
        }
    }

    /// In one line.
    pub(crate) fn machine(&self) -> String {
        format!("{}, {} cores, {} MiB, Linux {}", self.processor, self.cores, self.memory_mib, self.kernel)
    }
}
