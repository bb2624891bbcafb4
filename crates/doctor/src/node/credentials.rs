//! Checks the shim's kubeconfig and token for the cluster's API, which are files on the node.

use super::super::checks::CLUSTER_KUBECONFIG;
use super::super::{Finding, options};
use super::Layout;
use berth_cluster::Access;
use berth_cluster::kubeconfig::Token;
use berth_manifest::Container;
use berth_os::file::{self, read_small};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Facts about the files of the shim's kubeconfig and token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub path: PathBuf,
    /// Path, owner (uid) and mode of each file, and of the directory with the files.
    pub files: Vec<(PathBuf, u32, u32)>,
    /// True if the kubeconfig contains a client certificate. An error if the kubeconfig or its
    /// token cannot be read.
    pub has_certificate: Result<bool, String>,
}

impl Credentials {
    /// Reads the credentials of the shim of a manifest. The node's files are below `root`. Returns
    /// `None` if the shim has no credentials in files, or this process may not read them.
    pub(super) fn gather(root: &Path, layout: &Layout<'_>) -> Option<Self> {
        let serving = layout.serving_berth()?;
        let (cluster, _) = options::cluster_args(&serving.parsed)
            .filter(|(cluster, _)| *cluster != options::IN_CLUSTER)?;
        let path = PathBuf::from(serving.container.path_on_node(cluster)?);
        let at = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        let directory = path.parent()?;
        let text = match read_small(&at(&path)).and_then(file::decode_text) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return None,
            text => text,
        };
        // The kubeconfig names files by their paths in the container.
        let resolve = |file: &Path| resolve_path(serving.container, directory, file);
        let mut files = vec![directory.to_owned(), path.clone()];
        let has_certificate = text.map_err(|error| error.to_string()).and_then(|text| {
            let read = |file: &Path| {
                let read = resolve(file)
                    .map(|file| read_small(&at(&file)).map_err(|error| error.to_string()));
                read.unwrap_or_else(|| {
                    Err(format!("{} is in no hostPath of the shim", file.display()))
                })
            };
            let access = Access::parse(&text, read).map_err(|mistake| mistake.to_string())?;
            if let Some(Token::File(file)) = &access.token {
                files.extend(resolve(file));
                read(file)?;
            }
            Ok(access.client.is_some())
        });
        let look = |path: PathBuf| {
            let meta = fs::metadata(at(&path)).ok()?;
            Some((path, meta.uid(), meta.mode() & 0o7777))
        };
        Some(Self {
            path,
            files: files.into_iter().filter_map(look).collect(),
            has_certificate,
        })
    }

    pub(in super::super) fn examine(&self, uid: u32) -> Vec<Finding> {
        let path = self.path.display().to_string();
        let grant = format!("berth grant --out {path}");
        let has_certificate = match &self.has_certificate {
            Err(why) => {
                return vec![CLUSTER_KUBECONFIG.make_finding(
                    path,
                    format!("the shim will not start: {why}"),
                    grant,
                )];
            }
            Ok(has_certificate) => *has_certificate,
        };
        let mut found = Vec::new();
        if has_certificate {
            let cause = "the file holds a client certificate, so it is an operator's kubeconfig, and the shim will not start with it";
            found.push(CLUSTER_KUBECONFIG.make_finding(path, cause, grant));
        }
        for (file, owner, mode) in &self.files {
            let place = file.display().to_string();
            let (cause, fix) = match () {
                () if *owner != uid => (
                    format!("the file belongs to uid {owner}, and the shim is uid {uid}"),
                    format!("chown {uid} {place}"),
                ),
                () if mode & 0o077 != 0 => (
                    format!("the file has mode {mode:04o}, so other users may read the token"),
                    format!("chmod {:04o} {place}", mode & 0o700),
                ),
                () => continue,
            };
            found.push(CLUSTER_KUBECONFIG.make_finding(place, cause, fix));
        }
        found
    }
}

/// Finds the path on the node of a file that the kubeconfig names by its path in the container.
fn resolve_path(container: Container<'_>, directory: &Path, file: &Path) -> Option<PathBuf> {
    if file.is_absolute() {
        container.path_on_node(file.to_str()?).map(PathBuf::from)
    } else {
        Some(directory.join(file))
    }
}
