//! Writes the man pages of berth and of each subcommand into a directory: for scripts/release.sh.

use clap::CommandFactory;

fn main() -> std::io::Result<()> {
    let directory = std::env::args_os().nth(1).expect("usage: man DIRECTORY");
    clap_mangen::generate_to(berth::cli::Cli::command(), directory)
}
