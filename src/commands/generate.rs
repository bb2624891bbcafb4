//! `berth generate`: man pages and shell completions from the clap types.

use super::{Exit, print, unavailable};
use crate::cli::{Cli, Generate, GenerateArgs};
use clap::CommandFactory;

pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<Exit> {
    match &args.what {
        Generate::Man { dir } => {
            let made = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir));
            made.map_err(|error| unavailable(format!("cannot write man pages to {}: {error}", dir.display())))?;
            Ok(Exit::Ok)
        }
        Generate::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "berth", &mut script);
            print(&String::from_utf8(script)?)
        }
    }
}
