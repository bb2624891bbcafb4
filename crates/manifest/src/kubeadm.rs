//! The same edits as patches for kubeadm (`kubeadm … --patches DIR`), so that kubeadm itself writes
//! the manifest behind berth, at `init`, `join` and each `upgrade`.
//!
//! A strategic merge patch names containers and volumes by their names, so the patch fits manifests
//! of later kubeadm versions, and its additions to a list come first. Only the command line cannot
//! be changed by a merge, since a list of strings is replaced as a whole. For the command line, a
//! JSON patch inserts berth before the command and appends flags at the end.

use super::edit::{Change, Edit, Step};
use super::write::Style;
use super::{Manifest, Problem};
use berth_cluster::yaml::YamlNode;
use serde_json::{Value, json};

/// A file of kubeadm's patches directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    /// File name. The 9 sorts the file after the operator's patches.
    pub name: &'static str,
    pub text: String,
}

/// Writes the edits as patches.
///
/// # Errors
/// The manifest is not kubeadm's, or an edit cannot be written as a patch.
pub fn make_patches(manifest: &Manifest, edits: &[Edit]) -> Result<[Patch; 2], Problem> {
    if !manifest.is_kubeadm() {
        return Err(Problem::new(
            1,
            "kubeadm did not write this manifest: give the manifest that kubeadm wrote",
        ));
    }
    let mut merge = json!({"metadata": {"name": "kube-apiserver", "namespace": "kube-system"}});
    let mut operations = Vec::new();
    let containers = (
        manifest.pod_path().key("containers"),
        "/spec/containers".to_owned(),
    );
    let arguments = format!("{}/{}/command", containers.1, manifest.apiserver_index());
    let lists = [
        containers,
        (manifest.apiserver_path().key("command"), arguments),
    ];
    for edit in edits {
        let said = match lists.iter().find(|(path, _)| *path == edit.path) {
            Some((_, list)) => {
                operations.extend(operations_of(&edit.change, list));
                Some(())
            }
            None => add_change(
                &mut merge,
                Some(manifest.root()),
                &edit.path.0,
                &edit.change,
            ),
        };
        said.ok_or_else(|| {
            let line = manifest.apiserver().line;
            Problem::new(
                line,
                format!(
                    "{} cannot be written as a patch: use the manifest as kubeadm writes it",
                    edit.path
                ),
            )
        })?;
    }
    let style = Style {
        indented: true,
        sorted: false,
        json: false,
    };
    let merge = merge
        .as_object()
        .map(|map| style.fields(0, map))
        .unwrap_or_default();
    let operations = style.items(0, &operations);
    Ok([
        Patch {
            name: "kube-apiserver9-berth+json.yaml",
            text: format!("{HEAD}{operations}"),
        },
        Patch {
            name: "kube-apiserver9-berth+strategic.yaml",
            text: format!("{HEAD}{merge}"),
        },
    ])
}

const HEAD: &str =
    "# Written by berth inject --kubeadm-patch; regenerate it rather than edit it.\n";

/// Operations of a JSON patch (RFC 6902).
fn operations_of(change: &Change, list: &str) -> Vec<Value> {
    let operation =
        |path: String, value: &Value| json!({"op": "add", "path": path, "value": value});
    match change {
        // Each value is inserted before the values inserted so far.
        Change::Prepend(values) => values
            .iter()
            .rev()
            .map(|value| operation(format!("{list}/0"), value))
            .collect(),
        Change::Append(values) => values
            .iter()
            .map(|value| operation(format!("{list}/-"), value))
            .collect(),
        Change::Set(_) | Change::Remove => Vec::new(),
    }
}

/// Puts a change into a strategic merge patch. `None` if the change cannot be written as a patch.
fn add_change(
    patch: &mut Value,
    there: Option<&YamlNode>,
    path: &[Step],
    change: &Change,
) -> Option<()> {
    let Some((step, rest)) = path.split_first() else {
        *patch = match (change, there) {
            // Without `replace`, the value would be merged with the present value: an httpGet with
            // an exec.
            (Change::Set(Value::Object(map)), Some(_)) => {
                let replace = ("$patch".to_owned(), Value::from("replace"));
                Value::Object(std::iter::once(replace).chain(map.clone()).collect())
            }
            (Change::Set(value), _) => value.clone(),
            (Change::Remove, _) => Value::Null,
            (Change::Prepend(values), _) | (Change::Append(values), None) => {
                Value::Array(values.clone())
            }
            (Change::Append(_), Some(_)) => return None,
        };
        return Some(());
    };
    match step {
        Step::Key(key) => {
            if patch.is_null() {
                *patch = json!({});
            }
            let there = there.and_then(|there| there.get(key));
            add_change(
                patch
                    .as_object_mut()?
                    .entry(key.clone())
                    .or_insert(Value::Null),
                there,
                rest,
                change,
            )
        }
        Step::Name(name) => {
            if patch.is_null() {
                *patch = json!([]);
            }
            let items = patch.as_array_mut()?;
            let at = items.iter().position(|item| item["name"] == name.as_str());
            let at = at.unwrap_or_else(|| {
                items.push(json!({"name": name}));
                items.len() - 1
            });
            let there = there.and_then(|there| Some(there.named(name)?.1));
            add_change(&mut items[at], there, rest, change)
        }
        Step::Index(_) => None,
    }
}
