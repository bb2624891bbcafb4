//! `berth ready` and `berth live`: the exec probes of an apiserver's container.

use super::{Exit, block_on, mistaken, unavailable};
use crate::backend::health::Seen;
use crate::backend::probe::Probe;
use crate::cli::{AskArgs, LiveArgs};
use crate::config::{Checks, Mistakes, check_probe};
use crate::control;
use crate::control::wire::Status;
use crate::instance::InstanceId;
use crate::node::{Known, Node};
use std::net::SocketAddr;

pub(super) fn ready(args: &AskArgs) -> anyhow::Result<Exit> {
    let known = match find(args) {
        Ok(known) => known,
        Err(exit) => return Ok(exit),
    };
    let ready = block_on(async { status(&known).await?.ready() })?;
    Ok(answer(ready))
}

pub(super) fn live(args: &LiveArgs) -> anyhow::Result<Exit> {
    let mut checks = Checks::default();
    let config = check_probe(&args.probe, "/livez", false, &mut checks);
    let config = match checks.finish(config) {
        Ok(config) => config,
        Err(mistakes) => return Ok(mistaken(&mistakes)),
    };
    let known = match find(&args.ask) {
        Ok(known) => known,
        Err(exit) => return Ok(exit),
    };
    // The apiserver is asked itself: a shim that hangs must not make the kubelet restart it.
    let live = block_on(async {
        let address = address(&known).await?;
        let answer = Probe::new(config).ready(address).await;
        if answer.seen == Seen::Pass { Ok(()) } else { Err(answer.words) }
    })?;
    Ok(answer(live))
}

fn answer(result: Result<(), String>) -> Exit {
    match result {
        Ok(()) => Exit::Ok,
        Err(why) => {
            println!("{why}");
            Exit::No
        }
    }
}

/// The instance that was asked for, or the only one there.
fn find(args: &AskArgs) -> Result<Known, Exit> {
    let id = args.instance.as_deref().map(InstanceId::parse).transpose();
    let id = id.map_err(|error| mistaken(&Mistakes(vec![format!("--instance: {error}")])))?;
    let node = Node::look(args.run_dir.run_dir.as_deref()).map_err(|error| unavailable(&error))?;
    let asked = |known: &Known| id.as_ref().is_none_or(|id| known.id == *id);
    let mut known: Vec<_> = node.instances.into_iter().filter(asked).collect();
    // What an earlier instance left behind is not meant where one runs.
    let runs = |known: &Known| known.socket || known.record.as_ref().is_some_and(|listed| listed.alive);
    if known.iter().any(runs) {
        known.retain(runs);
    }
    match (known.pop(), known.is_empty()) {
        (Some(known), true) => Ok(known),
        (Some(last), false) => {
            known.push(last);
            let names: Vec<_> =
                known.iter().map(|known| format!("{} at {}", known.id, known.berth.address())).collect();
            let mend = if id.is_some() { "give each berth its own --run-dir" } else { "name one with --instance" };
            Err(mistaken(&Mistakes(vec![format!("several instances are there ({}): {mend}", names.join(", "))])))
        }
        (None, _) => {
            match id {
                Some(id) => println!("instance {id} is not there: no record and no shim in {}", node.path.display()),
                None => println!("no instance is there: no record and no shim in {}", node.path.display()),
            }
            Err(Exit::No)
        }
    }
}

async fn status(known: &Known) -> Result<Status, String> {
    let path = known.berth.socket_path(&known.id).map_err(|error| error.to_string())?;
    let status = control::status(&path).await;
    status.map(|status| *status).map_err(|why| format!("the shim of instance {}: {why}", known.id))
}

async fn address(known: &Known) -> Result<SocketAddr, String> {
    match &known.record {
        Some(listed) if listed.alive => Ok(listed.record.address),
        Some(_) => Err(format!("instance {} is not running: its process ended", known.id)),
        // `berth serve --backend`: only the shim knows.
        None => {
            let own = status(known).await?.instances.into_iter().find(|instance| instance.own);
            own.map(|own| own.address).ok_or_else(|| format!("instance {} is not running", known.id))
        }
    }
}
