//! Waits for changes of files (inotify(7)) on a tokio runtime.

pub use rustix::fs::inotify::WatchFlags;
use rustix::fs::inotify::{CreateFlags, Reader, add_watch, init};
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Size of the buffer for a burst of events, in bytes. An event has at most 16 bytes and a file
/// name.
const BUFFER_SIZE: usize = 4096;

#[derive(Debug)]
pub struct Events(AsyncFd<OwnedFd>);

impl Events {
    /// Makes an inotify instance, which watches nothing yet. Must be called within a tokio runtime
    /// that has I/O.
    ///
    /// # Errors
    /// EMFILE if the user has too many inotify instances, and errors of epoll.
    pub fn new() -> io::Result<Self> {
        Ok(Self(crate::make_awaitable(
            init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?,
            Interest::READABLE,
        )?))
    }

    /// Adds a path to the watched paths, or changes the watched events of a path.
    ///
    /// # Errors
    /// ENOENT, EACCES, and ENOSPC if the user has too many watches.
    pub fn watch_path(&self, path: &Path, wanted: WatchFlags) -> io::Result<()> {
        add_watch(self.0.get_ref(), path, wanted)?;
        Ok(())
    }

    /// Waits for events and returns the file name of each event, if the event has one. Dropping the
    /// future loses no event.
    pub async fn next_names(&self) -> io::Result<Vec<Option<CString>>> {
        self.0
            .async_io(Interest::READABLE, |inotify| {
                let mut space = [MaybeUninit::uninit(); BUFFER_SIZE];
                let mut reader = Reader::new(inotify, &mut space);
                let mut names = Vec::new();
                loop {
                    names.push(reader.next()?.file_name().map(ToOwned::to_owned));
                    if reader.is_buffer_empty() {
                        return Ok(names);
                    }
                }
            })
            .await
    }
}
