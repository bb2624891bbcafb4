//! `berth rehearse` and the stand-in apiserver that it starts.

use super::Exit;
use crate::cli::{RehearseArgs, StandInArgs};

pub(super) fn run(_args: &RehearseArgs) -> anyhow::Result<Exit> {
    Ok(Exit::Bug)
}

pub(super) fn stand_in(_args: &StandInArgs) -> anyhow::Result<Exit> {
    Ok(Exit::Bug)
}
