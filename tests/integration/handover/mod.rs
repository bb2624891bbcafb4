//! What siblings owe their clients: upgrades, crashes, hangs, restarts and lies, with real `berth serve`
//! processes and echo servers behind them.
//!
//! Four tests run at a time, on machines that have much else to do. So what is judged is what happened, never how long it
//! took, and a lease is long ([`node::LEASE`]) unless its end is what a test is about.

mod commands;
mod death;
mod inject;
mod liars;
mod listeners;
mod names;
mod node;
mod outage;
mod passing;
mod run_dir;
mod share;
mod stalls;
mod standstill;
mod upgrades;
mod versions;
