//! Pipes as buffers in the kernel. With splice(2), received bytes move through a pipe from one
//! socket to another, page by page and without a copy.

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
    /// Makes a pipe with room for `size` bytes, or with the kernel's default size if that is
    /// larger. A user who has reached the limit of pipe memory gets a smaller pipe.
    pub fn new(size: usize) -> io::Result<Self> {
        let (read, write) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        // All pipes of an unprivileged user share a limit (pipe-user-pages-soft). If it is reached,
        // the pipe keeps a smaller size, which works too.
        let size = i32::try_from(size).unwrap_or(i32::MAX);
        // By default, a pipe has 16 pages. Each received fragment takes a page, however short it
        // is. If pages had 64 KiB, a pipe of 64 KiB would have one page and move one fragment at a
        // time.
        if fcntl(&write, FcntlArg::F_GETPIPE_SZ).is_ok_and(|has| has < size) {
            let _ = fcntl(&write, FcntlArg::F_SETPIPE_SZ(size));
        }
        Ok(Self { read, write })
    }

    /// Moves up to `length` bytes from a socket into the pipe, which must be empty: then `EAGAIN`
    /// can only mean that the socket has no bytes. 0 means end of file.
    pub fn fill(&self, socket: &impl AsFd, length: usize) -> io::Result<usize> {
        Ok(splice(
            socket,
            None,
            &self.write,
            None,
            length,
            splice_flags(),
        )?)
    }

    /// Reads `length` bytes from the pipe.
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

    /// Moves up to `length` bytes from the pipe, which must hold so many, to a socket.
    ///
    /// # Errors
    /// Errors of splice(2). A broken pipe raises no SIGPIPE if SIGPIPE is ignored, as in Rust
    /// programs.
    pub fn drain(&self, socket: &impl AsFd, length: usize) -> io::Result<usize> {
        Ok(splice(
            &self.read,
            None,
            socket,
            None,
            length,
            splice_flags(),
        )?)
    }
}

fn splice_flags() -> SpliceFFlags {
    SpliceFFlags::SPLICE_F_NONBLOCK | SpliceFFlags::SPLICE_F_MOVE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_at_least_as_large_as_the_kernels_default() {
        let size = |pipe: &OwnedFd| fcntl(pipe, FcntlArg::F_GETPIPE_SZ).unwrap();
        let (_read, kernels) = pipe2(OFlag::O_CLOEXEC).unwrap();
        assert_eq!(size(&Pipe::new(1).unwrap().write), size(&kernels));
        assert!(size(&Pipe::new(1 << 20).unwrap().write) >= size(&kernels));
    }
}
