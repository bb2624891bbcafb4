//! Clients that connect, exchange 64 bytes and close.

pub(crate) use crate::support::load::{Load, Record};
use crate::support::load::{connect, failed};
use crate::support::net::client_hello;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// This many clients, each of which begins a connection in each period.
pub(crate) fn start(to: SocketAddr, clients: u32, period: Duration) -> Load {
    Load::start(clients, Some(period), move |source| exchange(source, to))
}

pub(crate) async fn exchange(source: Ipv4Addr, to: SocketAddr) -> Result<(), String> {
    let mut stream = connect(source, to).await?;
    let (sent, mut got) = (client_hello(64), [0; 64]);
    stream.write_all(&sent).await.map_err(failed("write"))?;
    stream.read_exact(&mut got).await.map_err(failed("read"))?;
    if got[..] == sent { Ok(()) } else { Err("other bytes".to_owned()) }
}
