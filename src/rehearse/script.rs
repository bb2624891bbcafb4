//! The script of one run: start old, load, start new, wait until it joined, stop old, and so on; then
//! end the load and stop what is left.

use super::apiserver::Instance;
use super::hub;
use super::load::{Load, Target};
use super::plan::{Plan, Via};
use super::progress::Progress;
use super::record::{Recorder, Stamp};
use super::stage::{Error, Stage};
use super::store::Store;
use super::verdict::{NEW, OLD};
use std::sync::Arc;
use tokio::net::UnixListener;
use tokio::time::{Instant, sleep};

/// Versions that stand-ins report, so that a look at `/version` tells them apart.
const VERSIONS: [&str; 2] = ["v1.33.0", "v1.34.0"];

/// Plays it. What clients and instances did is in the record afterwards.
pub async fn play(plan: &Plan, stage: &mut Stage, recorder: &Arc<Recorder>) -> Result<(), Error> {
    let path = stage.setting.store();
    let socket = UnixListener::bind(&path).map_err(|e| {
        Error::Unavailable(format!("cannot make the socket {} (TMPDIR names another place): {e}", path.display()))
    })?;
    // Aborted with this future when it is dropped.
    let mut background = tokio::task::JoinSet::new();
    background.spawn(hub::serve(socket, Arc::new(Store::default()), Arc::clone(recorder)));
    let progress = Progress::new(recorder);
    let mut play = Play { plan, stage, recorder, progress: &progress };

    play.stage.open()?;
    let old = instance(plan, 0);
    play.start(&old).await?;
    play.joined(&old).await?;

    let load = &plan.load;
    play.say(&format!(
        "load: {} new connections a second, {} kept connections, {} watches, seed {}",
        load.rate, load.clients, load.watches, load.seed
    ));
    let target = Target::new(play.stage.setting.address, &play.stage.setting.certs)
        .map_err(|e| Error::Unavailable(format!("cannot use the certificates just made: {e}")))?;
    let load = Load::start(load, &target, &play.stage.instances(), recorder).await.map_err(Error::Unavailable)?;
    recorder.note(|r| r.began = Some(Stamp::now()));
    sleep(plan.timing.before).await;

    let mut old = old;
    for upgrade in 1..=plan.upgrades {
        let new = instance(plan, upgrade);
        play.upgrade(&old, &new).await?;
        sleep(plan.timing.after).await;
        old = new;
    }

    recorder.note(|r| r.over = Some(Stamp::now()));
    if let Err(broken) = load.finish().await {
        recorder.note(|r| r.troubles.push(broken));
    }
    play.say(&format!("load is over, stop {}", old.name));
    play.stop(&old).await;
    Ok(())
}

/// The instance that serves after so many upgrades.
fn instance(plan: &Plan, upgrades: u32) -> Instance {
    let new = !upgrades.is_multiple_of(2);
    let (side, apiserver) = if new { (NEW, &plan.new) } else { (OLD, &plan.old) };
    let name = if upgrades < 2 { side.to_owned() } else { format!("{side}-{}", upgrades / 2 + 1) };
    Instance { name, apiserver: apiserver.clone(), version: VERSIONS[usize::from(new)], spoiled: Vec::new() }
}

/// What every step of the script has.
struct Play<'a> {
    plan: &'a Plan,
    stage: &'a mut Stage,
    recorder: &'a Recorder,
    progress: &'a Progress,
}

impl Play<'_> {
    fn say(&self, what: &str) {
        self.progress.say(what);
    }

    async fn upgrade(&mut self, old: &Instance, new: &Instance) -> Result<(), Error> {
        if self.stage.layout.via == Via::Direct {
            // The port is for one of them alone.
            self.say(&format!("SIGTERM to {}", old.name));
            self.stop(old).await;
            self.start(new).await?;
            return self.joined(new).await;
        }
        self.start(new).await?;
        self.joined(new).await?;
        sleep(self.plan.timing.together).await;
        self.say(&format!("stop {}", old.name));
        self.stop(old).await;
        Ok(())
    }

    async fn start(&mut self, instance: &Instance) -> Result<(), Error> {
        self.say(&format!("start {} behind {}", instance.name, self.stage.setting.address));
        self.stage.start(instance, true).await
    }

    async fn joined(&mut self, instance: &Instance) -> Result<(), Error> {
        let took = self.stage.joined(&instance.name, self.plan.timing.ready_within).await?;
        self.say(&format!("{} is ready and joined after {took:.1?}", instance.name));
        Ok(())
    }

    /// Stops an instance; what is not as it should be goes into the record.
    async fn stop(&mut self, instance: &Instance) {
        let (name, began) = (&instance.name, Instant::now());
        let stopped = self.stage.stop(name, self.plan.timing.grace).await;
        let trouble = match stopped.status {
            _ if !stopped.killed.is_empty() => {
                Some(format!("{name} was still there {:?} after SIGTERM and had to be killed", self.plan.timing.grace))
            }
            Some(status) if stopped.early => Some(format!("{name} ended before it was told to ({status})")),
            Some(status) if !status.success() => Some(format!("{name} ended with {status}")),
            _ => None,
        };
        match trouble {
            None => self.say(&format!("{name} is gone after {:.1?}", began.elapsed())),
            Some(trouble) => {
                let log = self.stage.log(name).await;
                self.say(&format!("{trouble}; its last lines of log:\n{log}"));
                self.recorder.note(|r| r.troubles.push(trouble));
            }
        }
    }
}
