//! The clients of a storm, and how each of them fares.

use super::NODE_ADDRESS;
use super::instance::{ANSWER, HELLO, REQUEST};
use crate::clients::{TIMEOUT, open_loop};
use berth_os::socket::{self, Keepalive};
use std::cell::RefCell;
use std::io;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout};

/// Time between two requests of a client that is measured.
const PERIOD: Duration = Duration::from_millis(100);

const KEEPALIVE: Keepalive = Keepalive { idle: None, interval: Duration::from_secs(1), probes: 1, user_timeout: None };

/// How clients use what is behind berth.
pub(super) trait Service: Clone + Send + 'static {
    type Connection: 'static;

    /// Opens a connection and waits for the answer to its first request, without a timeout.
    fn open(&self, from: Ipv4Addr) -> impl Future<Output = io::Result<Self::Connection>>;

    /// Sends a further request and waits for its answer.
    fn ask(&self, connection: &mut Self::Connection) -> impl Future<Output = io::Result<()>>;
}

/// The simulated apiserver.
#[derive(Clone, Copy)]
pub(super) struct Simulated;

impl Service for Simulated {
    type Connection = TcpStream;

    async fn open(&self, from: Ipv4Addr) -> io::Result<TcpStream> {
        let mut stream = TcpStream::from_std(socket::connect(NODE_ADDRESS, Some(from.into()), &KEEPALIVE)?)?;
        stream.writable().await?;
        if let Some(error) = stream.take_error()? {
            return Err(error);
        }
        stream.write_all(&HELLO).await?;
        stream.read_exact(&mut ANSWER.clone()).await?;
        self.ask(&mut stream).await?;
        Ok(stream)
    }

    async fn ask(&self, stream: &mut TcpStream) -> io::Result<()> {
        stream.write_all(&REQUEST).await?;
        stream.read_exact(&mut REQUEST.clone()).await.map(drop)
    }
}

/// The answers that a client got.
#[derive(Debug, Clone, Default)]
pub(super) struct Answers {
    pub(super) took: Vec<Duration>,
    /// Not answered within [`TIMEOUT`], refused or reset.
    pub(super) lost: u64,
}

impl Answers {
    fn add(&mut self, began: Instant, result: &Result<io::Result<()>, Elapsed>) {
        match result {
            Ok(Ok(())) => self.took.push(began.elapsed()),
            _ => self.lost += 1,
        }
    }
}

/// Opens a new connection each period, until `stop`.
pub(super) async fn new_connections(
    from: Ipv4Addr,
    service: impl Service,
    period: Duration,
    stop: impl Future<Output = ()>,
) -> Answers {
    let answers = Rc::<RefCell<Answers>>::default();
    let client = || {
        let (answers, service) = (answers.clone(), service.clone());
        async move {
            let began = Instant::now();
            let result = timeout(TIMEOUT, async { service.open(from).await.map(drop) }).await;
            answers.borrow_mut().add(began, &result);
        }
    };
    open_loop(period, stop, client).await;
    answers.take()
}

/// Sends a request each period on one connection, until `stop` or until one is lost.
pub(super) async fn kept_connection(
    from: Ipv4Addr,
    service: impl Service,
    stop: impl Future<Output = ()>,
) -> io::Result<Answers> {
    let mut connection = service.open(from).await?;
    let mut answers = Answers::default();
    let mut stop = std::pin::pin!(stop);
    loop {
        let began = Instant::now();
        answers.add(began, &timeout(TIMEOUT, service.ask(&mut connection)).await);
        if answers.lost > 0 {
            return Ok(answers);
        }
        tokio::select! {
            () = sleep(PERIOD) => {}
            () = &mut stop => return Ok(answers),
        }
    }
}
