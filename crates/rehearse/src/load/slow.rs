//! A client that reads a large answer slowly: what buffers it or waits for its client must not cut it.

use super::dial;
use super::objects::{self, LARGE};
use super::timetable::{Ask, Seed};
use super::{Client, Due, START};
use crate::event::{Answer, ConnectionKind, EventKind, Failure, Protocol, StreamKind};
use crate::plan::UNANSWERED;
use http_body_util::BodyExt;
use hyper::body::{Bytes, Incoming};
use std::time::Duration;

/// Bytes that it takes at once, and has room for.
const BUFFER: usize = 16 << 10;

/// Pause after an answer, and after a connection that could not be opened.
const PAUSE: Duration = Duration::from_millis(500);

/// Reads one answer after the other until the load stops, the last to its end; each on a connection of its own: of
/// HTTP/1.1, where what is not read stays in the sockets.
pub(super) async fn run(client: Client, seed: Seed, index: u64, bytes_a_second: u32) {
    let client = Client { target: client.target.receiving(BUFFER), ..client };
    let mut pause = seed.start(b's', index, START);
    let mut number = 0_u64;
    while client.stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
        number += 1;
        read(&client, format!("{}-{number}", client.name("slow", index)), bytes_a_second).await;
        pause = PAUSE;
    }
}

async fn read(client: &Client, stream: String, bytes_a_second: u32) {
    let due = Due::now();
    let opened = dial::within(UNANSWERED, async {
        let mut link = client.target.dial(Protocol::Http1, stream.clone()).await?;
        let response = link.first(objects::get(objects::maps(LARGE))).await?;
        Ok((link, response))
    });
    let (link, response) = match opened.await {
        Ok(opened) => opened,
        Err(failure) => {
            return client.attempt(ConnectionKind::New, Ask::List, &stream, due.stamp, Answer::Failed(failure));
        }
    };
    client.attempt(ConnectionKind::New, Ask::List, &stream, due.stamp, link.judge(response.status()));
    match slowly(response.into_body(), bytes_a_second).await {
        Ok(()) => client.recorder.add(&link.stream, EventKind::SlowRead),
        Err(how) => client.ended(link.end(StreamKind::Slow, how, true, false)),
    }
}

/// Reads a body to its end.
async fn slowly(mut body: Incoming, bytes_a_second: u32) -> Result<(), Failure> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| dial::http_failure(&e))?;
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        tokio::time::sleep(Duration::from_secs_f64(bytes as f64 / f64::from(bytes_a_second))).await;
    }
    Ok(())
}
