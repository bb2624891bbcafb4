//! Rewrites kube-apiserver's arguments. These functions do no I/O and write no log.
//!
//! Flags are parsed as kube-apiserver's pflag parses them: `--flag value` and `--flag=value`, `_`
//! equals `-` in a name, the last occurrence wins, a bare `--` ends the flags. The module does not
//! know which further flags take a value, and need not know: an argument other than the three flags
//! is never changed, except for `{instance}` in the argument.
//!
//! Arguments are bytes: invalid UTF-8 passes through unchanged.

use berth_node::instance_id::InstanceId;
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

const BIND_FLAG: &str = "--bind-address";
const PORT_FLAG: &str = "--secure-port";
const ADVERTISE_FLAG: &str = "--advertise-address";
const INSTANCE_PLACEHOLDER: &[u8] = b"{instance}";

/// Values to set.
#[derive(Debug, Clone, Copy)]
pub struct WantedValues<'a> {
    /// The value for `--bind-address`: the instance's own address.
    pub address: Ipv4Addr,
    /// The value for `--secure-port`: the port of the berth.
    pub port: u16,
    /// The value for `--advertise-address`. It is used only if the command line has none.
    pub advertise: IpAddr,
    /// The instance's ID, which replaces `{instance}` in arguments.
    pub instance: &'a InstanceId,
}

/// The new command line, and the values that were replaced in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewrittenCommand {
    pub argv: Vec<OsString>,
    /// The values that were replaced, in the order of the arguments, for the log.
    pub replaced: Vec<ReplacedValue>,
    /// The value of an existing `--advertise-address`, which is kept. If the flag is given several
    /// times, this is the last value, which kube-apiserver uses.
    pub kept_advertise: Option<OsString>,
}

/// A flag's value that was replaced by another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplacedValue {
    pub flag: &'static str,
    pub was: OsString,
    pub now: String,
}

/// The reason why a command line cannot be rewritten.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ArgsError(String);

/// Returns every mistake in a command line. If there is none, [`rewrite_command`] will succeed.
#[must_use]
pub fn check_command(argv: &[OsString]) -> Vec<ArgsError> {
    if argv.is_empty() {
        return vec![ArgsError(
            "there is no command: write the apiserver's command after --".into(),
        )];
    }
    [BIND_FLAG, PORT_FLAG, ADVERTISE_FLAG]
        .into_iter()
        .flat_map(|flag| find_missing_values(argv, flag))
        .collect()
}

/// Returns the value of `--advertise-address`. `None` if the flag is missing or its value is not an
/// address.
#[must_use]
pub fn advertise_address(argv: &[OsString]) -> Option<IpAddr> {
    flag_value(argv, ADVERTISE_FLAG)?
        .to_str()?
        .trim()
        .parse()
        .ok()
}

/// Returns the value of a flag such as `--secure-port`. If the flag is given several times, the
/// last value wins.
#[must_use]
pub fn flag_value<'a>(argv: &'a [OsString], flag: &str) -> Option<&'a OsStr> {
    find_occurrences(argv, flag).last().map(|(_, value)| value)
}

/// Parses the value of a flag that is on or off, in the forms that Go's `strconv.ParseBool`
/// accepts.
#[must_use]
pub fn parse_bool(value: &str) -> Option<bool> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

/// Returns every value of a flag, in order. kube-apiserver joins the values of a list flag that is
/// given several times.
pub fn flag_values<'a>(argv: &'a [OsString], flag: &str) -> impl Iterator<Item = &'a OsStr> {
    find_occurrences(argv, flag).map(|(_, value)| value)
}

/// Sets a flag to a value, as the last argument before a bare `--`. Previous values of the flag are
/// removed.
pub fn set_flag(argv: &mut Vec<OsString>, flag: &str, value: &OsStr) {
    let spans: Vec<_> = find_occurrences(argv, flag).map(|(span, _)| span).collect();
    for span in spans.into_iter().rev() {
        argv.drain(span);
    }
    let mut whole = OsString::from(flag);
    whole.push("=");
    whole.push(value);
    argv.insert(find_end_of_flags(argv), whole);
}

/// Returns the index of a bare `--`, which ends the flags, or else the number of arguments.
fn find_end_of_flags(argv: &[OsString]) -> usize {
    argv.iter()
        .skip(1)
        .position(|arg| arg == "--")
        .map_or(argv.len(), |at| at + 1)
}

/// Finds the occurrences of a flag. Returns for each the range of its arguments, and its value.
fn find_occurrences<'a>(
    argv: &'a [OsString],
    flag: &str,
) -> impl Iterator<Item = (Range<usize>, &'a OsStr)> {
    let end = find_end_of_flags(argv);
    let mut at = 1;
    std::iter::from_fn(move || {
        while at < end {
            let begin = at;
            at += 1;
            match split_flag(&argv[begin]) {
                (name, _) if !is_flag(name, flag) => {}
                (_, Some(value)) => return Some((begin..at, value)),
                (_, None) => {
                    // Like pflag, take the next argument as the value even if it looks like a flag.
                    let value = argv[..end].get(at)?;
                    at += 1;
                    return Some((begin..at, value.as_os_str()));
                }
            }
        }
        None
    })
}

/// Sets the three flags in [`WantedValues`], and replaces `{instance}` in every argument except the
/// program's name.
///
/// An existing `--advertise-address` is kept. The new values of `--bind-address` and
/// `--secure-port` replace all existing ones.
///
/// # Errors
/// The first mistake that [`check_command`] finds.
pub fn rewrite_command(
    argv: &[OsString],
    wanted: &WantedValues<'_>,
) -> Result<RewrittenCommand, ArgsError> {
    if let Some(error) = check_command(argv).into_iter().next() {
        return Err(error);
    }
    let kept_advertise = flag_value(argv, ADVERTISE_FLAG).map(ToOwned::to_owned);
    let mut argv = argv.to_vec();
    let mut replaced = Vec::new();
    for (flag, now) in [
        (BIND_FLAG, wanted.address.to_string()),
        (PORT_FLAG, wanted.port.to_string()),
    ] {
        if flag_values(&argv, flag).eq([OsStr::new(&now)]) {
            continue;
        }
        let was = flag_values(&argv, flag).map(ToOwned::to_owned);
        replaced.extend(was.map(|was| ReplacedValue {
            flag,
            was,
            now: now.clone(),
        }));
        set_flag(&mut argv, flag, now.as_ref());
    }
    if kept_advertise.is_none() {
        set_flag(
            &mut argv,
            ADVERTISE_FLAG,
            wanted.advertise.to_string().as_ref(),
        );
    }
    for arg in argv.iter_mut().skip(1) {
        *arg = expand_instance(std::mem::take(arg), wanted.instance);
    }
    Ok(RewrittenCommand {
        argv,
        replaced,
        kept_advertise,
    })
}

/// Returns an error for each occurrence of a flag that has no value.
fn find_missing_values(argv: &[OsString], flag: &'static str) -> impl Iterator<Item = ArgsError> {
    let flags = (1..find_end_of_flags(argv))
        .filter(move |at| matches!(split_flag(&argv[*at]), (name, None) if is_flag(name, flag)));
    flags.filter_map(move |at| {
        let what = match argv.get(at + 1) {
            None => "is the last argument and has no value".to_owned(),
            // The user forgot the value. As pflag would take the next flag as the value, that flag
            // would be lost.
            Some(next) if next.as_bytes().starts_with(b"--") => {
                format!("has no value, {next:?} follows")
            }
            Some(_) => return None,
        };
        Some(ArgsError(format!(
            "{flag} {what}: give a value, or leave {flag} out and berth sets the flag"
        )))
    })
}

/// Splits an argument into a flag's name and its value. The value is `None` if it is not joined to
/// the name by `=`.
fn split_flag(arg: &OsStr) -> (&OsStr, Option<&OsStr>) {
    let bytes = arg.as_bytes();
    match bytes.iter().position(|b| *b == b'=') {
        Some(at) => (
            OsStr::from_bytes(&bytes[..at]),
            Some(OsStr::from_bytes(&bytes[at + 1..])),
        ),
        None => (arg, None),
    }
}

/// True if a name is the name of `flag`. pflag's normaliser accepts `_` for `-` in a name, but the
/// two leading dashes must be dashes.
fn is_flag(name: &OsStr, flag: &str) -> bool {
    let (name, flag) = (name.as_bytes(), flag.as_bytes());
    name.len() == flag.len()
        && name.starts_with(b"--")
        && name
            .iter()
            .zip(flag)
            .all(|(a, b)| a == b || (*a == b'_' && *b == b'-'))
}

fn expand_instance(arg: OsString, instance: &InstanceId) -> OsString {
    let mut bytes = arg.into_vec();
    // The loop ends, because an instance's ID contains no braces.
    while let Some(at) = bytes
        .windows(INSTANCE_PLACEHOLDER.len())
        .position(|window| window == INSTANCE_PLACEHOLDER)
    {
        bytes.splice(
            at..at + INSTANCE_PLACEHOLDER.len(),
            instance.as_str().bytes(),
        );
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn to_argv(args: &[&str]) -> Vec<OsString> {
        std::iter::once("kube-apiserver")
            .chain(args.iter().copied())
            .map(OsString::from)
            .collect()
    }

    fn rewrite_with_sample_values(args: &[OsString]) -> Result<RewrittenCommand, ArgsError> {
        let id = InstanceId::parse("a1").unwrap();
        let wanted = WantedValues {
            address: Ipv4Addr::new(127, 1, 2, 3),
            port: 6443,
            advertise: Ipv4Addr::new(10, 0, 0, 5).into(),
            instance: &id,
        };
        rewrite_command(args, &wanted)
    }

    fn rewrite_arguments(args: &[&str]) -> Vec<String> {
        rewrite_with_sample_values(&to_argv(args))
            .unwrap()
            .argv
            .into_iter()
            .skip(1)
            .map(|arg| arg.into_string().unwrap())
            .collect()
    }

    #[test]
    fn any_flag_is_read_and_set() {
        let mut args = to_argv(&[
            "--audit_log-path",
            "/a",
            "--v=2",
            "--audit-log-path=/b",
            "--",
            "--audit-log-path=/c",
        ]);
        assert_eq!(
            flag_value(&args, "--audit-log-path"),
            Some(OsStr::new("/b"))
        );
        assert_eq!(flag_value(&args, "--cert-dir"), None);
        set_flag(&mut args, "--audit-log-path", "/d".as_ref());
        assert_eq!(
            args,
            to_argv(&["--v=2", "--audit-log-path=/d", "--", "--audit-log-path=/c"])
        );
        set_flag(&mut args, "--cert-dir", "/e".as_ref());
        assert_eq!(args[2..4], ["--audit-log-path=/d", "--cert-dir=/e"]);
        let mut args = to_argv(&["--cert-dir", "--cert-dir", "x"]);
        assert_eq!(
            flag_value(&args, "--cert-dir"),
            Some(OsStr::new("--cert-dir"))
        );
        set_flag(&mut args, "--cert-dir", "/e".as_ref());
        assert_eq!(args, to_argv(&["x", "--cert-dir=/e"]));
        // The flag's value is missing. kube-apiserver itself reports this.
        assert_eq!(flag_value(&to_argv(&["--cert-dir"]), "--cert-dir"), None);
    }

    #[test]
    fn replaced_values_are_reported() {
        let args = to_argv(&[
            "--bind_address",
            "0.0.0.0",
            "--a",
            "--secure-port=443",
            "--bind-address=::",
            "--b",
        ]);
        let done = rewrite_with_sample_values(&args).unwrap();
        let expected = [
            "--a",
            "--b",
            "--bind-address=127.1.2.3",
            "--secure-port=6443",
            "--advertise-address=10.0.0.5",
        ];
        assert_eq!(done.argv[1..], expected);
        let replaced = |flag, was: &str, now: &str| ReplacedValue {
            flag,
            was: was.into(),
            now: now.into(),
        };
        let addresses = ["0.0.0.0", "::"].map(|was| replaced(BIND_FLAG, was, "127.1.2.3"));
        assert_eq!(
            done.replaced,
            [&addresses[..], &[replaced(PORT_FLAG, "443", "6443")]].concat()
        );
        assert_eq!(
            rewrite_with_sample_values(&to_argv(&["--secure-port=6443"]))
                .unwrap()
                .replaced,
            []
        );
    }

    #[test]
    fn the_last_advertise_address_counts() {
        let args = to_argv(&[
            "--advertise-address",
            "10.9.9.9",
            "--advertise_address=10.8.8.8",
        ]);
        assert_eq!(
            rewrite_with_sample_values(&args)
                .unwrap()
                .kept_advertise
                .unwrap(),
            "10.8.8.8"
        );
        assert_eq!(
            advertise_address(&args),
            Some(Ipv4Addr::new(10, 8, 8, 8).into())
        );
        assert_eq!(advertise_address(&to_argv(&["--advertise-address="])), None);
    }

    #[test]
    fn similar_arguments_are_left_alone() {
        let args = [
            "-bind-address=1",
            "--bind-addresses=1",
            "__bind-address=1",
            "--Bind-address=1",
            "bind-address",
        ];
        assert_eq!(rewrite_arguments(&args)[..5], args);
    }

    #[test]
    fn the_instance_is_expanded_except_in_the_programs_name() {
        let args: Vec<OsString> = [
            "{instance}",
            "--audit-log-path=/{instance}/{instance}.log",
            "--",
            "{instance}",
        ]
        .map(OsString::from)
        .to_vec();
        let done = rewrite_with_sample_values(&args).unwrap().argv;
        assert_eq!(done[..2], ["{instance}", "--audit-log-path=/a1/a1.log"]);
        assert_eq!(done.last().unwrap(), "a1");
        let odd = OsString::from_vec(b"--x=\xff{instance}\xfe".to_vec());
        assert_eq!(
            rewrite_with_sample_values(&["k".into(), odd]).unwrap().argv[1].as_bytes(),
            b"--x=\xffa1\xfe"
        );
    }

    #[test]
    fn every_flag_without_a_value_is_named() {
        let errors = check_command(&to_argv(&[
            "--secure-port",
            "--bind-address=1",
            "--advertise-address",
        ]));
        let [ArgsError(port), ArgsError(advertise)] = &errors[..] else {
            panic!("{errors:?}")
        };
        assert!(
            port.starts_with("--secure-port has no value, \"--bind-address=1\" follows: "),
            "{port}"
        );
        assert!(
            advertise.starts_with("--advertise-address is the last argument"),
            "{advertise}"
        );
        assert!(
            rewrite_with_sample_values(&to_argv(&["--bind-address"]))
                .unwrap_err()
                .0
                .starts_with("--bind-address is the last")
        );
        assert_eq!(check_command(&[]).len(), 1);
    }

    /// A model of pflag: returns the values that pflag gives to a flag. Every other flag must have
    /// its value joined by `=`.
    fn pflag_values(args: &[OsString], wanted: &str) -> Vec<OsString> {
        let mut values = Vec::new();
        let mut args = args.iter().skip(1);
        while let Some(arg) = args.next() {
            if arg == "--" {
                break;
            }
            let (name, value) = split_flag(arg);
            let name = String::from_utf8_lossy(name.as_bytes()).into_owned();
            let normal = name
                .strip_prefix("--")
                .map(|name| name.replace('_', "-"))
                .unwrap_or_default();
            if ["bind-address", "secure-port", "advertise-address"].contains(&normal.as_str()) {
                let value = value.or_else(|| args.next().map(OsString::as_os_str));
                if format!("--{normal}") == wanted {
                    values.push(value.unwrap().to_owned());
                }
            }
        }
        values
    }

    fn without_the_three_flags(args: &[OsString]) -> Vec<OsString> {
        let mut args = args.to_vec();
        for flag in [BIND_FLAG, PORT_FLAG, ADVERTISE_FLAG] {
            set_flag(&mut args, flag, OsStr::new(""));
            args.remove(find_end_of_flags(&args) - 1);
        }
        args
    }

    fn any_arguments() -> impl Strategy<Value = Vec<OsString>> {
        let name = "--(bind[-_]address|secure[-_]port|advertise[-_]address)";
        let ours =
            (name, "[0-9a-f.:]{0,9}", any::<bool>()).prop_map(
                |(name, value, joined)| match joined {
                    true => vec![OsString::from(format!("{name}={value}"))],
                    false => vec![name.into(), value.into()],
                },
            );
        let bytes = prop::collection::vec(1..=255_u8, 0..12)
            .prop_map(|bytes| vec![OsString::from_vec(bytes)]);
        let text = "(--)?[a-z_-]{0,8}(=[ -z]{0,8})?".prop_map(|text| vec![OsString::from(text)]);
        prop::collection::vec(
            prop_oneof![3 => ours, 1 => bytes, 3 => text, 1 => Just(vec!["--".into()])],
            0..12,
        )
        .prop_map(|args| {
            std::iter::once("kube-apiserver".into())
                .chain(args.into_iter().flatten())
                .collect()
        })
    }

    proptest! {
        #[test]
        fn each_flag_gets_one_value_and_further_arguments_are_unchanged(args in any_arguments()) {
            let done = rewrite_with_sample_values(&args).unwrap();
            prop_assert_eq!(pflag_values(&done.argv, BIND_FLAG), vec![OsString::from("127.1.2.3")]);
            prop_assert_eq!(pflag_values(&done.argv, PORT_FLAG), vec![OsString::from("6443")]);
            let before = pflag_values(&args, ADVERTISE_FLAG);
            let expected = if before.is_empty() { vec!["10.0.0.5".into()] } else { before };
            prop_assert_eq!(pflag_values(&done.argv, ADVERTISE_FLAG), expected);
            prop_assert_eq!(without_the_three_flags(&done.argv), without_the_three_flags(&args));
            let again = rewrite_with_sample_values(&done.argv).unwrap();
            prop_assert_eq!(&again.argv, &done.argv);
            prop_assert_eq!(again.replaced, vec![]);
        }

        #[test]
        fn rewriting_fails_exactly_if_the_check_finds_a_mistake(args in prop::collection::vec("(--(bind|secure|advertise)[_-](address|port)|--|=|.){0,3}", 0..6)) {
            let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
            prop_assert_eq!(rewrite_with_sample_values(&args).is_err(), !check_command(&args).is_empty());
        }
    }
}
