//! The edits that restore a manifest to its state before `berth inject`.
//!
//! Additions of `inject` are found by their names. Values that `inject` changed or removed are
//! stored in an annotation of the pod. So a manifest can be ejected anywhere: in a repository,
//! after other edits, without a backup. Values that someone has changed since then stay.

use super::edit::{COMMENT_PREFIX, Change, Edit, Path, apply_edits};
use super::names::{
    BINARY, INSTALL_CONTAINER, MIN_PROBE_SECONDS, PROBES, SHIM_CONTAINER, VARIABLES, VOLUMES,
};
use super::{Manifest, Problem, basename, exec_words};
use berth_cluster::yaml::{YamlNode, parse_documents};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;

/// The annotation that stores the [`Original`].
pub const ORIGINAL_ANNOTATION: &str = "berth/original";

const RESTORE_REASON: &str = "as it was before";

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Original {
    /// Original values of the container's fields that `inject` has changed. Of a probe, only the
    /// changed fields. Null if the field did not exist.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub fields: Map<String, Value>,
    /// Arguments that `inject` has written. Each has the original argument, or `None` if there was
    /// none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flags: Vec<(String, Option<String>)>,
    /// The `terminationGracePeriodSeconds` that `inject` has written, and the original value, if
    /// any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace: Option<(u64, Option<u64>)>,
}

impl fmt::Display for Original {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Serialization of these fields cannot fail.
        f.write_str(&serde_json::to_string(self).unwrap_or_default())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ejected {
    pub text: String,
    pub edits: Vec<Edit>,
}

/// Takes berth out of a manifest that `inject` wrote.
///
/// # Errors
/// berth is not in the manifest, or the manifest cannot be read or edited.
pub fn undo_injection(manifest: &Manifest) -> Result<Ejected, Problem> {
    let edits = plan_edits(manifest)?;
    let text = apply_edits(manifest.text(), manifest.document_index(), &edits)?;
    Ok(Ejected {
        text: remove_comments(&text, manifest.document_index()),
        edits,
    })
}

/// True if the manifest has no mark of `inject` and starts kube-apiserver without berth.
pub fn is_without_berth(manifest: &Manifest) -> bool {
    let is_berth = |word: &YamlNode| word.text().is_some_and(|word| basename(word) == "berth");
    manifest.annotation(ORIGINAL_ANNOTATION).is_none()
        && !manifest.arguments().iter().any(|word| is_berth(word))
}

/// Plans the edits that take berth out.
///
/// # Errors
/// The annotation of `inject` is missing or cannot be read.
pub fn plan_edits(manifest: &Manifest) -> Result<Vec<Edit>, Problem> {
    let annotation = manifest.annotation(ORIGINAL_ANNOTATION).ok_or_else(|| {
        let line = manifest.template().line;
        Problem::new(
            line,
            format!("berth inject did not write this manifest: the annotation {ORIGINAL_ANNOTATION} is missing, so remove berth from the manifest by hand"),
        )
    })?;
    let original: Original = serde_json::from_str(annotation.text().unwrap_or_default()).map_err(|error| {
        Problem::new(
            annotation.line,
            format!("the annotation {ORIGINAL_ANNOTATION} cannot be read ({error}): put the manifest back from a backup"),
        )
    })?;
    let mut undo = UndoPlanner {
        manifest,
        edits: Vec::new(),
    };
    let (pod, container) = (manifest.pod(), manifest.apiserver());
    let (pod_path, container_path) = (manifest.pod_path(), manifest.apiserver_path());
    undo.remove_named(
        pod,
        &pod_path,
        "initContainers",
        &[INSTALL_CONTAINER, SHIM_CONTAINER],
    );
    undo.remove_named(pod, &pod_path, "containers", &[SHIM_CONTAINER]);
    undo.remove_named(pod, &pod_path, "volumes", &VOLUMES);
    undo.remove_named(container, &container_path, "env", &VARIABLES);
    undo.remove_named(container, &container_path, "volumeMounts", &VOLUMES);
    undo.restore_flags(&original);
    undo.unwrap_command();
    undo.remove_pre_stop();
    undo.restore_fields(&original);
    undo.restore_grace_period(&original);
    let annotations = manifest.template_path().key("metadata").key("annotations");
    let only = manifest
        .template()
        .find_path(&["metadata", "annotations"])
        .is_some_and(|all| all.entries().len() == 1);
    undo.remove(if only {
        annotations
    } else {
        annotations.key(ORIGINAL_ANNOTATION)
    });
    Ok(undo.edits)
}

struct UndoPlanner<'a> {
    manifest: &'a Manifest,
    edits: Vec<Edit>,
}

impl UndoPlanner<'_> {
    fn add_edit(&mut self, path: Path, change: Change, reason: &str) {
        self.edits.push(Edit {
            path,
            change,
            reason: reason.to_owned(),
            comment: false,
        });
    }

    fn remove(&mut self, path: Path) {
        self.add_edit(path, Change::Remove, "berth inject added it");
    }

    /// Removes the items with these names from a list. If no other item is left, the list itself is
    /// removed.
    fn remove_named(&mut self, parent: &YamlNode, path: &Path, list: &str, names: &[&str]) {
        let Some(node) = parent.get(list) else { return };
        let there: Vec<_> = names
            .iter()
            .filter(|name| node.find_named(name).is_some())
            .collect();
        if there.is_empty() {
            return;
        }
        let path = path.key(list);
        if there.len() == node.items().len() {
            return self.remove(path);
        }
        for name in there {
            self.remove(path.name(name));
        }
    }

    fn restore_flags(&mut self, original: &Original) {
        let arguments = self.manifest.arguments();
        let mut removed = Vec::new();
        for (new, old) in &original.flags {
            let Some(at) = arguments
                .iter()
                .rposition(|argument| argument.text() == Some(new))
            else {
                continue;
            };
            match old {
                Some(old) => {
                    self.add_edit(
                        self.manifest.argument_path(at),
                        Change::Set(old.as_str().into()),
                        RESTORE_REASON,
                    );
                }
                None => removed.push(at),
            }
        }
        // Arguments are removed from the end on, so that earlier indices stay valid.
        removed.sort_unstable();
        for at in removed.into_iter().rev() {
            self.remove(self.manifest.argument_path(at));
        }
    }

    fn unwrap_command(&mut self) {
        let arguments = self.manifest.arguments();
        let words: Vec<_> = arguments
            .iter()
            .map_while(|argument| argument.text())
            .take(3)
            .collect();
        if words == [BINARY, "exec", "--"] {
            for _ in words {
                self.remove(self.manifest.apiserver_path().key("command").index(0));
            }
        }
    }

    fn remove_pre_stop(&mut self) {
        let Some(lifecycle) = self.manifest.apiserver().get("lifecycle") else {
            return;
        };
        if lifecycle.get("preStop").is_some_and(runs_berth) {
            let path = self.manifest.apiserver_path().key("lifecycle");
            let only = lifecycle.entries().len() == 1;
            self.remove(if only { path } else { path.key("preStop") });
        }
    }

    fn restore_fields(&mut self, original: &Original) {
        for (field, old) in &original.fields {
            let now = self.manifest.apiserver().get(field);
            let path = self.manifest.apiserver_path().key(field);
            match (field.as_str(), now, old) {
                ("ports", None, old) => {
                    self.add_edit(path, Change::Set(old.clone()), RESTORE_REASON);
                }
                (probe, Some(now), old) if PROBES.contains(&probe) && runs_berth(now) => {
                    match old {
                        Value::Object(old) => self.restore_probe(&path, now, old),
                        _ => self.remove(path),
                    }
                }
                _ => {}
            }
        }
    }

    fn restore_probe(&mut self, path: &Path, now: &YamlNode, original: &Map<String, Value>) {
        for (key, old) in original {
            let raised = now.get(key).map(YamlNode::value) == Some(MIN_PROBE_SECONDS.into());
            match old {
                Value::Object(_) => {
                    self.add_edit(path.key(key), Change::Set(old.clone()), RESTORE_REASON);
                }
                _ if !raised => {}
                Value::Null => self.remove(path.key(key)),
                old => self.add_edit(path.key(key), Change::Set(old.clone()), RESTORE_REASON),
            }
        }
        self.remove(path.key("exec"));
    }

    fn restore_grace_period(&mut self, original: &Original) {
        let path = self
            .manifest
            .pod_path()
            .key("terminationGracePeriodSeconds");
        let now = self
            .manifest
            .pod()
            .get("terminationGracePeriodSeconds")
            .map(YamlNode::value);
        match original.grace {
            Some((new, None)) if now == Some(new.into()) => self.remove(path),
            Some((new, Some(old))) if now == Some(new.into()) => {
                self.add_edit(path, Change::Set(old.into()), RESTORE_REASON);
            }
            _ => {}
        }
    }
}

fn runs_berth(hook: &YamlNode) -> bool {
    exec_words(hook).first() == Some(&BINARY)
}

/// Removes berth's comments from one document of a file. Returns the text of the whole file.
fn remove_comments(text: &str, document: usize) -> String {
    let Ok(documents) = parse_documents(text) else {
        return text.to_owned();
    };
    let line_of = |document: usize| documents.get(document).map_or(usize::MAX, |root| root.line);
    let ours = line_of(document)..line_of(document + 1);
    let lines = text.split_inclusive('\n').enumerate();
    lines
        .filter(|(at, line)| {
            !(ours.contains(&(at + 1)) && line.trim_start().starts_with(COMMENT_PREFIX))
        })
        .map(|(_, line)| line)
        .collect()
}
