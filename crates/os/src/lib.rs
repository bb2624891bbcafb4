//! System calls and /proc. All `unsafe` of berth is here.
#![allow(
    unsafe_code,
    reason = "it is here and nowhere else, each block with its SAFETY comment"
)]

pub mod bpf;
pub mod clock;
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

/// Lets the runtime wait for a descriptor. To be called within a tokio runtime that has I/O.
pub fn awaitable(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open, and the same, until the AsyncFd drops it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// A message without the numbers that Rust puts behind the system's own words: " (os error 2)".
pub fn plain(message: String) -> String {
    match message.split_once(" (os error ") {
        Some((before, rest)) => {
            plain(before.to_owned() + rest.split_once(')').map_or("", |(_, after)| after))
        }
        None => message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_has_no_numbers() {
        let missing = io::Error::from_raw_os_error(2);
        assert_eq!(
            plain(format!("a: {missing}: b ({missing})")),
            "a: No such file or directory: b (No such file or directory)"
        );
        assert_eq!(plain("all is well".into()), "all is well");
    }
}
