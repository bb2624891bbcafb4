//! Pipes as the kernel's own buffer: what a socket received moves to another socket by splice(2), page
//! by page and without a copy.

use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};
use nix::unistd::{pipe2, read};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Both ends of a pipe, non-blocking and close-on-exec.
#[derive(Debug)]
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pipe {
    /// A pipe that holds `size` bytes, or what the kernel gives if that is more, or all that is left.
    pub fn new(size: usize) -> io::Result<Self> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        // Without privilege all pipes of a user share a limit (pipe-user-pages-soft): beyond it they
        // stay at 64 KiB, which works too.
        let size = i32::try_from(size).unwrap_or(i32::MAX);
        // The kernel gives 16 pages, and each part of what a socket received takes one, however short it is: where a page has 64 KiB,
        // 64 KiB would be a single part a move.
        if fcntl(&write, FcntlArg::F_GETPIPE_SZ).is_ok_and(|has| has < size) {
            let _ = fcntl(&write, FcntlArg::F_SETPIPE_SZ(size));
        }
        Ok(Self { read, write })
    }

    /// Moves up to `length` bytes from a socket into the pipe, which must be empty: then `EAGAIN` is
    /// about the socket alone. 0 is the socket's end.
    pub fn fill(&self, socket: &impl AsFd, length: usize) -> io::Result<usize> {
        Ok(splice(socket, None, &self.write, None, length, flags())?)
    }

    /// Reads what is in the pipe, `length` bytes.
    pub fn read(&self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let mut at = 0;
        while at < length {
            match read(&self.read, &mut bytes[at..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                more => at += more,
            }
        }
        Ok(bytes)
    }

    /// Moves up to `length` bytes from the pipe to a socket; there must be as many.
    ///
    /// # Errors
    /// Those of splice(2). It raises no SIGPIPE where that is ignored, as in Rust programs.
    pub fn drain(&self, socket: &impl AsFd, length: usize) -> io::Result<usize> {
        Ok(splice(&self.read, None, socket, None, length, flags())?)
    }
}

fn flags() -> SpliceFFlags {
    SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_has_no_fewer_pages_than_the_kernel_gives() {
        let size = |pipe: &OwnedFd| fcntl(pipe, FcntlArg::F_GETPIPE_SZ).unwrap();
        let (_read, kernels) = pipe2(OFlag::O_CLOEXEC).unwrap();
        assert_eq!(size(&Pipe::new(1).unwrap().write), size(&kernels));
        assert!(size(&Pipe::new(1 << 20).unwrap().write) >= size(&kernels));
    }
}
