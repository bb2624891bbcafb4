//! The socket through which simulated apiservers use the store and the log.

use super::Store;
use super::wire::{self, Call, Reason, Reply};
use crate::record::{event::EventKind, log::Recorder};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::MissedTickBehavior;

/// Answers the calls of simulated apiservers until the future is dropped.
pub async fn serve(listener: UnixListener, store: Arc<Store>, recorder: Arc<Recorder>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (store, recorder) = (Arc::clone(&store), Arc::clone(&recorder));
                connections.spawn(async move {
                    if let Err(error) = answer_calls(stream, &store, &recorder).await {
                        tracing::debug!(%error, "the connection of a simulated apiserver failed");
                    }
                });
            }
            // Probably no file descriptors are left. The simulated apiserver's call waits in the
            // backlog meanwhile.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of a simulated apiserver");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn answer_calls(stream: UnixStream, store: &Store, recorder: &Recorder) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let Some(Call::Hello {
        version: wire::VERSION,
        instance,
    }) = wire::read_message(&mut reader).await?
    else {
        return wire::write_message(
            &mut writer,
            &Reply::Failed {
                reason: Reason::Protocol,
            },
        )
        .await;
    };
    wire::write_message(&mut writer, &Reply::Noted).await?;
    while let Some(call) = wire::read_message(&mut reader).await? {
        let reply = match call {
            Call::Get { namespace, name } => object_reply(store.get(&namespace, &name)),
            Call::Create { object: new } => object_reply(store.create(new)),
            Call::Delete { namespace, name } => object_reply(store.delete(&namespace, &name)),
            Call::List { namespace } => {
                let (revision, items) = store.list(namespace.as_deref());
                Reply::List { revision, items }
            }
            Call::Watch { after } => return stream_changes(store, after, reader, writer).await,
            Call::Mark { mark, at } => {
                recorder.add_at(
                    at,
                    &instance,
                    EventKind::Mark {
                        mark,
                        text: String::new(),
                    },
                );
                Reply::Noted
            }
            Call::Ended(report) => {
                recorder.add(&instance, EventKind::EndReport(report));
                Reply::Noted
            }
            Call::Hello { .. } => Reply::Failed {
                reason: Reason::Protocol,
            },
        };
        wire::write_message(&mut writer, &reply).await?;
    }
    Ok(())
}

async fn stream_changes(
    store: &Store,
    after: u64,
    mut reader: BufReader<OwnedReadHalf>,
    mut writer: OwnedWriteHalf,
) -> io::Result<()> {
    let mut changes = store.watch(after);
    let mut announced = after;
    let mut notify = tokio::time::interval(store.notify_every());
    notify.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let batch = tokio::select! {
            batch = changes.next() => batch,
            _ = notify.tick() => {
                wire::write_message(&mut writer, &Reply::Progress { revision: announced }).await?;
                continue;
            }
            // Any message of the simulated apiserver ends the watch.
            _ = wire::read_message::<Call>(&mut reader) => return Ok(()),
        };
        match batch {
            Ok(batch) => {
                for change in batch {
                    announced = change.revision;
                    wire::write_message(&mut writer, &Reply::Change(change)).await?;
                }
            }
            Err(reason) => {
                return wire::write_message(&mut writer, &Reply::Failed { reason }).await;
            }
        }
    }
}

fn object_reply(result: Result<serde_json::Value, Reason>) -> Reply {
    match result {
        Ok(object) => Reply::Object { object },
        Err(reason) => Reply::Failed { reason },
    }
}
