//! A socket that is reset unless its connection ended properly.

use berth_os::socket::reset_on_close;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use tokio::net::TcpStream;

/// A socket that resets its peer when dropped. The shim then ends first (the drain deadline, a
/// second signal), or an attempt was abandoned. After a FIN, a client could take a part of an
/// answer for the whole.
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

    /// Sets whether a drop resets the peer. The option belongs to the socket and not to the
    /// descriptor, so `abort` must be false while another process may have the socket too.
    pub(super) fn set_abort(&mut self, abort: bool) {
        self.abort = abort;
    }

    /// Registers the socket with the runtime again. Without this, bytes that have already arrived
    /// would cause no second event.
    ///
    /// # Errors
    /// No descriptor is left for a duplicate. The client's next bytes still cause an event.
    pub(super) fn register_again(&mut self) -> io::Result<()> {
        let duplicate = self.stream.as_fd().try_clone_to_owned()?;
        self.stream = TcpStream::from_std(duplicate.into())?;
        Ok(())
    }

    /// Closes the socket: by FIN, unless it was set to reset.
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
