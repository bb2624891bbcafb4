//! Checks the other files in the manifest's directory. The kubelet reads every file, with any
//! extension, unless the file's name begins with a dot. Of two files with the same pod name, one
//! overwrites the other.

use super::checks::{SAME_POD_NAME, STRAY_FILE};
use super::{Case, Finding};
use berth_cluster::yaml::{YamlNode, parse_documents};
use berth_manifest::Manifest;
use std::borrow::Cow;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Extensions of file names that manifests usually have.
const FILE_ENDINGS: [&str; 3] = [".yaml", ".yml", ".json"];

/// A file that the kubelet reads as a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestFile {
    pub path: PathBuf,
    /// The content of the file, or the reason why the file cannot be read.
    pub text: Result<String, String>,
}

/// Lists the other files that the kubelet reads in the directory of `own`, sorted by name. `own` is
/// the file of the manifest, or the file to be replaced. If `own` does not exist, the first file
/// with the same pod is left out instead.
///
/// # Errors
/// The directory cannot be listed.
pub fn gather_files(own: &Path, manifest: &Manifest) -> io::Result<Vec<ManifestFile>> {
    let directory = own
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        // Leave out directories, as the kubelet does. The kubelet follows symbolic links.
        let file = fs::metadata(&path).is_ok_and(|meta| meta.is_file());
        if file && !file_name(&path).starts_with('.') {
            let text =
                berth_manifest::file::read_manifest_text(&path).map_err(|error| error.to_string());
            files.push(ManifestFile { path, text });
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let pod = pod_name(manifest.root());
    let is_own = |file: &ManifestFile| file.path.file_name() == own.file_name();
    let same = |file: &ManifestFile| file.find_pod().is_ok_and(|of| of.is_some() && of == pod);
    if let Some(at) = files
        .iter()
        .position(is_own)
        .or_else(|| files.iter().position(same))
    {
        files.remove(at);
    }
    Ok(files)
}

fn file_name(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

impl ManifestFile {
    /// Returns namespace and name of the pod in this file. `None` if the file contains no pod, and
    /// an error if the file cannot be read.
    fn find_pod(&self) -> Result<Option<PodName>, String> {
        let documents = parse_documents(self.text.as_ref().map_err(String::clone)?)
            .map_err(|problem| problem.to_string())?;
        Ok(documents.first().and_then(pod_name))
    }
}

pub(super) fn examine(case: &Case<'_>, files: &[ManifestFile]) -> Vec<Finding> {
    let own = pod_name(case.manifest.root());
    let pods: Vec<_> = files
        .iter()
        .map(|file| (file.path.as_path(), file.find_pod()))
        .collect();
    pods.iter()
        .filter_map(|(file, pod)| check_pod(case, file, pod, own.as_ref()?, &pods))
        .collect()
}

type PodName = (String, String);
type PodOf = Result<Option<PodName>, String>;

fn check_pod(
    case: &Case<'_>,
    file: &Path,
    pod: &PodOf,
    own: &PodName,
    all: &[(&Path, PodOf)],
) -> Option<Finding> {
    let path = file.display().to_string();
    let fix = format!(
        "move the file out of the directory, for example: mv {path} /etc/kubernetes/berth/"
    );
    // Returns a file's name without the extension of a manifest. `None` if the name has no such
    // extension.
    let stem = |file: &Path| {
        FILE_ENDINGS
            .iter()
            .find_map(|ending| file_name(file).strip_suffix(ending).map(ToOwned::to_owned))
    };
    let cause = match pod {
        Err(why) => format!(
            "the kubelet tries to read this file as a manifest: {}",
            why.trim_end_matches('.')
        ),
        Ok(None) => {
            "the kubelet reads this file as a manifest, and the file defines no pod".to_owned()
        }
        Ok(Some(pod)) => {
            // If several files define the same pod, one of them is not reported: the file with the
            // pod's name, or else the first file.
            let rank = |file: &Path| (stem(file).as_ref() != Some(&pod.1), file.to_owned());
            let same = |(other, of): &&(&Path, PodOf)| {
                of.as_ref().ok() == Some(&Some(pod.clone())) && rank(other) < rank(file)
            };
            let twin = all
                .iter()
                .find(same)
                .map(|(other, _)| other.display().to_string());
            if let Some(twin) = Some(case.name.to_owned()).filter(|_| pod == own).or(twin) {
                let cause = format!(
                    "this file and {twin} define the pod {}/{}: the kubelet uses only one of the two files, and not always the same file",
                    pod.0, pod.1
                );
                return Some(SAME_POD_NAME.make_finding(path, cause, fix));
            }
            if stem(file).is_some() {
                return None;
            }
            "the kubelet runs this pod, since the kubelet reads every file in this directory, whatever the extension"
                .to_owned()
        }
    };
    Some(STRAY_FILE.make_finding(path, cause, fix))
}

/// Returns namespace and name of a pod. As for the kubelet, a missing namespace means `default`.
/// `None` if the document is no pod.
fn pod_name(root: &YamlNode) -> Option<PodName> {
    let metadata = |key| {
        root.find_path(&["metadata", key])
            .and_then(YamlNode::text)
            .map(ToOwned::to_owned)
    };
    let is_pod = root.get_text("kind") == Some("Pod");
    is_pod.then(|| {
        Some((
            metadata("namespace").unwrap_or_else(|| "default".into()),
            metadata("name")?,
        ))
    })?
}
