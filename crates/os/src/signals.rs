//! Receives signals instead of their default action.

use nix::sys::signal::Signal;
use std::io;
use std::task::Poll;
use tokio::signal::unix::{self, SignalKind};

/// Signals for which a process waits. The default action of these signals is off from the
/// construction until the process ends.
#[derive(Debug)]
pub struct Signals(Vec<(Signal, unix::Signal)>);

impl Signals {
    /// Must be called within a tokio runtime that has I/O.
    pub fn new(signals: &[Signal]) -> io::Result<Self> {
        let listen =
            |signal: &Signal| Ok((*signal, unix::signal(SignalKind::from_raw(*signal as i32))?));
        signals
            .iter()
            .map(listen)
            .collect::<io::Result<_>>()
            .map(Self)
    }

    /// Waits for the next signal. The future can be dropped, and `next` called again.
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
