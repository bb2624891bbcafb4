//! The bridge's logs. Their size is limited, since /run is in memory, and the logs of a failed
//! bridge are kept.

use berth_os::file::none_if_missing;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The daemon's log, in the bridge's directory.
pub const BRIDGE: &str = "bridge.log";

pub const INSTANCE_LOG: &str = "kube-apiserver.log";

pub const ETCD: &str = "etcd.log";

const ALL_LOGS: [&str; 3] = [BRIDGE, INSTANCE_LOG, ETCD];

/// Longest log, in bytes: kube-apiserver writes some 10 MB in an hour at the default verbosity. All
/// logs together, with those of a failed bridge, need no more space than preflight requires to be
/// free.
const MAX_LOG_SIZE: u64 = 10 << 20;

/// Time between two checks of the sizes: at the highest verbosity kube-apiserver writes some 10 MB
/// in that time.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Begins new logs. The logs of a failed bridge are kept until another bridge fails.
pub(super) fn begin_logs(directory: &Path, last_failed: bool) {
    for name in ALL_LOGS {
        let log = directory.join(name);
        let _ = match last_failed {
            true => fs::rename(&log, directory.join(format!("{name}.failed"))),
            false => fs::remove_file(&log),
        };
    }
}

/// Limits the logs' size until the future is dropped.
pub(super) async fn limit_log_sizes(directory: PathBuf) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let directory = directory.clone();
        // The logs are cut on a separate thread, because the directory may be on a slow disk.
        let bounded = tokio::task::spawn_blocking(move || {
            for log in ALL_LOGS.map(|name| directory.join(name)) {
                if let Err(error) = none_if_missing(keep_end_of_log(&log, MAX_LOG_SIZE)) {
                    tracing::debug!(log = %log.display(), %error, "cannot be cut");
                }
            }
        });
        let _ = bounded.await;
    }
}

/// Keeps the last half of a log that is longer than `longest`. Writers are not disturbed, since all
/// append to the file. Lines written during the cut may be lost.
fn keep_end_of_log(log: &Path, longest: u64) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .read(true)
        .append(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(log)?;
    let length = file.metadata()?.len();
    if length <= longest {
        return Ok(());
    }
    file.seek(SeekFrom::Start(length - longest / 2))?;
    let mut end = Vec::new();
    // Reads to the end of the file, so lines that were written since the length was read are kept,
    // too.
    Read::by_ref(&mut file)
        .take(longest)
        .read_to_end(&mut end)?;
    let whole = end
        .iter()
        .position(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    file.set_len(0)?;
    file.write_all(&end[whole..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_long_log_is_kept_and_its_writer_goes_on() {
        let temp = tempfile::tempdir().unwrap();
        let log = temp.path().join("log");
        let mut writer = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap();
        writer.write_all(b"one\ntwo\nthree\n").unwrap();
        keep_end_of_log(&log, 14).unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "one\ntwo\nthree\n");
        writer.write_all(b"4\n").unwrap();
        keep_end_of_log(&log, 14).unwrap();
        writer.write_all(b"5\n").unwrap();
        assert_eq!(fs::read_to_string(&log).unwrap(), "4\n5\n");
    }
}
