//! The kubeconfig and token of a shim for the cluster's API, as they are on the node.

use super::super::checks::{CLUSTER_KUBECONFIG, CLUSTER_TOKEN_EXPIRED, CLUSTER_TOKEN_EXPIRES_SOON};
use super::super::{Finding, options};
use super::Layout;
use crate::manifest::Container;
use berth_cluster::Access;
use berth_cluster::account::Claims;
use berth_cluster::kubeconfig::Token;
use humantime::format_rfc3339_seconds;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What was seen of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    pub path: PathBuf,
    /// When they were read.
    pub now: SystemTime,
    /// The files and their directory: uid and mode.
    pub files: Vec<(PathBuf, u32, u32)>,
    /// Their content, or why it cannot be read.
    pub held: Result<HeldCredentials, String>,
}

/// What a kubeconfig and its token hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeldCredentials {
    /// There is a client certificate.
    pub certificate: bool,
    /// The token's account and its validity, if they are in it.
    pub claims: Option<Claims>,
}

impl Credentials {
    /// Of the shim of a manifest, on a node whose files are below `root`. None: it has none from the node, or they may not be read.
    pub(super) fn gather(root: &Path, layout: &Layout<'_>) -> Option<Self> {
        let serving = layout.serving()?;
        let (cluster, _) = options::cluster(&serving.parsed).filter(|(cluster, _)| *cluster != options::IN_CLUSTER)?;
        let path = PathBuf::from(serving.container.on_node(cluster)?);
        let at = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        let directory = path.parent()?;
        let text = match fs::read_to_string(at(&path)) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return None,
            text => text,
        };
        // Files that it names are the container's.
        let resolve = |file: &Path| within(serving.container, directory, file);
        let mut files = vec![directory.to_owned(), path.clone()];
        let held = text.map_err(|error| error.to_string()).and_then(|text| {
            let read = |file: &Path| {
                let read = resolve(file).map(|file| fs::read(at(&file)).map_err(|error| error.to_string()));
                read.unwrap_or_else(|| Err(format!("{} is in no hostPath of the shim", file.display())))
            };
            let access = Access::parse(&text, read).map_err(|mistake| mistake.to_string())?;
            let token = match &access.token {
                Some(Token::File(file)) => {
                    files.extend(resolve(file));
                    String::from_utf8(read(file)?).ok()
                }
                Some(Token::Text(token)) => Some(token.clone()),
                None => None,
            };
            let claims = token.and_then(|token| Claims::parse(&token));
            Ok(HeldCredentials { certificate: access.client.is_some(), claims })
        });
        let look = |path: PathBuf| {
            let meta = fs::metadata(at(&path)).ok()?;
            Some((path, meta.uid(), meta.mode() & 0o7777))
        };
        Some(Self { path, now: SystemTime::now(), files: files.into_iter().filter_map(look).collect(), held })
    }

    pub(in super::super) fn examine(&self, uid: u32) -> Vec<Finding> {
        let path = self.path.display().to_string();
        let grant = format!("berth grant --write {path}");
        let held = match &self.held {
            Err(why) => {
                return vec![CLUSTER_KUBECONFIG.at(path, format!("the shim will not start: {why}"), grant)];
            }
            Ok(held) => held,
        };
        let mut found = Vec::new();
        if held.certificate {
            let cause = "it holds a client certificate, which is an operator's, so the shim will not start";
            found.push(CLUSTER_KUBECONFIG.at(path.clone(), cause, grant.clone()));
        }
        for (file, owner, mode) in &self.files {
            let (cause, fix) = match () {
                () if *owner != uid => (format!("it belongs to uid {owner}, and the shim is uid {uid}"), "chown"),
                () if mode & 0o077 != 0 => (format!("it has mode {mode:04o}, so others may use the token"), "chmod"),
                () => continue,
            };
            let fix = match fix {
                "chown" => format!("chown {uid} {}", file.display()),
                _ => format!("chmod {:04o} {}", mode & 0o700, file.display()),
            };
            found.push(CLUSTER_KUBECONFIG.at(file.display().to_string(), cause, fix));
        }
        found.extend(held.claims.as_ref().and_then(|claims| self.token(claims, path, grant)));
        found
    }

    fn token(&self, claims: &Claims, path: String, grant: String) -> Option<Finding> {
        let until = claims.until?;
        let life = until.duration_since(claims.from).unwrap_or_default();
        let (left, end) = (until.duration_since(self.now).unwrap_or_default(), format_rfc3339_seconds(until));
        let days = left.as_secs() / (24 * 60 * 60);
        match left {
            Duration::ZERO => {
                let cause =
                    format!("its token expired at {end}: the shim serves, and does not keep the Service kubernetes");
                Some(CLUSTER_TOKEN_EXPIRED.at(path, cause, grant))
            }
            left if left < life / 2 => Some(CLUSTER_TOKEN_EXPIRES_SOON.at(
                path,
                format!(
                    "its token expires in {days} days, at {end}, and no shim has renewed it since {}",
                    format_rfc3339_seconds(claims.from)
                ),
                format!("if a shim runs, `berth status --json` says why it cannot (cluster.problems); {grant}"),
            )),
            _ => None,
        }
    }
}

/// Where a file that a kubeconfig names is on the node.
fn within(container: Container<'_>, directory: &Path, file: &Path) -> Option<PathBuf> {
    if file.is_absolute() { container.on_node(file.to_str()?).map(PathBuf::from) } else { Some(directory.join(file)) }
}
