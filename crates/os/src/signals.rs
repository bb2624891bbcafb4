//! Receives signals as events of a tokio runtime, instead of their default action.

use nix::sys::signal::Signal;
use std::io;
use std::task::Poll;
use tokio::signal::unix::{self, SignalKind};

/// Signals that this process receives. From the construction until the process ends, these signals
/// no longer have their default action.
#[derive(Debug)]
pub struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// Receives these signals from now on. Must be called within a tokio runtime that has I/O.
    pub fn new(signals: &[Signal]) -> io::Result<Self> {
        let listen =
            |signal: &Signal| Ok((*signal, unix::signal(SignalKind::from_raw(*signal as i32))?));
        signals
            .iter()
            .map(listen)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// Waits for the next signal. The caller may drop the future, for example in `select!`, and
    /// call `next` again.
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
