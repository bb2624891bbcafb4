//! Edits of kube-apiserver's flags, and of the times in the manifest that depend on the flags.

use super::{Change, Planner, YamlNode, basename};
use crate::command::{WATCH_GRACE, WATCH_GRACE_FLAG, names_regular_file};
use crate::edit::Step;
use std::time::Duration;

/// `--shutdown-delay-duration` for a manifest without the flag: time for clients to learn that the
/// address left the Service `kubernetes`.
const SHUTDOWN_DELAY: Duration = Duration::from_secs(5);

/// Flags with a path that only one instance may write to. True if the path is a file, false if it
/// is a directory.
pub(super) const PER_INSTANCE_PATHS: [(&str, bool); 3] = [
    ("audit-log-path", true),
    ("cert-dir", false),
    ("debug-socket-path", true),
];

/// How long connections may take to end: kube-apiserver's limit, and the default of
/// `--drain-timeout`.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Part of the grace period for the preStop hook, the start of processes and a slow node.
const GRACE_MARGIN: Duration = Duration::from_secs(30);

impl Planner<'_> {
    /// Puts `{instance}` into a flag's path, if only one instance may write to that path. `berth
    /// exec` replaces `{instance}` by the instance's ID.
    pub(super) fn make_flag_path_unique(&mut self, (name, named): (&str, bool)) {
        let Some(flag) = self.manifest.flag(name) else {
            return;
        };
        // The file belongs to one instance already, or the flag is off.
        if is_per_instance(flag.value) || !names_regular_file(flag.value.as_ref()) {
            return;
        }
        let mount = self.manifest.container().find_mount(flag.value);
        let mounted = mount
            .and_then(|mount| mount.get("mountPath"))
            .and_then(YamlNode::text);
        if named && mounted == Some(flag.value) {
            self.add_problem(flag.line, format!("--{name}={} is mounted as a single file, and each instance needs a file of its own: mount the directory of the file", flag.value));
            return;
        }
        let value = if named {
            insert_instance(flag.written)
        } else {
            format!("{}/{{instance}}", flag.written.trim_end_matches('/'))
        };
        self.set_flag(
            name,
            &value,
            "two instances must not write one file; berth exec adds the instance's name to the path",
        );
    }

    /// Adds a note on the audit log. Its name changes, and log shippers and retention have to
    /// follow.
    pub(super) fn add_audit_log_note(&mut self) {
        let Some(flag) = self
            .manifest
            .flag("audit-log-path")
            .filter(|flag| names_regular_file(flag.value.as_ref()))
        else {
            return;
        };
        let path = if is_per_instance(flag.value) {
            flag.written.to_owned()
        } else {
            insert_instance(flag.written)
        };
        self.notes.push(format!(
            "each pod has an audit log of its own ({path}), so the log's name changes with each upgrade: let the log shipper follow all audit logs (audit*.log), and delete logs of former pods; kube-apiserver deletes only files that it rotated itself"
        ));
    }

    /// Sets `--shutdown-delay-duration` if missing, and returns its value.
    pub(super) fn set_shutdown_delay(&mut self) -> Duration {
        match self.read_duration("shutdown-delay-duration") {
            delay if delay.is_zero() => {
                let value = humantime::format_duration(SHUTDOWN_DELAY).to_string();
                self.set_flag(
                    "shutdown-delay-duration",
                    &value,
                    "kube-apiserver serves clients that do not know yet that the address is gone",
                );
                SHUTDOWN_DELAY
            }
            delay => delay,
        }
    }

    /// Adds the flag that makes kube-apiserver end its watches one after the other, if the manifest
    /// lacks the flag. Returns how long the watches take to end.
    pub(super) fn set_watch_grace(&mut self) -> Duration {
        let name = WATCH_GRACE_FLAG.trim_start_matches('-');
        if self.manifest.flag(name).is_some() {
            return self.read_watch_grace();
        }
        let value = humantime::format_duration(WATCH_GRACE).to_string();
        self.set_flag(
            name,
            &value,
            "watches end one after another, so clients do not all reconnect to the other instances at once",
        );
        WATCH_GRACE
    }

    pub(super) fn read_watch_grace(&mut self) -> Duration {
        self.read_duration(WATCH_GRACE_FLAG.trim_start_matches('-'))
    }

    /// Reads a flag's value, which is a duration in Go's notation. Zero if the flag is missing.
    fn read_duration(&mut self, name: &str) -> Duration {
        let Some(flag) = self.manifest.flag(name) else {
            return Duration::ZERO;
        };
        let parsed = if flag.value == "0" {
            Ok(Duration::ZERO)
        } else {
            humantime::parse_duration(flag.value)
        };
        parsed.unwrap_or_else(|_| {
            self.add_problem(
                flag.line,
                format!(
                    "--{name}={}: give a duration with units, such as 10s or 1m30s",
                    flag.value
                ),
            );
            Duration::ZERO
        })
    }

    /// Changes a flag in place, or adds it. In a manifest of kubeadm, the flag is always added at
    /// the end, and the last flag counts: a patch for kubeadm cannot name an argument by its value.
    fn set_flag(&mut self, name: &str, value: &str, reason: &str) {
        let whole = format!("--{name}={value}");
        let flag = self
            .manifest
            .flag(name)
            .filter(|_| !self.manifest.is_kubeadm());
        let Some(flag) = flag else {
            let key = if self.manifest.apiserver().get("args").is_some() {
                "args"
            } else {
                "command"
            };
            self.original.flags.push((whole.clone(), None));
            self.add_edit(
                self.container.key(key),
                Change::Append(vec![whole.into()]),
                format!("--{name}: {reason}"),
            );
            return;
        };
        let new = if flag.apart { value.to_owned() } else { whole };
        let old = self.manifest.arguments()[flag.argument]
            .text()
            .unwrap_or_default()
            .to_owned();
        let mut path = self.manifest.argument_path(flag.argument);
        // An earlier edit has inserted berth's arguments before the command, so the index is higher
        // now.
        if let Some(Step::Index(index)) = path.0.last_mut()
            && flag.argument == *index
        {
            *index += self.wrapping.inserted_arguments;
        }
        self.original.flags.push((new.clone(), Some(old)));
        self.add_edit(path, Change::Set(new.into()), format!("--{name}: {reason}"));
    }

    /// Raises the grace period to the time until kube-apiserver's connections have ended.
    pub(super) fn raise_grace_period(&mut self, delay: Duration, watches: Duration) {
        let path = self
            .manifest
            .pod_path()
            .key("terminationGracePeriodSeconds");
        let old = self.manifest.pod().get("terminationGracePeriodSeconds");
        let seconds = old.map(YamlNode::number);
        if let (Some(old), Some(None)) = (old, seconds) {
            self.add_problem(
                old.line,
                "terminationGracePeriodSeconds is no number: give a number of seconds",
            );
        }
        let needed = [delay, watches, self.wrapping.drain, GRACE_MARGIN];
        let needed = needed
            .into_iter()
            .fold(self.hook_duration(), Duration::saturating_add)
            .as_secs()
            .min(i64::MAX.unsigned_abs());
        if seconds.flatten().is_some_and(|seconds| seconds >= needed) {
            return;
        }
        self.original.grace = Some((needed, seconds.flatten()));
        self.add_edit(
            path,
            Change::Set(needed.into()),
            "longer than the preStop hook, the shutdown delay, the drain and a margin together",
        );
    }
}

/// True if the value differs from pod to pod, because the value contains the instance's name, or a
/// variable with the pod's UID or name. A variable such as the node's name has the same value in
/// both pods of a node.
fn is_per_instance(value: &str) -> bool {
    value.contains("{instance}")
}

/// Inserts `-{instance}` before the extension of a path.
pub(super) fn insert_instance(path: &str) -> String {
    let name = basename(path);
    // A dot within $(…) belongs to a variable's name.
    match name
        .rfind('.')
        .filter(|at| *at > 0 && !name[*at..].contains(')'))
    {
        Some(at) => format!(
            "{}-{{instance}}{}",
            &path[..path.len() - name.len() + at],
            &name[at..]
        ),
        None => format!("{path}-{{instance}}"),
    }
}
