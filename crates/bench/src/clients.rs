//! When clients connect: by a timetable, whatever became of those before.

use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::interval;

/// Starts one client in each period (an open loop: a slow server meets as many clients as a fast one), until `stop`; then waits for
/// those that are under way. Needs a `LocalSet`; a client that panics ends it.
pub(crate) async fn open_loop<F: Future<Output = ()> + 'static>(
    period: Duration,
    stop: impl Future<Output = ()>,
    client: impl Fn() -> F,
) {
    let mut ticks = interval(period);
    let mut clients = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            biased;
            () = &mut stop => break,
            Some(ended) = clients.join_next() => ended.expect("a client panicked"),
            _ = ticks.tick() => drop(clients.spawn_local(client())),
        }
    }
    clients.join_all().await;
}

/// Waits until a flag is set, or its sender is gone.
pub(crate) async fn is_set(mut flag: watch::Receiver<bool>) {
    drop(flag.wait_for(|flag| *flag).await);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use tokio::task::{LocalSet, spawn_local};
    use tokio::time::timeout;

    #[tokio::test]
    async fn a_client_that_panics_ends_the_clients_of_its_kind() {
        let test = async {
            let clients = spawn_local(open_loop(Duration::from_secs(1), pending(), async || panic!("on purpose")));
            assert!(timeout(Duration::from_secs(10), clients).await.expect("it ends").is_err());
        };
        LocalSet::new().run_until(test).await;
    }
}
