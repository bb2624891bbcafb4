//! kube-apiserver's flag syntax, for the few flags of a simulated apiserver.
//!
//! The syntax follows kube-apiserver's flag library (pflag): `--flag value` and `--flag=value`, `_`
//! counts as `-` in names, a boolean takes a value only after `=`, the last value wins, and the
//! first mistake ends the process.

use crate::testbed::store::HISTORY_LENGTH;
use berth_exec::args;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

/// Time between two bookmarks of a watch, as in kube-apiserver.
const BOOKMARK_PERIOD: Duration = Duration::from_secs(60);

/// The checked flags of a simulated apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Flags {
    pub(super) bind_address: IpAddr,
    pub(super) secure_port: u16,
    /// Share the port with other processes of this user.
    pub(super) permit_port_sharing: bool,
    pub(super) tls_cert_file: PathBuf,
    pub(super) tls_private_key_file: PathBuf,
    /// CA of client certificates.
    pub(super) client_ca_file: Option<PathBuf>,
    /// Answer clients without a certificate.
    pub(super) anonymous_auth: bool,
    /// Socket of the rehearsal's store.
    pub(super) store: PathBuf,
    /// Time from SIGTERM until the listener is closed.
    pub(super) shutdown_delay_duration: Duration,
    /// Keep listening during the drain, and answer 429.
    pub(super) shutdown_send_retry_after: bool,
    /// Time over which watches are ended. Zero ends all watches at once.
    pub(super) shutdown_watch_termination_grace_period: Duration,
    /// Audit log file. The file is created, as by kube-apiserver, and stays empty.
    pub(super) audit_log_path: Option<PathBuf>,
    /// Instance name in answers and reports.
    pub(super) name: String,
    /// Instance name of the temporary instance that a bridge starts as a copy.
    bridge_name: Option<String>,
    /// The answer of `/version`.
    pub(super) version: String,
    /// Time from listening to a `/readyz` of 200.
    pub(super) start_delay: Duration,
    /// Largest number of changes in the watch cache.
    pub(super) watch_cache_size: usize,
    /// Time between two bookmarks of a watch.
    pub(super) bookmark_period: Duration,
}

impl Default for Flags {
    fn default() -> Self {
        Self {
            bind_address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            secure_port: 6443,
            permit_port_sharing: false,
            tls_cert_file: PathBuf::new(),
            tls_private_key_file: PathBuf::new(),
            client_ca_file: None,
            anonymous_auth: true,
            store: PathBuf::new(),
            shutdown_delay_duration: Duration::ZERO,
            shutdown_send_retry_after: false,
            shutdown_watch_termination_grace_period: Duration::ZERO,
            audit_log_path: None,
            name: "stand-in".into(),
            bridge_name: None,
            version: "v1.33.0".into(),
            start_delay: Duration::ZERO,
            watch_cache_size: HISTORY_LENGTH,
            bookmark_period: BOOKMARK_PERIOD,
        }
    }
}

impl Flags {
    /// Parses a command line. The error is the text after `Error: `, in kube-apiserver's words.
    pub(super) fn parse(args: &[String]) -> Result<Self, String> {
        let mut flags = Self::default();
        let mut positional = Vec::new();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let Some(flag) = arg.strip_prefix("--") else {
                match arg.strip_prefix('-').and_then(|rest| rest.chars().next()) {
                    Some(short) => {
                        return Err(format!("unknown shorthand flag: '{short}' in {arg}"));
                    }
                    None => positional.push(arg.clone()),
                }
                continue;
            };
            if flag.is_empty() {
                positional.extend(args.by_ref().cloned());
                break;
            }
            if flag.starts_with(['-', '=']) {
                return Err(format!("bad flag syntax: {arg}"));
            }
            let (name, value) = flag
                .split_once('=')
                .map_or((flag, None), |(n, v)| (n, Some(v)));
            let known = name.replace('_', "-");
            let value = match value {
                Some(value) => value,
                None if SWITCHES.contains(&known.as_str()) => "true",
                None if !FLAGS.contains(&known.as_str()) => {
                    return Err(format!("unknown flag: --{name}"));
                }
                None => args
                    .next()
                    .ok_or_else(|| format!("flag needs an argument: --{name}"))?,
            };
            flags.set_flag(&known, name, value)?;
        }
        if !positional.is_empty() {
            return Err(format!(
                "\"kube-apiserver\" does not take any arguments, got {positional:?}"
            ));
        }
        flags.check_flags()
    }
}

/// Names of boolean flags, which are true without a value.
const SWITCHES: [&str; 3] = [
    "shutdown-send-retry-after",
    "permit-port-sharing",
    "anonymous-auth",
];

/// Names of the flags with a value.
const FLAGS: [&str; 19] = [
    "bind-address",
    "secure-port",
    "advertise-address",
    "tls-cert-file",
    "tls-private-key-file",
    "client-ca-file",
    "etcd-servers",
    "etcd-servers-overrides",
    "etcd-cafile",
    "endpoint-reconciler-type",
    "shutdown-delay-duration",
    "shutdown-watch-termination-grace-period",
    "audit-log-path",
    "stand-in-name",
    "stand-in-bridge-name",
    "stand-in-version",
    "stand-in-start-delay",
    "default-watch-cache-size",
    "stand-in-bookmark-period",
];

impl Flags {
    fn set_flag(&mut self, known: &str, name: &str, value: &str) -> Result<(), String> {
        let invalid =
            |why: String| format!("invalid argument {value:?} for \"--{name}\" flag: {why}");
        let ip = || {
            value
                .trim()
                .parse()
                .map_err(|_| invalid(format!("failed to parse IP: {value:?}")))
        };
        let time = || parse_duration(value).map_err(invalid);
        let syntax = || {
            invalid(format!(
                "strconv.ParseBool: parsing {value:?}: invalid syntax"
            ))
        };
        let truth = || args::parse_bool(value).ok_or_else(syntax);
        match known {
            "bind-address" => self.bind_address = ip()?,
            "secure-port" => {
                self.secure_port = value.parse().map_err(|_| {
                    invalid(format!(
                        "strconv.ParseInt: parsing {value:?}: not a port between 1 and 65535"
                    ))
                })?;
            }
            "tls-cert-file" => self.tls_cert_file = value.into(),
            "tls-private-key-file" => self.tls_private_key_file = value.into(),
            "client-ca-file" => self.client_ca_file = parse_path(value),
            "anonymous-auth" => self.anonymous_auth = truth()?,
            // The server with a unix:// address is the store. No other etcd is dialled.
            "etcd-servers" | "etcd-servers-overrides" => {
                if let Some((_, path)) = value.split_once("unix://") {
                    self.store = path.into();
                }
            }
            "etcd-cafile" => {}
            // Ignored: a simulated apiserver writes no Service.
            "advertise-address" => {
                ip()?;
            }
            "endpoint-reconciler-type" => {}
            "shutdown-delay-duration" => self.shutdown_delay_duration = time()?,
            "shutdown-watch-termination-grace-period" => {
                self.shutdown_watch_termination_grace_period = time()?;
            }
            "audit-log-path" => self.audit_log_path = parse_path(value),
            "stand-in-name" => self.name = value.into(),
            "stand-in-bridge-name" => self.bridge_name = Some(value.into()),
            "stand-in-version" => self.version = value.into(),
            "stand-in-start-delay" => self.start_delay = time()?,
            "default-watch-cache-size" => {
                let why = || format!("strconv.ParseInt: parsing {value:?}: invalid syntax");
                self.watch_cache_size = value.parse().map_err(|_| invalid(why()))?;
            }
            "stand-in-bookmark-period" => {
                self.bookmark_period = Some(time()?)
                    .filter(|time| !time.is_zero())
                    .unwrap_or(BOOKMARK_PERIOD);
            }
            "shutdown-send-retry-after" => self.shutdown_send_retry_after = truth()?,
            "permit-port-sharing" => self.permit_port_sharing = truth()?,
            _ => return Err(format!("unknown flag: --{name}")),
        }
        Ok(())
    }

    fn check_flags(mut self) -> Result<Self, String> {
        let mut errors = Vec::new();
        if self.store.as_os_str().is_empty() {
            errors.push(
                "--etcd-servers must be specified: a simulated apiserver has unix:///PATH, the socket of a rehearsal's store"
                    .into(),
            );
        }
        if self.tls_cert_file.as_os_str().is_empty()
            || self.tls_private_key_file.as_os_str().is_empty()
        {
            errors.push(
                "--tls-cert-file and --tls-private-key-file must be specified: a simulated apiserver makes no certificate".into(),
            );
        }
        if self.secure_port == 0 {
            errors
                .push("--secure-port 0 must be between 1 and 65535, inclusive. It cannot be turned off with 0".into());
        }
        match errors.len() {
            0 => {}
            1 => return Err(errors.remove(0)),
            _ => return Err(format!("[{}]", errors.join(", "))),
        }
        // A bridge copies the flags of the running apiserver and changes only flags that it knows,
        // such as the address. So a loopback address shows that this process is the copy.
        if let Some(name) = self
            .bridge_name
            .take()
            .filter(|_| self.bind_address.is_loopback())
        {
            self.name = name;
        }
        Ok(self)
    }
}

/// `None` if the value is empty, as in kube-apiserver.
fn parse_path(value: &str) -> Option<PathBuf> {
    (!value.is_empty()).then(|| value.into())
}

/// Parses a duration in Go's syntax: `1m30s`, `1.5s`, `0`. Negative durations are errors.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("time: invalid duration {text:?}");
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let digits = rest
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(rest.len());
        let (number, tail) = rest.split_at(digits);
        let number: f64 = number.parse().map_err(|_| invalid())?;
        let end = tail
            .find(|c: char| c.is_ascii_digit() || c == '.')
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(end);
        sum += number
            * match unit {
                "ns" => 1e-9,
                "us" | "µs" | "μs" => 1e-6,
                "ms" => 1e-3,
                "s" => 1.0,
                "m" => 60.0,
                "h" => 3600.0,
                "" => return Err(format!("time: missing unit in duration {text:?}")),
                _ => return Err(format!("time: unknown unit {unit:?} in duration {text:?}")),
            };
        rest = tail;
    }
    if text.is_empty() {
        return Err(invalid());
    }
    Duration::try_from_secs_f64(sum).map_err(|_| invalid())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Flags, String> {
        Flags::parse(&args.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    const NEEDED: [&str; 3] = [
        "--etcd-servers=unix:///s",
        "--tls-cert-file=c",
        "--tls-private-key-file=k",
    ];

    #[test]
    fn the_temporary_instance_of_a_bridge_has_a_name_of_its_own() {
        let name = |bind: &str| {
            let own = [
                "--stand-in-name=old",
                "--stand-in-bridge-name=old-bridge",
                bind,
            ];
            parse(&[&NEEDED[..], &own].concat()).unwrap().name
        };
        assert_eq!(
            (
                name("--bind-address=0.0.0.0"),
                name("--bind-address=127.1.2.3")
            ),
            ("old".into(), "old-bridge".into())
        );
    }
}
