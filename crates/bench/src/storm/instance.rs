//! An instance whose handshakes cost processor time, on one processor of its own: who comes is served in the order in which its bytes
//! came, as Go's scheduler does it where there is one processor.
//!
//! A process of its own. It says its address on standard output; when its standard input ends, it says how many handshakes it computed and ends.

use crate::wire::{ANSWER, HELLO, REQUEST, hear, say};
use nix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::LocalSet;

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
    let handshakes = Rc::<Cell<u64>>::default();
    runtime.block_on(LocalSet::new().run_until(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(address)?;
        let listener = socket.listen(u16::MAX.into())?;
        println!("{}", listener.local_addr()?);
        let told = tokio::task::spawn_blocking(|| io::stdin().read_to_end(&mut Vec::new()));
        tokio::select! {
            () = accept(listener, cost, handshakes.clone()) => {}
            _ = told => {}
        }
        io::Result::Ok(())
    }))?;
    println!("{}", handshakes.get());
    Ok(())
}

async fn accept(listener: TcpListener, cost: Cost, handshakes: Rc<Cell<u64>>) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                let handshakes = handshakes.clone();
                tokio::task::spawn_local(async move { drop(serve(client, cost, &handshakes).await) });
            }
            // What ends gives a descriptor back.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

async fn serve(mut client: TcpStream, cost: Cost, handshakes: &Cell<u64>) -> io::Result<()> {
    client.set_nodelay(true)?;
    hear(&mut client, HELLO.len()).await?;
    burn(cost.handshake)?;
    handshakes.set(handshakes.get() + 1);
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
