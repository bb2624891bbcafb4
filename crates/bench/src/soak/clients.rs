//! Clients of all kinds. None retries: the judge records what fails.

use super::instance::{DOWNLOAD, ECHO, HANDSHAKE, MESSAGE, SHUTTING_DOWN, SIZE, UPLOAD};
use super::judge::Judge;
use crate::client_hello::client_hello;
use crate::clients::{is_set, open_loop};
use anyhow::Result;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{sleep, timeout};

/// A connection without an answer for this long is lost.
const ANSWERED: Duration = Duration::from_secs(15);

/// Clients that keep a connection, and the time between two messages of each.
const KEPT: usize = 24;
const PING: Duration = Duration::from_millis(200);

/// Bytes that a slow reader reads at once, and its pause after that.
const PART: usize = 64 * 1024;
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes of an upload.
const UP: usize = 300_000;

/// The clients at work, on a thread of their own.
pub(super) struct Load {
    stop: watch::Sender<bool>,
    thread: std::thread::JoinHandle<()>,
}

type LocalBoxFuture = Pin<Box<dyn Future<Output = ()>>>;

#[derive(Clone)]
struct Client {
    to: SocketAddr,
    judge: Arc<Judge>,
    stop: watch::Receiver<bool>,
}

impl Load {
    pub(super) fn start(to: SocketAddr, rate: u32, judge: Arc<Judge>, seed: u64) -> Self {
        let (stop, stopped) = watch::channel(false);
        let client = Client { to, judge, stop: stopped };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            LocalSet::new().block_on(&runtime, client.all(rate, fastrand::Rng::with_seed(seed)));
        });
        Self { stop, thread }
    }

    /// Whether it has ended by itself, which is a fault of the clients.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Starts no more clients and waits for those that are under way. A client that panicked is an error: it could not report losses.
    pub(super) async fn finish(self) -> Result<()> {
        self.stop.send_replace(true);
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await?;
        joined.map_err(|_| anyhow::anyhow!("a client panicked: nothing can be concluded from this run"))
    }
}

/// A connection, and the instance that answered on it.
struct Link {
    stream: TcpStream,
    instance: Option<String>,
}

impl Client {
    async fn all(self, rate: u32, mut random: fastrand::Rng) {
        let mut clients = JoinSet::new();
        for _ in 0..KEPT {
            let lives: Vec<_> = (0..4096).map(|_| Duration::from_millis(random.u64(2_000..20_000))).collect();
            let client = self.clone();
            clients.spawn_local(async move {
                for life in lives.into_iter().cycle() {
                    if client.is_over() {
                        break;
                    }
                    client.kept(life).await;
                }
            });
        }
        let mut start = |period, one: fn(Self) -> LocalBoxFuture| {
            let client = self.clone();
            let stop = is_set(self.stop.clone());
            clients.spawn_local(open_loop(period, stop, move || one(client.clone())));
        };
        start(Duration::from_secs(1) / rate.max(1), |client| Box::pin(client.once("new", ECHO, echo)));
        start(Duration::from_millis(700), |client| {
            Box::pin(client.once("bulk", DOWNLOAD, async |stream| download(stream, Duration::ZERO).await))
        });
        start(Duration::from_millis(500), |client| {
            Box::pin(client.once("slow reader", DOWNLOAD, async |stream| download(stream, PAUSE).await))
        });
        start(Duration::from_millis(300), |client| Box::pin(client.once("upload", UPLOAD, upload)));
        start(Duration::from_millis(200), |client| Box::pin(client.port_check(Duration::ZERO)));
        start(Duration::from_secs(1), |client| Box::pin(client.port_check(Duration::from_secs(3))));
        clients.join_all().await;
    }

    fn is_over(&self) -> bool {
        *self.stop.borrow()
    }

    /// Connects, asks, and waits for the first answer.
    async fn open(&self, kind: &'static str, want: u8) -> Option<Link> {
        let mut client = None;
        let opened = timeout(ANSWERED, async {
            let mut stream = dial(self.to).await?;
            client = stream.local_addr().ok();
            let mut message: [_; MESSAGE] = client_hello();
            message[1] = want;
            stream.write_all(&message).await?;
            let mut name = vec![0; stream.read_u8().await?.into()];
            stream.read_exact(&mut name).await?;
            io::Result::Ok(Link { stream, instance: Some(String::from_utf8_lossy(&name).into_owned()) })
        });
        match opened.await {
            Ok(Ok(link)) => return Some(link),
            Ok(Err(error)) => self.judge.failed(kind, client, None, &error.to_string()),
            Err(_) => self.judge.failed(kind, client, None, "no answer"),
        }
        None
    }

    fn judge(&self, kind: &'static str, link: &Link, began: Instant, result: io::Result<()>) {
        match result {
            Ok(()) => self.judge.served(kind, began.elapsed()),
            Err(error) => {
                self.judge.failed(kind, link.stream.local_addr().ok(), link.instance.as_deref(), &error.to_string());
            }
        }
    }

    /// Connects, uses the connection once, and reports the outcome.
    async fn once(self, kind: &'static str, want: u8, exchange: impl AsyncFnOnce(&mut TcpStream) -> io::Result<()>) {
        let began = Instant::now();
        let Some(mut link) = self.open(kind, want).await else { return };
        let result = exchange(&mut link.stream).await;
        self.judge(kind, &link, began, result);
    }

    async fn kept(&self, life: Duration) {
        let until = Instant::now() + life;
        let Some(mut link) = self.open("kept", ECHO).await else { return sleep(PING).await };
        let mut message = [0; MESSAGE];
        let mut result = echo(&mut link.stream).await;
        while result.is_ok() && Instant::now() < until && !self.is_over() {
            sleep(PING).await;
            let began = Instant::now();
            let sent = [HANDSHAKE; MESSAGE];
            result = answered(async {
                // An instance that shuts down may have closed already: its last message can still be read.
                let written = link.stream.write_all(&sent).await;
                link.stream.read_exact(&mut message).await?;
                if message[0] == SHUTTING_DOWN { Ok(()) } else { written }
            })
            .await;
            if result.is_ok() && message[0] == SHUTTING_DOWN {
                return self.judge.ended_by_instance();
            }
            if result.is_ok() {
                self.judge.served("ping", began.elapsed());
            }
        }
        if result.is_err() {
            self.judge("kept", &link, until, result);
        }
    }

    /// Connects, sends nothing, and closes after a while.
    async fn port_check(self, after: Duration) {
        let began = Instant::now();
        match answered(dial(self.to)).await {
            Ok(stream) => {
                self.judge.served("port check", began.elapsed());
                sleep(after).await;
                drop(stream);
            }
            Err(error) => self.judge.failed("port check", None, None, &error.to_string()),
        }
    }
}

async fn echo(stream: &mut TcpStream) -> io::Result<()> {
    answered(stream.read_exact(&mut [0; MESSAGE])).await.map(drop)
}

/// Pauses after each part.
async fn download(stream: &mut TcpStream, pause: Duration) -> io::Result<()> {
    let mut buffer = vec![0; PART];
    let mut count = 0;
    loop {
        match answered(stream.read(&mut buffer)).await? {
            0 if count == SIZE => return Ok(()),
            0 => return Err(io::Error::other(format!("the end after {count} of {SIZE} bytes"))),
            length => count += length,
        }
        sleep(pause).await;
    }
}

async fn upload(stream: &mut TcpStream) -> io::Result<()> {
    let arrived = answered(async {
        stream.write_all(&vec![HANDSHAKE; UP]).await?;
        stream.shutdown().await?;
        stream.read_u64().await
    });
    match arrived.await? {
        count if count == UP as u64 => Ok(()),
        count => Err(io::Error::other(format!("{count} of {UP} bytes arrived"))),
    }
}

/// Connects from an address of 127.0.0.0/8 by which this connection is found in every log.
async fn dial(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from(([127, fastrand::u8(1..250), fastrand::u8(1..250), fastrand::u8(1..250)], 0)))?;
    let stream = socket.connect(to).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn answered<T>(what: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(ANSWERED, what).await.unwrap_or_else(|_| Err(io::Error::other("no answer for 15 s")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_load_of_which_a_part_panics_fails() {
        // At this rate the period is zero, which a timer rejects.
        let load = Load::start(SocketAddr::from(([127, 0, 0, 1], 1)), u32::MAX, Arc::default(), 1);
        assert!(load.finish().await.is_err());
    }
}
