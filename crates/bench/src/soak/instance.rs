//! An instance: what a client's first message asks for. After SIGTERM it listens no more, ends what goes on with a word
//! that says so, and exits when its last connection has ended, as kube-apiserver does without a shutdown delay.

use std::io;
use std::process::ExitCode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The argument that makes this program one.
pub(crate) const COMMAND: &str = "instance";

/// Length of a client's messages and of each echo.
pub(crate) const MESSAGE: usize = 64;

/// The first byte of what a client says: that of a TLS handshake, so that a shim replays it.
pub(crate) const HANDSHAKE: u8 = 0x16;

/// The first byte of the last message of an instance that shuts down.
pub(crate) const SHUTTING_DOWN: u8 = b'E';

/// What a client wants, in the second byte of its first message.
pub(crate) const ECHO: u8 = b'e';
pub(crate) const DOWNLOAD: u8 = b'd';
pub(crate) const UPLOAD: u8 = b'u';

/// Bytes of a download.
pub(crate) const SIZE: usize = 1 << 20;

pub(crate) fn run(args: &[String]) -> ExitCode {
    let flag = |name: &str| args.iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('=').map(str::to_owned));
    let (Some(address), Some(port), Some(name)) = (flag("--bind-address"), flag("--secure-port"), flag("--name"))
    else {
        eprintln!("an instance needs --name, --bind-address and --secure-port, not {args:?}");
        return ExitCode::from(64);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(serve(format!("{address}:{port}"), name))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("Error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(address: String, name: String) -> io::Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let listener = TcpListener::bind(address).await?;
    let (tell, told) = watch::channel(false);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            _ = term.recv() => break,
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(answer(stream, name.clone(), told.clone()));
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    tell.send_replace(true);
    while connections.join_next().await.is_some() {}
    Ok(())
}

/// Who goes away early is no matter here: the client says what it saw.
async fn answer(mut stream: TcpStream, name: String, told: watch::Receiver<bool>) -> io::Result<()> {
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
            echo(&mut stream, told).await?;
        }
    }
    stream.shutdown().await?;
    // Until the client's end, so that nothing unread makes a reset of the close.
    while let 1.. = stream.read(&mut message).await? {}
    Ok(())
}

async fn echo(stream: &mut TcpStream, mut told: watch::Receiver<bool>) -> io::Result<()> {
    loop {
        let mut message = [0; MESSAGE];
        tokio::select! {
            biased;
            read = stream.read_exact(&mut message) => match read {
                Ok(_) => stream.write_all(&message).await?,
                Err(_) => return Ok(()),
            },
            () = is_told(&mut told) => return stream.write_all(&[SHUTTING_DOWN; MESSAGE]).await,
        }
    }
}

async fn is_told(told: &mut watch::Receiver<bool>) {
    // An error: the process ends.
    let _ = told.wait_for(|told| *told).await;
}
