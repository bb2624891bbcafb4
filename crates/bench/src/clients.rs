//! When clients connect: by a timetable, whatever became of those before, or again and again until one attempt succeeds.

use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

/// client-go's timeout of a TLS handshake, here of all that precedes the first answer.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Time between a failed attempt and the next.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

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

/// Why an attempt failed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Failed {
    TimedOut,
    /// Refused, reset, or answered by an error.
    Rejected,
}

/// Tries until an attempt succeeds, as client-go does.
pub(crate) async fn insist<T, E>(
    mut attempt: impl AsyncFnMut() -> Result<T, E>,
    mut on_failure: impl FnMut(Failed),
) -> T {
    loop {
        match timeout(TIMEOUT, attempt()).await {
            Ok(Ok(done)) => return done,
            Ok(Err(_)) => on_failure(Failed::Rejected),
            Err(_) => on_failure(Failed::TimedOut),
        }
        sleep(RETRY).await;
    }
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

    #[tokio::test]
    async fn a_client_that_panics_ends_the_clients_of_its_kind() {
        let test = async {
            let clients = spawn_local(open_loop(RETRY, pending(), async || panic!("on purpose")));
            assert!(timeout(TIMEOUT, clients).await.expect("it ends").is_err());
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_insists_is_served_in_the_end() {
        let (mut attempts, mut failures) = (0, Vec::new());
        let attempt = async || {
            attempts += 1;
            match attempts {
                1 => Err("refused"),
                2 => pending().await,
                number => Ok(number),
            }
        };
        assert_eq!(insist(attempt, |failed| failures.push(failed)).await, 3);
        assert!(matches!(failures[..], [Failed::Rejected, Failed::TimedOut]));
    }
}
