//! Clients that connect, again and again, and never retry.

use super::eventually;
use super::net::fresh_ip;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, timeout};

/// A client that is not answered by then is lost. Outside of the tests that is so after 15 s, but here what berth does is judged,
/// and not the speed of the machine: a slow answer is no loss.
const ANSWERED: Duration = Duration::from_secs(60);

/// Groups of clients.
const GROUPS: u32 = 8;

/// Most open connections of a client. A machine that cannot keep up with the timetable gets as many as it can take:
/// more would only wait in queues.
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
    /// When one was answered last, and the longest time before that in which none was.
    answered: Option<Instant>,
    pub(crate) gap: Duration,
}

impl Record {
    pub(crate) fn lost(&self) -> usize {
        self.lost.values().map(Vec::len).sum()
    }

    /// How many are neither served nor lost yet.
    pub(crate) fn open(&self) -> usize {
        self.begun.len() - self.served as usize - self.lost()
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
    /// This many clients, each with an address of its own. With a period they begin a connection in each, whatever became
    /// of the last one, in groups that begin at once: a queue that is always empty shows nothing. Without, they begin one
    /// when the last one has ended. `attempt` is one connection, from an address.
    pub(crate) fn start<F>(
        clients: u32,
        period: Option<Duration>,
        attempt: impl Fn(Ipv4Addr) -> F + Clone + Send + 'static,
    ) -> Self
    where
        F: Future<Output = Result<(), String>> + Send + 'static,
    {
        let record = Arc::<Mutex<Record>>::default();
        let (stop, stopped) = watch::channel(false);
        let shared = record.clone();
        let thread = std::thread::spawn(move || {
            Builder::new_current_thread().enable_all().build().unwrap().block_on(async move {
                let mut all = JoinSet::new();
                for client in 0..clients {
                    let (source, attempt, record) = (fresh_ip(), attempt.clone(), shared.clone());
                    let one = move || one(attempt(source), record.clone());
                    match period {
                        Some(period) => {
                            all.spawn(timed(period * (client % GROUPS) / GROUPS, period, stopped.clone(), one))
                        }
                        None => all.spawn(looping(stopped.clone(), one)),
                    };
                }
                all.join_all().await;
            });
        });
        Self { record, stop, thread: Some(thread) }
    }

    pub(crate) fn so_far(&self) -> Record {
        self.record.lock().unwrap().clone()
    }

    /// Waits until this many more were begun and as many served or lost.
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

async fn timed<F: Future<Output = ()> + Send + 'static>(
    offset: Duration,
    period: Duration,
    mut stopped: watch::Receiver<bool>,
    one: impl Fn() -> F,
) {
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + offset, period);
    // What a machine that stood still has missed is not made up for in one burst.
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            _ = stopped.wait_for(|stopped| *stopped) => break,
            Some(_) = open.join_next() => {}
            _ = tick.tick(), if open.len() < OPEN => {
                open.spawn(one());
            }
        }
    }
    open.join_all().await;
}

async fn looping<F: Future<Output = ()>>(stopped: watch::Receiver<bool>, one: impl Fn() -> F) {
    while !*stopped.borrow() {
        one().await;
    }
}

/// One connection, from its beginning into the record.
async fn one(attempt: impl Future<Output = Result<(), String>>, record: Arc<Mutex<Record>>) {
    let begun = Instant::now();
    record.lock().unwrap().begun.push(begun);
    let result = timeout(ANSWERED, attempt).await.unwrap_or_else(|_| Err("no answer".to_owned()));
    let mut record = record.lock().unwrap();
    record.slowest = record.slowest.max(begun.elapsed());
    match result {
        Ok(()) => {
            record.served += 1;
            let gap = record.answered.replace(Instant::now()).map(|last| last.elapsed());
            record.gap = record.gap.max(gap.unwrap_or_default());
        }
        Err(kind) => record.lost.entry(kind).or_default().push(begun),
    }
}

/// What failed, and how.
pub(crate) fn failed(what: &'static str) -> impl FnOnce(std::io::Error) -> String {
    move |error| format!("{what}: {:?}", error.kind())
}

/// Connects from an address.
pub(crate) async fn connect(source: Ipv4Addr, to: SocketAddr) -> Result<TcpStream, String> {
    let socket = TcpSocket::new_v4().map_err(failed("no socket"))?;
    socket.bind((source, 0).into()).map_err(failed("bind"))?;
    socket.connect(to).await.map_err(failed("connect"))
}
