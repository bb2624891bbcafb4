//! The other files of the manifest directory. The kubelet reads every file whose name does not begin with a dot, whatever
//! its extension, and of two with the same pod name one overwrites the other.

use super::checks::{SAME_POD_NAME, STRAY_FILE};
use super::{Case, Finding};
use berth_cluster::yaml::{YamlNode, parse};
use std::fs;
use std::io;
use std::path::Path;

/// File name extensions of manifests.
const ENDINGS: [&str; 3] = [".yaml", ".yml", ".json"];

/// A file that the kubelet reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestFile {
    pub name: String,
    /// Its content, or why it cannot be read.
    pub text: Result<String, String>,
}

/// The other files in a manifest's directory, in the order of their names.
///
/// # Errors
/// The directory cannot be listed.
pub fn gather(manifest: &Path) -> io::Result<Vec<ManifestFile>> {
    let directory = manifest.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let ours = manifest.file_name() == Some(&name);
        // As the kubelet looks: through symbolic links, and not into directories.
        let file = fs::metadata(entry.path()).is_ok_and(|meta| meta.is_file());
        let name = name.to_string_lossy().into_owned();
        if !ours && file && !name.starts_with('.') {
            let text = berth_manifest::file::read(&entry.path()).map_err(|error| error.to_string());
            files.push(ManifestFile { name, text });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

pub(super) fn examine(case: &Case<'_>, files: &[ManifestFile]) -> Vec<Finding> {
    let own = pod_name(case.manifest.root());
    files.iter().filter_map(|file| judge(case, file, own.as_ref()?)).collect()
}

fn judge(case: &Case<'_>, file: &ManifestFile, own: &(String, String)) -> Option<Finding> {
    let path = Path::new(case.name).with_file_name(&file.name).display().to_string();
    let fix =
        format!("move it out of the directory, such as to /etc/kubernetes/berth/: mv {path} /etc/kubernetes/berth/");
    let documents =
        file.text.as_ref().map_err(String::clone).and_then(|text| parse(text).map_err(|problem| problem.to_string()));
    let name = documents.map(|documents| documents.first().and_then(pod_name));
    if name.as_ref().is_ok_and(|name| name.as_ref() == Some(own)) {
        let (namespace, name) = own;
        let cause = format!(
            "it has the pod {namespace}/{name} too: the kubelet runs one of both files, and not always the same"
        );
        return Some(SAME_POD_NAME.at(path, cause, fix));
    }
    let cause = match name {
        Err(why) => format!("the kubelet tries to read it as a manifest: {}", why.trim_end_matches('.')),
        Ok(None) => "the kubelet reads it as a manifest, and it is no pod".to_owned(),
        Ok(Some(_)) if ENDINGS.iter().any(|ending| file.name.ends_with(ending)) => return None,
        Ok(Some(_)) => "the kubelet runs it: it reads every file here, whatever its ending".to_owned(),
    };
    Some(STRAY_FILE.at(path, cause, fix))
}

/// Namespace and name of a pod, as the kubelet sees them.
fn pod_name(root: &YamlNode) -> Option<(String, String)> {
    let metadata = |key| root.at(&["metadata", key]).and_then(YamlNode::text).map(ToOwned::to_owned);
    let is_pod = root.text_of("kind") == Some("Pod");
    is_pod.then(|| Some((metadata("namespace").unwrap_or_else(|| "default".into()), metadata("name")?)))?
}
