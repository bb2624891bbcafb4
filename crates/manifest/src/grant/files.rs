//! The kubeconfig and the token on a node. Both are replaced by a rename, so a container sees the
//! new files only if it mounts their directory, not the files. The files have a directory of their
//! own for this.

use crate::file::{Access, FileError, replace_file_with_access};
use crate::write_document;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use berth_cluster::account::TOKEN_FILE;
use berth_cluster::lease::NAMESPACE;
use berth_os::file::{ensure_private_directory, none_if_missing};
use nix::unistd::getegid;
use serde_json::json;
use std::fs;
use std::path::Path;

/// A shim's kubeconfig. The token is another file in the same directory.
pub fn render_kubeconfig(account: &str, server: &str, server_name: &str, ca: &[u8]) -> String {
    let cluster = json!({
        "server": server,
        "tls-server-name": server_name,
        "certificate-authority-data": STANDARD.encode(ca),
    });
    write_document(&json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "berth",
        "clusters": [{"name": "berth", "cluster": cluster}],
        "contexts": [{"name": "berth", "context": {"cluster": "berth", "namespace": NAMESPACE, "user": account}}],
        "users": [{"name": account, "user": {"tokenFile": TOKEN_FILE}}],
    }))
}

/// Checks that the directory can hold the files. The directory must be missing or empty, since it
/// will belong to the shim.
///
/// # Errors
/// The obstacle, and its fix.
pub fn check_directory(file: &Path) -> Result<(), String> {
    let shown = file.display();
    let (Some(name), Some(directory)) = (
        file.file_name(),
        file.parent().filter(|it| it.parent().is_some()),
    ) else {
        return Err(format!(
            "{shown}: name a file in a directory of its own, such as /etc/kubernetes/berth-cluster/kubeconfig"
        ));
    };
    if name == TOKEN_FILE {
        return Err(format!(
            "{shown}: {TOKEN_FILE} is the name of the token's file: give another name, such as kubeconfig"
        ));
    }
    let entries = none_if_missing(fs::read_dir(directory))
        .map_err(FileError::wrap_io_error("read", directory))
        .map_err(|error| error.to_string())?;
    let ours = |other: &std::ffi::OsStr| {
        // Files left half written by a shim or by berth begin with the token's name or a dot.
        other == name
            || other.to_string_lossy().starts_with(['.'])
            || other.to_string_lossy().starts_with(TOKEN_FILE)
    };
    let other = entries
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name())
        .find(|other| !ours(other));
    other.map_or(Ok(()), |other| {
        Err(format!(
            "{shown}: the directory {} also contains {}, and after berth grant only the shim may read that directory: name a file in a directory without other files, such as /etc/kubernetes/berth-cluster/kubeconfig",
            directory.display(),
            other.display()
        ))
    })
}

/// Writes the kubeconfig and the token, readable for this uid alone.
///
/// # Errors
/// A file cannot be written. Each file is complete, either old or new.
pub fn write_credentials(
    file: &Path,
    uid: u32,
    kubeconfig: &str,
    token: &str,
) -> Result<(), FileError> {
    let directory = file.parent().unwrap_or(Path::new("/"));
    ensure_private_directory(directory, uid)
        .map_err(FileError::wrap_io_error("write", directory))?;
    // The token comes first, since a kubeconfig without a token is useless.
    for (path, text) in [
        (file.with_file_name(TOKEN_FILE), token),
        (file.to_owned(), kubeconfig),
    ] {
        replace_file_with_access(
            &path,
            text,
            Some(Access {
                mode: 0o600,
                uid,
                gid: getegid().as_raw(),
            }),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_cluster::kubeconfig::Token;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn the_files_are_private_and_can_be_read_again() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("cluster/kubeconfig");
        let own = nix::unistd::geteuid().as_raw();
        let uid = if own == 0 { 65534 } else { own };
        let text = render_kubeconfig("berth-cp-1", "https://[fd00::5]:6443", "kubernetes", b"PEM");
        check_directory(&file).unwrap();
        for token in ["one", "two"] {
            write_credentials(&file, uid, &text, token).unwrap();
            check_directory(&file).unwrap();
        }
        let access = berth_cluster::Access::read(&file).unwrap();
        assert_eq!(
            (access.server.as_str(), access.server_name.as_deref()),
            ("https://[fd00::5]:6443", Some("kubernetes"))
        );
        assert_eq!((access.ca.as_slice(), access.client), (&b"PEM"[..], None));
        let Some(Token::File(token)) = access.token else {
            panic!("no token file")
        };
        assert_eq!(fs::read_to_string(&token).unwrap(), "two");
        let directory = file.parent().unwrap();
        for (path, mode) in [(directory, 0o700), (&file, 0o600), (&token, 0o600)] {
            let meta = fs::metadata(path).unwrap();
            assert_eq!(
                (meta.mode() & 0o7777, meta.uid()),
                (mode, uid),
                "{}",
                path.display()
            );
        }
        assert_eq!(fs::read_dir(directory).unwrap().count(), 2);
    }

    /// A shim owns the directory. It could put a link there, so that `berth grant` writes
    /// elsewhere.
    #[test]
    fn a_link_in_the_way_is_replaced_and_not_followed() {
        let temp = tempfile::tempdir().unwrap();
        let (file, aim) = (
            temp.path().join("cluster/kubeconfig"),
            temp.path().join("aim"),
        );
        let own = nix::unistd::geteuid().as_raw();
        write_credentials(&file, own, "a", "b").unwrap();
        fs::write(&aim, "kept").unwrap();
        for name in ["token", "kubeconfig"] {
            let _ = fs::remove_file(file.with_file_name(name));
            symlink(&aim, file.with_file_name(name)).unwrap();
            symlink(
                &aim,
                file.with_file_name(format!(".{name}.{}", std::process::id())),
            )
            .unwrap();
        }
        write_credentials(&file, own, "a", "b").unwrap();
        assert_eq!(fs::read_to_string(&aim).unwrap(), "kept");
        assert_eq!(fs::read_to_string(&file).unwrap(), "a");
    }

    #[test]
    fn a_directory_with_something_else_in_it_is_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        let is_left_alone = || check_directory(&temp.path().join("berth.conf")).is_err();
        assert!(!is_left_alone());
        fs::write(temp.path().join("admin.conf"), "").unwrap();
        assert!(is_left_alone());
        for wrong in ["/", "/kubeconfig", "/etc/x/token"] {
            assert!(check_directory(Path::new(wrong)).is_err(), "{wrong}");
        }
        let error = write_credentials(Path::new("/proc/none/kubeconfig"), 0, "", "")
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("cannot write /proc/none: "), "{error}");
    }
}
