//! Duties of siblings towards their clients: upgrades, crashes, hangs, restarts and invalid
//! messages, with real `berth serve` processes and echo servers behind them.
//!
//! Four tests run at a time on busy machines. So tests judge events and never durations, and a
//! lease is long ([`node::LEASE`]) unless the test is about its end.

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
