//! Waits for what comes by itself, by asking for it again and again.

use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Asks with this pause until an answer counts, for at most this long; gives the last answer.
pub async fn until<T>(
    within: Duration,
    pause: Duration,
    mut ask: impl AsyncFnMut() -> T,
    counts: impl Fn(&T) -> bool,
) -> T {
    let began = Instant::now();
    loop {
        let answer = ask().await;
        if counts(&answer) || began.elapsed() >= within {
            return answer;
        }
        sleep(pause).await;
    }
}
