//! What programs begin with: a command line, a network of their own, and a process of their own to measure against.

use anyhow::{Context, Result};
use berth_os::netdevice::{self, Setting};
use berth_rehearse::netns;
use clap::Parser;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

/// Exit status of a wrong command line, and of something that cannot be had.
pub const EX_USAGE: u8 = 64;
/// See [`EX_USAGE`].
pub const EX_UNAVAILABLE: u8 = 69;

/// The command line.
///
/// # Errors
/// The exit status, of a wrong one or of a request for help; what there is to say is said.
pub fn command_line<T: Parser>() -> Result<T, ExitCode> {
    T::try_parse().map_err(|error| {
        let _ = error.print();
        ExitCode::from(if error.use_stderr() { EX_USAGE } else { 0 })
    })
}

/// Gives root a network namespace with this address, all addresses of whose network are the machine's own. To be called before
/// there are threads.
///
/// # Errors
/// There can be none.
pub fn enter_network(node: Ipv4Addr, netmask: Ipv4Addr) -> Result<()> {
    netns::enter_as_root(node)?;
    netdevice::set(netns::ALIAS, Setting::Netmask(netmask)).context("cannot give the clients addresses")
}

/// This program once more, which ends with it, and whose first line is to be its address ([`said_address`]).
///
/// # Errors
/// It is not known where this program is.
pub fn another<'a>(args: impl IntoIterator<Item = &'a str>) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(args).stdout(Stdio::piped());
    berth_os::process::die_with_parent(&mut command);
    Ok(command)
}

/// Where it listens, and what else it is to say.
///
/// # Errors
/// It said no address.
pub fn said_address(child: &mut Child) -> Result<(SocketAddr, BufReader<ChildStdout>)> {
    let mut said = BufReader::new(child.stdout.take().context("no pipe to what was started")?);
    let mut line = String::new();
    said.read_line(&mut line)?;
    Ok((line.trim().parse().context("what was started says no address")?, said))
}
