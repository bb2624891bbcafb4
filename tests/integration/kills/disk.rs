//! The disk under a node's files, as a power loss leaves it: contents and directory entries that
//! were not synced are lost.
//!
//! Only the changes of the supervised command are known. Of an entry that another process changed
//! meanwhile, too, a power loss takes both changes.

use berth_testing::supervise::Effect;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Changes that are not on the disk.
#[derive(Debug)]
pub(super) struct Disk {
    root: PathBuf,
    /// Directories and files in memory, which a power loss leaves to the scene.
    memory: Vec<PathBuf>,
    /// Hard links to the files that entries on the disk name, and to the files that were written. As
    /// long as the links exist, no inode is used again.
    links: TempDir,
    /// Files that were written and not synced, by their inodes.
    files: BTreeSet<u64>,
    /// Entries as they are on the disk, of directories that were changed and not synced.
    entries: BTreeMap<PathBuf, Entry>,
}

/// A directory's entry.
#[derive(Debug)]
enum Entry {
    Missing,
    Directory {
        inode: u64,
        mode: u32,
        owner: (u32, u32),
    },
    Other {
        inode: u64,
        link: PathBuf,
    },
}

impl Disk {
    pub(super) fn new(root: &Path, memory: Vec<PathBuf>) -> Self {
        Self {
            root: root.to_owned(),
            memory,
            links: tempfile::tempdir_in(root.parent().unwrap()).unwrap(),
            files: BTreeSet::new(),
            entries: BTreeMap::new(),
        }
    }

    /// Notes what a call will change or sync. The kernel has not carried out the call.
    pub(super) fn note(&mut self, effect: &Effect) {
        let path = Path::new(&effect.object);
        match effect.call {
            "write" | "truncate" => self.note_contents(path),
            "sync" => {
                self.files
                    .retain(|inode| inode_of(path).as_ref() != Some(inode));
                self.entries.retain(|entry, _| entry.parent() != Some(path));
            }
            "create" if path.exists() => {}
            "create" | "mkdir" | "symlink" | "link" | "mknod" | "unlink" | "rmdir" => {
                self.note_entry(path);
            }
            "bind" if path.is_absolute() => self.note_entry(path),
            "rename" => {
                effect.from.iter().for_each(|from| self.note_entry(from));
                self.note_entry(path);
            }
            _ => {}
        }
    }

    /// Returns the path without symbolic links. `None` if the file is not on the node's disk.
    fn path_on_disk(&self, path: &Path) -> Option<PathBuf> {
        let plain = path.parent()?.canonicalize().ok()?.join(path.file_name()?);
        let is_in_memory = self.memory.iter().any(|memory| plain.starts_with(memory));
        (plain.starts_with(&self.root) && !is_in_memory).then_some(plain)
    }

    /// Returns the path of the next hard link.
    fn next_link(&self) -> PathBuf {
        let links = fs::read_dir(self.links.path()).unwrap().count();
        self.links.path().join(links.to_string())
    }

    fn note_contents(&mut self, path: &Path) {
        let link = self.next_link();
        if let Some(path) = self.path_on_disk(path)
            && let Some(inode) = inode_of(&path)
            && self.files.insert(inode)
        {
            fs::hard_link(path, link).unwrap();
        }
    }

    fn note_entry(&mut self, path: &Path) {
        let Some(path) = self.path_on_disk(path) else {
            return;
        };
        let link = self.next_link();
        self.entries.entry(path).or_insert_with_key(|path| {
            let Ok(now) = fs::symlink_metadata(path) else {
                return Entry::Missing;
            };
            let inode = now.ino();
            if now.is_dir() {
                let (mode, owner) = (now.mode(), (now.uid(), now.gid()));
                return Entry::Directory { inode, mode, owner };
            }
            fs::hard_link(path, &link).unwrap();
            Entry::Other { inode, link }
        });
    }

    /// True if a power loss would take an entry.
    pub(super) fn has_unsynced_entries(&self) -> bool {
        self.entries
            .iter()
            .any(|(path, entry)| inode_of(path) != entry.inode())
    }

    /// Takes all entries that were not synced.
    pub(super) fn lose_entries(&self) {
        // Directories come first: a directory that was renamed goes back with its files.
        let is_directory = |entry: &Entry| matches!(entry, Entry::Directory { .. });
        for directories in [true, false] {
            for (path, entry) in &self.entries {
                if is_directory(entry) == directories
                    && inode_of(path) != entry.inode()
                    && path.parent().is_some_and(Path::exists)
                {
                    self.put_back(path, entry);
                }
            }
        }
    }

    fn put_back(&self, path: &Path, entry: &Entry) {
        match fs::symlink_metadata(path) {
            Ok(now) if now.is_dir() => fs::remove_dir_all(path).unwrap(),
            Ok(_) => fs::remove_file(path).unwrap(),
            Err(_) => {}
        }
        match entry {
            Entry::Missing => {}
            Entry::Other { link, .. } => fs::hard_link(link, path).unwrap(),
            Entry::Directory { inode, mode, owner } => {
                let is_moved = |other: &PathBuf| inode_of(other) == Some(*inode);
                match walk(&self.root).into_iter().find(is_moved) {
                    Some(moved) => fs::rename(moved, path).unwrap(),
                    None => {
                        fs::create_dir(path).unwrap();
                        fs::set_permissions(path, Permissions::from_mode(*mode)).unwrap();
                        chown(path, Some(owner.0), Some(owner.1)).unwrap();
                    }
                }
            }
        }
    }

    /// Empties each file that was not synced.
    pub(super) fn lose_contents(&self) {
        let unsynced = |path: &PathBuf| {
            path.is_file() && inode_of(path).is_some_and(|inode| self.files.contains(&inode))
        };
        for path in walk(&self.root).into_iter().filter(unsynced) {
            let file = File::options().write(true).open(path);
            file.and_then(|file| file.set_len(0)).unwrap();
        }
    }
}

impl Entry {
    fn inode(&self) -> Option<u64> {
        match self {
            Self::Missing => None,
            Self::Directory { inode, .. } | Self::Other { inode, .. } => Some(*inode),
        }
    }
}

fn inode_of(path: &Path) -> Option<u64> {
    Some(fs::symlink_metadata(path).ok()?.ino())
}

/// Returns everything below a directory.
pub(super) fn walk(directory: &Path) -> Vec<PathBuf> {
    let (mut all, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            }
            all.push(entry.path());
        }
    }
    all
}
