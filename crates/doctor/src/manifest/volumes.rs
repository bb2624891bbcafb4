//! Volumes: where the shims of a node meet, and where the binary comes from.

use super::super::checks::{BINARY_MISSING, RUN_DIR_OWNER, RUN_DIR_VOLUME};
use super::super::layout::{Layout, uid};
use super::super::options;
use super::Examiner;
use berth_cluster::yaml::YamlNode;
use berth_manifest::Container;
use berth_options::PodCommand;
use berth_options::place::PlaceArgs;
use std::path::Path;

/// Where the shims of a node meet by default.
const RUN_DIR: &str = "/run/berth";

impl Examiner<'_> {
    pub(super) fn run_dir(&mut self, layout: &Layout<'_>) {
        let shim = layout.shim.as_ref().map(|(shim, _)| shim);
        let mut directories = Vec::new();
        for berth in [Some(&layout.apiserver), shim].into_iter().flatten() {
            let Some(place) = options::place(&berth.parsed) else { continue };
            let (run_dir, name, line) = (run_dir_of(place), berth.container.name(), berth.container.node().line);
            let mut wrong = |line, cause: String, fix: String| self.found(RUN_DIR_VOLUME, line, cause, fix);
            let Some(mount) = berth.container.mount_of(run_dir) else {
                wrong(
                    line,
                    format!("{name} has no volume at the run directory {run_dir}, so no sibling finds it"),
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
            match berth.container.on_node(run_dir) {
                Some(directory) => directories.push((directory, mount.line)),
                None => wrong(
                    mount.line,
                    format!(
                        "the run directory {run_dir} in {name} is no hostPath, so shims of other pods do not meet there"
                    ),
                    format!("make the volume {{hostPath: {{path: {run_dir}, type: DirectoryOrCreate}}}}"),
                ),
            }
        }
        if let [(own, _), (other, line)] = &directories[..]
            && own != other
        {
            let cause = format!("the shim's run directory is {other} on the node, kube-apiserver's is {own}");
            self.found(RUN_DIR_VOLUME, *line, cause, format!("mount {own} in both"));
        }
    }

    /// Which container copies the binary, and which uid the run directory will belong to.
    pub(super) fn install(&mut self, layout: &Layout<'_>) {
        let apiserver = layout.apiserver.container;
        let uid = uid(apiserver);
        let copy = layout.install.as_ref().and_then(|install| match install.parsed.command()? {
            PodCommand::CopySelf(args) => Some((install.container, args)),
            _ => None,
        });
        if let Some(mount) = apiserver.mount_of(layout.binary)
            && let Some(volume) = apiserver.volume_of(mount).filter(|volume| volume.get("emptyDir").is_some())
        {
            let name = volume.text_of("name");
            let brings = |container: Container<'_>| {
                let mounts = container.node().list("volumeMounts");
                mounts.iter().any(|mount| mount.text_of("name") == name)
            };
            if !self.case.manifest.containers("initContainers").any(brings) {
                self.found(
                    BINARY_MISSING,
                    mount.line,
                    format!("{} is in an emptyDir that no init container puts it into", layout.binary),
                    format!("add an init container with args: [copy-self, {}] that mounts it", layout.binary),
                );
            }
        }
        let Some(place) = options::place(&layout.apiserver.parsed) else { return };
        let Some(mount) = apiserver.mount_of(run_dir_of(place)) else { return };
        let kind =
            apiserver.volume_of(mount).and_then(|volume| volume.at(&["hostPath", "type"])).and_then(YamlNode::text);
        let owner =
            copy.filter(|(_, args)| args.run_dir.is_some()).map(|(install, args)| (install, args.owner.unwrap_or(0)));
        match owner {
            Some((install, owner)) if owner != uid => self.found(
                RUN_DIR_OWNER,
                install.node().line,
                format!("{} makes the run directory for uid {owner}, and kube-apiserver is uid {uid}", install.name()),
                format!("give it --owner {uid}"),
            ),
            // The operator has to make it.
            None if uid != 0 && kind != Some("Directory") => self.found(
                RUN_DIR_OWNER,
                mount.line,
                format!("the kubelet makes the run directory as root, and kube-apiserver is uid {uid}"),
                format!(
                    "let an init container make it: args: [copy-self, PATH, --run-dir, {}, --owner, \"{uid}\"]",
                    run_dir_of(place)
                ),
            ),
            _ => {}
        }
    }
}

/// The run directory in a container.
pub(in super::super) fn run_dir_of(place: &PlaceArgs) -> &str {
    place.run_dir.run_dir.as_deref().and_then(Path::to_str).unwrap_or(RUN_DIR)
}
