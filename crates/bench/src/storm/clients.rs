//! Those who come, each from an address of its own choice, and the node's own client beside them: to whatever there is to come to.

use crate::wire::{ANSWER, HELLO, REQUEST, hear, say};
use berth_os::socket::{self, Keepalive};
use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

/// client-go's patience with a TLS handshake, and with all that comes before its first answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// After that it comes again.
pub(crate) const AGAIN: Duration = Duration::from_secs(1);

/// Time between two requests of a client that is measured.
const PERIOD: Duration = Duration::from_millis(100);

const KEEPALIVE: Keepalive = Keepalive { idle: None, interval: Duration::from_secs(1), probes: 1, user_timeout: None };

/// What stands behind berth, as a client knows it.
pub(crate) trait Service: Clone + Send + 'static {
    /// A connection.
    type Open: 'static;

    /// A connection that is open, its first request answered. There is no bound in time here.
    fn open(&self, from: Ipv4Addr) -> impl Future<Output = io::Result<Self::Open>>;

    /// A further request, and its answer.
    fn ask(&self, open: &mut Self::Open) -> impl Future<Output = io::Result<()>>;
}

/// The stand-in.
#[derive(Clone, Copy)]
pub(crate) struct StandIn(pub(crate) SocketAddr);

impl Service for StandIn {
    type Open = TcpStream;

    async fn open(&self, from: Ipv4Addr) -> io::Result<TcpStream> {
        let mut stream = TcpStream::from_std(socket::connect(self.0, Some(from.into()), &KEEPALIVE)?)?;
        stream.writable().await?;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        stream.write_all(&HELLO).await?;
        hear(&mut stream, ANSWER).await?;
        self.ask(&mut stream).await?;
        Ok(stream)
    }

    async fn ask(&self, open: &mut TcpStream) -> io::Result<()> {
        say(open, REQUEST).await?;
        hear(open, REQUEST).await
    }
}

/// What one that has to come until it is served saw.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Served {
    pub(crate) after: Duration,
    /// Times that it gave up before, and that it was refused or reset.
    pub(crate) gave_up: u32,
    pub(crate) rejected: u32,
}

/// Comes until it is served, and stays as long as the connection is kept.
pub(crate) async fn insist<S: Service>(from: Ipv4Addr, service: S) -> (Served, S::Open) {
    let (began, mut gave_up, mut rejected) = (Instant::now(), 0, 0);
    loop {
        match timeout(PATIENCE, service.open(from)).await {
            Ok(Ok(open)) => return (Served { after: began.elapsed(), gave_up, rejected }, open),
            Ok(Err(_)) => rejected += 1,
            Err(_) => gave_up += 1,
        }
        sleep(AGAIN).await;
    }
}

/// What a client that is measured saw.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) took: Vec<Duration>,
    /// Not answered within [`PATIENCE`], refused or reset.
    pub(crate) lost: u64,
}

impl Seen {
    fn add(&mut self, began: Instant, result: &Result<io::Result<()>, Elapsed>) {
        match result {
            Ok(Ok(())) => self.took.push(began.elapsed()),
            _ => self.lost += 1,
        }
    }
}

/// A new connection each period, whatever became of those before, until `ends`.
pub(crate) async fn new_connections(
    from: Ipv4Addr,
    service: impl Service,
    period: Duration,
    ends: impl Future<Output = ()>,
) -> Seen {
    let seen = Rc::<RefCell<Seen>>::default();
    let mut begun = JoinSet::new();
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut ends = std::pin::pin!(ends);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                let (seen, service) = (seen.clone(), service.clone());
                begun.spawn_local(async move {
                    let began = Instant::now();
                    let result = timeout(PATIENCE, async { service.open(from).await.map(drop) }).await;
                    seen.borrow_mut().add(began, &result);
                });
            }
            Some(_) = begun.join_next() => {}
            () = &mut ends => break,
        }
    }
    while begun.join_next().await.is_some() {}
    seen.take()
}

/// A request each period on a connection that was there before, until `ends`.
pub(crate) async fn kept_connection(
    from: Ipv4Addr,
    service: impl Service,
    ends: impl Future<Output = ()>,
) -> io::Result<Seen> {
    let mut open = service.open(from).await?;
    let mut seen = Seen::default();
    let mut ends = std::pin::pin!(ends);
    loop {
        let began = Instant::now();
        let result = timeout(PATIENCE, service.ask(&mut open)).await;
        let lost = !matches!(result, Ok(Ok(())));
        seen.add(began, &result);
        if lost {
            return Ok(seen);
        }
        tokio::select! {
            () = sleep(PERIOD) => {}
            () = &mut ends => return Ok(seen),
        }
    }
}
