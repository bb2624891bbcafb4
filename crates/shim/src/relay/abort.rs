//! A socket of a connection, which is reset unless the connection ended properly.

use berth_os::socket::reset_on_close;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use tokio::net::TcpStream;

/// Resets its peer when it is dropped: the shim ended first (the drain deadline, a second signal), or an attempt was
/// abandoned. After a FIN, a client could take a part of an answer for the whole.
#[derive(Debug)]
pub(super) struct AbortOnDrop {
    stream: TcpStream,
    abort: bool,
}

impl AbortOnDrop {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            abort: true,
        }
    }

    /// Whether dropping it resets the peer. Not so while another process may have the socket too: the option is the
    /// socket's and not the descriptor's.
    pub(super) fn set_abort(&mut self, abort: bool) {
        self.abort = abort;
    }

    /// Lets the runtime look at the socket anew: an event of what has arrived already does not come twice.
    ///
    /// # Errors
    /// There is no descriptor left for that. What the client sends next is an event nevertheless.
    pub(super) fn register_again(&mut self) -> io::Result<()> {
        let duplicate = self.stream.as_fd().try_clone_to_owned()?;
        self.stream = TcpStream::from_std(duplicate.into())?;
        Ok(())
    }

    /// Closes it: by FIN, unless it was set to reset.
    pub(super) fn close(mut self) {
        self.abort = false;
    }
}

impl Deref for AbortOnDrop {
    type Target = TcpStream;

    fn deref(&self) -> &TcpStream {
        &self.stream
    }
}

impl DerefMut for AbortOnDrop {
    fn deref_mut(&mut self) -> &mut TcpStream {
        &mut self.stream
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if self.abort {
            reset_on_close(&self.stream);
        }
    }
}
