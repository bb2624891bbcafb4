//! Clients that connect, exchange 64 bytes and close: on a timetable, whatever became of the last
//! connection, and never twice.

use super::node::runtime;
use super::support::eventually;
use super::support::net::{fresh_ip, hello};
use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Who is not answered by then is lost.
const ANSWERED: Duration = Duration::from_secs(15);

/// Groups of clients.
const GROUPS: u32 = 8;

/// Most open connections of a client. A machine that cannot keep up with the timetable gets as many as it can take:
/// more would only wait in queues, and nobody would begin one near a switch.
const OPEN: usize = 2;

/// What became of the connections.
#[derive(Debug, Default, Clone)]
pub(crate) struct Record {
    /// When each was begun.
    pub(crate) begun: Vec<Instant>,
    pub(crate) served: u64,
    /// By kind of failure, with when each was begun.
    pub(crate) lost: BTreeMap<String, Vec<Instant>>,
    /// Longest time that one took.
    pub(crate) slowest: Duration,
}

impl Record {
    pub(crate) fn lost(&self) -> usize {
        self.lost.values().map(Vec::len).sum()
    }

    /// How many were begun near a moment.
    pub(crate) fn near(&self, moment: Instant, distance: Duration) -> usize {
        let near = |begun: &&Instant| begun.max(&&moment).duration_since(*(*begun).min(&moment)) <= distance;
        self.begun.iter().filter(near).count()
    }

    pub(crate) fn kinds(&self) -> String {
        let kinds: Vec<_> = self.lost.iter().map(|(kind, when)| format!("{} × {kind}", when.len())).collect();
        if kinds.is_empty() { "none".into() } else { kinds.join(", ") }
    }
}

/// Clients at work.
pub(crate) struct Load {
    record: Arc<Mutex<Record>>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    /// So many clients, each with an address of its own, begin a connection in each period, in groups that
    /// begin at once: a queue that is always empty shows nothing.
    pub(crate) fn start(to: SocketAddr, clients: u32, period: Duration) -> Self {
        let record = Arc::<Mutex<Record>>::default();
        let (stop, stopped) = watch::channel(false);
        let shared = record.clone();
        let thread = std::thread::spawn(move || {
            runtime().block_on(async move {
                let mut all = JoinSet::new();
                for client in 0..clients {
                    let offset = period * (client % GROUPS) / GROUPS;
                    all.spawn(one(to, offset, period, shared.clone(), stopped.clone()));
                }
                all.join_all().await;
            });
        });
        Self { record, stop, thread: Some(thread) }
    }

    pub(crate) fn so_far(&self) -> Record {
        self.record.lock().unwrap().clone()
    }

    /// Waits until so many more were begun and as many served or lost.
    #[track_caller]
    pub(crate) fn more(&self, number: usize) {
        let ended = |record: &Record| record.served as usize + record.lost();
        let (begun, before) = {
            let record = self.record.lock().unwrap();
            (record.begun.len(), ended(&record))
        };
        eventually("more connections", || {
            let record = self.record.lock().unwrap();
            (record.begun.len() >= begun + number && ended(&record) >= before + number).then_some(())
        });
    }

    /// Begins no more, and waits for those that were begun.
    pub(crate) fn end(mut self) -> Record {
        self.finish();
        self.so_far()
    }

    fn finish(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.finish();
    }
}

async fn one(
    to: SocketAddr,
    offset: Duration,
    period: Duration,
    record: Arc<Mutex<Record>>,
    mut stopped: watch::Receiver<bool>,
) {
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + offset, period);
    let source = fresh_ip();
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = stopped.wait_for(|stopped| *stopped) => break,
            Some(_) = open.join_next() => {}
            _ = tick.tick(), if open.len() < OPEN => {
                let record = record.clone();
                open.spawn(async move {
                    let begun = Instant::now();
                    record.lock().unwrap().begun.push(begun);
                    let result = exchange(source, to).await;
                    let mut record = record.lock().unwrap();
                    record.slowest = record.slowest.max(begun.elapsed());
                    match result {
                        Ok(()) => record.served += 1,
                        Err(kind) => record.lost.entry(kind).or_default().push(begun),
                    }
                });
            }
        }
    }
    open.join_all().await;
}

/// One connection.
async fn exchange(source: Ipv4Addr, to: SocketAddr) -> Result<(), String> {
    let said = |what: &'static str| move |error: io::Error| format!("{what}: {:?}", error.kind());
    let attempt = async {
        let socket = TcpSocket::new_v4().map_err(said("no socket"))?;
        socket.bind((source, 0).into()).map_err(said("bind"))?;
        let mut stream = socket.connect(to).await.map_err(said("connect"))?;
        let (sent, mut got) = (hello(64), [0; 64]);
        stream.write_all(&sent).await.map_err(said("write"))?;
        stream.read_exact(&mut got).await.map_err(said("read"))?;
        if got[..] == sent { Ok(()) } else { Err("other bytes".to_owned()) }
    };
    timeout(ANSWERED, attempt).await.unwrap_or_else(|_| Err("no answer".to_owned()))
}
