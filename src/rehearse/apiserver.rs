//! What `--old` and `--new` say: which apiserver, and how it becomes a whole command line.

use super::stage::Setting;
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// This very binary, even if its file was replaced meanwhile.
pub const THIS: &str = "/proc/self/exe";

/// An apiserver's command as it was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Apiserver {
    /// berth's own.
    StandIn {
        /// Further flags.
        flags: Vec<OsString>,
    },
    /// A real one.
    Command {
        /// The program, looked up in PATH.
        program: OsString,
        /// Its flags; those that it needs and are not here are filled in.
        flags: Vec<OsString>,
    },
}

impl Default for Apiserver {
    fn default() -> Self {
        Self::StandIn { flags: Vec::new() }
    }
}

/// One apiserver of a rehearsal.
#[derive(Debug, Clone)]
pub struct Instance {
    /// Its name among them all.
    pub name: String,
    /// What it runs.
    pub apiserver: Apiserver,
    /// What a stand-in says in `/version`.
    pub version: &'static str,
    /// Flags that a fault adds.
    pub spoiled: Vec<OsString>,
}

impl Apiserver {
    /// Splits a command as a shell does it; nothing is expanded.
    pub fn parse(text: &str) -> Result<Self, String> {
        let words = shell_words::split(text).map_err(|error| error.to_string())?;
        let mut words = words.into_iter().map(OsString::from);
        let program = words.next().ok_or("it is empty")?;
        let flags = words.collect();
        Ok(if program == "stand-in" { Self::StandIn { flags } } else { Self::Command { program, flags } })
    }

    /// Whether it is berth's own.
    pub fn is_stand_in(&self) -> bool {
        matches!(self, Self::StandIn { .. })
    }
}

impl Instance {
    /// Program and flags, all but where it listens.
    pub fn command(&self, setting: &Setting) -> Vec<OsString> {
        let mut command: Vec<OsString> = match &self.apiserver {
            Apiserver::StandIn { .. } => vec![THIS.into(), "stand-in".into()],
            Apiserver::Command { program, .. } => vec![program.clone()],
        };
        let (Apiserver::StandIn { flags } | Apiserver::Command { flags, .. }) = &self.apiserver;
        for (name, value) in self.defaults(setting) {
            if !has(flags, name) {
                let mut flag = OsString::from(format!("--{name}="));
                flag.push(value);
                command.push(flag);
            }
        }
        command.extend(flags.iter().chain(&self.spoiled).cloned());
        command
    }

    /// Flags that are filled in where they are not given.
    fn defaults(&self, setting: &Setting) -> Vec<(&'static str, OsString)> {
        let path = |path: &Path| path.as_os_str().to_owned();
        let millis = |time: std::time::Duration| OsString::from(format!("{}ms", time.as_millis()));
        let shutdown = &setting.shutdown;
        let mut flags = vec![
            ("tls-cert-file", path(&setting.certs.cert_file(&self.name))),
            ("tls-private-key-file", path(&setting.certs.key_file(&self.name))),
            ("audit-log-path", path(&setting.dir.join(format!("audit-{}.log", self.name)))),
            ("shutdown-delay-duration", millis(shutdown.delay)),
        ];
        if shutdown.send_retry_after {
            flags.push(("shutdown-send-retry-after", "true".into()));
        }
        if !shutdown.watch_grace.is_zero() {
            flags.push(("shutdown-watch-termination-grace-period", millis(shutdown.watch_grace)));
        }
        match self.apiserver {
            Apiserver::StandIn { .. } => {
                let mut store = OsString::from("unix://");
                store.push(setting.store());
                flags.push(("etcd-servers", store));
                flags.push(("stand-in-name", (&self.name).into()));
                flags.push(("stand-in-version", self.version.into()));
            }
            Apiserver::Command { .. } => flags.extend(setting.etcd.iter().map(|etcd| ("etcd-servers", etcd.into()))),
        }
        flags
    }
}

/// Whether a flag is among those typed; `_` counts as `-`, as in kube-apiserver.
pub fn has(flags: &[OsString], name: &str) -> bool {
    let named = |flag: &OsString| {
        let flag = flag.to_string_lossy();
        flag.strip_prefix("--").is_some_and(|flag| flag.split('=').next().unwrap_or(flag).replace('_', "-") == name)
    };
    flags.iter().any(named)
}

/// `--name=value` of a path.
pub fn flag(name: &str, value: impl AsRef<OsStr>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value);
    flag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_split_as_a_shell_does() {
        let parsed = Apiserver::parse("kube-apiserver --a='x y' \"--b=1\"").unwrap();
        let flags = vec!["--a=x y".into(), "--b=1".into()];
        assert_eq!(parsed, Apiserver::Command { program: "kube-apiserver".into(), flags });
        assert!(Apiserver::parse("stand-in --x").unwrap().is_stand_in());
        assert!(Apiserver::parse("  ").is_err() && Apiserver::parse("a 'b").is_err());
    }

    #[test]
    fn what_was_typed_is_found() {
        let flags: Vec<OsString> = ["--tls_cert_file=x", "--etcd-servers", "y", "-z"].map(Into::into).into();
        assert!(has(&flags, "tls-cert-file") && has(&flags, "etcd-servers"));
        assert!(!has(&flags, "tls-cert") && !has(&flags, "z"));
    }
}
