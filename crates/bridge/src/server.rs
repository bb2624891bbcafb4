//! Answers requests on the bridge's socket, until the bridge ends.

use berth_node::ipc::bridge::{Ask, BridgeStatus, Connection, Reply};
use berth_os::{make_awaitable, seqpacket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use tokio::io::Interest;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

/// Pause after a failed accept.
const AGAIN: Duration = Duration::from_millis(200);

/// A request, and the channel for the reply. `None` reports that the process that ran COMMAND ended
/// before COMMAND did.
pub(super) type Request = (Option<Ask>, oneshot::Sender<Answer>);

/// A reply to be sent before the status, or the reason for a refusal.
pub(super) type Answer = Result<Option<Reply>, String>;

/// Accepts connections until the bridge ends, then answers those that are still open.
pub(super) async fn serve_commands(
    socket: OwnedFd,
    status: watch::Sender<BridgeStatus>,
    ask: mpsc::UnboundedSender<Request>,
    mut ended: oneshot::Receiver<()>,
) {
    let mut connections = JoinSet::new();
    match make_awaitable(socket, Interest::READABLE) {
        Ok(socket) => loop {
            let accept = socket.async_io(Interest::READABLE, |socket| {
                seqpacket::accept(socket.as_fd())
            });
            tokio::select! {
                _ = &mut ended => break,
                Some(_) = connections.join_next() => {}
                accepted = accept => match accepted.and_then(Connection::new) {
                    Ok(command) => {
                        connections.spawn(answer_command(command, status.subscribe(), ask.clone()));
                    }
                    Err(error) => {
                        tracing::info!(%error, "cannot accept a command, trying again");
                        tokio::time::sleep(AGAIN).await;
                    }
                },
            }
        },
        Err(error) => tracing::info!(%error, "no command can reach this bridge"),
    }
    while connections.join_next().await.is_some() {}
}

async fn answer_command(
    command: Connection,
    mut status: watch::Receiver<BridgeStatus>,
    to: mpsc::UnboundedSender<Request>,
) {
    let Some(first) = command.next().await else {
        return;
    };
    let (mut accompanies, mut runs) = (first == Ask::Accompany, false);
    match send_request(&to, Some(first)).await {
        Ok(None) => {}
        Ok(Some(reply)) => drop(command.send(&reply).await),
        Err(why) => return drop(command.send(&Reply::Refused(why)).await),
    }
    status.mark_changed();
    loop {
        tokio::select! {
            changed = status.changed() => {
                let now = Box::new(status.borrow_and_update().clone());
                let over = changed.is_err() || now.outcome.is_some();
                if command.send(&Reply::Status(now)).await.is_err() || over {
                    break;
                }
            }
            asked = command.next() => match asked {
                Some(begins @ Ask::Command) if accompanies => {
                    if let Err(why) = send_request(&to, Some(begins)).await {
                        let _ = command.send(&Reply::Refused(why)).await;
                        break;
                    }
                    (accompanies, runs) = (false, true);
                }
                Some(ended @ Ask::Ended { .. }) if runs => {
                    runs = false;
                    let _ = send_request(&to, Some(ended)).await;
                    // Reading the node's files may take long: a status with COMMAND still running
                    // goes out first.
                    status.mark_changed();
                }
                _ => break,
            },
        }
    }
    if runs {
        let _ = send_request(&to, None).await;
    } else if accompanies {
        // COMMAND will not be run: end the bridge, which clients would use for nothing.
        let _ = send_request(&to, Some(Ask::End { now: false })).await;
    }
}

async fn send_request(to: &mpsc::UnboundedSender<Request>, what: Option<Ask>) -> Answer {
    let (reply, replied) = oneshot::channel();
    let _ = to.send((what, reply));
    // A request without an answer finds the outcome in the status.
    replied.await.unwrap_or(Ok(None))
}
