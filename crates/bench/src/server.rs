//! The accept loop of the simulated apiservers.

use std::future::Future;
use std::io;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Accepts connections until `stop`. Returns those that are still served, without a listener. Needs a `LocalSet`.
pub(crate) async fn accept<F: Future<Output = io::Result<()>> + 'static>(
    listener: TcpListener,
    stop: impl Future<Output = ()>,
    serve: impl Fn(TcpStream) -> F,
) -> JoinSet<io::Result<()>> {
    let mut connections = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => return connections,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn_local(serve(stream))),
                // Out of descriptors: wait until a connection ends.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}
