//! The client that writes the objects for watches and informers. The writer is no client under
//! test: it dials the instances directly and retries, so that at the end the exact writes are
//! known.
//!
//! The bookkeeping is simple, because every name is written only once. A create answered by 409 was
//! done by an earlier try, and a delete answered by 404 as well.

use super::dial::{Link, Target, limit_time};
use super::objects::{self, ALL_CONFIGMAPS, List, Request, Tag};
use super::timetable::protocol_of;
use super::{Client, Instances};
use crate::config::WRITE_INTERVAL;
use crate::record::event::Failure;
use hyper::StatusCode;
use hyper::body::Bytes;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch::Receiver;
use tokio::time::{Instant, MissedTickBehavior, timeout};

/// At every write with a multiple of `DELETE_EVERY`, the object written `DELETE_BEFORE` writes
/// earlier is deleted.
const DELETE_EVERY: u64 = 4;
const DELETE_BEFORE: u64 = 3;

/// Time limit of a try.
const TRY_TIMEOUT: Duration = Duration::from_secs(3);

/// Pause after a request was tried at all instances.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Time limit of all tries while the load begins or ends. In between there is no limit: without an
/// instance nothing can be written.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(20);

/// The expected state after the last write.
#[derive(Debug)]
pub(super) struct Goal {
    /// Number of the last write.
    pub(super) last: u64,
    /// Names of the rehearsal's objects. `None` if they could not be listed.
    pub(super) objects: Option<BTreeSet<String>>,
}

/// Acknowledged writes: names of objects that must exist at the end. Clones share the names.
#[derive(Debug, Clone, Default)]
pub(super) struct Ledger(Arc<Mutex<BTreeSet<String>>>);

impl Ledger {
    pub(super) fn add_name(&self, name: String) {
        self.lock().insert(name);
    }

    fn remove_name(&self, name: &str) {
        self.lock().remove(name);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Writer {
    client: Client,
    tag: Tag,
    instances: Receiver<Instances>,
    link: Option<Link>,
    dialled: u64,
    last: u64,
    /// Why the last try failed.
    why: String,
}

impl Writer {
    pub(super) fn new(client: Client, tag: Tag, instances: Receiver<Instances>) -> Self {
        Self {
            client,
            tag,
            instances,
            link: None,
            dialled: 0,
            last: 0,
            why: String::new(),
        }
    }

    /// Writes the objects that must exist before the load.
    pub(super) async fn write_stock(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + TOTAL_TIMEOUT;
        for request in self.tag.stock_requests() {
            let made = tokio::time::timeout_at(
                deadline,
                self.repeat_until_done(&request, StatusCode::CONFLICT),
            )
            .await;
            made.map_err(|_| format!("cannot write the objects of the rehearsal: {}", self.why))?;
        }
        Ok(())
    }

    /// Writes a numbered object every [`WRITE_INTERVAL`], from 1 on, and deletes some, until the
    /// load stops.
    pub(super) async fn run(mut self) -> Self {
        let mut ticks = tokio::time::interval(WRITE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let stop = self.client.stop.clone();
        while stop.run_until_cancelled(ticks.tick()).await.is_some() {
            let number = self.last + 1;
            let name = self.tag.written_name(number);
            // A stop of the load does not interrupt a write, since the outcome of an interrupted
            // write would be unknown.
            if !self
                .try_until_too_late(&objects::write_request(&name, number), StatusCode::CONFLICT)
                .await
            {
                break;
            }
            self.last = number;
            self.client.ledger.add_name(name);
            if number.is_multiple_of(DELETE_EVERY) {
                let name = self.tag.written_name(number - DELETE_BEFORE);
                self.client.ledger.remove_name(&name);
                if !self
                    .try_until_too_late(&objects::delete_request(&name), StatusCode::NOT_FOUND)
                    .await
                {
                    break;
                }
            }
        }
        self
    }

    /// Returns the objects that exist after the last write, and an objection if acknowledged
    /// objects are missing. To be called after the last write.
    pub(super) async fn find_goal(mut self) -> (Goal, Option<String>) {
        let Ok(list) = timeout(TOTAL_TIMEOUT, self.list_objects()).await else {
            let trouble = format!(
                "the objects could not be listed at the end, so the result of the writes is unknown: {}",
                self.why
            );
            return (
                Goal {
                    last: self.last,
                    objects: None,
                },
                Some(trouble),
            );
        };
        let lost = self.client.ledger.lock().difference(&list).count();
        let trouble = (lost > 0).then(|| {
            format!("{lost} objects are missing although the apiserver acknowledged their creation")
        });
        (
            Goal {
                last: self.last,
                objects: Some(list),
            },
            trouble,
        )
    }

    /// Like [`Writer::repeat_until_done`], with a time limit of [`TOTAL_TIMEOUT`] after the stop of
    /// the load. Returns false if the request was not done by then.
    async fn try_until_too_late(&mut self, request: &Request, already: StatusCode) -> bool {
        let stop = self.client.stop.clone();
        let too_late = async {
            stop.cancelled().await;
            tokio::time::sleep(TOTAL_TIMEOUT).await;
        };
        tokio::select! {
            () = self.repeat_until_done(request, already) => true,
            () = too_late => false,
        }
    }

    /// Repeats a request until an instance has done it, or answers with the status `already`: then
    /// an earlier try has done it.
    async fn repeat_until_done(&mut self, request: &Request, already: StatusCode) {
        loop {
            match self.send_to_any_instance(request).await {
                Ok((status, _)) if status.is_success() || status == already => return,
                Ok((status, body)) => {
                    self.why = format!(
                        "{} {}: {status} {}",
                        request.method,
                        request.path,
                        String::from_utf8_lossy(&body)
                    );
                }
                Err(why) => self.why = format!("{} {}: {why}", request.method, request.path),
            }
            self.link = None;
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// The names of the rehearsal's objects, as listed.
    async fn list_objects(&mut self) -> BTreeSet<String> {
        loop {
            match self
                .send_to_any_instance(&objects::get_request(ALL_CONFIGMAPS.to_owned()))
                .await
            {
                Ok((StatusCode::OK, body)) => match serde_json::from_slice::<List<'_>>(&body) {
                    Ok(list) => {
                        let names = list
                            .items
                            .iter()
                            .map(|object| object.metadata.name.to_string());
                        return names
                            .filter(|name| self.tag.owns_object_name(name))
                            .collect();
                    }
                    Err(error) => self.why = error.to_string(),
                },
                Ok((status, _)) => self.why = status.to_string(),
                Err(why) => self.why = why.to_string(),
            }
            self.link = None;
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Sends a request over the open connection. If that fails, dials the instances in turn, and
    /// sends the request over the new connection, until an instance answers.
    async fn send_to_any_instance(
        &mut self,
        request: &Request,
    ) -> Result<(StatusCode, Bytes), Failure> {
        let mut last = Failure::Refused;
        if let Some(link) = &mut self.link {
            match limit_time(TRY_TIMEOUT, link.ask(request.clone())).await {
                Ok(answer) => return Ok(answer),
                Err(failure) => last = failure,
            }
        }
        self.link = None;
        let targets: Vec<Target> = self
            .client
            .target
            .instance_targets(&self.instances.borrow_and_update());
        for target in targets {
            self.dialled += 1;
            let sent = async {
                let mut link = limit_time(
                    TRY_TIMEOUT,
                    target.dial(protocol_of(1), format!("writer-{}", self.dialled)),
                )
                .await?;
                Ok((
                    limit_time(TRY_TIMEOUT, link.ask(request.clone())).await?,
                    link,
                ))
            };
            match sent.await {
                Ok((answer, link)) => {
                    self.link = Some(link);
                    return Ok(answer);
                }
                Err(failure) => last = failure,
            }
        }
        Err(last)
    }
}
