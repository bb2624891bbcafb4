//! What siblings owe their clients: upgrades, crashes, hangs, restarts and lies, with real `berth serve`
//! processes and echo servers behind them.
//!
//! Every test runs alone: what is measured is time and loss.

#[path = "../support/mod.rs"]
mod support;

mod commands;
mod death;
mod direct;
mod liars;
mod listeners;
mod load;
mod names;
mod node;
mod outage;
mod passing;
mod run_dir;
mod upgrades;
