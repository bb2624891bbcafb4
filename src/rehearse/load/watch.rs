//! A watch as an informer does it: list, then watch from the list's revision; after an end, watch on
//! from the last revision that was seen, over a new connection.

use super::dial::{self, Link, Protocol, Unsent};
use super::sequence::{self, Sequence};
use super::{Client, Due};
use crate::rehearse::plan::UNANSWERED;
use crate::rehearse::record::{Answer, Failure, Kind, Stamp, StreamEnd, StreamId, WatchSum, What};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;
use std::time::Duration;
use tokio::sync::watch::Receiver;

const LIST: &str = "/api/v1/namespaces/rehearsal/configmaps";

/// Pause after an opening that failed. It is a new attempt of the same client, counted as one.
const PAUSE: Duration = Duration::from_secs(1);

/// How long the last writes may take to arrive.
const CATCH_UP: Duration = Duration::from_secs(5);

/// Longest line that is put together.
const MAX_LINE: usize = 1 << 20;

/// Watches until the load stops and the last write (`goal`) was seen or [`CATCH_UP`] is over.
pub(super) async fn run(client: Client, index: u64, mut goal: Receiver<Option<u64>>) {
    let sum = WatchSum { client: format!("watch-{index}"), ..WatchSum::default() };
    let mut watch = Watch { client, index, opened: 0, revision: None, sequence: Sequence::default(), sum };
    let mut told = goal.clone();
    let too_late = async {
        let _ = told.wait_for(Option::is_some).await;
        tokio::time::sleep(CATCH_UP).await;
    };
    tokio::select! {
        () = watch.go_on(&mut goal) => {}
        () = too_late => {}
    }
    let last = goal.borrow().unwrap_or(0);
    watch.sequence.finish(last);
    watch.sum.missed = watch.sequence.missed;
    watch.sum.doubled = watch.sequence.doubled;
    watch.client.recorder.note(|r| r.watches.push(watch.sum));
}

struct Watch {
    client: Client,
    index: u64,
    opened: u64,
    /// Where to go on; none before the first list, and after an error that asks for a new list.
    revision: Option<String>,
    sequence: Sequence,
    sum: WatchSum,
}

impl Watch {
    /// Returns when the goal is known and reached.
    async fn go_on(&mut self, goal: &mut Receiver<Option<u64>>) {
        loop {
            let Some((link, response)) = self.open().await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let instance = dial::instance(&response);
            let mut lines = Lines { body: response.into_body(), rest: Vec::new() };
            let how = loop {
                let reached = goal.borrow_and_update().is_some_and(|g| self.sequence.has(g));
                if reached {
                    return;
                }
                tokio::select! {
                    line = lines.next() => match line {
                        Ok(line) => self.saw(&instance, &line),
                        Err(how) => break how,
                    },
                    // An error means that it will never be known, which the caller bounds.
                    Ok(()) = goal.changed() => {}
                }
            };
            self.ended(link.stream.clone(), how);
        }
    }

    /// Opens a connection and a watch on it; lists before, if there is no revision to go on from.
    async fn open(&mut self) -> Option<(Link, hyper::Response<Incoming>)> {
        self.opened += 1;
        let (stream, due) = (format!("{}-{}", self.sum.client, self.opened), Due::now());
        let protocol = Protocol::of(self.index);
        let mut kind = Kind::New;
        let opened = tokio::time::timeout(UNANSWERED, async {
            let mut link = self.client.target.dial(protocol, stream.clone()).await?;
            if self.revision.is_none() {
                let response = answered(&mut link, LIST).await?;
                let answer = judge(&response);
                let good = matches!(answer, Answer::Good { .. });
                let body = dial::whole(response.into_body()).await?;
                self.client.attempt(kind, &stream, due.stamp, answer);
                kind = Kind::Kept;
                if !good || !self.listed(&body) {
                    return Ok(None);
                }
            }
            let revision = self.revision.as_deref().unwrap_or_default();
            let path = format!("{LIST}?watch=1&allowWatchBookmarks=true&resourceVersion={revision}");
            let response = answered(&mut link, &path).await?;
            Ok::<_, Failure>(Some((link, response)))
        });
        match opened.await {
            Ok(Ok(None)) => None,
            Ok(Ok(Some((link, response)))) => {
                let answer = judge(&response);
                let good = matches!(answer, Answer::Good { .. });
                self.client.attempt(kind, &stream, due.stamp, answer);
                good.then_some((link, response))
            }
            Ok(Err(failure)) => {
                // On a connection that answered before, the end is judged as a stream's.
                if kind == Kind::Kept {
                    self.ended(stream.clone(), failure.clone());
                }
                self.client.attempt(kind, &stream, due.stamp, Answer::Failed(failure));
                None
            }
            Err(_) => {
                self.client.attempt(kind, &stream, due.stamp, Answer::Failed(Failure::Unanswered));
                None
            }
        }
    }

    fn ended(&self, stream: StreamId, how: Failure) {
        let end = StreamEnd { stream, what: What::Watch, at: Stamp::now(), how, in_flight: true };
        self.client.recorder.note(|r| r.ends.push(end));
    }

    fn listed(&mut self, body: &[u8]) -> bool {
        let list: Value = serde_json::from_slice(body).unwrap_or_default();
        let Some(revision) = list["metadata"]["resourceVersion"].as_str() else {
            return false;
        };
        self.revision = Some(revision.to_owned());
        let numbers = list["items"].as_array().map(|items| items.iter().filter_map(sequence::number).max());
        let first = self.sum.events.is_empty();
        self.sequence.listed(numbers.flatten().unwrap_or(0), first);
        true
    }

    fn saw(&mut self, instance: &str, line: &[u8]) {
        let event: Value = serde_json::from_slice(line).unwrap_or_default();
        if event["type"] == "ERROR" || event["object"].is_null() {
            tracing::warn!(%event, "a watch was told an error; it lists again");
            self.revision = None;
            return;
        }
        if let Some(revision) = event["object"]["metadata"]["resourceVersion"].as_str() {
            self.revision = Some(revision.to_owned());
        }
        if event["type"] == "ADDED"
            && let Some(number) = sequence::number(&event["object"])
        {
            *self.sum.events.entry(instance.to_owned()).or_default() += 1;
            self.sequence.saw(number);
        }
    }
}

async fn answered(link: &mut Link, path: &str) -> Result<hyper::Response<Incoming>, Failure> {
    match link.get(path).await {
        Ok(response) => Ok(response),
        Err(Unsent::Died(failure)) => Err(failure),
        Err(Unsent::NeverSent) => Err(link.ended().await),
    }
}

fn judge(response: &hyper::Response<Incoming>) -> Answer {
    let (instance, status) = (dial::instance(response), response.status().as_u16());
    if status < 400 { Answer::Good { instance } } else { Answer::Bad { instance, status } }
}

/// The lines of a body.
struct Lines {
    body: Incoming,
    rest: Vec<u8>,
}

impl Lines {
    /// The next line. Cancel-safe: what was read stays in `rest`.
    async fn next(&mut self) -> Result<Vec<u8>, Failure> {
        loop {
            if let Some(end) = self.rest.iter().position(|&b| b == b'\n') {
                let tail = self.rest.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.rest, tail));
            }
            if self.rest.len() > MAX_LINE {
                return Err(Failure::Http("an event is too long".into()));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => self.rest.extend_from_slice(frame.data_ref().map_or(&[][..], |d| d)),
                Some(Err(error)) => return Err(dial::http_failure(&error)),
                None => return Err(Failure::Closed),
            }
        }
    }
}
