//! Rescue of a node's etcd that serves from a database without a name: the database is copied, and
//! the process is ended if nothing is lost.
//!
//! After the next raft snapshot, etcd can no longer open the data directory with the file that the
//! database's path names. So the process is stopped (SIGSTOP) before the copy is made and the
//! snapshots are listed: the copy is complete, and no snapshot is written in between.

use super::database::Database;
use berth_os::file::{replace_file, sync_parent_directory};
use berth_os::process::HeldProcess;
use rustix::fs::ioctl_ficlone;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The documentation of the next steps.
pub const PAGE: &str = "docs/bridge.md, \"A node whose etcd serves a deleted database\"";

/// Time for the process's threads to stop. A thread that writes to a disk stops after the write.
const STOPS: Duration = Duration::from_secs(10);

/// Longest stop of the process for the copy, which would never end on a hung disk.
const COPIES: Duration = Duration::from_secs(60);

const NOT_ENDED: &str = "the process had ended by itself, or the copy failed";

/// Result of a rescue.
#[derive(Debug)]
pub struct Rescued {
    pub pid: i32,
    /// Path of the copy. A failed copy may be tried again.
    pub copy: Result<PathBuf, String>,
    ended: Result<(), String>,
}

impl Rescued {
    /// The result of a rescue that copied nothing, and ended no process.
    pub fn failed(pid: i32, why: String) -> Self {
        Self {
            pid,
            copy: Err(why),
            ended: Err(NOT_ENDED.to_owned()),
        }
    }

    /// True if the bridge did not end the process: the file at the database's path may lack writes
    /// that the process acknowledged.
    pub fn is_unrecovered(&self) -> bool {
        self.ended.is_err()
    }

    /// Message for the operator.
    pub fn trouble(&self) -> String {
        let copy = match &self.copy {
            Ok(path) => format!("a copy of this database is {}", path.display()),
            Err(why) => format!("this database could not be copied ({why})"),
        };
        let ended = match &self.ended {
            Ok(()) => "the process was ended, and etcd's write-ahead log has all writes that etcd acknowledged"
                .to_owned(),
            Err(why) => format!(
                "the process was not ended ({why}), and the bridge sends it no clients: do not restart this etcd before you have read \
                 {PAGE}"
            ),
        };
        format!(
            "the node's etcd (process {}) served from a database file that was deleted or renamed: {copy}; {ended}",
            self.pid
        )
    }
}

/// Adds the rescue of the process `pid`: `None` if there was nothing to rescue. Earlier rescues go,
/// except unrecovered ones of other processes: the file may still lack these processes' writes.
pub fn record_rescue(all: &mut Vec<Rescued>, pid: Option<i32>, rescued: Option<Rescued>) {
    all.retain(|it| it.is_unrecovered() && Some(it.pid) != pid);
    all.extend(rescued);
}

/// Copies the database of a process. Ends the process if it has written no snapshot since `known`,
/// the last snapshot from a time at which an etcd served from the database that the path names.
/// `None` if the process has that database now, for example after a defragmentation. Blocks for as
/// long as the copy takes.
pub fn rescue_database(
    pid: i32,
    database: &Database,
    known: Option<&Option<OsString>>,
) -> Option<Rescued> {
    let mut ended = Err(NOT_ENDED.to_owned());
    let copied = HeldProcess::of(pid).and_then(|process| {
        stop_and_copy(&process, database, |from| {
            ended = end_process_if_recoverable(&process, from, database, known);
        })
    });
    let copy = copied.transpose()?.map_err(|error| error.to_string());
    Some(Rescued { pid, copy, ended })
}

/// Stops a process, copies its database, and calls `then` before the process continues.
fn stop_and_copy(
    process: &HeldProcess,
    database: &Database,
    then: impl FnOnce(&Path),
) -> io::Result<Option<PathBuf>> {
    let _paused = process.pause(STOPS)?;
    let named = Database::of_process(process.pid);
    let its = named.as_ref().unwrap_or(database);
    let Some(from) = process.read_while_alive(|pid| Ok(its.file_opened_by(pid).1))? else {
        return Ok(None);
    };
    let copy = copy_with_time_limit(from.clone(), database.data_directory().to_owned())?;
    // Whatever happens to the bridge, the log names the copy.
    tracing::info!(pid = process.pid, copy = %copy.display(), "the database of the node's etcd was copied");
    then(&from);
    Ok(Some(copy))
}

/// Copies like [`copy_beside`], on a separate thread. A copy that takes too long is abandoned, and
/// removed at its end.
fn copy_with_time_limit(from: PathBuf, beside: PathBuf) -> io::Result<PathBuf> {
    let (done, copied) = mpsc::sync_channel(0);
    std::thread::spawn(move || {
        if let Err(mpsc::SendError(Ok(late))) = done.send(copy_beside(&from, &beside)) {
            drop(fs::remove_file(late));
        }
    });
    copied.recv_timeout(COPIES).unwrap_or_else(|_| {
        Err(io::Error::other(format!(
            "the copy takes longer than {COPIES:?}"
        )))
    })
}

/// Copies a file beside a directory. The copy is on the disk on return.
fn copy_beside(from: &Path, beside: &Path) -> io::Result<PathBuf> {
    let mut name = beside
        .file_name()
        .ok_or(io::ErrorKind::InvalidInput)?
        .to_owned();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    name.push(format!("-berth-{}.db", now.as_millis()));
    let to = beside.with_file_name(name);
    // A killed bridge leaves half a database, which needs another name.
    let part = to.with_extension("db.part");
    let mut from = File::open(from)?;
    // A partial database is useless, and takes space.
    replace_file(&to, &part, |mut file| {
        ioctl_ficlone(&file, &from).or_else(|_| io::copy(&mut from, &mut file).map(drop))?;
        file.sync_all()
    })?;
    sync_parent_directory(&to).inspect_err(|_| drop(fs::remove_file(&to)))?;
    Ok(to)
}

/// Ends a stopped process if the log has all writes that the file at the database's path lacks. The
/// process is not ended if COMMAND moved or replaced the data: then the log is elsewhere, or the
/// database has another name.
fn end_process_if_recoverable(
    process: &HeldProcess,
    from: &Path,
    database: &Database,
    known: Option<&Option<OsString>>,
) -> Result<(), String> {
    let is_deleted = fs::metadata(from).is_ok_and(|file| file.nlink() == 0);
    let has_log = database
        .is_log_open_in(process.pid)
        .map_err(|error| format!("etcd's write-ahead log cannot be listed: {error}"))?;
    if !is_deleted || !has_log {
        return Err(format!(
            "the database or the write-ahead log is not in {}",
            database.data_directory().display()
        ));
    }
    let known =
        known.ok_or("the bridge never saw an etcd serve from the file at the database's path")?;
    let now = database
        .last_snapshot()
        .map_err(|error| format!("etcd's snapshots cannot be listed: {error}"))?;
    if now > *known {
        let now = now.unwrap_or_default();
        return Err(format!(
            "etcd has written the newer snapshot {}, and the data directory has no database for this snapshot",
            now.display()
        ));
    }
    match process.kill() {
        // The process has ended meanwhile.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            Ok(())
        }
        killed => killed.map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    #[test]
    fn an_unrecovered_rescue_of_another_process_stays() {
        let recovered = |pid| Rescued {
            ended: Ok(()),
            ..Rescued::failed(pid, "disk full".into())
        };
        let failed = |pid| Rescued::failed(pid, "disk full".into());
        for (last, now, then) in [
            (failed(1), Some(recovered(1)), &[(1, false)][..]),
            (failed(1), Some(recovered(2)), &[(1, true), (2, false)]),
            (failed(1), Some(failed(2)), &[(1, true), (2, true)]),
            (failed(2), None, &[]),
            (failed(1), None, &[(1, true)]),
            (recovered(1), None, &[]),
            (recovered(1), Some(failed(2)), &[(2, true)]),
        ] {
            let pid = now.as_ref().map_or(2, |now| now.pid);
            let mut all = vec![last];
            record_rescue(&mut all, Some(pid), now);
            let all: Vec<_> = all.iter().map(|it| (it.pid, it.is_unrecovered())).collect();
            assert_eq!(all, then);
        }
    }

    const FIRST: &str = "0000000000000002-0000000000002711.snap";
    const SEGMENT: &str = "member/wal/0000000000000000-0000000000000000.wal";
    const SECOND: &str = "0000000000000002-0000000000004e22.snap";

    /// A process that holds a database as etcd does, by flock(1).
    fn spawn_etcd(database: &Database) -> Option<Child> {
        let mut command = Command::new("flock");
        // Opens a segment of the log, too, if there is one.
        let script = "[ ! -e \"$0\" ] || exec 9<\"$0\"; echo; read line";
        command
            .arg("--no-fork")
            .arg(database.path())
            .args(["sh", "-c", script])
            .arg(database.data_directory().join(SEGMENT));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let mut line = [0];
        io::Read::read_exact(child.stdout.as_mut()?, &mut line).ok()?;
        Some(child)
    }

    #[test]
    fn a_process_that_has_ended_leaves_a_file_that_may_lack_writes() {
        let temp = tempfile::tempdir().unwrap();
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        child.kill().unwrap();
        let pid = child.id().try_into().unwrap();
        // The parent has not waited for the process yet.
        let process = HeldProcess::of(pid).unwrap();
        assert!(process.ends_within(Duration::from_secs(60)).unwrap());
        let database = Database::from_directory(temp.path());
        let rescued = rescue_database(pid, &database, Some(&None)).unwrap();
        assert!(rescued.copy.is_err() && rescued.is_unrecovered());
        child.wait().unwrap();
    }

    #[test]
    fn a_database_is_copied_and_its_process_ended_only_without_a_newer_snapshot() {
        for (known, now, has_log, ends) in [
            (Some(None), None, true, true),
            (Some(None), None, false, false),
            (Some(Some(FIRST)), Some(FIRST), true, true),
            (Some(Some(FIRST)), Some(SECOND), true, false),
            (Some(None), Some(FIRST), true, false),
            (None, None, true, false),
        ] {
            let temp = tempfile::tempdir().unwrap();
            let data = temp.path().join("etcd");
            let database = Database::from_directory(&data);
            let at = database.path();
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            fs::write(&at, "acknowledged").unwrap();
            let segment = data.join(SEGMENT);
            fs::create_dir_all(segment.parent().unwrap()).unwrap();
            if has_log {
                fs::write(&segment, "").unwrap();
            }
            let Some(mut child) = spawn_etcd(&database) else {
                return;
            };
            let pid = i32::try_from(child.id()).unwrap();
            assert!(
                rescue_database(pid, &database, Some(&None)).is_none(),
                "it is the one that its path names"
            );
            assert!(child.try_wait().unwrap().is_none());
            fs::write(at.with_file_name("db.tmp.1"), "old").unwrap();
            fs::rename(at.with_file_name("db.tmp.1"), &at).unwrap();
            if let Some(now) = now {
                fs::write(at.with_file_name(now), "").unwrap();
            }
            let known = known.map(|known| known.map(OsString::from));
            let rescued = rescue_database(pid, &database, known.as_ref()).unwrap();
            let copy = rescued.copy.as_ref().unwrap();
            assert_eq!(
                (copy.parent(), fs::read_to_string(copy).unwrap().as_str()),
                (data.parent(), "acknowledged")
            );
            assert_eq!(fs::metadata(copy).unwrap().mode() & 0o777, 0o600);
            assert_eq!(
                rescued.ended.is_ok(),
                ends,
                "{known:?} {now:?}: {rescued:?}"
            );
            assert_eq!(rescued.is_unrecovered(), !ends);
            assert!(rescued.trouble().contains(&copy.display().to_string()));
            assert_eq!(rescued.trouble().contains(PAGE), !ends);
            drop(child.stdin.take());
            let status = child.wait().unwrap();
            assert_eq!(
                std::os::unix::process::ExitStatusExt::signal(&status).is_some(),
                ends,
                "{status}"
            );
        }
    }
}
