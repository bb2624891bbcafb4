//! Clients that connect again and again, and never retry.

use super::net::{client_hello, fresh_ip};
use super::{eventually, too_busy};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, timeout};

/// Longest wait of a client. A connection without an answer by then is lost. In a rehearsal the
/// limit is 15 s. Tests judge berth and not the speed of the machine, so a slow answer counts as
/// served.
const ANSWERED: Duration = Duration::from_secs(60);

/// Time between two checks that the clients' thread runs in time, and the delay from which the
/// thread counts as late.
const TICK: Duration = Duration::from_millis(50);
const LATE: Duration = Duration::from_millis(500);

/// Kind of failure of a connection without an answer in time.
const NO_ANSWER: &str = "no answer";

/// Number of groups of clients.
const GROUPS: u32 = 8;

/// Most open connections of a client. On a machine that cannot keep up with the timetable, clients
/// begin fewer connections, because further connections would only wait in queues.
const OPEN: usize = 2;

/// Results of all connections.
#[derive(Debug, Default, Clone)]
pub(crate) struct Record {
    /// The moment at which each connection began.
    pub(crate) begun: Vec<Instant>,
    pub(crate) served: u64,
    /// For each kind of failure, the moments at which the lost connections began.
    pub(crate) lost: BTreeMap<String, Vec<Instant>>,
    /// Number of unanswered connections that count as neither served nor lost, because the clients'
    /// thread was late for at least half of the time of the connection.
    unknown: usize,
    /// Periods in which the clients' thread was late.
    late: Vec<(Instant, Instant)>,
    /// Longest duration of a connection.
    pub(crate) slowest: Duration,
    /// Time of the last answer, and the longest time between two answers so far.
    answered: Option<Instant>,
    pub(crate) gap: Duration,
}

impl Record {
    pub(crate) fn lost(&self) -> usize {
        self.lost.values().map(Vec::len).sum()
    }

    /// Number of connections that are neither served nor lost yet.
    pub(crate) fn open(&self) -> usize {
        self.begun.len() - self.served as usize - self.lost() - self.unknown
    }

    /// Fails if a connection was lost. Returns false if the machine was too busy to know. Then the
    /// caller returns, and the test counts as skipped.
    #[track_caller]
    pub(crate) fn expect_no_loss(&self, more: &str) -> bool {
        assert_eq!(
            self.lost(),
            0,
            "besides {} served: {}\n{more}",
            self.served,
            self.kinds()
        );
        self.is_conclusive()
    }

    /// True if the result of each connection is known. If not, prints that the test is skipped.
    pub(crate) fn is_conclusive(&self) -> bool {
        if self.unknown > 0 {
            too_busy(&format!(
                "{} of {} connections",
                self.unknown,
                self.begun.len()
            ));
        }
        self.unknown == 0
    }

    /// True if the clients' thread was late at least once.
    pub(crate) fn was_late(&self) -> bool {
        !self.late.is_empty()
    }

    /// Moves connections from lost to unknown if the clients' thread was too late to see their
    /// answers. Connections that were refused or reset stay lost.
    fn discount_late(&mut self) {
        let Some(unanswered) = self.lost.remove(NO_ANSWER) else {
            return;
        };
        let explained = |begun: &Instant| {
            let common = |(from, to): &(Instant, Instant)| {
                (*to)
                    .min(*begun + ANSWERED)
                    .saturating_duration_since((*from).max(*begun))
            };
            self.late.iter().map(common).sum::<Duration>() * 2 >= ANSWERED
        };
        let (unknown, lost): (Vec<_>, Vec<_>) = unanswered.into_iter().partition(explained);
        self.unknown += unknown.len();
        if !lost.is_empty() {
            self.lost.insert(NO_ANSWER.to_owned(), lost);
        }
    }

    pub(crate) fn kinds(&self) -> String {
        let kinds: Vec<_> = self
            .lost
            .iter()
            .map(|(kind, when)| format!("{} × {kind}", when.len()))
            .collect();
        if kinds.is_empty() {
            "none".into()
        } else {
            kinds.join(", ")
        }
    }
}

/// Clients at work.
pub(crate) struct Load {
    record: Arc<Mutex<Record>>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    /// Starts the given number of clients, each with an address of its own. `attempt` makes one
    /// connection from an address. With a period, each client begins a connection in each period,
    /// even while its last connection is open. The clients of a group begin their connections at
    /// the same moment, so that connections wait in queues: tests with empty queues would show
    /// nothing. Without a period, a client begins the next connection when the last one has ended.
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
            Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(async move {
                    tokio::spawn(watch_lateness(shared.clone()));
                    let mut all = JoinSet::new();
                    for client in 0..clients {
                        let (source, attempt, record) =
                            (fresh_ip(), attempt.clone(), shared.clone());
                        let one = move || record_attempt(attempt(source), record.clone());
                        match period {
                            Some(period) => all.spawn(run_timed(
                                period * (client % GROUPS) / GROUPS,
                                period,
                                stopped.clone(),
                                one,
                            )),
                            None => all.spawn(run_in_loop(stopped.clone(), one)),
                        };
                    }
                    all.join_all().await;
                });
        });
        Self {
            record,
            stop,
            thread: Some(thread),
        }
    }

    pub(crate) fn so_far(&self) -> Record {
        self.record.lock().unwrap().clone()
    }

    /// Waits until the given number of further connections has begun, and the same number has been
    /// served or lost.
    #[track_caller]
    pub(crate) fn more(&self, number: usize) {
        let ended = |record: &Record| record.served as usize + record.lost();
        let (begun, before) = {
            let record = self.record.lock().unwrap();
            (record.begun.len(), ended(&record))
        };
        eventually("more connections", || {
            let record = self.record.lock().unwrap();
            (record.begun.len() >= begun + number && ended(&record) >= before + number)
                .then_some(())
        });
    }

    /// Stops the clients after 50 further connections, and fails if a connection was lost.
    #[track_caller]
    pub(crate) fn end_without_loss(self) {
        self.more(50);
        self.end().expect_no_loss("");
    }

    /// Begins no further connections, and waits for the open ones.
    pub(crate) fn end(mut self) -> Record {
        self.finish();
        let mut record = self.so_far();
        record.discount_late();
        record
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

async fn run_timed<F: Future<Output = ()> + Send + 'static>(
    offset: Duration,
    period: Duration,
    mut stopped: watch::Receiver<bool>,
    one: impl Fn() -> F,
) {
    let mut tick = tokio::time::interval_at(tokio::time::Instant::now() + offset, period);
    // After a pause of the machine, connections must not catch up in one burst.
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

/// Records the periods in which the clients' thread is late.
async fn watch_lateness(record: Arc<Mutex<Record>>) {
    loop {
        let due = Instant::now() + TICK;
        tokio::time::sleep_until(due.into()).await;
        let now = Instant::now();
        if now.saturating_duration_since(due) >= LATE {
            record.lock().unwrap().late.push((due, now));
        }
    }
}

async fn run_in_loop<F: Future<Output = ()>>(stopped: watch::Receiver<bool>, one: impl Fn() -> F) {
    while !*stopped.borrow() {
        one().await;
    }
}

/// Makes one connection and records the result.
async fn record_attempt(
    attempt: impl Future<Output = Result<(), String>>,
    record: Arc<Mutex<Record>>,
) {
    let begun = Instant::now();
    record.lock().unwrap().begun.push(begun);
    let result = timeout(ANSWERED, attempt)
        .await
        .unwrap_or_else(|_| Err(NO_ANSWER.to_owned()));
    let mut record = record.lock().unwrap();
    record.slowest = record.slowest.max(begun.elapsed());
    match result {
        Ok(()) => {
            record.served += 1;
            let gap = record
                .answered
                .replace(Instant::now())
                .map(|last| last.elapsed());
            record.gap = record.gap.max(gap.unwrap_or_default());
        }
        Err(kind) => record.lost.entry(kind).or_default().push(begun),
    }
}

/// Describes a failure: the step that failed, and the kind of error.
pub(crate) fn describe_failure(what: &'static str) -> impl FnOnce(std::io::Error) -> String {
    move |error| format!("{what}: {:?}", error.kind())
}

/// Connects from a source address.
pub(crate) async fn connect(source: Ipv4Addr, to: SocketAddr) -> Result<TcpStream, String> {
    let socket = TcpSocket::new_v4().map_err(describe_failure("no socket"))?;
    socket
        .bind((source, 0).into())
        .map_err(describe_failure("bind"))?;
    socket
        .connect(to)
        .await
        .map_err(describe_failure("connect"))
}

/// Makes one client's connection: exchanges 64 bytes with an echo server, and closes.
pub(crate) async fn exchange(source: Ipv4Addr, to: SocketAddr) -> Result<(), String> {
    let mut stream = connect(source, to).await?;
    let (sent, mut got) = (client_hello(64), [0; 64]);
    stream
        .write_all(&sent)
        .await
        .map_err(describe_failure("write"))?;
    stream
        .read_exact(&mut got)
        .await
        .map_err(describe_failure("read"))?;
    if got[..] == sent {
        Ok(())
    } else {
        Err("other bytes".to_owned())
    }
}

/// Starts clients that each begin an [`exchange`] in each period.
pub(crate) fn start_load(to: SocketAddr, clients: u32, period: Duration) -> Load {
    Load::start(clients, Some(period), move |source| exchange(source, to))
}

#[test]
fn a_load_distinguishes_a_loss_from_a_busy_machine() {
    let begun = Instant::now();
    let at = |s: u64| begun + Duration::from_secs(s);
    let told = |kind: &str, late: &[(u64, u64)]| {
        let lost = [(kind.to_owned(), vec![begun])].into();
        let late = late.iter().map(|(from, to)| (at(*from), at(*to))).collect();
        let mut record = Record {
            begun: vec![begun],
            lost,
            late,
            ..Record::default()
        };
        record.discount_late();
        (record.lost(), record.unknown, record.open())
    };
    assert_eq!(told(NO_ANSWER, &[(0, 20), (30, 41)]), (0, 1, 0));
    assert_eq!(told(NO_ANSWER, &[]), (1, 0, 0));
    assert_eq!(told(NO_ANSWER, &[(0, 29), (60, 90)]), (1, 0, 0));
    assert_eq!(told("read: ConnectionReset", &[(0, 60)]), (1, 0, 0));
}
