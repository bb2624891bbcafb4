//! A reconnect storm: clients that all connect at one moment, each from an address of its own, and
//! retry until they are served.
//!
//! As in client-go, each client gives a TLS handshake 10 s, and retries after a pause. A failed try
//! is not a loss, unlike a failed request of the timetables. The result tells which clients were
//! served in the end, and how soon.

use super::dial::{self, Target};
use super::objects::get_request;
use crate::config::ANSWER_TIMEOUT;
use crate::record::{
    event::{Answer, Failure, Protocol},
    stamp::Stamp,
};
use crate::testbed::address::storm_source;
use std::io;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Time limit of a TLS handshake, as in Go's `http.DefaultTransport`, which client-go follows.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between a failed try and the next.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Time after which a client that was not served gives up for good. The largest storm takes far
/// less, even on a small machine.
pub(crate) const GIVE_UP_AFTER: Duration = Duration::from_secs(120);

/// The path of the clients' requests. Requests for objects would be slower, because a simulated
/// apiserver has to ask the rehearsal for objects.
const VERSION_PATH: &str = "/version";

/// User agent of the storm's clients, for audit logs.
const USER_AGENT: &str = concat!("berth-rehearse-storm/", env!("CARGO_PKG_VERSION"));

/// The outcome of a try, and its time.
pub(crate) type Try = (Stamp, Answer);

/// A storm that goes on until the value is dropped.
pub(crate) struct StormClients {
    /// The tries of all clients. The channel closes when the last client has ended.
    pub(crate) tries: UnboundedReceiver<Try>,
    _goes_on: DropGuard,
}

impl StormClients {
    /// Starts the clients on a thread of their own: the timetables of other clients must not wait
    /// for the storm's handshakes.
    pub(crate) fn start(clients: u32, target: &Target) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (sender, tries) = unbounded_channel();
        let (target, over) = (target.clone(), CancellationToken::new());
        let token = over.clone();
        let run = async move {
            let until = Instant::now() + GIVE_UP_AFTER;
            for number in 0..clients {
                let target = target.with_source(
                    storm_source(target.address().ip(), number),
                    USER_AGENT.to_owned(),
                );
                tokio::spawn(run_client(target, number, until, sender.clone()));
            }
            drop(sender);
            token.cancelled().await;
        };
        std::thread::Builder::new()
            .name("storm".into())
            .spawn(move || runtime.block_on(run))?;
        Ok(Self {
            tries,
            _goes_on: over.drop_guard(),
        })
    }
}

async fn run_client(target: Target, number: u32, until: Instant, sender: UnboundedSender<Try>) {
    for again in 0_u32.. {
        let answer = ask_version(&target, format!("storm-{number}-{again}"))
            .await
            .unwrap_or_else(Answer::Failed);
        let served = matches!(answer, Answer::Good { .. });
        if sender.send((Stamp::now(), answer)).is_err()
            || served
            || Instant::now() + RETRY_PAUSE >= until
        {
            return;
        }
        sleep(RETRY_PAUSE).await;
    }
}

/// Connects and asks for the version. An instance answers at almost no cost, so the storm shows the
/// cost of connections.
async fn ask_version(target: &Target, stream: String) -> Result<Answer, Failure> {
    let mut link =
        dial::limit_time(HANDSHAKE_TIMEOUT, target.dial(Protocol::Http2, stream)).await?;
    let (status, _) = dial::limit_time(
        ANSWER_TIMEOUT,
        link.ask(get_request(VERSION_PATH.to_owned())),
    )
    .await?;
    Ok(link.to_answer(status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testbed::{address::free_address, certs};

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_not_served_retries_after_a_pause_until_it_is_too_late() {
        let dir = tempfile::tempdir().unwrap();
        let address = free_address().unwrap();
        let target = Target::new(address, &certs::make_certs(dir.path(), &[]).unwrap()).unwrap();
        let (sender, mut tries) = unbounded_channel();
        run_client(target, 0, Instant::now() + GIVE_UP_AFTER, sender).await;
        let mut count = 0;
        while let Some((_, answer)) = tries.recv().await {
            assert_eq!(answer, Answer::Failed(Failure::Refused));
            count += 1;
        }
        assert_eq!(count, GIVE_UP_AFTER.as_secs());
    }
}
