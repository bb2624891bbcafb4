//! A reconnect storm: clients that all come at one moment, each from an address of its own, and retry until they are served.
//!
//! As client-go does it, each gives a TLS handshake 10 s, and retries after a pause. So a try that fails is not lost, as a request
//! of the timetables would be: what counts is whether, and how soon, each client was served.

use super::dial::{self, Target};
use super::objects::get;
use crate::address::source;
use crate::event::{Answer, Failure, Protocol};
use crate::plan::UNANSWERED;
use crate::stamp::Stamp;
use std::io;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep};
use tokio_util::sync::{CancellationToken, DropGuard};

/// How long a TLS handshake may take, as in Go's `http.DefaultTransport`, which client-go follows.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time between a try that failed and the next.
const PAUSE: Duration = Duration::from_secs(1);

/// A client that was not served by then gives up for good: far beyond what a small machine needs for the largest storm.
pub(crate) const LONGEST: Duration = Duration::from_secs(120);

/// What they ask for, once connected. Of objects a simulated apiserver would have to ask the rehearsal, and all would wait for that.
const VERSION: &str = "/version";

/// Names its clients in audit logs.
const AGENT: &str = concat!("berth-rehearse-storm/", env!("CARGO_PKG_VERSION"));

/// What came of one try, and when.
pub(crate) type Try = (Stamp, Answer);

/// A storm that goes on until this is dropped.
pub(crate) struct StormClients {
    /// Ends with the last client.
    pub(crate) tries: UnboundedReceiver<Try>,
    _goes_on: DropGuard,
}

impl StormClients {
    /// Starts the clients, on a thread of their own: the others' timetables must not wait for their handshakes.
    pub(crate) fn start(clients: u32, target: &Target) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (sender, tries) = unbounded_channel();
        let (target, over) = (target.clone(), CancellationToken::new());
        let token = over.clone();
        let run = async move {
            let until = Instant::now() + LONGEST;
            for number in 0..clients {
                let target = target.from(source(target.address().ip(), number), AGENT.to_owned());
                tokio::spawn(client(target, number, until, sender.clone()));
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

async fn client(target: Target, number: u32, until: Instant, sender: UnboundedSender<Try>) {
    for again in 0_u32.. {
        let answer = ask(&target, format!("storm-{number}-{again}"))
            .await
            .unwrap_or_else(Answer::Failed);
        let served = matches!(answer, Answer::Good { .. });
        if sender.send((Stamp::now(), answer)).is_err() || served || Instant::now() + PAUSE >= until
        {
            return;
        }
        sleep(PAUSE).await;
    }
}

/// Connects and asks for what costs nearly nothing: what is to be seen is what connections cost.
async fn ask(target: &Target, stream: String) -> Result<Answer, Failure> {
    let mut link = dial::within(PATIENCE, target.dial(Protocol::Http2, stream)).await?;
    let (status, _) = dial::within(UNANSWERED, link.ask(get(VERSION.to_owned()))).await?;
    Ok(link.judge(status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::free_address;
    use crate::certs;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_not_served_retries_after_a_pause_until_it_is_too_late() {
        let dir = tempfile::tempdir().unwrap();
        let address = free_address().unwrap();
        let target = Target::new(address, &certs::make(dir.path(), &[]).unwrap()).unwrap();
        let (sender, mut tries) = unbounded_channel();
        client(target, 0, Instant::now() + LONGEST, sender).await;
        let mut count = 0;
        while let Some((_, answer)) = tries.recv().await {
            assert_eq!(answer, Answer::Failed(Failure::Refused));
            count += 1;
        }
        assert_eq!(count, LONGEST.as_secs());
    }
}
