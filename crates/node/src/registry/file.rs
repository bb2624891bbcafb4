//! Code shared by records and leases, which are files with the name `ID.json` that other processes
//! write.

use super::BerthDir;
use crate::instance_id::InstanceId;
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

/// Maximum size of a record or lease, in bytes; a larger file is ignored. Real ones have some 250
/// to 4,000 bytes.
pub(super) const MAX_SIZE: u64 = 64 * 1024;

/// Maximum length of the reason why a file is ignored, in characters. A JSON error repeats its
/// input, however long that is.
const MAX_REASON: usize = 200;

/// The last second of the year 9999. Times after it, and before 1970, cannot be written in a
/// record.
const LAST_TIME: Duration = Duration::from_secs(253_402_300_799);

/// A file among the records or leases that is ignored, with the reason.
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
        // Other processes choose names and contents, which are not trusted. No line feed or escape
        // may get into the log.
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

/// The result of reading a directory of records or leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing<T> {
    /// The contents of the valid files, sorted by ID.
    pub found: Vec<T>,
    /// Files that were ignored. Each listing contains them again, so the caller logs only those
    /// that are new.
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
            None => Err("the file's name is not an instance's ID with .json".into()),
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

/// True if no file has this name. If the file cannot be inspected, it does not count as missing.
pub(super) fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// An open file with its content. If the content cannot be used, the reason to ignore the file.
pub(super) struct OpenedFile<T> {
    pub(super) file: File,
    pub(super) content: Result<T, String>,
}

/// Opens a file of any type and parses it. Returns `None` if there is no file. The error is the
/// reason to ignore the file.
pub(super) fn open_and_parse<T>(
    berth: &BerthDir,
    path: &Path,
    parse: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<Option<OpenedFile<T>>, String> {
    // Without O_NONBLOCK, opening a FIFO would block.
    let file = match OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
    {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return Err("the file is a symbolic link".into());
        }
        Err(error) => return Err(format!("the file cannot be opened: {error}")),
    };
    let meta = file.metadata().map_err(|error| error.to_string())?;
    if !meta.is_file() {
        return Err("it is no regular file".into());
    }
    if !berth.trusts_owner(meta.uid()) {
        return Err(format!("the file is owned by uid {}", meta.uid()));
    }
    if meta.len() > MAX_SIZE {
        return Err(format!(
            "the file is {} bytes long, and at most {MAX_SIZE} bytes are read",
            meta.len()
        ));
    }
    let mut bytes = Vec::new();
    let read = (&file)
        .take(MAX_SIZE)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string());
    Ok(Some(OpenedFile {
        file,
        content: read.and_then(|_| parse(&bytes)),
    }))
}

pub(super) fn to_bytes(content: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(content)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Parses a file of the kind `what`, if it has the format `known`. The error is the reason to
/// ignore the file.
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
    // Parse the version alone first. Then the error for a later format names that format, and not a
    // missing field.
    match serde_json::from_slice(bytes).map_err(torn)? {
        Format { version } if version == known => serde_json::from_slice(bytes).map_err(torn),
        Format { version } => Err(format!(
            "the file has format {version}, this berth reads format {known}"
        )),
    }
}

/// Removes a file. Returns true if the file existed.
pub(super) fn remove_file(path: &Path) -> io::Result<bool> {
    Ok(none_if_missing(fs::remove_file(path))?.is_some())
}

/// Functions for serde that write a field as text. They write a type's own text, and wall-clock
/// times as Kubernetes' Time (`2026-05-04T03:02:01Z`) and MicroTime
/// (`2026-05-04T03:02:01.000000Z`).
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
    // A time before 1970 is written as 1970: a wrong clock must not be an error.
    let since = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .min(LAST_TIME);
    serialize_display(
        &humantime::format_rfc3339_micros(SystemTime::UNIX_EPOCH + since),
        serializer,
    )
}
