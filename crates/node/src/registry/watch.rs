//! Notices of changes to a berth's instance records and leases.
//!
//! An owner keeps its record open for writing until it ends, so its death is also an event: the
//! kernel closes the file. The renewal of a lease, each second by each shim including this process,
//! is an event. The expiry of a lease is no event; the notice that comes each second finds it. A
//! notice only means that the directories should be listed again.

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

/// Time after which a notice comes without an event. If an event is lost, its notice is late by no
/// more than this.
const MAX_INTERVAL: Duration = Duration::from_secs(1);

/// Time from an event to a second notice about it. When a process ends, the kernel sends the event
/// of a file's closing before it releases the lock on the file (`__fput`: fsnotify_close, then
/// locks_remove_file), so the first listing may still find the file locked.
const SECOND_NOTICE_DELAY: Duration = Duration::from_millis(20);

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
    /// Starts to watch a berth. If inotify fails (EMFILE: the user has too many inotify instances),
    /// notices come only each second, and a warning is logged.
    ///
    /// Call this within a tokio runtime that has I/O and time.
    pub fn new(berth: &BerthDir) -> Self {
        Self::with_tick(berth, MAX_INTERVAL)
    }

    fn with_tick(berth: &BerthDir, tick: Duration) -> Self {
        // Records and leases are renamed into place. The kernel closes a record's file when its
        // owner ends, which is an event. A lease's file is closed as soon as it is written, which
        // says nothing.
        let named = WatchFlags::MOVED_TO | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        let written = WatchFlags::CLOSE_WRITE | WatchFlags::CREATE;
        let mut watch = Self {
            directories: [
                (berth.instances_path(), named | written),
                (berth.leases_path(), named),
            ],
            events: None,
            calls: OffThread::new("the run directory"),
            tick,
            next: Instant::now() + tick,
            warned: false,
        };
        match watch.make_watch_start_function().and_then(|begin| begin()) {
            // If a directory is missing, the next listing reports that.
            Err(error) if error.kind() != io::ErrorKind::NotFound => watch.warn_once(&error),
            _ => {}
        }
        watch
    }

    /// Waits until something may have changed: on an event, shortly after an event, and at least
    /// each second. Events between two calls are not lost. The caller may drop the future at any
    /// time, which does not delay the next notice.
    pub async fn wait_for_change(&mut self) {
        loop {
            let next = self.next;
            let event = async {
                match &self.events {
                    Some(events) => events.next_names().await.map(|read| is_change(&read)),
                    None => std::future::pending().await,
                }
            };
            let outcome = tokio::select! {
                outcome = event => outcome,
                () = sleep_until(next) => {
                    // Watch both directories again: a removed directory may exist again, and
                    // inotify may be available now. A rename or a mount can also have put another
                    // directory in place of the old one, without an event. Watching a directory
                    // twice has no effect.
                    if let Ok(begin) = self.make_watch_start_function() {
                        let _ = self.calls.call_within(MAX_INTERVAL, begin).await;
                    }
                    self.next = Instant::now() + self.tick;
                    return;
                }
            };
            match outcome {
                Ok(false) => {}
                Ok(true) => {
                    self.next = Instant::now() + SECOND_NOTICE_DELAY.min(self.tick);
                    return;
                }
                Err(error) => {
                    self.events = None;
                    self.warn_once(&error);
                }
            }
        }
    }

    /// Returns a function that starts to watch both directories. The function may block, so the
    /// caller may run it on another thread.
    fn make_watch_start_function(
        &mut self,
    ) -> io::Result<impl FnOnce() -> io::Result<()> + Send + use<>> {
        let events = match &self.events {
            Some(events) => events.clone(),
            None => self.events.insert(Arc::new(Events::new()?)).clone(),
        };
        let directories = self.directories.clone();
        Ok(move || {
            // Watch the second directory even if the first one cannot be watched.
            let [instances, leases] =
                directories.map(|(directory, wanted)| events.watch_path(&directory, wanted));
            instances.and(leases)
        })
    }

    fn warn_once(&mut self, error: &io::Error) {
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

/// True unless every event is about a file of the registry itself.
fn is_change(names: &[Option<CString>]) -> bool {
    // A name that begins with a dot is a file of the registry itself: a lock or a temporary file.
    // An event without a name means that the event queue has overflowed or a directory has ended,
    // so anything may have changed.
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

    fn claim_instance_a(berth: &BerthDir) -> InstanceClaim {
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

    /// Waits until `count` instances are alive. Looks at the records only after a notice.
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
                watch.wait_for_change().await;
            }
        })
        .await
        .expect("no notice");
    }

    #[tokio::test]
    async fn birth_death_and_removal_of_an_instance_are_reported() {
        let (_temp, berth) = berth();
        let mut watch = Watch::with_tick(&berth, LONG);
        for _ in 0..3 {
            let claimed = claim_instance_a(&berth);
            wait_until_alive(&mut watch, &berth, 1).await;
            drop(claimed);
            wait_until_alive(&mut watch, &berth, 0).await;
        }
        let removed = claim_instance_a(&berth);
        wait_until_alive(&mut watch, &berth, 1).await;
        removed.remove();
        wait_until_alive(&mut watch, &berth, 0).await;
    }

    /// Asserts that two notices come and no third: one at once after the event, and a second one
    /// shortly afterwards.
    async fn expect_two_changes(watch: &mut Watch) {
        for _ in 0..2 {
            timeout(PATIENCE, watch.wait_for_change())
                .await
                .expect("no notice");
        }
        assert!(
            timeout(Duration::from_millis(100), watch.wait_for_change())
                .await
                .is_err(),
            "a third notice"
        );
    }

    #[tokio::test]
    async fn creation_renewal_and_removal_of_a_lease_are_reported() {
        let (_temp, berth) = berth();
        let mut watch = Watch::with_tick(&berth, LONG);
        let lease = lease::tests::golden_lease();
        for _ in 0..2 {
            lease::write(&berth, &lease).unwrap();
            expect_two_changes(&mut watch).await;
        }
        lease::remove(&berth, &lease).unwrap();
        expect_two_changes(&mut watch).await;
    }

    #[tokio::test]
    async fn reading_is_not_reported_as_a_change() {
        let (_temp, berth) = berth();
        drop(claim_instance_a(&berth));
        prune(&berth, SystemTime::now()).unwrap();
        let lease = lease::tests::golden_lease();
        lease::write(&berth, &lease).unwrap();
        let mut watch = Watch::with_tick(&berth, LONG);
        list(&berth).unwrap();
        prune(&berth, SystemTime::now()).unwrap();
        lease::list(&berth).unwrap();
        lease::prune(&berth, &lease.boot_id, Duration::ZERO).unwrap();
        assert!(
            timeout(Duration::from_millis(100), watch.wait_for_change())
                .await
                .is_err()
        );
    }

    #[tokio::test]
    async fn without_inotify_or_directory_ticks_are_still_reported() {
        let (_temp, berth) = berth();
        let mut watch = Watch::with_tick(&berth, Duration::from_millis(10));
        std::fs::remove_file(berth.instances_path().join(".lock")).ok();
        std::fs::remove_dir(berth.instances_path()).unwrap();
        std::fs::remove_dir(berth.leases_path()).unwrap();
        for _ in 0..3 {
            timeout(PATIENCE, watch.wait_for_change()).await.unwrap();
        }
        // Only one of the two directories exists again.
        std::fs::create_dir(berth.instances_path()).unwrap();
        for _ in 0..3 {
            timeout(PATIENCE, watch.wait_for_change()).await.unwrap();
        }
        std::fs::create_dir(berth.leases_path()).unwrap();
        // The removed directories have left events. Wait for more notices than these, so that later
        // notices come from the tick alone.
        for _ in 0..10 {
            timeout(PATIENCE, watch.wait_for_change()).await.unwrap();
        }
        (watch.tick, watch.next) = (LONG, Instant::now() + LONG);
        lease::write(&berth, &lease::tests::golden_lease()).unwrap();
        expect_two_changes(&mut watch).await;
        drop(claim_instance_a(&berth));
        expect_two_changes(&mut watch).await;
        watch.tick = Duration::from_millis(10);
        watch.next = Instant::now();
        watch.events = None;
        timeout(PATIENCE, watch.wait_for_change()).await.unwrap();
    }
}
