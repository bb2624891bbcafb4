//! Follows objects: reads a list, then watches, and lists again when the watch breaks.

use crate::client::{Ask, Client, Error};
use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

/// After this many seconds the apiserver ends a watch, and another continues it: kube-apiserver's own
/// informers take 5 to 10 minutes.
const WATCH_SECONDS: u64 = 300;

/// Longest silence of a watch. The apiserver sends a bookmark once a minute.
const SILENCE: Duration = Duration::from_secs(90);

/// First and longest pause after a failure, as client-go's reflector has them.
const PAUSES: (Duration, Duration) = (Duration::from_millis(800), Duration::from_secs(30));

/// A watch that lasted this long has not failed.
const LASTED: Duration = Duration::from_secs(10);

/// A watch that ends this soon and without an event has failed, as in client-go's reflector.
const SHORT: Duration = Duration::from_secs(1);

/// Longest event. Etcd keeps no object above 1.5 MB.
const EVENT_LIMIT: usize = 4 << 20;

/// The objects of a list, by name.
pub type Objects = BTreeMap<String, Value>;

/// Follows the objects of a list for as long as it is polled; publishes all of them after each change, and each failure, after
/// which it lists again, with growing pauses. `list` is a path with a query; `client` makes the client of the next request.
pub async fn follow<C: Future<Output = Result<Client, Error>>>(
    client: impl Fn() -> C,
    list: &str,
    mut publish: impl FnMut(Result<&Objects, &Error>),
) {
    let mut pauses = pauses();
    loop {
        let began = Instant::now();
        let Err(error) = list_and_watch(&client, list, &mut publish).await;
        publish(Err(&error));
        if began.elapsed() >= LASTED {
            pauses = self::pauses();
        }
        sleep(pauses.next().unwrap_or(PAUSES.1)).await;
    }
}

/// Pauses that double, with jitter up to twice as long, so that not all shims of a cluster retry at once.
#[must_use]
pub fn pauses() -> ExponentialBackoff {
    let builder = ExponentialBuilder::default().with_min_delay(PAUSES.0).with_max_delay(PAUSES.1);
    builder.with_jitter().without_max_times().build()
}

enum Never {}

async fn list_and_watch<C: Future<Output = Result<Client, Error>>>(
    client: &impl Fn() -> C,
    list: &str,
    publish: &mut impl FnMut(Result<&Objects, &Error>),
) -> Result<Never, Error> {
    let read = client().await?.get(list).await?;
    let mut version = read["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
    let items = read["items"].as_array().into_iter().flatten();
    let mut objects: Objects = items.filter_map(|item| Some((name(item)?, item.clone()))).collect();
    let mut published = false;
    loop {
        let path = format!(
            "{list}&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={version}"
        );
        let client = client().await?;
        let (began, mut any) = (Instant::now(), false);
        let mut watch = Watch::begin(&client, &path).await?;
        // Not before: a list that may be read but not watched is one lasting failure, not one that comes and goes.
        if !std::mem::replace(&mut published, true) {
            publish(Ok(&objects));
        }
        while let Some(events) = watch.next(&client).await? {
            let mut changed = false;
            any |= !events.is_empty();
            for Event { kind, object } in events {
                if kind == EventKind::Error {
                    // 410: the last resourceVersion is too old.
                    let code =
                        object["code"].as_u64().and_then(|code| StatusCode::from_u16(code.try_into().ok()?).ok());
                    let status = code.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                    return Err(client.refused(status, Method::GET, &path, object.to_string().as_bytes()));
                }
                if let Some(seen) = object["metadata"]["resourceVersion"].as_str() {
                    seen.clone_into(&mut version);
                }
                let Some(name) = name(&object).filter(|_| kind != EventKind::Bookmark) else { continue };
                changed = true;
                if kind == EventKind::Deleted {
                    objects.remove(&name);
                } else {
                    objects.insert(name, object);
                }
            }
            if changed {
                publish(Ok(&objects));
            }
        }
        if !any && began.elapsed() < SHORT {
            return Err(client.unreachable("a watch ended at once".into()));
        }
    }
}

fn name(object: &Value) -> Option<String> {
    object["metadata"]["name"].as_str().map(ToOwned::to_owned)
}

/// A streamed response.
struct Watch {
    body: Incoming,
    events: Events,
    _connection: AbortOnDropHandle<Result<(), hyper::Error>>,
}

impl Watch {
    async fn begin(client: &Client, path: &str) -> Result<Self, Error> {
        let begin = async {
            let request = client.request(Ask::get(path)).await?;
            let stream = TokioIo::new(client.connect().await?);
            let no_http = |error| format!("no HTTP answer: {error}");
            let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.map_err(no_http)?;
            let connection = AbortOnDropHandle::new(tokio::spawn(connection));
            Ok((sender.send_request(request).await.map_err(no_http)?, connection))
        };
        let (response, connection) = client.in_time(begin).await?;
        let status = response.status();
        let body = response.into_body();
        if !status.is_success() {
            let body = Limited::new(body, EVENT_LIMIT).collect();
            let body = client.in_time(async { body.await.map_err(|error| error.to_string()) }).await?;
            return Err(client.refused(status, Method::GET, path, &body.to_bytes()));
        }
        Ok(Self { body, events: Events::default(), _connection: connection })
    }

    /// The next events; `None` where the apiserver ended the watch in good order.
    async fn next(&mut self, client: &Client) -> Result<Option<Vec<Event>>, Error> {
        let silent = |_| client.unreachable(format!("a watch was silent for {} s", SILENCE.as_secs()));
        match timeout(SILENCE, self.body.frame()).await.map_err(silent)? {
            None => Ok(None),
            Some(Err(error)) => Err(client.unreachable(format!("a watch broke off: {error}"))),
            Some(Ok(frame)) => {
                let bytes = frame.into_data().unwrap_or_default();
                self.events.push(&bytes).map(Some).map_err(|why| client.unreachable(why))
            }
        }
    }
}

/// What an event of a watch is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum EventKind {
    Added,
    Modified,
    Deleted,
    /// Nothing of what is watched changed up to a version.
    Bookmark,
    /// The watch cannot go on.
    Error,
}

/// An event of a watch.
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
pub struct Event {
    #[serde(rename = "type")]
    pub kind: EventKind,
    pub object: Value,
}

/// Understands the bytes of a watch as they come: a JSON document a line.
#[derive(Debug, Default)]
pub struct Events {
    rest: Vec<u8>,
}

impl Events {
    /// Takes bytes; gives the events that they complete.
    ///
    /// # Errors
    /// They are no events, or one that is too long.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Event>, String> {
        let mut events = Vec::new();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.rest.len() + part.len() > EVENT_LIMIT {
                return Err(format!("an event of a watch is longer than {EVENT_LIMIT} bytes"));
            }
            self.rest.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let event = serde_json::from_slice(&self.rest);
                self.rest.clear();
                events.push(event.map_err(|error| format!("a watch sent no event: {error}"))?);
            }
        }
        Ok(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TWO: &str =
        "{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"name\":\"a\"}}}\n{\"type\":\"BOOKMARK\",\"object\":{}}\n";

    proptest! {
        #[test]
        fn events_are_the_same_however_they_are_cut(cuts in prop::collection::vec(0..TWO.len(), 0..8)) {
            let mut cuts = cuts;
            cuts.extend([0, TWO.len()]);
            cuts.sort_unstable();
            let (mut events, mut seen) = (Events::default(), Vec::new());
            for pair in cuts.windows(2) {
                seen.extend(events.push(&TWO.as_bytes()[pair[0]..pair[1]]).unwrap());
            }
            let kinds: Vec<_> = seen.iter().map(|event| event.kind).collect();
            prop_assert_eq!(kinds, [EventKind::Added, EventKind::Bookmark]);
        }
    }

    #[test]
    fn what_is_no_event_and_what_is_endless_are_errors() {
        assert!(Events::default().push(b"{}\n").unwrap_err().starts_with("a watch sent no event"));
        assert!(Events::default().push(b"\n").is_err());
        let mut events = Events::default();
        let part = vec![b' '; 1 << 20];
        assert!((0..4).all(|_| events.push(&part).is_ok()));
        assert!(events.push(&part).unwrap_err().contains("longer than"));
    }
}
