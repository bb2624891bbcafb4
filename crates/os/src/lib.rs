//! System calls and /proc. Every `unsafe` block of berth is in this crate.
#![allow(
    unsafe_code,
    reason = "this is the only crate with unsafe code, each block with its SAFETY comment"
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

use std::io;
use std::os::fd::OwnedFd;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Lets the runtime wait for a descriptor. Must be called within a tokio runtime that has I/O.
pub fn make_awaitable(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd stays open, with the same number, until the AsyncFd drops it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// Removes the numbers that Rust appends to the system's messages: " (os error 2)".
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
    fn numbers_are_removed_from_the_systems_messages() {
        let missing = io::Error::from_raw_os_error(2);
        assert_eq!(
            strip_error_numbers(format!("a: {missing}: b ({missing})")),
            "a: No such file or directory: b (No such file or directory)"
        );
        assert_eq!(strip_error_numbers("all is well".into()), "all is well");
    }
}
