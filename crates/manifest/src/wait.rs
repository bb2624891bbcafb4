//! Waits for an answer by repeating a question.

use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Asks at intervals of `pause` until an answer counts, for at most `within`. Returns the last
/// answer.
pub async fn ask_until<T>(
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
