//! berth from outside: the program as its users run it, and a shim or a rehearsal in this process
//! with plain sockets before and behind it. All integration tests are in one binary: linking
//! happens once, and no file's last tests run alone.
//!
//! Tests that decide at run time whether they can run are in the binaries `e2e`, `examples` and
//! `image.rs`.

#[path = "../support/mod.rs"]
mod support;

#[cfg(all(feature = "operate", feature = "rehearse"))]
mod bridge;
#[cfg(feature = "operate")]
mod docs;
#[cfg(feature = "operate")]
mod doctor;
mod exec;
#[cfg(feature = "operate")]
mod grant;
mod handover;
mod init;
#[cfg(feature = "operate")]
mod kills;
#[cfg(feature = "operate")]
mod manifest;
mod output;
#[cfg(feature = "rehearse")]
mod rehearse;
mod relay;
mod run;
mod serve;
mod stand_in;
#[cfg(feature = "operate")]
mod upgrade;
