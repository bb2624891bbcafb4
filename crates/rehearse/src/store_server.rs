//! The socket where simulated apiservers reach the store and the log.

use super::event::EventKind;
use super::log::Recorder;
use super::store::Store;
use super::wire::{self, Call, Reason, Reply};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::MissedTickBehavior;

/// Serves simulated apiservers until the future is dropped.
pub async fn serve(listener: UnixListener, store: Arc<Store>, recorder: Arc<Recorder>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (store, recorder) = (Arc::clone(&store), Arc::clone(&recorder));
                connections.spawn(async move {
                    if let Err(error) = answer(stream, &store, &recorder).await {
                        tracing::debug!(%error, "the connection of a simulated apiserver failed");
                    }
                });
            }
            // No descriptors left, most likely: the simulated apiserver's call waits in the backlog meanwhile.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection of a simulated apiserver");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(stream: UnixStream, store: &Store, recorder: &Recorder) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let Some(Call::Hello { version: wire::VERSION, instance }) = wire::read(&mut reader).await? else {
        return wire::write(&mut writer, &Reply::Failed { reason: Reason::Protocol }).await;
    };
    wire::write(&mut writer, &Reply::Noted).await?;
    while let Some(call) = wire::read(&mut reader).await? {
        let reply = match call {
            Call::Get { namespace, name } => object(store.get(&namespace, &name)),
            Call::Create { object: new } => object(store.create(new)),
            Call::Delete { namespace, name } => object(store.delete(&namespace, &name)),
            Call::List { namespace } => {
                let (revision, items) = store.list(namespace.as_deref());
                Reply::List { revision, items }
            }
            Call::Watch { after } => return stream_changes(store, after, reader, writer).await,
            Call::Mark { mark, at } => {
                recorder.add_at(at, &instance, EventKind::Mark { mark, text: String::new() });
                Reply::Noted
            }
            Call::Ended(report) => {
                recorder.add(&instance, EventKind::EndReport(report));
                Reply::Noted
            }
            Call::Hello { .. } => Reply::Failed { reason: Reason::Protocol },
        };
        wire::write(&mut writer, &reply).await?;
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
                wire::write(&mut writer, &Reply::Progress { revision: announced }).await?;
                continue;
            }
            // Whatever comes from the simulated apiserver ends its watch.
            _ = wire::read::<Call>(&mut reader) => return Ok(()),
        };
        match batch {
            Ok(batch) => {
                for change in batch {
                    announced = change.revision;
                    wire::write(&mut writer, &Reply::Change(change)).await?;
                }
            }
            Err(reason) => return wire::write(&mut writer, &Reply::Failed { reason }).await,
        }
    }
}

fn object(result: Result<serde_json::Value, Reason>) -> Reply {
    match result {
        Ok(object) => Reply::Object { object },
        Err(reason) => Reply::Failed { reason },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ChangeKind;
    use serde_json::json;

    async fn dial(path: &std::path::Path, version: u32) -> (BufReader<OwnedReadHalf>, OwnedWriteHalf, Reply) {
        let (reader, mut writer) = UnixStream::connect(path).await.unwrap().into_split();
        let mut reader = BufReader::new(reader);
        wire::write(&mut writer, &Call::Hello { version, instance: "old".into() }).await.unwrap();
        let reply: Reply = wire::read(&mut reader).await.unwrap().unwrap();
        (reader, writer, reply)
    }

    #[tokio::test]
    async fn calls_watches_and_a_wrong_version() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        let (store, recorder) = (Arc::new(Store::default()), Arc::new(Recorder::default()));
        let listener = UnixListener::bind(&path).unwrap();
        let served = tokio::spawn(serve(listener, Arc::clone(&store), Arc::clone(&recorder)));

        assert_eq!(dial(&path, 999).await.2, Reply::Failed { reason: Reason::Protocol });

        let (mut reader, mut writer, hello) = dial(&path, wire::VERSION).await;
        assert_eq!(hello, Reply::Noted);
        let new = json!({"metadata": {"namespace": "n", "name": "a"}});
        for (call, good) in [
            (Call::Create { object: new.clone() }, true),
            (Call::Create { object: new }, false),
            (Call::Get { namespace: "n".into(), name: "a".into() }, true),
            (Call::Get { namespace: "n".into(), name: "b".into() }, false),
        ] {
            wire::write(&mut writer, &call).await.unwrap();
            let reply: Reply = wire::read(&mut reader).await.unwrap().unwrap();
            assert_eq!(matches!(reply, Reply::Object { .. }), good, "{call:?}: {reply:?}");
        }

        wire::write(&mut writer, &Call::Watch { after: 1 }).await.unwrap();
        let mut replies = Vec::new();
        while replies.len() < 2 {
            let reply: Reply = wire::read(&mut reader).await.unwrap().unwrap();
            if matches!(reply, Reply::Progress { .. }) {
                continue;
            }
            replies.push(reply);
            if replies.len() == 1 {
                store.create(json!({"metadata": {"namespace": "other", "name": "a"}})).unwrap();
            }
        }
        assert!(matches!(&replies[0], Reply::Change(c) if c.revision == 2 && c.kind == ChangeKind::Added));
        assert!(matches!(&replies[1], Reply::Change(c) if c.revision == 3));
        served.abort();
    }
}
