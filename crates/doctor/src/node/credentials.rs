//! The shim's kubeconfig and token for the cluster's API, as files of the node.

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

/// Facts about the kubeconfig and the token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub path: PathBuf,
    /// Path, uid and mode of each file and of the directory.
    pub files: Vec<(PathBuf, u32, u32)>,
    /// True if the kubeconfig holds a client certificate; an error if the kubeconfig or its token
    /// cannot be read.
    pub has_certificate: Result<bool, String>,
}

impl Credentials {
    /// Reads the credentials of the shim of a manifest. The node's files are below `root`. `None`
    /// if the credentials do not come from the node, or may not be read.
    pub(super) fn gather(root: &Path, layout: &Layout<'_>) -> Option<Self> {
        let serving = layout.serving()?;
        let (cluster, _) = options::cluster_args(&serving.parsed)
            .filter(|(cluster, _)| *cluster != options::IN_CLUSTER)?;
        let path = PathBuf::from(serving.container.on_node(cluster)?);
        let at = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        let directory = path.parent()?;
        let text = match read_small(&at(&path)).and_then(file::decode_text) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return None,
            text => text,
        };
        // Paths in the kubeconfig are paths in the container.
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
                return vec![CLUSTER_KUBECONFIG.at(
                    path,
                    format!("the shim will not start: {why}"),
                    grant,
                )];
            }
            Ok(has_certificate) => *has_certificate,
        };
        let mut found = Vec::new();
        if has_certificate {
            let cause =
                "it holds a client certificate, which is an operator's, so the shim will not start";
            found.push(CLUSTER_KUBECONFIG.at(path, cause, grant));
        }
        for (file, owner, mode) in &self.files {
            let place = file.display().to_string();
            let (cause, fix) = match () {
                () if *owner != uid => (
                    format!("it belongs to uid {owner}, and the shim is uid {uid}"),
                    format!("chown {uid} {place}"),
                ),
                () if mode & 0o077 != 0 => (
                    format!("it has mode {mode:04o}, so others may use the token"),
                    format!("chmod {:04o} {place}", mode & 0o700),
                ),
                () => continue,
            };
            found.push(CLUSTER_KUBECONFIG.at(place, cause, fix));
        }
        found
    }
}

/// Maps a path in the kubeconfig to a path on the node.
fn resolve_path(container: Container<'_>, directory: &Path, file: &Path) -> Option<PathBuf> {
    if file.is_absolute() {
        container.on_node(file.to_str()?).map(PathBuf::from)
    } else {
        Some(directory.join(file))
    }
}
