//! An apiserver of a rehearsal. Completes the command line that the user typed.

use super::settings::Settings;
use crate::config::{
    apiserver::{Apiserver, format_flag, has_flag, this_binary},
    fault::Fault,
};
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

/// An apiserver of a rehearsal.
#[derive(Debug, Clone)]
pub(crate) struct InstanceSpec {
    /// Unique name of the instance.
    pub(crate) name: String,
    pub(crate) apiserver: Apiserver,
    /// Expected answer of `/version`.
    pub(crate) version: String,
    /// Time from listening to ready of a simulated apiserver.
    pub(crate) start_delay: Duration,
    /// Fault that the instance has from the start.
    pub(crate) fault: Option<Fault>,
}

impl InstanceSpec {
    /// Describes the temporary instance that a bridge starts as a copy of this instance.
    pub(crate) fn temporary_instance_spec(&self) -> Self {
        Self {
            name: format!("{}-bridge", self.name),
            fault: None,
            ..self.clone()
        }
    }

    /// Returns program and flags, without the listen address.
    pub(crate) fn command(&self, settings: &Settings) -> Vec<OsString> {
        let mut command: Vec<OsString> = match &self.apiserver {
            Apiserver::Simulated { .. } => vec![this_binary(), "stand-in".into()],
            Apiserver::Command { program, .. } => vec![program.clone()],
        };
        let (Apiserver::Simulated { flags } | Apiserver::Command { flags, .. }) = &self.apiserver;
        for (name, value) in self.default_flags(settings) {
            if !is_flag_given(flags, name) {
                command.push(format_flag(name, value));
            }
        }
        command.extend(flags.iter().cloned());
        command.extend(self.spoiling_flag());
        command
    }

    /// Returns the flag that makes the instance fail on purpose.
    fn spoiling_flag(&self) -> Option<OsString> {
        match (self.fault?, self.apiserver.is_simulated()) {
            (Fault::BadFlag, _) => Some("--no-such-flag".into()),
            (Fault::NeverReady, true) => Some("--stand-in-start-delay=1h".into()),
            _ => None,
        }
    }

    /// Returns the default flags, for flags that the user did not type.
    fn default_flags(&self, settings: &Settings) -> Vec<(&'static str, OsString)> {
        let path = |path: &Path| path.as_os_str().to_owned();
        let millis = |time: Duration| OsString::from(format!("{}ms", time.as_millis()));
        let mut flags = vec![
            ("tls-cert-file", path(&settings.certs.cert_file(&self.name))),
            (
                "tls-private-key-file",
                path(&settings.certs.key_file(&self.name)),
            ),
            ("client-ca-file", path(&settings.certs.ca_file)),
            (
                "audit-log-path",
                path(&settings.dir.join(format!("audit-{}.log", self.name))),
            ),
        ];
        match self.apiserver {
            Apiserver::Simulated { .. } => {
                let mut store = OsString::from("unix://");
                store.push(settings.store_path());
                flags.push(("etcd-servers", store));
                // If this flag were missing, a bridge would give its copy a grace period. The copy
                // would then spread the ends of its watches over the whole period.
                flags.push(("shutdown-watch-termination-grace-period", "0s".into()));
                flags.push(("stand-in-name", (&self.name).into()));
                flags.push(("stand-in-version", (&self.version).into()));
                flags.push(("stand-in-start-delay", millis(self.start_delay)));
            }
            Apiserver::Command { .. } => {
                match self.fault {
                    // Nothing listens on port 1: without an etcd, a kube-apiserver never gets
                    // ready.
                    Some(Fault::NeverReady) => {
                        flags.push(("etcd-servers", "http://127.0.0.1:1".into()));
                    }
                    _ => flags.extend(
                        settings
                            .etcd
                            .iter()
                            .map(|etcd| ("etcd-servers", etcd.into())),
                    ),
                }
                flags.extend([
                    ("authorization-mode", "RBAC".into()),
                    ("service-cluster-ip-range", "10.96.0.0/24".into()),
                    (
                        "service-account-issuer",
                        "https://kubernetes.default.svc".into(),
                    ),
                    (
                        "service-account-key-file",
                        path(&settings.certs.account_public_key_file),
                    ),
                    (
                        "service-account-signing-key-file",
                        path(&settings.certs.account_key_file),
                    ),
                    (
                        "cert-dir",
                        path(&settings.dir.join(format!("certs-{}", self.name))),
                    ),
                ]);
                // kube-apiserver cannot put a loopback address into the Service `kubernetes`, and
                // would log errors for ever.
                if settings.address.ip().is_loopback() {
                    flags.push(("endpoint-reconciler-type", "none".into()));
                }
            }
        }
        flags
    }
}

/// True if the user typed the flag, or another flag that replaces it.
fn is_flag_given(flags: &[OsString], name: &str) -> bool {
    let instead = match name {
        "authorization-mode" => "authorization-config",
        "service-account-key-file" | "service-account-signing-key-file" => {
            "service-account-signing-endpoint"
        }
        _ => name,
    };
    has_flag(flags, name) || has_flag(flags, instead)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excluded_flags_are_not_filled_in() {
        let flags: Vec<OsString> = vec!["--authorization-config=x".into()];
        assert!(
            is_flag_given(&flags, "authorization-mode")
                && is_flag_given(&flags, "authorization-config")
        );
        assert!(!is_flag_given(&flags, "service-account-key-file"));
    }
}
