//! Code shared by records and leases, which are files with the name `ID.json` that other processes
//! write.

use super::BerthDir;
use crate::instance::InstanceId;
use berth_os::file::none_if_missing;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

/// Maximum size of a file that is read, in bytes. Real files have some 250 to 4,000.
pub(super) const MAX_SIZE: u64 = 64 * 1024;

/// Maximum length of a reason, in characters: a JSON error repeats its input, however long.
const MAX_REASON: usize = 200;

/// The last second of the year 9999. Later times, and times before 1970, have no RFC 3339 text
/// here.
const LAST_TIME: Duration = Duration::from_secs(253_402_300_799);

/// An ignored file among the records or leases.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IgnoredFile {
    pub path: PathBuf,
    pub reason: String,
}

impl IgnoredFile {
    pub(super) fn new(path: PathBuf, reason: &str) -> Self {
        Self {
            path,
            reason: reason.chars().take(MAX_REASON).collect(),
        }
    }
}

impl fmt::Display for IgnoredFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Names and contents are not trusted: no line feed or escape gets into the log.
        let printable = |text: &str| text.replace(char::is_control, "\u{fffd}");
        let path = self.path.to_string_lossy();
        write!(
            f,
            "{} is ignored: {}",
            printable(&path),
            printable(&self.reason)
        )
    }
}

/// The files of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing<T> {
    /// The valid files, sorted by ID.
    pub found: Vec<T>,
    /// Ignored files. Each listing repeats them, so the caller logs only new entries.
    pub problems: Vec<IgnoredFile>,
}

/// Reads each file of a directory, except names that begin with a dot.
///
/// # Errors
/// The directory cannot be listed. A missing directory gives an empty listing.
pub(super) fn read_all<T>(
    directory: &Path,
    read: impl Fn(&InstanceId, &Path) -> Result<Option<T>, String>,
) -> io::Result<Listing<T>> {
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    let mut names = list_names(directory)?;
    names.sort_by_cached_key(|name| id_of(name));
    for name in names {
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = directory.join(&name);
        let content = match id_of(&name) {
            Some(id) => read(&id, &path),
            None => Err("its name is not an instance's ID with .json".into()),
        };
        match content {
            Ok(content) => found.extend(content),
            Err(reason) => problems.push(IgnoredFile::new(path, &reason)),
        }
    }
    problems.sort();
    Ok(Listing { found, problems })
}

pub(super) fn list_names(directory: &Path) -> io::Result<Vec<OsString>> {
    let entries = none_if_missing(fs::read_dir(directory))?
        .into_iter()
        .flatten();
    entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect()
}

pub(super) fn id_of(name: &OsStr) -> Option<InstanceId> {
    InstanceId::parse(name.to_str()?.strip_suffix(".json")?).ok()
}

/// True if no file has this name. A file that cannot be inspected is not missing.
pub(super) fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// An open file, and its content or the reason to ignore the file.
pub(super) struct Opened<T> {
    pub(super) file: File,
    pub(super) content: Result<T, String>,
}

/// Opens a file of any type and parses it. Returns `None` if there is no file. The error is the
/// reason to ignore the file.
pub(super) fn open_and_parse<T>(
    berth: &BerthDir,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<Option<Opened<T>>, String> {
    // Without O_NONBLOCK, opening a FIFO would block.
    let file = match OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
    {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return Err("it is a symbolic link".into());
        }
        Err(error) => return Err(format!("it cannot be opened: {error}")),
    };
    let meta = file.metadata().map_err(|error| error.to_string())?;
    if !meta.is_file() {
        return Err("it is no regular file".into());
    }
    if !berth.trusts(meta.uid()) {
        return Err(format!("it is owned by uid {}", meta.uid()));
    }
    if meta.len() > MAX_SIZE {
        return Err(format!(
            "it is {} bytes long, at most {MAX_SIZE} are read",
            meta.len()
        ));
    }
    let mut bytes = Vec::new();
    let read = (&file)
        .take(MAX_SIZE)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string());
    Ok(Some(Opened {
        file,
        content: read.and_then(|_| parse(&bytes)),
    }))
}

pub(super) fn to_bytes(content: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(content)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Parses a `what` of the format `known`. The error is the reason to ignore the file.
pub(super) fn parse_versioned<T: DeserializeOwned>(
    bytes: &[u8],
    what: &str,
    known: u32,
) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Format {
        version: u32,
    }
    let torn = |error| format!("not a {what}: {error}");
    // Parse only the version first, so that the error for a later format names its version and not
    // a missing field.
    match serde_json::from_slice(bytes).map_err(torn)? {
        Format { version } if version == known => serde_json::from_slice(bytes).map_err(torn),
        Format { version } => Err(format!("format {version}, this berth reads {known}")),
    }
}

/// Removes a file. Returns true if it existed.
pub(super) fn remove_file(path: &Path) -> io::Result<bool> {
    Ok(none_if_missing(fs::remove_file(path))?.is_some())
}

/// Serializers of fields: the text of a type, and wall-clock times as Kubernetes' Time
/// (`2026-05-04T03:02:01Z`) and MicroTime (`2026-05-04T03:02:01.000000Z`).
pub(super) fn serialize_display<S: Serializer>(
    value: &impl fmt::Display,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

pub(super) fn deserialize_from_str<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(
    from: D,
) -> Result<T, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

pub(super) fn deserialize_time<'de, D: Deserializer<'de>>(from: D) -> Result<SystemTime, D::Error> {
    humantime::parse_rfc3339(&String::deserialize(from)?).map_err(D::Error::custom)
}

pub(super) fn serialize_second_time<S: Serializer>(
    time: &SystemTime,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serialize_display(&humantime::format_rfc3339_seconds(*time), serializer)
}

pub(super) fn serialize_micro_time<S: Serializer>(
    time: &SystemTime,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    // A wrong clock is no reason to fail.
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .min(LAST_TIME);
    serialize_display(
        &humantime::format_rfc3339_micros(SystemTime::UNIX_EPOCH + since),
        serializer,
    )
}
