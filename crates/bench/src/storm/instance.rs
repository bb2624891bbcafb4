//! An instance whose handshakes cost processor time, on one processor of its own: who comes is served in the order in which its bytes
//! came, as Go's scheduler does it where there is one processor.
//!
//! A process of its own. It says its address on standard output; when its standard input ends, it says what it did and ends.

use crate::wire::{ANSWER, HELLO, REQUEST, hear, say};
use berth_os::socket;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::LocalSet;

/// What it did.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Done {
    pub(crate) handshakes: u64,
    /// Handshakes that were computed for a client that had left.
    pub(crate) wasted: u64,
}

/// What it takes of its processor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) handshake: Duration,
    pub(crate) request: Duration,
}

/// Serves until standard input ends.
pub(crate) fn run(address: SocketAddr, cost: Cost) -> io::Result<()> {
    berth_os::process::raise_file_limit()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = Rc::<Cell<Done>>::default();
    runtime.block_on(LocalSet::new().run_until(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(address)?;
        let listener = socket.listen(u16::MAX.into())?;
        println!("{}", listener.local_addr()?);
        let told = tokio::task::spawn_blocking(|| io::stdin().read_to_end(&mut Vec::new()));
        tokio::select! {
            () = accept(listener, cost, done.clone()) => {}
            _ = told => {}
        }
        io::Result::Ok(())
    }))?;
    println!("{}", serde_json::to_string(&done.get())?);
    Ok(())
}

async fn accept(listener: TcpListener, cost: Cost, done: Rc<Cell<Done>>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                let done = done.clone();
                tokio::task::spawn_local(async move { drop(serve(client, cost, &done).await) });
            }
            // What ends gives a descriptor back.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn serve(mut client: TcpStream, cost: Cost, done: &Cell<Done>) -> io::Result<()> {
    client.set_nodelay(true)?;
    hear(&mut client, HELLO.len()).await?;
    burn(cost.handshake)?;
    let mut now = done.get();
    now.handshakes += 1;
    now.wasted += u64::from(socket::has_ended(&client));
    done.set(now);
    say(&mut client, ANSWER).await?;
    loop {
        hear(&mut client, REQUEST).await?;
        burn(cost.request)?;
        say(&mut client, REQUEST).await?;
    }
}

/// Takes so much of the processor, however long that takes.
fn burn(time: Duration) -> io::Result<()> {
    let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
    let until = now()? + time;
    while now()? < until {}
    Ok(())
}
