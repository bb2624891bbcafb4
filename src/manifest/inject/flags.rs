//! Flags of the kube-apiserver, and the times that follow from them.

use super::{Change, Node, Planner, basename};
use crate::manifest::edit::Step;
use std::time::Duration;

/// `--shutdown-delay-duration` where there is none: time for the others to hear that the address left the
/// Service `kubernetes`.
const DELAY: Duration = Duration::from_secs(5);

/// Flags that name files which only one instance may write, and whether each is a file and not a folder.
pub(super) const OWN: [(&str, bool); 3] = [("audit-log-path", true), ("cert-dir", false), ("debug-socket-path", true)];

/// How long connections may take to end: kube-apiserver's own limit and the default of `--drain-timeout`.
pub(super) const DRAIN: Duration = Duration::from_secs(60);

/// Of the grace period, for the preStop hook, the start of processes and a slow node.
const MARGIN: Duration = Duration::from_secs(30);

impl Planner<'_> {
    /// A file that only one instance may write, with the instance in its name.
    pub(super) fn file_of_its_own(&mut self, (name, named): (&str, bool)) {
        let Some(flag) = self.manifest.flag(name) else { return };
        // An instance's own already; or standard output, or off.
        if flag.value.contains("{instance}") || flag.value.contains("$(") || matches!(flag.value, "-" | "") {
            return;
        }
        let mount = self.manifest.container().mount_of(flag.value);
        let mounted = mount.and_then(|mount| mount.get("mountPath")).and_then(Node::text);
        if named && mounted == Some(flag.value) {
            self.wrong(flag.line, format!("--{name}={} is mounted as this one file, and each instance needs a file of its own: mount its folder", flag.value));
            return;
        }
        let value = if named {
            with_instance(flag.value)
        } else {
            format!("{}/{{instance}}", flag.value.trim_end_matches('/'))
        };
        self.set_flag(name, &value, "two instances must not write the same; berth exec puts the instance's name in");
    }

    /// Sets `--shutdown-delay-duration` where there is none, and gives what it is.
    pub(super) fn shutdown_delay(&mut self) -> Duration {
        match self.duration("shutdown-delay-duration") {
            delay if delay.is_zero() => {
                let value = humantime::format_duration(DELAY).to_string();
                self.set_flag(
                    "shutdown-delay-duration",
                    &value,
                    "clients that still have the address find it served until they have heard",
                );
                DELAY
            }
            delay => delay,
        }
    }

    /// A flag in Go's notation of durations.
    fn duration(&mut self, name: &str) -> Duration {
        let Some(flag) = self.manifest.flag(name) else { return Duration::ZERO };
        let parsed = if flag.value == "0" { Ok(Duration::ZERO) } else { humantime::parse_duration(flag.value) };
        parsed.unwrap_or_else(|_| {
            self.wrong(flag.line, format!("--{name}={}: give it with units, such as 10s or 1m30s", flag.value));
            Duration::ZERO
        })
    }

    /// Changes a flag where it stands, or adds it. In what kubeadm writes it is always added, where it
    /// counts because it is the last: a patch of kubeadm's cannot name an argument by what it says.
    fn set_flag(&mut self, name: &str, value: &str, reason: &str) {
        let whole = format!("--{name}={value}");
        let flag = self.manifest.flag(name).filter(|_| !self.manifest.is_kubeadm());
        let Some(flag) = flag else {
            let key = if self.manifest.apiserver().get("args").is_some() { "args" } else { "command" };
            self.original.flags.push((whole.clone(), None));
            self.edit(self.container.key(key), Change::Append(vec![whole.into()]), format!("--{name}: {reason}"));
            return;
        };
        let new = if flag.apart { value.to_owned() } else { whole };
        let old = self.manifest.arguments()[flag.argument].text().unwrap_or_default().to_owned();
        let mut path = self.manifest.argument_path(flag.argument);
        // The command has more words by now.
        if let Some(Step::Index(index)) = path.0.last_mut()
            && flag.argument == *index
        {
            *index += self.wrapping.words;
        }
        self.original.flags.push((new.clone(), Some(old)));
        self.edit(path, Change::Set(new.into()), format!("--{name}: {reason}"));
    }

    pub(super) fn grace(&mut self, delay: Duration) {
        let path = self.manifest.pod_path().key("terminationGracePeriodSeconds");
        let old = self.manifest.pod().get("terminationGracePeriodSeconds");
        let seconds = old.map(|old| old.text().and_then(|text| text.parse::<u64>().ok()));
        if let (Some(old), Some(None)) = (old, seconds) {
            self.wrong(old.line, "terminationGracePeriodSeconds is no number of seconds: give one");
        }
        let needed =
            (delay + self.duration("shutdown-watch-termination-grace-period") + self.wrapping.drain + MARGIN).as_secs();
        if seconds.flatten().is_some_and(|seconds| seconds >= needed) {
            return;
        }
        self.original.grace = Some((needed, seconds.flatten()));
        self.edit(path, Change::Set(needed.into()), "longer than the shutdown delay, the drain and a margin together");
    }
}

/// A file's path with the instance before the extension.
pub(super) fn with_instance(path: &str) -> String {
    let name = basename(path);
    match name.rfind('.').filter(|at| *at > 0) {
        Some(at) => format!("{}-{{instance}}{}", &path[..path.len() - name.len() + at], &name[at..]),
        None => format!("{path}-{{instance}}"),
    }
}
