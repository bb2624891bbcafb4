//! Runs the subcommands. Each has a file, which turns its options into an exit status.
//!
//! This file has the common parts of the subcommands: exit statuses, the log, and the dispatch.

use crate::cli::{Cli, Command};
use crate::log;
use anyhow::Context;
use berth_options::PodCommand;
use berth_options::check::Mistakes;
use berth_options::log::{LogArgs, LogFormat, LogLevel};
use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue};
use serde::Serialize;
use std::fmt::{self, Display};
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

mod ask;
#[cfg(feature = "operate")]
mod bridge;
mod copy_self;
#[cfg(feature = "operate")]
mod doctor;
mod exec;
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

/// Result of a command. Each variant is an exit status, most of them from sysexits(3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// 0: done.
    Ok,
    /// 1: the answer is negative: not ready, not alive, requests were lost.
    No,
    /// 64 (EX_USAGE): wrong command line or configuration; nothing was started.
    Usage,
    /// 69 (EX_UNAVAILABLE): a required port or file is not available.
    Unavailable,
    /// 70 (EX_SOFTWARE): a bug in berth.
    Bug,
    /// 71 (EX_OSERR): this machine was too busy for a result.
    Busy,
    /// 74 (EX_IOERR): standard output cannot be written.
    Output,
    /// 75 (EX_TEMPFAIL): a change was begun and neither completed nor undone, and the next step is
    /// printed. Or the answer is neither yes nor no.
    Again,
    /// The exit status of the program that berth ran as its child.
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
            Exit::Busy => 71,
            Exit::Output => 74,
            Exit::Again => 75,
            Exit::Child(status) => status,
        })
    }
}

/// Prints a line on standard error. Ignores errors of the write, for example of a closed pipe, on
/// which `eprintln!` would panic.
fn print_stderr(line: impl Display) {
    let _ = writeln!(
        io::stderr(),
        "berth: {}",
        berth_os::strip_error_numbers(line.to_string())
    );
}

/// Writes the result of a command to standard output.
fn print(text: &str) -> anyhow::Result<Exit> {
    let mut out = io::stdout().lock();
    check_printed(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Formats a JSON document with a newline at its end.
fn format_json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value).context("cannot write JSON")? + "\n")
}

/// Formats a list of steps, each on a line with its number.
#[cfg(feature = "operate")]
fn format_numbered_steps(steps: &[String]) -> String {
    steps
        .iter()
        .enumerate()
        .map(|(at, step)| format!("{}  {step}\n", at + 1))
        .collect()
}

/// Checks the result of a write to standard output. A pipe without a reader is no error (`berth
/// status | head`).
fn check_printed(result: io::Result<()>) -> anyhow::Result<Exit> {
    match result {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let why = format!(
                "cannot write to standard output (free space there, or redirect it): {error}"
            );
            Err(CommandError {
                exit: Exit::Output,
                why: vec![why],
            }
            .into())
        }
        _ => Ok(Exit::Ok),
    }
}

/// Reason why a command ends early, other than a bug in berth: lines for its user, and the exit
/// status.
#[derive(Debug)]
struct CommandError {
    exit: Exit,
    why: Vec<String>,
}

impl std::error::Error for CommandError {}

impl Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why.join("; "))
    }
}

/// Makes the error for a wrong command line (exit status 64).
fn usage_error(mistakes: Mistakes) -> anyhow::Error {
    CommandError {
        exit: Exit::Usage,
        why: mistakes.0,
    }
    .into()
}

/// A missing requirement.
fn unavailable_error(error: impl Display) -> anyhow::Error {
    CommandError {
        exit: Exit::Unavailable,
        why: vec![error.to_string()],
    }
    .into()
}

#[cfg(feature = "operate")]
fn refusal_error(refusal: impl Into<berth_manifest::report::Refusal>) -> anyhow::Error {
    use berth_manifest::report::Refusal;
    let (exit, why) = match refusal.into() {
        Refusal::Usage(mistakes) => return usage_error(mistakes),
        Refusal::Unavailable(errors) => (Exit::Unavailable, errors),
        Refusal::Errors => (Exit::No, Vec::new()),
    };
    CommandError { exit, why }.into()
}

/// Returns the exit status for a child that has ended. As in a shell, the status is 128 plus the
/// signal's number if a signal ended the child.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(70);
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// Runs a future on the calling thread, and on no other: a child of `berth run` gets a signal when
/// the thread that started it ends.
fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("no runtime")?;
    let result = runtime.block_on(future);
    // A thread may still wait for a disk. It must not keep this process from ending.
    runtime.shutdown_background();
    Ok(result)
}

/// Sets up the log on standard error. If it is set up already, does nothing. For a command that
/// relays (`relays`), writing a line never blocks.
fn init_log(args: &LogArgs, relays: bool) -> Option<log::FlushGuard> {
    let level = match args.log_level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    let (writer, flush) = match relays.then(log::LineWriter::to_stderr) {
        Some(Ok((lines, flush))) => (BoxMakeWriter::new(lines), Some(flush)),
        // For a command that does not relay, and if the writing thread cannot be started, write
        // lines directly.
        Some(Err(_)) | None => (BoxMakeWriter::new(io::stderr), None),
    };
    // Turn off the subscriber's own message about a failed write: it would panic if standard error
    // is closed.
    let builder = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(writer)
        .log_internal_errors(false);
    let _ = match args.log_format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => {
            use std::io::IsTerminal;
            let color = io::stderr().is_terminal()
                && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
            builder.with_target(false).with_ansi(color).try_init()
        }
    };
    flush
}

/// Runs a subcommand. If it fails, prints the error once, with all its causes.
pub fn dispatch(cli: Cli) -> ExitCode {
    let _flush = init_log(
        &cli.log,
        matches!(
            cli.command,
            Command::InPod(PodCommand::Serve(_) | PodCommand::Run(_))
        ),
    );
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
        Command::Completions { shell } => print_completions(shell),
        Command::Version => print(&Cli::command().render_version()),
    };
    exit_code_of(result)
}

fn print_completions(shell: clap_complete::Shell) -> anyhow::Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "berth", &mut script);
    print(&String::from_utf8(script)?)
}

/// Prints what clap has to say instead of running a subcommand: a mistake in the command line, the
/// help, or the version.
pub fn print_clap_message(mut error: clap::Error) -> ExitCode {
    if let Some(suggestion) = suggest_command(&error) {
        // clap suggests the most similar word, which is wrong here: berth knows the right command.
        let _ = (
            error.remove(ContextKind::SuggestedSubcommand),
            error.remove(ContextKind::SuggestedArg),
        );
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(vec![suggestion.into()]),
        );
    } else if let Some(ContextValue::StyledStrs(mut suggestions)) =
        error.remove(ContextKind::Suggested)
    {
        // Drop clap's advice "to pass … as a value": nobody means a misspelled option or command as
        // a value.
        suggestions.retain(|suggestion| !suggestion.to_string().starts_with("to pass "));
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(suggestions),
        );
    }
    let result = error.print().and_then(|()| io::stdout().flush());
    if error.use_stderr() {
        Exit::Usage.into()
    } else {
        exit_code_of(check_printed(result))
    }
}

/// Words that other tools have for a command or an option, and that users may try. An entry has the
/// subcommand of berth before the words, the words, and the right command line.
#[cfg(feature = "operate")]
const OTHER_TOOLS_WORDS: [(&str, &[&str], &str); 11] = [
    ("", &["install"], "berth inject --image IMAGE"),
    ("", &["uninstall", "remove"], "berth eject"),
    (
        "",
        &["rollback"],
        "berth upgrade FILE, with the previous manifest; under a bridge: berth bridge restore",
    ),
    (
        "",
        &["start", "stop", "end", "restore"],
        "berth bridge --help",
    ),
    ("", &["check"], "berth doctor"),
    (
        "",
        &["plan"],
        "berth upgrade FILE --dry-run; for a bridge: berth bridge --dry-run",
    ),
    (
        "",
        &["metrics"],
        "a shim serves its metrics at /metrics of its --admin address (docs/monitoring.md)",
    ),
    ("bridge", &["stop", "off"], "berth bridge end"),
    (
        "upgrade",
        &["--manifest"],
        "give the new manifest without an option: berth upgrade FILE",
    ),
    (
        "status",
        &["--all", "-A"],
        "berth status shows every berth of this node; for other nodes see docs/monitoring.md",
    ),
    ("status", &["-w", "--watch"], "watch berth status"),
];

/// Suggests the right command line for a word of [`OTHER_TOOLS_WORDS`].
#[cfg(feature = "operate")]
fn suggest_command(error: &clap::Error) -> Option<String> {
    let context = |kind| error.get(kind).map(ToString::to_string);
    let wrong =
        context(ContextKind::InvalidSubcommand).or_else(|| context(ContextKind::InvalidArg))?;
    let usage = context(ContextKind::Usage)?;
    let mut commands = usage
        .split_whitespace()
        .skip(2)
        .take_while(|word| word.starts_with(char::is_alphabetic));
    let (command, None) = (commands.next().unwrap_or_default(), commands.next()) else {
        return None;
    };
    if let Some((.., right)) = OTHER_TOOLS_WORDS
        .iter()
        .find(|(of, words, _)| *of == command && words.contains(&&*wrong))
    {
        return Some((*right).to_owned());
    }
    match command {
        "upgrade" if wrong == "--version" => Some(suggest_upgrade("VERSION")),
        "grant" if !wrong.starts_with('-') => Some(format!("berth grant --manifest {wrong}")),
        "upgrade" if is_version(&wrong) => Some(suggest_upgrade(&wrong)),
        _ if wrong.starts_with('-') => None,
        "bridge" if !<crate::cli::BridgeAction as clap::Subcommand>::has_subcommand(&wrong) => {
            let mut words: Vec<_> = std::env::args_os()
                .map(|word| word.to_string_lossy().into_owned())
                .collect();
            words.insert(words.iter().position(|word| *word == wrong)?, "--".into());
            Some(format!(
                "COMMAND goes after --: {}",
                shell_words::join(words)
            ))
        }
        _ => None,
    }
}

#[cfg(not(feature = "operate"))]
fn suggest_command(_: &clap::Error) -> Option<String> {
    None
}

#[cfg(feature = "operate")]
fn is_version(word: &str) -> bool {
    let mut numbers = word
        .trim_start_matches('v')
        .split('.')
        .map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(_)), Some(Ok(_))))
}

#[cfg(feature = "operate")]
fn suggest_upgrade(version: &str) -> String {
    format!(
        "give the new manifest, not a version: berth upgrade FILE; on a node without berth: \
         berth bridge -- kubeadm upgrade apply {version}"
    )
}

fn exit_code_of(result: anyhow::Result<Exit>) -> ExitCode {
    let exit = result.unwrap_or_else(|error| {
        if let Some(CommandError { exit, why }) = error.downcast_ref() {
            why.iter().for_each(print_stderr);
            return *exit;
        }
        print_stderr(format_args!(
            "{error:#} (this should not happen: please report it)"
        ));
        Exit::Bug
    });
    exit.into()
}
