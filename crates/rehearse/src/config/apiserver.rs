//! The values of `--old` and `--new`: an apiserver and its flags.

use berth_exec::args;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Stdio;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::time::timeout;

/// Returns the path of this binary. The path stays valid for all processes even if the file was
/// replaced. The berth under rehearsal may be another build without the simulated apiserver, so the
/// processes of that build start this binary in its place. The path names an open file, because
/// under QEMU `/proc/PID/exe` is QEMU.
pub(crate) fn this_binary() -> OsString {
    static PROGRAM_FILE: LazyLock<Option<File>> =
        LazyLock::new(|| File::open("/proc/self/exe").ok());
    let file = PROGRAM_FILE
        .as_ref()
        .map_or("exe".into(), |file| format!("fd/{}", file.as_raw_fd()));
    format!("/proc/{}/{file}", std::process::id()).into()
}

/// Time limit for the answer to `--version`.
const VERSION_TIMEOUT: Duration = Duration::from_secs(20);

/// An apiserver's command as typed by the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Apiserver {
    /// The simulated apiserver of berth.
    Simulated { flags: Vec<OsString> },
    /// A real kube-apiserver.
    Command {
        /// Name of the program, searched in PATH.
        program: OsString,
        /// Flags of the program. Missing required flags are filled in.
        flags: Vec<OsString>,
    },
}

impl Default for Apiserver {
    fn default() -> Self {
        Self::Simulated { flags: Vec::new() }
    }
}

impl Apiserver {
    /// Splits a command like a shell, without expansions.
    pub fn parse(text: &str) -> Result<Self, String> {
        let words = shell_words::split(text).map_err(|error| error.to_string())?;
        let mut words = words.into_iter().map(OsString::from);
        let program = words.next().ok_or("it is empty")?;
        let flags = words.collect();
        Ok(if program == "stand-in" {
            Self::Simulated { flags }
        } else {
            Self::Command { program, flags }
        })
    }

    /// Asks the apiserver for its version. kube-apiserver parses all flags first, so an unknown
    /// flag is found before the start of the rehearsal.
    pub(crate) async fn version(&self, simulated: &str) -> Result<String, String> {
        let Self::Command { program, flags } = self else {
            return Ok(simulated.to_owned());
        };
        let mut command = tokio::process::Command::new(program);
        command
            .args(flags)
            .arg("--version")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = timeout(VERSION_TIMEOUT, command.output()).await;
        let output =
            output.map_err(|_| format!("no answer to --version within {VERSION_TIMEOUT:?}"))?;
        let output = output.map_err(|error| format!("cannot be started: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text
            .lines()
            .find_map(|line| line.strip_prefix("Kubernetes "))
            .map(str::trim);
        match version {
            Some(version) if !version.contains(' ') && output.status.success() => {
                Ok(version.to_owned())
            }
            _ => {
                let text = text + String::from_utf8_lossy(&output.stderr);
                let last = text
                    .lines()
                    .rfind(|line| !line.trim().is_empty())
                    .unwrap_or("nothing");
                Err(format!(
                    "--version ended with {} and printed: {last}",
                    output.status
                ))
            }
        }
    }

    /// True if the apiserver may reject clients without a certificate: its flags turn anonymous
    /// access off, or name a configuration file that may do so.
    pub(crate) fn wants_certificates(&self) -> bool {
        let (Self::Simulated { flags } | Self::Command { flags, .. }) = self;
        let off = find_values(flags, "anonymous-auth")
            .last()
            .is_some_and(|value| args::parse_bool(&value) == Some(false));
        off || has_flag(flags, "authentication-config")
    }

    /// Returns the value of `--shutdown-delay-duration`. Zero if the flag is missing.
    pub fn shutdown_delay(&self) -> Duration {
        let (Self::Simulated { flags } | Self::Command { flags, .. }) = self;
        let given = find_values(flags, "shutdown-delay-duration").last();
        given
            .and_then(|text| humantime::parse_duration(&text).ok())
            .unwrap_or_default()
    }

    /// True for berth's simulated apiserver, false for a real kube-apiserver.
    pub fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated { .. })
    }
}

/// True if the user typed the flag.
pub fn has_flag(flags: &[OsString], name: &str) -> bool {
    find_values(flags, name).next().is_some()
}

/// Returns the values of a flag given as `--name=value`, or "true" for a flag without `=`. `_`
/// counts as `-` in the name, as in kube-apiserver.
fn find_values(flags: &[OsString], name: &str) -> impl Iterator<Item = String> {
    flags.iter().filter_map(move |flag| {
        let flag = flag.to_string_lossy();
        let flag = flag.strip_prefix("--")?;
        let (named, value) = flag.split_once('=').unwrap_or((flag, "true"));
        (named.replace('_', "-") == name).then(|| value.to_owned())
    })
}

/// Returns `--name=value` for a path.
pub(crate) fn format_flag(name: &str, value: impl AsRef<OsStr>) -> OsString {
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
        assert_eq!(
            parsed,
            Apiserver::Command {
                program: "kube-apiserver".into(),
                flags
            }
        );
        assert!(Apiserver::parse("stand-in --x").unwrap().is_simulated());
        assert!(Apiserver::parse("  ").is_err() && Apiserver::parse("a 'b").is_err());
    }

    #[tokio::test]
    async fn a_command_is_asked_for_its_version() {
        let ask = async |text: &str| Apiserver::parse(text).unwrap().version("v1").await;
        assert_eq!(ask("stand-in").await.unwrap(), "v1");
        assert_eq!(
            ask("echo Kubernetes v1.36.3").await.unwrap_err(),
            "--version ended with exit status: 0 and printed: Kubernetes v1.36.3 --version"
        );
        assert_eq!(
            ask("sh -c 'echo Kubernetes v1.36.3'").await.unwrap(),
            "v1.36.3"
        );
        let wrong = ask("sh -c 'echo Error: unknown flag: --x >&2; exit 1'")
            .await
            .unwrap_err();
        assert_eq!(
            wrong,
            "--version ended with exit status: 1 and printed: Error: unknown flag: --x"
        );
        assert!(ask("/etc/hostname").await.is_err());
    }

    #[test]
    fn flags_that_refuse_anonymous_clients() {
        let wants = |flags: &str| {
            Apiserver::parse(&format!("kube-apiserver {flags}"))
                .unwrap()
                .wants_certificates()
        };
        for yes in [
            "--anonymous-auth=false",
            "--anonymous_auth=F",
            "--authentication-config=/x",
            "--authentication-config /x",
        ] {
            assert!(wants(yes), "{yes}");
        }
        for no in [
            "",
            "--anonymous-auth",
            "--anonymous-auth=false --anonymous-auth=true",
            "--anonymous-auth-x=false",
        ] {
            assert!(!wants(no), "{no}");
        }
    }

    #[test]
    fn typed_flags_are_found() {
        let flags: Vec<OsString> = ["--tls_cert_file=x", "--etcd-servers", "y", "-z"]
            .map(Into::into)
            .into();
        assert!(has_flag(&flags, "tls-cert-file") && has_flag(&flags, "etcd-servers"));
        assert!(!has_flag(&flags, "tls-cert") && !has_flag(&flags, "z"));
    }
}
