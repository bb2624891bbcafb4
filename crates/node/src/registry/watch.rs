//! Notices of changes to a berth's instance records and leases.
//!
//! An owner keeps its record open for writing until it ends, so its death is also an event: the
//! kernel closes the file. The renewal of a lease, each second by each shim including this process,
//! is an event. The expiry of a lease is no event, and is found by the tick. A notice only means
//! that the directories should be listed again.

use super::BerthDir;
use berth_os::explained;
use berth_os::inotify::{Events, WatchFlags};
use berth_os::off_thread::OffThread;
use std::ffi::CString;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Maximum time between two notices, and the maximum delay after a lost event.
const TICK: Duration = Duration::from_secs(1);

/// Time from an event to a second notice. When a process ends, the kernel sends the event of a
/// file's closing before it releases the lock on the file (`__fput`: fsnotify_close, then
/// locks_remove_file), so the first listing may still find the file locked.
const ECHO: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Watch {
    directories: [(PathBuf, WatchFlags); 2],
    events: Option<Arc<Events>>,
    calls: OffThread,
    tick: Duration,
    next: Instant,
    warned: bool,
}

impl Watch {
    /// Watches a berth. Without inotify (EMFILE: the user has too many instances) notices come only
    /// each second, and a warning is logged.
    ///
    /// Call this within a tokio runtime that has I/O and time.
    pub fn new(berth: &BerthDir) -> Self {
        Self::with_tick(berth, TICK)
    }

    fn with_tick(berth: &BerthDir, tick: Duration) -> Self {
        // Records and leases are renamed into place. The closing of a record's file shows its
        // owner's death; a lease's file is closed at once.
        let named = WatchFlags::MOVED_TO | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        let written = WatchFlags::CLOSE_WRITE | WatchFlags::CREATE;
        let mut watch = Self {
            directories: [
                (berth.instances(), named | written),
                (berth.leases(), named),
            ],
            events: None,
            calls: OffThread::new("the run directory"),
            tick,
            next: Instant::now() + tick,
            warned: false,
        };
        match watch.watch_function().and_then(|begin| begin()) {
            // A missing directory is reported when it is listed.
            Err(error) if error.kind() != io::ErrorKind::NotFound => watch.warn(&error),
            _ => {}
        }
        watch
    }

    /// Waits until something may have changed: on an event, shortly after an event, and at least
    /// each second. Events between two calls are not lost. The future may be dropped at any time
    /// without delaying the next notice.
    pub async fn changed(&mut self) {
        loop {
            let next = self.next;
            let event = async {
                match &self.events {
                    Some(events) => events.next().await.map(|read| is_change(&read)),
                    None => std::future::pending().await,
                }
            };
            let outcome = tokio::select! {
                outcome = event => outcome,
                () = sleep_until(next) => {
                    // A removed directory may exist again, and inotify may be available now. A
                    // rename or a mount can give the name to another directory, without an event
                    // from the old directory. Watching a directory twice has no effect.
                    if let Ok(begin) = self.watch_function() {
                        let _ = self.calls.within(TICK, begin).await;
                    }
                    self.next = Instant::now() + self.tick;
                    return;
                }
            };
            match outcome {
                Ok(false) => {}
                Ok(true) => {
                    self.next = Instant::now() + ECHO.min(self.tick);
                    return;
                }
                Err(error) => {
                    self.events = None;
                    self.warn(&error);
                }
            }
        }
    }

    /// Returns a function that starts to watch both directories.
    fn watch_function(&mut self) -> io::Result<impl FnOnce() -> io::Result<()> + Send + use<>> {
        let events = match &self.events {
            Some(events) => events.clone(),
            None => self.events.insert(Arc::new(Events::new()?)).clone(),
        };
        let directories = self.directories.clone();
        Ok(move || {
            // The second directory is watched even if the first cannot be watched.
            let [instances, leases] =
                directories.map(|(directory, wanted)| events.watch(&directory, wanted));
            instances.and(leases)
        })
    }

    fn warn(&mut self, error: &io::Error) {
        if !std::mem::replace(&mut self.warned, true) {
            let [(instances, _), (leases, _)] = &self.directories;
            tracing::warn!(
                code = %explained::NO_INOTIFY,
                instances = %instances.display(), leases = %leases.display(), %error,
                "no notice of changes by inotify: instance records and leases are read each second (see \
                 fs.inotify.max_user_instances and max_user_watches)"
            );
        }
    }
}

/// True if the names in the events mean that something may have changed.
fn is_change(names: &[Option<CString>]) -> bool {
    // Names with a dot are files of the registry itself: the lock, and temporary files. An overflow
    // of the queue and the end of a directory have no name and mean that anything may have changed.
    let own = |name: &Option<CString>| {
        name.as_ref()
            .is_some_and(|name| name.to_bytes().starts_with(b"."))
    };
    !names.iter().all(own)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::instance::{Claimant, InstanceClaim, claim, list, prune};
    use crate::registry::lease;
    use crate::registry::tests::{berth, id};
    use std::time::SystemTime;
    use tokio::time::timeout;

    const LONG: Duration = Duration::from_secs(3600);
    const PATIENCE: Duration = Duration::from_secs(20);

    fn claim_a(berth: &BerthDir) -> InstanceClaim {
        let claimant = Claimant {
            instance: &id("a"),
            advertise: "10.0.0.5".parse().unwrap(),
            supervisor: None,
            pid: None,
        };
        claim(berth, &claimant, |_, _| {
            Ok("127.1.2.3:6443".parse().unwrap())
        })
        .unwrap()
    }

    /// Waits, by notices alone, until `count` instances are alive.
    async fn wait_until_alive(watch: &mut Watch, berth: &BerthDir, count: usize) {
        let alive = || {
            list(berth)
                .unwrap()
                .found
                .iter()
                .filter(|listed| listed.alive)
                .count()
        };
        timeout(PATIENCE, async {
            while alive() != count {
                watch.changed().await;
            }
        })
        .await
        .expect("no notice");
    }

    #[tokio::test]
    async fn birth_death_and_removal_are_events() {
        let (_temp, berth) = berth();
        let mut watch = Watch::with_tick(&berth, LONG);
        for _ in 0..3 {
            let claimed = claim_a(&berth);
            wait_until_alive(&mut watch, &berth, 1).await;
            drop(claimed);
            wait_until_alive(&mut watch, &berth, 0).await;
        }
        let removed = claim_a(&berth);
        wait_until_alive(&mut watch, &berth, 1).await;
        removed.remove();
        wait_until_alive(&mut watch, &berth, 0).await;
    }

    /// Asserts that an event causes two notices: an immediate notice and an echo.
    async fn expect_two_notices(watch: &mut Watch) {
        for _ in 0..2 {
            timeout(PATIENCE, watch.changed()).await.expect("no notice");
        }
        assert!(
            timeout(Duration::from_millis(100), watch.changed())
                .await
                .is_err(),
            "a third notice"
        );
    }

    #[tokio::test]
    async fn creation_renewal_and_removal_of_a_lease_are_events() {
        let (_temp, berth) = berth();
        let mut watch = Watch::with_tick(&berth, LONG);
        let lease = lease::tests::golden();
        for _ in 0..2 {
            lease::write(&berth, &lease).unwrap();
            expect_two_notices(&mut watch).await;
        }
        lease::remove(&berth, &lease).unwrap();
        expect_two_notices(&mut watch).await;
    }

    #[tokio::test]
    async fn reading_is_no_event() {
        let (_temp, berth) = berth();
        drop(claim_a(&berth));
        prune(&berth, SystemTime::now()).unwrap();
        let lease = lease::tests::golden();
        lease::write(&berth, &lease).unwrap();
        let mut watch = Watch::with_tick(&berth, LONG);
        list(&berth).unwrap();
        prune(&berth, SystemTime::now()).unwrap();
        lease::list(&berth).unwrap();
        lease::prune(&berth, &lease.boot_id, Duration::ZERO).unwrap();
        assert!(
            timeout(Duration::from_millis(100), watch.changed())
                .await
                .is_err()
        );
    }

    #[tokio::test]
    async fn without_inotify_or_directory_the_ticks_go_on() {
        let (_temp, berth) = berth();
        let mut watch = Watch::with_tick(&berth, Duration::from_millis(10));
        std::fs::remove_file(berth.instances().join(".lock")).ok();
        std::fs::remove_dir(berth.instances()).unwrap();
        std::fs::remove_dir(berth.leases()).unwrap();
        for _ in 0..3 {
            timeout(PATIENCE, watch.changed()).await.unwrap();
        }
        // The directories are watched again once both exist.
        std::fs::create_dir(berth.instances()).unwrap();
        for _ in 0..3 {
            timeout(PATIENCE, watch.changed()).await.unwrap();
        }
        std::fs::create_dir(berth.leases()).unwrap();
        // More notices than there are events left from the removed directories: all further notices
        // are ticks.
        for _ in 0..10 {
            timeout(PATIENCE, watch.changed()).await.unwrap();
        }
        (watch.tick, watch.next) = (LONG, Instant::now() + LONG);
        lease::write(&berth, &lease::tests::golden()).unwrap();
        expect_two_notices(&mut watch).await;
        drop(claim_a(&berth));
        expect_two_notices(&mut watch).await;
        watch.tick = Duration::from_millis(10);
        watch.next = Instant::now();
        watch.events = None;
        timeout(PATIENCE, watch.changed()).await.unwrap();
    }
}
