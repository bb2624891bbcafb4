//! A snapshot of a run directory: every berth, instance and shim. Commands use it; shims do not.

use crate::instance_id::InstanceId;
use crate::registry::instance::{IgnoredFile, ListedInstance, list};
use crate::registry::{BerthDir, Error, RunDir};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The contents of a run directory at one moment.
#[derive(Debug)]
pub struct RunDirSnapshot {
    pub path: PathBuf,
    /// The instances, sorted by berth and name.
    pub instances: Vec<KnownInstance>,
    /// Files that are ignored, because they are not valid records.
    pub problems: Vec<IgnoredFile>,
}

/// An instance that has a record, a shim's socket, or both.
#[derive(Debug)]
pub struct KnownInstance {
    pub berth: BerthDir,
    pub id: InstanceId,
    pub record: Option<ListedInstance>,
    /// True if a shim's socket exists. The shim may be alive or dead.
    pub socket: bool,
}

impl RunDirSnapshot {
    /// Reads the run directory at `path`, or the default directory. If the directory does not
    /// exist, the snapshot is empty.
    pub fn read(path: Option<&Path>) -> Result<Self, Error> {
        let path = path.map_or_else(RunDir::default_path, Path::to_path_buf);
        let mut node = Self {
            path,
            instances: Vec::new(),
            problems: Vec::new(),
        };
        let Some(run_dir) = RunDir::find(&node.path)? else {
            return Ok(node);
        };
        for berth in run_dir.berths()? {
            let listing = list(&berth).map_err(|why| Error::Read {
                path: berth.instances_path(),
                why,
            })?;
            node.problems.extend(listing.problems);
            let mut sockets = list_socket_ids(&berth)?;
            for listed in listing.found {
                let id = listed.record.instance.clone();
                let socket = sockets.remove(&id);
                node.instances.push(KnownInstance {
                    berth: berth.clone(),
                    id,
                    record: Some(listed),
                    socket,
                });
            }
            for id in sockets {
                node.instances.push(KnownInstance {
                    berth: berth.clone(),
                    id,
                    record: None,
                    socket: true,
                });
            }
        }
        node.instances
            .sort_by(|a, b| (a.berth.address(), &a.id).cmp(&(b.berth.address(), &b.id)));
        Ok(node)
    }
}

fn list_socket_ids(berth: &BerthDir) -> Result<BTreeSet<InstanceId>, Error> {
    let error = |why| Error::Read {
        path: berth.path().to_owned(),
        why,
    };
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(berth.path()).map_err(error)? {
        let name = entry.map_err(error)?.file_name();
        let id = name
            .to_str()
            .and_then(|name| name.strip_suffix(".sock"))
            .and_then(|id| InstanceId::parse(id).ok());
        found.extend(id);
    }
    Ok(found)
}
