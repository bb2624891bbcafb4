//! Receives signals instead of their default action.

use nix::sys::signal::Signal;
use std::io;
use std::task::Poll;
use tokio::signal::unix::{self, SignalKind};

/// Signals that a process waits for; from when this is made until the process ends, they do nothing by themselves.
#[derive(Debug)]
pub struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// To be called within a tokio runtime that has I/O.
    pub fn new(signals: &[Signal]) -> io::Result<Self> {
        let listen =
            |signal: &Signal| Ok((*signal, unix::signal(SignalKind::from_raw(*signal as i32))?));
        signals
            .iter()
            .map(listen)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// The next of them. Can be dropped and called again.
    pub async fn next(&mut self) -> Signal {
        std::future::poll_fn(|cx| {
            for (signal, comes) in &mut self.0 {
                if comes.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }
}
