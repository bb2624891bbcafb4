//! The runtime of a node's containers: the container of a process, its specification, and the
//! program that starts containers (runc or crun).
//!
//! A container's parent stays with the container: containerd's shim, or CRI-O's conmon. The parent
//! leads to the directory of the specification and to the program.

use super::spec::Spec;
use berth_manifest::command::{is_program, split_strings};
use berth_os::file::open_regular_file;
use berth_os::process::parent_of;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Name of a specification in a container's directory (a bundle).
const CONFIG_FILE: &str = "config.json";

/// Upper bound of a specification's size, in bytes.
const MAX_CONFIG_SIZE: u64 = 16 << 20;

/// Number of ancestors that are searched for the shim, the parent of the container's first process.
const MAX_PARENTS: usize = 16;

/// The programs that start containers.
const RUNTIME_PROGRAMS: [&str; 2] = ["runc", "crun"];

/// The container's ID, from /proc/PID/cgroup: the last 64 hexadecimal digits of a line.
pub fn parse_container_id(cgroup: &str) -> Option<&str> {
    let is_id = |word: &&str| {
        word.len() == 64
            && word
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    cgroup.lines().find_map(|line| {
        line.rsplit(|c: char| !c.is_ascii_alphanumeric())
            .find(is_id)
    })
}

/// The parent of a container's processes: containerd's shim, or CRI-O's conmon.
#[derive(Debug)]
pub struct Shim {
    pid: i32,
    arguments: Vec<OsString>,
}

impl Shim {
    /// Finds the shim among the ancestors of a process in a container. `None` outside a container.
    pub fn of_process(pid: i32) -> Option<Self> {
        let parents = std::iter::successors(Some(pid), |pid| parent_of(*pid))
            .skip(1)
            .take(MAX_PARENTS);
        parents.take_while(|pid| *pid > 1).find_map(|pid| {
            let arguments: Vec<OsString> =
                split_strings(&fs::read(format!("/proc/{pid}/cmdline")).ok()?);
            let name = Path::new(arguments.first()?).file_name()?.to_str()?;
            (name.starts_with("containerd-shim") || name.starts_with("conmon"))
                .then_some(Self { pid, arguments })
        })
    }

    /// Directories that may have the container's specification. containerd's shim serves all
    /// containers of a pod, and works in the directory of one of them.
    fn bundle_paths(&self, id: &str) -> Vec<PathBuf> {
        let own = self
            .find_value("-b")
            .or_else(|| self.find_value("--bundle"))
            .map(PathBuf::from);
        own.into_iter()
            .chain([PathBuf::from(format!("/proc/{}/cwd/../{id}", self.pid))])
            .collect()
    }

    /// Path of the program, runc or crun, with which the shim starts containers.
    pub fn find_program(&self) -> Option<PathBuf> {
        let named = self
            .find_value("-r")
            .or_else(|| self.find_value("--runtime"))
            .map(PathBuf::from)
            .filter(|path| path.is_absolute());
        let own = fs::read_link(format!("/proc/{}/exe", self.pid)).ok();
        let beside = own.as_deref().and_then(Path::parent).map(PathBuf::from);
        let environment =
            split_strings(&fs::read(format!("/proc/{}/environ", self.pid)).unwrap_or_default());
        let path = environment
            .iter()
            .find_map(|variable| variable.as_bytes().strip_prefix(b"PATH="));
        let path =
            path.map(|path| std::env::split_paths(OsStr::from_bytes(path)).collect::<Vec<_>>());
        let directories = beside
            .into_iter()
            .chain(path.into_iter().flatten())
            .filter(|path| path.is_absolute());
        let programs =
            directories.flat_map(|directory| RUNTIME_PROGRAMS.map(|name| directory.join(name)));
        named.into_iter().chain(programs).find(is_program)
    }

    fn find_value(&self, option: &str) -> Option<&OsString> {
        let at = self
            .arguments
            .iter()
            .position(|argument| argument == option)?;
        self.arguments.get(at + 1)
    }
}

/// A container's specification.
///
/// # Errors
/// All places that were tried.
pub fn read_spec(shim: Option<&Shim>, id: &str) -> Result<Spec, String> {
    let mut tried = Vec::new();
    if shim.is_none() {
        tried.push(
            "no containerd-shim and no conmon is an ancestor of the container's process".to_owned(),
        );
    }
    for bundle in shim.map(|shim| shim.bundle_paths(id)).unwrap_or_default() {
        let path = bundle.join(CONFIG_FILE);
        match read_limited(&path).and_then(|json| Spec::parse(&json).map_err(Into::into)) {
            Ok(spec) => return Ok(spec),
            Err(error) => tried.push(format!("{}: {error}", path.display())),
        }
    }
    Err(tried.join("; "))
}

fn read_limited(path: &Path) -> io::Result<Vec<u8>> {
    let mut json = Vec::new();
    open_regular_file(path)?
        .take(MAX_CONFIG_SIZE)
        .read_to_end(&mut json)?;
    Ok(json)
}
