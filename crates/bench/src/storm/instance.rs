//! A simulated apiserver whose handshakes and requests cost CPU time, on a CPU of its own: it serves clients in the order in which
//! their bytes arrive, as Go's scheduler does with one CPU. After SIGTERM it prints the number of handshakes and ends.
//!
//! Messages are as long as those of TLS, so that a relay waits for them in the same way.

use crate::client_hello::client_hello;
use crate::server::accept;
use nix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;

/// A client's first message.
pub(super) const HELLO: [u8; 517] = client_hello();

/// The answer to it.
pub(super) const ANSWER: [u8; 1200] = [0; 1200];

/// A request, and its answer.
pub(super) const REQUEST: [u8; 64] = [0; 64];

/// Serves until SIGTERM; times are microseconds of CPU time.
pub(crate) fn run(address: SocketAddr, handshake: u64, request: u64) -> io::Result<()> {
    berth_os::process::raise_file_limit()?;
    let [handshake, request] = [handshake, request].map(Duration::from_micros);
    let handshakes = Rc::<Cell<u64>>::default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(address)?;
        let listener = socket.listen(u16::MAX.into())?;
        let mut terminate = signal(SignalKind::terminate())?;
        println!("{}", listener.local_addr()?);
        let stop = async { _ = terminate.recv().await };
        accept(listener, stop, |client| serve(client, handshake, request, handshakes.clone())).await;
        println!("{}", handshakes.get());
        Ok(())
    })
}

async fn serve(
    mut client: TcpStream,
    handshake: Duration,
    request: Duration,
    handshakes: Rc<Cell<u64>>,
) -> io::Result<()> {
    client.set_nodelay(true)?;
    client.read_exact(&mut HELLO.clone()).await?;
    burn(handshake)?;
    handshakes.set(handshakes.get() + 1);
    client.write_all(&ANSWER).await?;
    loop {
        client.read_exact(&mut REQUEST.clone()).await?;
        burn(request)?;
        client.write_all(&REQUEST).await?;
    }
}

/// Uses this much CPU time, however long that takes.
fn burn(time: Duration) -> io::Result<()> {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let until = now()? + time;
    while now()? < until {}
    Ok(())
}
