//! inotify on a tokio runtime.

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// An inotify descriptor whose events are awaited.
#[derive(Debug)]
pub struct Events(AsyncFd<Descriptor>);

impl Events {
    /// Makes one. To be called within a tokio runtime that has I/O.
    ///
    /// # Errors
    /// EMFILE if the user has too many, and what epoll may say.
    pub fn new() -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // SAFETY: `Descriptor` owns the descriptor and hands it out only as borrowed, so it is open
        // and the same until the `AsyncFd` drops it.
        Ok(Self(unsafe { AsyncFd::register_with_interest(Descriptor(inotify), Interest::READABLE) }?))
    }

    /// Adds a path, or changes what is watched there.
    ///
    /// # Errors
    /// ENOENT, EACCES, and ENOSPC if the user has too many watches.
    pub fn watch(&self, path: &Path, wanted: AddWatchFlags) -> io::Result<()> {
        self.0.get_ref().0.add_watch(path, wanted)?;
        Ok(())
    }

    /// Waits for events and takes them. Dropping the future loses none.
    pub async fn next(&self) -> io::Result<Vec<InotifyEvent>> {
        loop {
            let mut ready = self.0.readable().await?;
            match self.0.get_ref().0.read_events() {
                Ok(events) => return Ok(events),
                Err(Errno::EAGAIN) => ready.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// [`Inotify`] as [`AsyncFd`] wants it.
#[derive(Debug)]
struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}
