//! Programs of the node that are run for their output.

use std::io;
use std::process::{Output, Stdio};
use std::time::Duration;
use tokio::process::Command;

/// Runs a program, and kills it if it takes longer.
///
/// # Errors
/// It is not there, cannot be run, or takes longer.
pub(crate) async fn output(program: &str, arguments: &[&str], within: Duration) -> Result<Output, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    match tokio::time::timeout(within, output).await {
        Err(_) => Err(format!("{program} does not answer in {}", humantime::format_duration(within))),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => Err(format!("{program} is not there")),
        Ok(output) => output.map_err(|error| format!("{program}: {error}")),
    }
}
