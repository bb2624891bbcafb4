//! A client that lists objects and then watches them, like client-go's reflector. When a watch has
//! ended, the follower watches over a new connection from the last known revision on, and lists
//! again if that revision is too old.

use super::dial::{self, Link};
use super::objects::{Event, List, Object, get_request};
use super::timetable::{Ask, protocol_of};
use super::writer::Goal;
use super::{Client, Due};
use crate::config::ANSWER_TIMEOUT;
use crate::record::event::{Answer, ConnectionKind, Failure, StreamKind};
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::Incoming;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::sync::watch::{Receiver, Sender as Sent};

/// Pause after a connection could not be opened. The next connection is not a retry: it counts as a
/// new attempt of the client.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Longest watch, in seconds: beyond any rehearsal. By default kube-apiserver ends a watch after
/// half an hour.
const MAX_WATCH_SECONDS: u32 = 24 * 60 * 60;

/// Longest line to assemble: the largest object with room to spare.
const MAX_LINE: usize = 4 << 20;

/// A client's use of lists and events: count them, or keep a copy.
pub(super) trait View {
    /// Takes all objects of a list.
    fn take_list(&mut self, objects: &[Object<'_>]);

    /// Takes an event of a watch about an object: not a bookmark, and no error.
    fn observe_event(&mut self, instance: &str, event: &Event<'_>);

    /// True if everything that was written has been seen.
    fn has_reached(&self, goal: &Goal) -> bool;
}

/// A client that lists and watches.
pub(super) struct Follower<V> {
    pub(super) client: Client,
    /// Prefix of the streams: `NAME-1`, `NAME-2` and so on.
    pub(super) name: String,
    pub(super) index: u64,
    /// The path to list and watch.
    pub(super) path: String,
    pub(super) view: V,
    /// Number of lists after the first list.
    pub(super) relists: u64,
    /// Number of 410 answers: the revision was too old for an instance.
    pub(super) expired: u64,
    listed: bool,
    opened: u64,
    /// The revision to continue from. `None` when a list is needed.
    revision: Option<String>,
    /// Notified of each list and event, to notice when no more arrive.
    progress: Sent<()>,
    /// Dropped when the first watch begins, which tells the load.
    pub(super) begun: Option<Sender<()>>,
}

impl<V: View> Follower<V> {
    pub(super) fn new(client: Client, kind: &str, index: u64, path: String, view: V) -> Self {
        let name = client.name(kind, index);
        Self {
            client,
            name,
            index,
            path,
            view,
            relists: 0,
            expired: 0,
            listed: false,
            opened: 0,
            revision: None,
            progress: Sent::new(()),
            begun: None,
        }
    }

    /// Follows until the load has stopped and the goal is reached, or until no list and no event
    /// has arrived for `catch_up`. Returns the goal.
    pub(super) async fn run(&mut self, mut goal: Receiver<Option<Arc<Goal>>>) -> Option<Arc<Goal>> {
        let mut goal_set = goal.clone();
        let (mut progress, recorder, catch_up) = (
            self.progress.subscribe(),
            Arc::clone(&self.client.recorder),
            self.client.catch_up,
        );
        let too_late = async {
            let _ = goal_set.wait_for(Option::is_some).await;
            // If the machine is so busy that clients were behind their timetable, the last writes
            // may be late by as much.
            let patience = catch_up + recorder.max_delay();
            while matches!(
                tokio::time::timeout(patience, progress.changed()).await,
                Ok(Ok(()))
            ) {}
        };
        tokio::select! {
            biased;
            () = self.follow_until_goal(&mut goal) => {}
            () = too_late => {}
        }
        goal.borrow().clone()
    }

    /// Returns when the goal is known and reached. A client of the control returns when its first
    /// stream has ended.
    async fn follow_until_goal(&mut self, goal: &mut Receiver<Option<Arc<Goal>>>) {
        loop {
            if self.client.control.is_some() && self.opened > 0 {
                return;
            }
            let Some((link, response)) = self.open_watch().await else {
                tokio::time::sleep(RETRY_PAUSE).await;
                continue;
            };
            self.begun = None;
            let mut lines = Lines {
                body: response.into_body(),
                rest: Vec::new(),
            };
            let (how, end_of_answer) = loop {
                let reached = goal
                    .borrow_and_update()
                    .as_ref()
                    .is_some_and(|goal| self.view.has_reached(goal));
                if reached {
                    return;
                }
                tokio::select! {
                    line = lines.next_line() => match line {
                        Ok(Some(line)) => self.observe_event(&link.instance, &line),
                        Ok(None) => break (Failure::Closed, true),
                        Err(how) => break (how, false),
                    },
                    // An error means that the goal will never be known. The caller limits the wait.
                    Ok(()) = goal.changed() => {}
                }
            };
            // An ERROR event is a regular end of a watch, and no loss.
            if self.revision.is_some() || !end_of_answer {
                self.client.record_end(link.describe_end(
                    StreamKind::Watch,
                    how,
                    true,
                    end_of_answer,
                ));
            }
        }
    }

    /// Opens a connection and a watch on it. Lists first if there is no revision to continue from.
    async fn open_watch(&mut self) -> Option<(Link, hyper::Response<Incoming>)> {
        self.opened += 1;
        let (stream, due) = (format!("{}-{}", self.name, self.opened), Due::now());
        let target = self.client.target.clone();
        let mut kind = ConnectionKind::New;
        let opened = dial::limit_time(ANSWER_TIMEOUT, async {
            let mut link = target.dial(protocol_of(self.index), stream.clone()).await?;
            let opened = self.list_and_begin_watch(&mut link, &mut kind, due).await;
            if let Err(failure) = &opened {
                // On a connection that answered before, the end is judged as the end of a stream.
                let what = if kind == ConnectionKind::New {
                    StreamKind::New
                } else {
                    StreamKind::Watch
                };
                let end = link.describe_end(what, failure.clone(), true, false);
                self.client.record_end(end);
            }
            Ok(opened?.map(|response| (link, response)))
        });
        match opened.await {
            Ok(opened) => opened,
            Err(failure) => {
                self.client.record_attempt(
                    kind,
                    Ask::List,
                    &stream,
                    due.stamp,
                    Answer::Failed(failure),
                );
                None
            }
        }
    }

    /// Begins a watch on a connection. `None` if the watch was refused.
    async fn list_and_begin_watch(
        &mut self,
        link: &mut Link,
        kind: &mut ConnectionKind,
        due: Due,
    ) -> Result<Option<hyper::Response<Incoming>>, Failure> {
        if self.revision.is_none() {
            let response = link.send_first(get_request(self.path.clone())).await?;
            let answer = link.to_answer(response.status());
            let good = matches!(answer, Answer::Good { .. });
            let body = dial::read_body(response.into_body()).await?;
            self.client
                .record_attempt(*kind, Ask::List, &link.stream, due.stamp, answer);
            *kind = ConnectionKind::Kept;
            if !good || !self.read_list(&body) {
                return Ok(None);
            }
        }
        let revision = self.revision.as_deref().unwrap_or_default();
        let path = format!(
            "{}?watch=1&allowWatchBookmarks=true&timeoutSeconds={MAX_WATCH_SECONDS}&resourceVersion={revision}",
            self.path
        );
        let response = link.send_first(get_request(path)).await?;
        // "410 Gone" (the revision is too old) counts as a good answer.
        let gone = response.status() == StatusCode::GONE;
        let status = if gone {
            StatusCode::OK
        } else {
            response.status()
        };
        let answer = link.to_answer(status);
        let good = matches!(answer, Answer::Good { .. }) && !gone;
        self.client
            .record_attempt(*kind, Ask::List, &link.stream, due.stamp, answer);
        if gone {
            self.expired += 1;
            self.revision = None;
        }
        Ok(good.then_some(response))
    }

    fn read_list(&mut self, body: &[u8]) -> bool {
        self.progress.send_replace(());
        let list: List<'_> = match serde_json::from_slice(body) {
            Ok(list) => list,
            Err(error) => {
                tracing::warn!(%error, name = self.name, "cannot read a list");
                return false;
            }
        };
        self.revision = Some(list.metadata.resource_version.into_owned());
        self.view.take_list(&list.items);
        self.relists += u64::from(self.listed);
        self.listed = true;
        true
    }

    fn observe_event(&mut self, instance: &str, line: &[u8]) {
        self.progress.send_replace(());
        let event = match serde_json::from_slice::<Event<'_>>(line) {
            Ok(event) if event.kind != "ERROR" => event,
            error => {
                tracing::debug!(?error, name = self.name, "the follower lists again");
                let gone = error.is_ok_and(|event| event.object.code == StatusCode::GONE);
                self.expired += u64::from(gone);
                self.revision = None;
                return;
            }
        };
        self.revision = Some(event.object.metadata.resource_version.clone().into_owned());
        if event.kind != "BOOKMARK" {
            self.view.observe_event(instance, &event);
        }
    }
}

/// The lines of a body.
struct Lines {
    body: Incoming,
    rest: Vec<u8>,
}

impl Lines {
    /// The next line. `None` if the body ended regularly. Cancel-safe: unread bytes stay in `rest`.
    async fn next_line(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        let mut looked_at = 0;
        loop {
            if let Some(end) = self.rest[looked_at..].iter().position(|&b| b == b'\n') {
                let tail = self.rest.split_off(looked_at + end + 1);
                return Ok(Some(std::mem::replace(&mut self.rest, tail)));
            }
            looked_at = self.rest.len();
            if looked_at > MAX_LINE {
                return Err(Failure::Http("an event is too long".into()));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self
                    .rest
                    .extend_from_slice(frame.data_ref().map_or(&[][..], |d| d)),
                Some(Err(error)) => return Err(dial::classify_http_error(&error)),
                None => return Ok(None),
            }
        }
    }
}
