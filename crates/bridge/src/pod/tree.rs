//! Directories of a container, measured and copied. Symbolic links are never followed: they name
//! files of the container, and not of the node.

use berth_os::file::{check_regular_file, none_if_missing, open_regular_file};
use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags,
    Uid, chmod, chownat, mkdir, openat, openat2, readlinkat, statx, symlink,
};
use rustix::param::page_size;
use std::ffi::{CStr, CString, OsStr};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Largest depth of directories: neither a container image nor a node's configuration has more.
const MAX_DEPTH: usize = 100;

/// Size of a directory entry with its inode, without content, in bytes: more than any kernel needs.
const ENTRY_SIZE: u64 = 4096;

/// Length from which the text of a symbolic link takes a page (SHORT_SYMLINK_LEN in mm/shmem.c).
const LINK_LIMIT: u64 = 128;

/// Treatment of a mount point below the directory: `Follow` includes the mounted files, `Leave`
/// leaves the mounted files out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountPoints {
    Follow,
    Leave,
}

/// Size of a directory or file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Size in memory.
    pub bytes: u64,
    /// True if there are sockets, pipes or devices, which are not copied.
    pub special: bool,
}

/// Opens the root directory of a process.
///
/// # Errors
/// The process has ended, or access is denied.
pub fn open_root(pid: i32) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(
        format!("/proc/{pid}/root"),
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Opens a path as a process with this root resolves it.
///
/// # Errors
/// The path does not exist.
pub fn open_within(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    Ok(openat2(
        root,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT,
    )?)
}

/// The type of an open file.
///
/// # Errors
/// Errors of statx(2).
pub fn read_file_type(of: &OwnedFd) -> io::Result<FileType> {
    Ok(FileType::from_raw_mode(
        read_attributes(of.as_fd(), c"")?.stx_mode.into(),
    ))
}

/// Measures the size of a copy. Stops beyond `most` bytes.
///
/// # Errors
/// A file or directory cannot be read.
pub fn measure_tree(of: &OwnedFd, mounted: MountPoints, most: u64) -> io::Result<Size> {
    measure_in_pages(of, mounted, most, page_size() as u64)
}

/// Measures like [`measure_tree`], with memory pages of the given size.
pub(super) fn measure_in_pages(
    of: &OwnedFd,
    mounted: MountPoints,
    most: u64,
    page: u64,
) -> io::Result<Size> {
    let mut size = Size::default();
    measure_entry(
        of.as_fd(),
        c"",
        &read_attributes(of.as_fd(), c"")?,
        (mounted, most, page),
        0,
        &mut size,
    )?;
    Ok(size)
}

fn measure_entry(
    at: BorrowedFd<'_>,
    name: &CStr,
    meta: &Statx,
    (mounted, most, page): (MountPoints, u64, u64),
    depth: usize,
    size: &mut Size,
) -> io::Result<()> {
    size.bytes += ENTRY_SIZE;
    match FileType::from_raw_mode(meta.stx_mode.into()) {
        FileType::RegularFile => size.bytes += meta.stx_size.div_ceil(page) * page,
        FileType::Symlink if meta.stx_size >= LINK_LIMIT => size.bytes += page,
        FileType::Directory => {
            let directory = open_directory(at, name)?;
            for (name, meta) in list_entries(&directory, mounted, depth)? {
                if size.bytes > most {
                    break;
                }
                let within = measure_entry(
                    directory.as_fd(),
                    &name,
                    &meta,
                    (mounted, most, page),
                    depth + 1,
                    size,
                );
                none_if_missing(within)?;
            }
        }
        FileType::Symlink => {}
        _ => size.special = true,
    }
    Ok(())
}

/// Copies a directory or a file to a new path, with modes and owners. File capabilities are left
/// out: programs need them for ports below 1024, which the temporary instance does not have.
///
/// # Errors
/// A file or directory cannot be read, or the copy cannot be written.
pub fn copy_tree(from: &OwnedFd, to: &Path, mounted: MountPoints) -> io::Result<()> {
    copy_entry(
        from.as_fd(),
        c"",
        &read_attributes(from.as_fd(), c"")?,
        to,
        mounted,
        0,
    )
}

fn copy_entry(
    at: BorrowedFd<'_>,
    name: &CStr,
    meta: &Statx,
    to: &Path,
    mounted: MountPoints,
    depth: usize,
) -> io::Result<()> {
    let kind = FileType::from_raw_mode(meta.stx_mode.into());
    match kind {
        FileType::RegularFile => {
            let mut from = open_file(at, name)?;
            let mut copy = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(to)?;
            io::copy(&mut from, &mut copy)?;
            set_owner(to, meta)?;
            chmod(to, Mode::from_raw_mode(u32::from(meta.stx_mode) & 0o7777))?;
        }
        FileType::Directory => {
            mkdir(to, Mode::RWXU)?;
            let directory = open_directory(at, name)?;
            for (name, meta) in list_entries(&directory, mounted, depth)? {
                let to = to.join(OsStr::from_bytes(name.to_bytes()));
                none_if_missing(copy_entry(
                    directory.as_fd(),
                    &name,
                    &meta,
                    &to,
                    mounted,
                    depth + 1,
                ))?;
            }
            set_owner(to, meta)?;
            chmod(to, Mode::from_raw_mode(u32::from(meta.stx_mode) & 0o7777))?;
        }
        FileType::Symlink => {
            symlink(readlinkat(at, name, Vec::new())?, to)?;
            set_owner(to, meta)?;
        }
        _ => {}
    }
    Ok(())
}

fn set_owner(path: &Path, meta: &Statx) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(meta.stx_uid), Gid::from_raw(meta.stx_gid));
    Ok(chownat(
        rustix::fs::CWD,
        path,
        Some(uid),
        Some(gid),
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}

/// Entries of a directory by name. The kernel marks mount points (since Linux 5.8), so mountinfo
/// need not be parsed.
fn list_entries(
    directory: &OwnedFd,
    mounted: MountPoints,
    depth: usize,
) -> io::Result<Vec<(CString, Statx)>> {
    if depth >= MAX_DEPTH {
        return Err(io::Error::other(format!(
            "more than {MAX_DEPTH} nested directories"
        )));
    }
    let mut named = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_owned();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        // Skip a file that was removed since.
        let Some(meta) = none_if_missing(read_attributes(directory.as_fd(), &name))? else {
            continue;
        };
        if mounted == MountPoints::Follow
            || !meta.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
        {
            named.push((name, meta));
        }
    }
    Ok(named)
}

/// Attributes of an entry in the directory `at`, or of the open file `at` itself if the name is
/// empty.
fn read_attributes(at: BorrowedFd<'_>, name: &CStr) -> io::Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    Ok(statx(at, name, flags, StatxFlags::BASIC_STATS)?)
}

fn open_directory(at: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let name = if name.is_empty() { c"." } else { name };
    Ok(openat(
        at,
        name,
        OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Opens a file, and fails if it is no longer a regular file.
pub(super) fn open_file(at: BorrowedFd<'_>, name: &CStr) -> io::Result<File> {
    if name.is_empty() {
        return open_regular_file(Path::new(&format!("/proc/self/fd/{}", at.as_raw_fd())));
    }
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    check_regular_file(openat(at, name, flags, Mode::empty())?.into())
}
