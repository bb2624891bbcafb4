//! Checks of the volume that contains the run directory, which all shims of a node share.

use super::super::checks::RUN_DIR_VOLUME;
use super::super::layout::Layout;
use super::super::options;
use super::Examiner;
use berth_options::place::PlaceArgs;
use std::path::Path;

/// The run directory that berth uses by default.
const DEFAULT_RUN_DIR: &str = "/run/berth";

impl Examiner<'_> {
    pub(super) fn check_run_dir(&mut self, layout: &Layout<'_>) {
        let mut directories = Vec::new();
        for berth in std::iter::once(&layout.apiserver).chain(&layout.shim) {
            let Some(place) = options::place_args(&berth.parsed) else {
                continue;
            };
            let (run_dir, name, line) = (
                run_dir_of(place),
                berth.container.name(),
                berth.container.node().line,
            );
            let mut wrong = |line, cause: String, fix: String| {
                self.add_finding(RUN_DIR_VOLUME, line, cause, fix);
            };
            let Some(mount) = berth.container.find_mount(run_dir) else {
                wrong(
                    line,
                    format!(
                        "{name} has no volume at the run directory {run_dir}, so no other shim or kube-apiserver finds this container"
                    ),
                    format!("mount a hostPath of type DirectoryOrCreate at {run_dir}"),
                );
                continue;
            };
            if mount.is_true("readOnly") {
                wrong(
                    mount.line,
                    format!("{name} cannot write to the run directory {run_dir}"),
                    "remove readOnly".into(),
                );
            }
            match berth.container.path_on_node(run_dir) {
                Some(directory) => directories.push((directory, mount.line)),
                None => wrong(
                    mount.line,
                    format!(
                        "the run directory {run_dir} in {name} is no hostPath, so shims of other pods use another directory"
                    ),
                    format!(
                        "make the volume {{hostPath: {{path: {run_dir}, type: DirectoryOrCreate}}}}"
                    ),
                ),
            }
        }
        if let [(own, _), (other, line)] = &directories[..]
            && own != other
        {
            let cause = format!(
                "the shim's run directory is {other} on the node, kube-apiserver's is {own}"
            );
            self.add_finding(RUN_DIR_VOLUME, *line, cause, format!("mount {own} in both"));
        }
    }
}

/// Returns the path of the run directory in a container.
pub(in super::super) fn run_dir_of(place: &PlaceArgs) -> &str {
    place
        .run_dir
        .run_dir
        .as_deref()
        .and_then(Path::to_str)
        .unwrap_or(DEFAULT_RUN_DIR)
}
