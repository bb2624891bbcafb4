//! A simulated apiserver, which does what a client's first message asks for. After SIGTERM it stops listening, ends echoes with a message
//! that announces it, and exits when its last connection has ended, as kube-apiserver does without a shutdown delay.

use crate::clients::is_set;
use crate::server::accept;
use clap::Args;
use std::io;
use std::net::IpAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::LocalSet;

/// Length of a client's messages and of each echo.
pub(super) const MESSAGE: usize = 64;

/// The first byte of a client's messages: that of a TLS handshake, so that a shim replays it.
pub(super) const HANDSHAKE: u8 = 0x16;

/// The first byte of the last message of an instance that shuts down.
pub(super) const SHUTTING_DOWN: u8 = b'E';

/// What a client wants, in the second byte of its first message.
pub(super) const ECHO: u8 = b'e';
pub(super) const DOWNLOAD: u8 = b'd';
pub(super) const UPLOAD: u8 = b'u';

/// Bytes of a download.
pub(super) const SIZE: usize = 1 << 20;

/// All but the name is set by `berth exec`.
#[derive(Debug, Args)]
pub(crate) struct SoakInstanceOptions {
    #[arg(long)]
    name: String,
    #[arg(long)]
    bind_address: IpAddr,
    #[arg(long)]
    secure_port: u16,
    #[arg(long = "advertise-address")]
    _advertise_address: Option<IpAddr>,
}

pub(crate) fn run(options: &SoakInstanceOptions) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, async {
        let mut terminate = signal(SignalKind::terminate())?;
        let listener = TcpListener::bind((options.bind_address, options.secure_port)).await?;
        let (stop, stopping) = watch::channel(false);
        let terminated = async { _ = terminate.recv().await };
        let mut connections =
            accept(listener, terminated, |stream| answer(stream, options.name.clone(), stopping.clone())).await;
        stop.send_replace(true);
        while connections.join_next().await.is_some() {}
        Ok(())
    })
}

/// Errors are ignored: the client reports them.
async fn answer(mut stream: TcpStream, name: String, stopping: watch::Receiver<bool>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut message = [0; MESSAGE];
    stream.read_exact(&mut message).await?;
    let mut head = vec![name.len() as u8];
    head.extend(name.as_bytes());
    match message[1] {
        DOWNLOAD => {
            head.extend(std::iter::repeat_n(b'x', SIZE));
            stream.write_all(&head).await?;
        }
        UPLOAD => {
            stream.write_all(&head).await?;
            let mut count = 0;
            let mut buffer = vec![0; 64 * 1024];
            while let length @ 1.. = stream.read(&mut buffer).await? {
                count += length as u64;
            }
            stream.write_all(&count.to_be_bytes()).await?;
        }
        _ => {
            head.extend(message);
            stream.write_all(&head).await?;
            echo(&mut stream, stopping).await?;
        }
    }
    stream.shutdown().await?;
    // Read until the client's end: close(2) with unread bytes would send a reset.
    while let 1.. = stream.read(&mut message).await? {}
    Ok(())
}

async fn echo(stream: &mut TcpStream, stopping: watch::Receiver<bool>) -> io::Result<()> {
    let mut stopping = std::pin::pin!(is_set(stopping));
    loop {
        let mut message = [0; MESSAGE];
        tokio::select! {
            biased;
            read = stream.read_exact(&mut message) => match read {
                Ok(_) => stream.write_all(&message).await?,
                Err(_) => return Ok(()),
            },
            () = &mut stopping => return stream.write_all(&[SHUTTING_DOWN; MESSAGE]).await,
        }
    }
}
