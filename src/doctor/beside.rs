//! The other files of the manifest folder. The kubelet reads each whose name does not begin with a dot, whatever
//! its ending, and of two with one pod name one overwrites the other.

use std::fs;
use std::io;
use std::path::Path;

/// A file that the kubelet reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its name.
    pub name: String,
    /// What is in it; or why that cannot be known.
    pub text: Result<String, String>,
}

/// The files beside a manifest, in the order of their names.
///
/// # Errors
/// The folder cannot be listed.
pub fn gather(manifest: &Path) -> io::Result<Vec<File>> {
    let folder = manifest.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let ours = manifest.file_name() == Some(&name);
        // As the kubelet looks: through symbolic links, and not into folders.
        let file = fs::metadata(entry.path()).is_ok_and(|meta| meta.is_file());
        let name = name.to_string_lossy().into_owned();
        if !ours && file && !name.starts_with('.') {
            let text = crate::manifest::file::read(&entry.path()).map_err(|error| error.to_string());
            files.push(File { name, text });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}
