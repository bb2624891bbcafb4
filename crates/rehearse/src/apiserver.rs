//! What `--old` and `--new` say: which apiserver, and how it becomes a whole command line.

use super::fault::{Fault, SLOW};
use super::stage::Setting;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::time::timeout;

/// This very binary, even if its file was replaced meanwhile.
pub const THIS: &str = "/proc/self/exe";

/// How long an answer to `--version` may take.
const VERSION_WITHIN: Duration = Duration::from_secs(20);

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
    /// What its `/version` should say.
    pub version: String,
    /// What is wrong with it from the start.
    pub fault: Option<Fault>,
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

    /// Asks it for its version. As kube-apiserver reads all its flags first, an unknown one is known
    /// before anything is started.
    pub async fn version(&self, stand_in: &str) -> Result<String, String> {
        let Self::Command { program, flags } = self else { return Ok(stand_in.to_owned()) };
        let mut command = tokio::process::Command::new(program);
        command.args(flags).arg("--version").stdin(Stdio::null()).kill_on_drop(true);
        let output = timeout(VERSION_WITHIN, command.output()).await;
        let output = output.map_err(|_| format!("no answer to --version within {VERSION_WITHIN:?}"))?;
        let output = output.map_err(|error| format!("cannot be started: {error}"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        let version = said.lines().find_map(|line| line.strip_prefix("Kubernetes ")).map(str::trim);
        match version {
            Some(version) if !version.contains(' ') && output.status.success() => Ok(version.to_owned()),
            _ => {
                let said = said + String::from_utf8_lossy(&output.stderr);
                let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("nothing");
                Err(format!("--version ends with {} and says: {last}", output.status))
            }
        }
    }

    /// Whether it may refuse who shows no certificate: it says so, or a file says it that is not read here.
    pub fn wants_certificates(&self) -> bool {
        let (Self::StandIn { flags } | Self::Command { flags, .. }) = self;
        let off = flags.iter().rev().find_map(|flag| {
            let (name, value) = flag.to_str()?.split_once('=').unwrap_or((flag.to_str()?, "true"));
            let named = name.replace('_', "-") == "--anonymous-auth";
            named.then_some(matches!(value, "0" | "f" | "F" | "false" | "FALSE" | "False"))
        });
        off == Some(true) || has(flags, "authentication-config")
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
            if !given(flags, name) {
                let mut flag = OsString::from(format!("--{name}="));
                flag.push(value);
                command.push(flag);
            }
        }
        command.extend(flags.iter().cloned());
        command.extend(self.spoil());
        command
    }

    /// Flags by which it fails. A real apiserver has none to start slowly; it is stopped for a while.
    fn spoil(&self) -> Option<OsString> {
        let delay = |time: &str| OsString::from(format!("--stand-in-start-delay={time}"));
        match (self.fault?, self.apiserver.is_stand_in()) {
            (Fault::BadFlag, _) => Some("--no-such-flag".into()),
            (Fault::NeverReady, true) => Some(delay("1h")),
            (Fault::SlowStart, true) => Some(delay(&format!("{}s", SLOW.as_secs()))),
            _ => None,
        }
    }

    /// Flags that are filled in where they are not given.
    fn defaults(&self, setting: &Setting) -> Vec<(&'static str, OsString)> {
        let path = |path: &Path| path.as_os_str().to_owned();
        let millis = |time: Duration| OsString::from(format!("{}ms", time.as_millis()));
        let shutdown = &setting.shutdown;
        let mut flags = vec![
            ("tls-cert-file", path(&setting.certs.cert_file(&self.name))),
            ("tls-private-key-file", path(&setting.certs.key_file(&self.name))),
            ("client-ca-file", path(&setting.certs.ca_file)),
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
                flags.push(("stand-in-version", (&self.version).into()));
            }
            Apiserver::Command { .. } => {
                match self.fault {
                    // Nobody listens on port 1.
                    Some(Fault::NeverReady) => flags.push(("etcd-servers", "http://127.0.0.1:1".into())),
                    _ => flags.extend(setting.etcd.iter().map(|etcd| ("etcd-servers", etcd.into()))),
                }
                flags.extend([
                    ("authorization-mode", "RBAC".into()),
                    ("service-cluster-ip-range", "10.96.0.0/24".into()),
                    ("service-account-issuer", "https://kubernetes.default.svc".into()),
                    ("service-account-key-file", path(&setting.certs.account_public_key_file)),
                    ("service-account-signing-key-file", path(&setting.certs.account_key_file)),
                    ("cert-dir", path(&setting.dir.join(format!("certs-{}", self.name)))),
                ]);
                // It cannot put a loopback address into the Service `kubernetes`, and says so for ever.
                if setting.address.ip().is_loopback() {
                    flags.push(("endpoint-reconciler-type", "none".into()));
                }
            }
        }
        flags
    }
}

/// Whether a flag was typed, or another with which it must not be.
fn given(flags: &[OsString], name: &str) -> bool {
    let instead = match name {
        "authorization-mode" => "authorization-config",
        "service-account-key-file" | "service-account-signing-key-file" => "service-account-signing-endpoint",
        _ => name,
    };
    has(flags, name) || has(flags, instead)
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

    #[tokio::test]
    async fn a_command_is_asked_for_its_version() {
        let ask = async |text: &str| Apiserver::parse(text).unwrap().version("v1").await;
        assert_eq!(ask("stand-in").await.unwrap(), "v1");
        assert_eq!(
            ask("echo Kubernetes v1.36.3").await.unwrap_err(),
            "--version ends with exit status: 0 and says: Kubernetes v1.36.3 --version"
        );
        assert_eq!(ask("sh -c 'echo Kubernetes v1.36.3'").await.unwrap(), "v1.36.3");
        let wrong = ask("sh -c 'echo Error: unknown flag: --x >&2; exit 1'").await.unwrap_err();
        assert_eq!(wrong, "--version ends with exit status: 1 and says: Error: unknown flag: --x");
        assert!(ask("/etc/hostname").await.unwrap_err().contains("cannot be started"));
    }

    #[test]
    fn what_excludes_one_another_is_not_filled_in() {
        let flags: Vec<OsString> = vec!["--authorization-config=x".into()];
        assert!(given(&flags, "authorization-mode") && given(&flags, "authorization-config"));
        assert!(!given(&flags, "service-account-key-file"));
    }

    #[test]
    fn who_knows_nobody_without_a_certificate() {
        let wants = |flags: &str| Apiserver::parse(&format!("kube-apiserver {flags}")).unwrap().wants_certificates();
        for yes in
            ["--anonymous-auth=false", "--anonymous_auth=F", "--authentication-config=/x", "--authentication-config /x"]
        {
            assert!(wants(yes), "{yes}");
        }
        for no in ["", "--anonymous-auth", "--anonymous-auth=false --anonymous-auth=true", "--anonymous-auth-x=false"] {
            assert!(!wants(no), "{no}");
        }
    }

    #[test]
    fn what_was_typed_is_found() {
        let flags: Vec<OsString> = ["--tls_cert_file=x", "--etcd-servers", "y", "-z"].map(Into::into).into();
        assert!(has(&flags, "tls-cert-file") && has(&flags, "etcd-servers"));
        assert!(!has(&flags, "tls-cert") && !has(&flags, "z"));
    }
}
