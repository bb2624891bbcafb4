//! One file a subcommand: from checked options to an exit status.
//!
//! Here is what the subcommands share: exit statuses, the log, and the dispatch.

use crate::cli::{Cli, Command};
use crate::log;
use anyhow::Context;
use berth_options::PodCommand;
use berth_options::check::Mistakes;
use berth_options::log::{LogArgs, LogFormat, LogLevel};
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

mod ask;
#[cfg(feature = "operate")]
mod bridge;
mod copy_self;
#[cfg(feature = "operate")]
mod doctor;
mod exec;
mod generate;
#[cfg(feature = "operate")]
mod grant;
#[cfg(feature = "operate")]
mod inject;
#[cfg(feature = "rehearse")]
mod rehearse;
mod run;
mod serve;
mod status;
#[cfg(feature = "operate")]
mod upgrade;

/// How a command ended, as an exit status after sysexits(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// 0: done.
    Ok,
    /// 1: the answer is no: not ready, not alive, something was lost.
    No,
    /// 64 (EX_USAGE): wrong command line or configuration; nothing was started.
    Usage,
    /// 69 (EX_UNAVAILABLE): a port or file that is needed cannot be had.
    Unavailable,
    /// 70 (EX_SOFTWARE): a bug in berth.
    Bug,
    /// 75 (EX_TEMPFAIL): neither done nor undone, and what to do is said; or neither yes nor no.
    Again,
    /// The exit status of the child.
    Child(u8),
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Ok => 0,
            Exit::No => 1,
            Exit::Usage => 64,
            Exit::Unavailable => 69,
            Exit::Bug => 70,
            Exit::Again => 75,
            Exit::Child(status) => status,
        })
    }
}

/// Prints all that is wrong with a command line.
fn mistaken(mistakes: &Mistakes) -> Exit {
    for mistake in &mistakes.0 {
        eprintln!("berth: {mistake}");
    }
    Exit::Usage
}

/// Prints why something cannot be had.
fn unavailable(error: &dyn std::fmt::Display) -> Exit {
    eprintln!("berth: {error}");
    Exit::Unavailable
}

/// Prints why a manifest cannot be read, or that what is there is none.
#[cfg(feature = "operate")]
fn unread(error: &berth_operate::manifest::file::FileError) -> Exit {
    if error.is_content() { mistaken(&Mistakes(vec![error.to_string()])) } else { unavailable(error) }
}

/// Runs the control plane: on this thread, which the children of `berth run` follow into death.
fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    Ok(runtime.block_on(future))
}

/// Sets up the log on standard error. Does nothing the second time. `relays`: nothing may wait for whoever reads it.
fn init_log(args: &LogArgs, relays: bool) -> Option<log::Flush> {
    let level = match args.log_level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let (writer, flush) = match relays.then(log::Lines::to_stderr) {
        Some(Ok((lines, flush))) => (BoxMakeWriter::new(lines), Some(flush)),
        // What a log is for is said without a thread, too.
        Some(Err(_)) | None => (BoxMakeWriter::new(std::io::stderr), None),
    };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(writer);
    let _ = match args.log_format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => {
            use std::io::IsTerminal;
            let color = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
            builder.with_target(false).with_ansi(color).try_init()
        }
    };
    flush
}

/// Runs a subcommand. Errors are printed here, once, with their causes.
#[must_use]
pub fn dispatch(cli: Cli) -> ExitCode {
    let _flush = init_log(&cli.log, matches!(cli.command, Command::InPod(PodCommand::Serve(_) | PodCommand::Run(_))));
    let result = match cli.command {
        Command::InPod(PodCommand::Serve(args)) => serve::run(&args),
        Command::InPod(PodCommand::Exec(args)) => exec::run(&args),
        Command::InPod(PodCommand::Run(args)) => run::run(&args, &cli.log),
        Command::InPod(PodCommand::Ready(args)) => ask::ready(&args),
        Command::InPod(PodCommand::Live(args)) => ask::live(&args),
        Command::InPod(PodCommand::Drain(args)) => ask::drain(&args),
        Command::Status(args) => status::run(&args),
        #[cfg(feature = "operate")]
        Command::Inject(args) => inject::inject(&args),
        #[cfg(feature = "operate")]
        Command::Eject(args) => inject::eject(&args),
        #[cfg(feature = "operate")]
        Command::Doctor(args) => doctor::run(&args),
        #[cfg(feature = "operate")]
        Command::Upgrade(args) => upgrade::run(&args),
        #[cfg(feature = "operate")]
        Command::Bridge(args) => bridge::run(&args),
        #[cfg(feature = "operate")]
        Command::Grant(args) => grant::run(&args),
        Command::InPod(PodCommand::CopySelf(args)) => copy_self::run(&args),
        #[cfg(feature = "rehearse")]
        Command::Rehearse(args) => rehearse::run(&args),
        #[cfg(feature = "rehearse")]
        Command::StandIn(args) => rehearse::stand_in(&args),
        Command::Generate(args) => generate::run(&args),
    };
    let exit = result.unwrap_or_else(|error| {
        eprintln!("berth: {error:#} (this should not happen: please report it)");
        Exit::Bug
    });
    exit.into()
}
