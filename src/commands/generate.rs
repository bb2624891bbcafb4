//! `berth generate`: man pages and shell completions from the clap types.

use super::Exit;
use crate::cli::{Cli, Generate, GenerateArgs};
use anyhow::Context;
use clap::CommandFactory;
use std::io::Write;

pub(super) fn run(args: &GenerateArgs) -> anyhow::Result<Exit> {
    match &args.what {
        Generate::Man { dir } => {
            let made = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir));
            if let Err(error) = made {
                eprintln!("berth: cannot write man pages to {}: {error}", dir.display());
                return Ok(Exit::Unavailable);
            }
        }
        Generate::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "berth", &mut script);
            std::io::stdout().write_all(&script).context("cannot write to standard output")?;
        }
    }
    Ok(Exit::Ok)
}
