//! System calls and /proc. Every `unsafe` block of the product is in this crate.
#![allow(
    unsafe_code,
    reason = "the product's only crate with unsafe code, each block with its SAFETY comment"
)]

pub mod bpf;
pub mod clock;
pub mod explained;
pub mod file;
pub mod inotify;
pub mod locks;
pub mod namespaces;
pub mod netdevice;
pub mod off_thread;
pub mod pipe;
pub mod proc_net;
pub mod process;
pub mod seccomp;
pub mod seqpacket;
pub mod signals;
pub mod sock_diag;
pub mod socket;

use std::borrow::Borrow;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use tokio::io::{Interest, unix::AsyncFd};

/// Registers a descriptor with the runtime, so that tasks can wait for it. Must be called within a
/// tokio runtime that has I/O.
pub fn make_awaitable<T: AsRawFd + Borrow<OwnedFd>>(
    fd: T,
    interest: Interest,
) -> io::Result<AsyncFd<T>> {
    // SAFETY: an OwnedFd, also a shared one, stays open, with the same number, until the AsyncFd
    // drops it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// Removes error numbers such as " (os error 2)", which Rust appends to the system's messages.
pub fn strip_error_numbers(message: String) -> String {
    match message.split_once(" (os error ") {
        Some((before, rest)) => strip_error_numbers(
            before.to_owned() + rest.split_once(')').map_or("", |(_, after)| after),
        ),
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_numbers_are_removed_from_messages() {
        let missing = io::Error::from_raw_os_error(2);
        assert_eq!(
            strip_error_numbers(format!("a: {missing}: b ({missing})")),
            "a: No such file or directory: b (No such file or directory)"
        );
        assert_eq!(strip_error_numbers("all is well".into()), "all is well");
    }
}
