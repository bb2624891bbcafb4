//! Answers requests on the bridge's socket, until the bridge ends.

use berth_node::ipc::bridge::{Ask, BridgeStatus, Connection, Reply};
use berth_os::{make_awaitable, seqpacket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use tokio::io::Interest;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

/// Pause after a failed accept.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// A request, and the channel for the reply. `None` reports that the process that ran COMMAND ended
/// before COMMAND did.
pub(super) type Request = (Option<Ask>, oneshot::Sender<Answer>);

/// A reply to be sent before the status, or the reason for a refusal.
pub(super) type Answer = Result<Option<Reply>, String>;

/// Accepts connections until the bridge ends. Then waits until the commands on open connections
/// have got their last status.
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
                        tokio::time::sleep(RETRY_PAUSE).await;
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
    let Some(first) = command.receive_message().await else {
        return;
    };
    let (mut accompanies, mut runs, mut hears) = (first == Ask::Accompany, false, true);
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
                // If the peer has gone away, the end of its messages is read next.
                if command.send(&Reply::Status(now)).await.is_err() && !hears || over {
                    break;
                }
            }
            asked = command.receive_message(), if hears => match asked {
                Some(begins @ Ask::Command) if accompanies => {
                    match send_request(&to, Some(begins)).await {
                        Ok(_) => (accompanies, runs) = (false, true),
                        // The peer ends, and then the bridge is asked to end.
                        Err(why) => drop(command.send(&Reply::Refused(why)).await),
                    }
                }
                Some(ended @ Ask::Ended { .. }) if runs => {
                    runs = false;
                    let _ = send_request(&to, Some(ended)).await;
                    // Reading the node's files may take long: a status with COMMAND still running
                    // goes out first.
                    status.mark_changed();
                }
                _ if accompanies || runs => {
                    // If COMMAND will not be run, the bridge is not needed and is asked to end. A
                    // peer that lives, and could not send its report, reads the status from now on.
                    hears = false;
                    let _ =
                        send_request(&to, accompanies.then_some(Ask::End { now: false })).await;
                }
                _ => break,
            },
        }
    }
}

async fn send_request(to: &mpsc::UnboundedSender<Request>, what: Option<Ask>) -> Answer {
    let (reply, replied) = oneshot::channel();
    let _ = to.send((what, reply));
    // If the bridge ends without a reply, the caller finds the outcome in the status.
    replied.await.unwrap_or(Ok(None))
}
