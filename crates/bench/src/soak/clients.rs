//! Clients of all kinds. None tries a connection twice: what fails is told to the judge.

use crate::instance::{DOWNLOAD, ECHO, HANDSHAKE, MESSAGE, SHUTTING_DOWN, SIZE, UPLOAD};
use crate::judge::Judge;
use anyhow::Result;
use berth_bench::client_hello::client_hello;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// Who is not answered by then is lost.
const ANSWERED: Duration = Duration::from_secs(15);

/// Clients that keep a connection, and how often each says something.
const KEPT: usize = 24;
const PING: Duration = Duration::from_millis(200);

/// A part of what a slow reader reads, and its pause after each.
const PART: usize = 64 * 1024;
const PAUSE: Duration = Duration::from_millis(100);

/// Bytes of an upload.
const UP: usize = 300_000;

/// The clients at work, on a thread of their own.
pub(crate) struct Load {
    stop: watch::Sender<bool>,
    thread: std::thread::JoinHandle<()>,
}

#[derive(Clone)]
struct Client {
    to: SocketAddr,
    judge: Arc<Judge>,
    stop: watch::Receiver<bool>,
}

impl Load {
    pub(crate) fn start(to: SocketAddr, rate: u32, judge: Arc<Judge>, seed: u64) -> Self {
        let (stop, stopped) = watch::channel(false);
        let client = Client { to, judge, stop: stopped };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(client.all(rate, fastrand::Rng::with_seed(seed)));
        });
        Self { stop, thread }
    }

    /// Whether it has ended by itself, which it should not.
    pub(crate) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }

    /// Begins no more, and waits for those that were begun. A client that panicked is an error: it saw nothing any more.
    pub(crate) async fn finish(self) -> Result<()> {
        self.stop.send_replace(true);
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await?;
        joined.map_err(|_| anyhow::anyhow!("a client panicked: the run tells nothing"))
    }
}

/// A connection, and what is known of it.
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
            clients.spawn(async move {
                for life in lives.into_iter().cycle() {
                    if client.is_over() {
                        break;
                    }
                    client.kept(life).await;
                }
            });
        }
        clients.spawn(self.clone().paced(Duration::from_secs(1) / rate.max(1), Self::fresh));
        clients.spawn(self.clone().paced(Duration::from_millis(700), |client| client.download("bulk", Duration::ZERO)));
        clients.spawn(self.clone().paced(Duration::from_millis(500), |client| client.download("slow reader", PAUSE)));
        clients.spawn(self.clone().paced(Duration::from_millis(300), Self::upload));
        clients.spawn(self.clone().paced(Duration::from_millis(200), |client| client.port_check(Duration::ZERO)));
        clients.spawn(self.clone().paced(Duration::from_secs(1), |client| client.port_check(Duration::from_secs(3))));
        clients.join_all().await;
    }

    fn is_over(&self) -> bool {
        *self.stop.borrow()
    }

    /// Begins one in each period, however the others fare.
    async fn paced<F: Future<Output = ()> + Send + 'static>(self, period: Duration, one: impl Fn(Self) -> F) {
        let mut tick = tokio::time::interval(period);
        let mut running = JoinSet::new();
        let mut stop = self.stop.clone();
        loop {
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                Some(one) = running.join_next() => one.expect("a client panicked"),
                _ = tick.tick() => drop(running.spawn(one(self.clone()))),
            }
        }
        running.join_all().await;
    }

    /// Connects and asks; the first answer is waited for.
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

    async fn fresh(self) {
        let began = Instant::now();
        let Some(mut link) = self.open("new", ECHO).await else { return };
        let result = answered(link.stream.read_exact(&mut [0; MESSAGE])).await.map(drop);
        self.judge("new", &link, began, result);
    }

    async fn kept(&self, life: Duration) {
        let until = Instant::now() + life;
        let Some(mut link) = self.open("kept", ECHO).await else { return sleep(PING).await };
        let mut message = [0; MESSAGE];
        let mut result = answered(link.stream.read_exact(&mut message)).await.map(drop);
        while result.is_ok() && Instant::now() < until && !self.is_over() {
            sleep(PING).await;
            let began = Instant::now();
            let sent = [HANDSHAKE; MESSAGE];
            result = answered(async {
                // One that shuts down may have closed already: what it said is there to be read.
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

    async fn download(self, kind: &'static str, pause: Duration) {
        let Some(mut link) = self.open(kind, DOWNLOAD).await else { return };
        let began = Instant::now();
        let mut buffer = vec![0; PART];
        let mut count = 0;
        let result = async {
            loop {
                match answered(link.stream.read(&mut buffer)).await? {
                    0 if count == SIZE => return Ok(()),
                    0 => return Err(io::Error::other(format!("the end after {count} of {SIZE} bytes"))),
                    length => count += length,
                }
                sleep(pause).await;
            }
        };
        let result = result.await;
        self.judge(kind, &link, began, result);
    }

    async fn upload(self) {
        let Some(mut link) = self.open("upload", UPLOAD).await else { return };
        let began = Instant::now();
        let result = answered(async {
            link.stream.write_all(&vec![HANDSHAKE; UP]).await?;
            link.stream.shutdown().await?;
            match link.stream.read_u64().await? {
                count if count == UP as u64 => Ok(()),
                count => Err(io::Error::other(format!("{count} of {UP} bytes arrived"))),
            }
        });
        let result = result.await;
        self.judge("upload", &link, began, result);
    }

    /// Connects, says nothing, and closes after a while.
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

/// From an address of 127.0.0.0/8 that names this connection in every log.
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

    fn client() -> (watch::Sender<bool>, Client) {
        let (sender, stop) = watch::channel(false);
        (sender, Client { to: SocketAddr::from(([127, 0, 0, 1], 1)), judge: Arc::default(), stop })
    }

    #[tokio::test]
    async fn a_client_that_panics_ends_the_clients_of_its_kind() {
        let (_stop, client) = client();
        let paced = tokio::spawn(client.paced(PING, async |_| panic!("on purpose")));
        assert!(timeout(ANSWERED, paced).await.expect("it ends").is_err());
    }

    #[tokio::test]
    async fn a_load_of_which_a_part_panics_fails() {
        let (_stop, Client { to, judge, .. }) = client();
        // So many a second that their period is zero, which no timer takes.
        let load = Load::start(to, u32::MAX, judge, 1);
        assert!(load.finish().await.is_err());
    }
}
