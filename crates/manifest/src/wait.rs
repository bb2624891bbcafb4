//! Waits for an answer by repeating a question.

use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Repeats a question, with a `pause` after each answer, until `counts` accepts an answer or
/// `within` is over. Returns the last answer.
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
