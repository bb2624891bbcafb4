//! `berth rehearse` and the stand-in apiserver that it starts.

use super::Exit;
use crate::cli::{RehearseArgs, StandInArgs};
use crate::rehearse::stand_in;

pub(super) fn run(_args: &RehearseArgs) -> anyhow::Result<Exit> {
    Ok(Exit::Bug)
}

pub(super) fn stand_in(args: &StandInArgs) -> anyhow::Result<Exit> {
    Ok(match stand_in::run(&args.flags) {
        0 => Exit::Ok,
        status => Exit::Child(status),
    })
}
