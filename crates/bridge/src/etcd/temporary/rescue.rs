//! Rescue of a node's etcd that serves from a database without a name: the database is copied, and
//! the process is ended if nothing is lost.
//!
//! After the next raft snapshot, etcd can no longer open the data directory with the file that the
//! database's path names. So the process is stopped (SIGSTOP) before the copy is made and the
//! snapshots are listed: the copy is complete, and no snapshot is written in between.

use super::database::Database;
use super::machine::Opened;
use berth_os::file::{replace_file, sync_parent};
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

/// Result of a rescue.
#[derive(Debug)]
pub struct Rescued {
    pub pid: i32,
    /// Path of the copy. A failed copy may be tried again.
    pub copy: Result<PathBuf, String>,
    ended: Result<(), String>,
}

impl Rescued {
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
            Ok(()) => "the process was ended, and the log has all writes that etcd acknowledged"
                .to_owned(),
            Err(why) => format!(
                "the process was not ended ({why}) and gets no client of the bridge's: do not restart this etcd before you have read {PAGE}"
            ),
        };
        format!(
            "the node's own etcd (process {}) served from a database that was replaced, to which no name leads: {copy}; {ended}",
            self.pid
        )
    }
}

/// Copies the database of a process. Ends the process if it has written no snapshot since `known`,
/// the last snapshot from a time at which the process had the database that the path names. `None`
/// if the process has that database now, for example after a defragmentation. Blocks for as long as
/// the copy takes.
pub fn rescue_database(
    pid: i32,
    database: &Database,
    known: Option<&Option<OsString>>,
) -> Option<Rescued> {
    let failed = |error: io::Error| error.to_string();
    let (copy, ended) = match HeldProcess::of(pid) {
        Ok(process) => {
            let mut ended = Err("its copy failed".to_owned());
            let copy = stop_and_copy(&process, database, |from| {
                ended = end_stopped(&process, from, database, known);
            });
            (copy.transpose()?.map_err(failed), ended)
        }
        Err(error) => (Err(failed(error)), Err("it has ended by itself".to_owned())),
    };
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
    let (opened, from) = named.as_ref().unwrap_or(database).opened_by(process.pid);
    let Some(from) = from.filter(|_| opened == Opened::Other) else {
        return Ok(None);
    };
    let copy = copy_in_time(from.clone(), database.data().to_owned())?;
    // Whatever happens to the bridge, the log names the copy.
    tracing::info!(pid = process.pid, copy = %copy.display(), "the database of the node's own etcd was copied");
    then(&from);
    Ok(Some(copy))
}

/// Copies like [`copy_beside`], on a separate thread. A copy that takes too long is abandoned, and
/// removed at its end.
fn copy_in_time(from: PathBuf, beside: PathBuf) -> io::Result<PathBuf> {
    let (done, copied) = mpsc::sync_channel(0);
    std::thread::spawn(move || {
        if let Err(mpsc::SendError(Ok(late))) = done.send(copy_beside(&from, &beside)) {
            let _: io::Result<()> = fs::remove_file::<PathBuf>(late);
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
    sync_parent(&to).inspect_err(|_| drop(fs::remove_file(&to)))?;
    Ok(to)
}

/// Ends a stopped process if the log has all writes that the file at the database's path lacks. The
/// process is not ended if COMMAND moved or replaced the data: then the log is elsewhere, or the
/// database has another name.
fn end_stopped(
    process: &HeldProcess,
    from: &Path,
    database: &Database,
    known: Option<&Option<OsString>>,
) -> Result<(), String> {
    let is_deleted = fs::metadata(from).is_ok_and(|file| file.nlink() == 0);
    let has_log = database
        .has_log_of(process.pid)
        .map_err(|error| format!("its log cannot be listed: {error}"))?;
    if !is_deleted || !has_log {
        return Err(format!(
            "its database or its log is not in {}",
            database.data().display()
        ));
    }
    let known = known.ok_or("its database was never seen where its path leads")?;
    let now = database
        .last_snapshot()
        .map_err(|error| format!("its snapshots cannot be listed: {error}"))?;
    if now > *known {
        let now = now.unwrap_or_default();
        return Err(format!(
            "etcd has written the snapshot {} since then, and its data directory has no database for that snapshot",
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
            .arg(database.data().join(SEGMENT));
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
