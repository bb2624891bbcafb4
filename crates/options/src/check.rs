//! Turns the texts of options into checked types. Each mistake names the option and the fix, and
//! all mistakes are reported at once.

use crate::cluster;
use crate::exec::ExecArgs;
pub use crate::mistakes::{Checks, Mistakes};
use crate::place::PlaceArgs;
use crate::probe::ProbeArgs;
use crate::shim::{RunArgs, ServeArgs, ShimArgs};
use berth_node::instance_id::InstanceId;
use berth_node::registry::{RunDir, lease};
use berth_shim::backend::probe::{ProbeConfig, ProbeKind};
use berth_shim::config::{Config, Listen, MaxOpenings, Place};
use clap::builder::Resettable;
use clap::{Args, FromArgMatches};
use humantime::format_duration;
use ipnet::IpNet;
use rustls::pki_types::ServerName;
use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::time::Duration;

/// Path of the request that a shim sends as a probe. `berth inject` has the same default.
pub const READY_PATH: &str = "/readyz";

/// Highest value of `--max-openings`. No instance has CPUs for more handshakes at a time.
const MAX_OPENINGS: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();

/// Checks the options for the berth, the instance and the run directory. Returns `None` after a
/// mistake.
pub fn check_place(args: &PlaceArgs, checks: &mut Checks) -> Option<Place> {
    let listen = check_addresses(&args.listen, checks);
    let instance = args.instance.as_deref().map(InstanceId::parse).transpose();
    let instance = checks
        .ok_or_report(instance.map_err(|error| format!("--instance: {error}")))
        .flatten();
    let run_dir = args
        .run_dir
        .run_dir
        .clone()
        .unwrap_or_else(RunDir::default_path);
    listen.map(|listen| Place {
        listen,
        instance,
        run_dir,
    })
}

/// Checks the values of `--listen`. At least one must be given.
pub fn check_addresses(given: &[String], checks: &mut Checks) -> Option<Vec<Listen>> {
    let listen: Vec<_> = given
        .iter()
        .filter_map(|text| checks.ok_or_report(parse_listen(text)))
        .collect();
    if given.is_empty() {
        checks.report(
            "--listen is not given: name the apiserver's public address, such as 10.0.0.5:6443",
        );
    }
    for (at, address) in listen.iter().enumerate() {
        if listen[..at]
            .iter()
            .any(|earlier| earlier.addr == address.addr)
        {
            checks.report(format!(
                "--listen {}: the address is given twice: give each address once",
                address.addr
            ));
        }
    }
    // The first address names the berth. If an address could not be parsed, the first parsed one
    // may not be the first given one.
    if listen.len() == given.len()
        && let Some(first) = listen.first().map(|first| first.addr)
        && first.ip().is_unspecified()
    {
        checks.report(format!(
            "--listen {first}: the first address names the berth and is advertised, so it cannot be a wildcard: \
             give the node's address first, such as 10.0.0.5:{}",
            first.port()
        ));
    }
    (!listen.is_empty()).then_some(listen)
}

/// Parses `--listen ADDR:PORT[,freebind]`.
///
/// # Errors
/// The text is not such an address. The error is a sentence with the fix.
pub fn parse_listen(text: &str) -> Result<Listen, String> {
    let mut parts = text.split(',');
    let address: Option<SocketAddr> = parts.next().and_then(|first| first.parse().ok());
    let mut addr = address.ok_or_else(|| {
        format!("--listen {text:?}: give an IP address with a port, such as 10.0.0.5:6443 or [fd00::5]:6443")
    })?;
    // An IPv4-mapped address such as ::ffff:10.0.0.5 cannot be bound on berth's IPv6 sockets, which
    // are IPv6 only.
    if addr.ip().to_canonical() != addr.ip() {
        addr.set_ip(addr.ip().to_canonical());
    }
    let mut freebind = false;
    for option in parts {
        match option {
            "freebind" => freebind = true,
            other => {
                return Err(format!(
                    "--listen {text:?}: {other:?} is no option of an address: only ,freebind is allowed"
                ));
            }
        }
    }
    Ok(Listen { addr, freebind })
}

/// Checks that the listen addresses do not clash with an instance, which listens on the same port
/// of a 127.x address.
pub fn check_instance_listen_addresses(listen: &[Listen], checks: &mut Checks) {
    let berth = listen[0].addr;
    for address in listen.iter().map(|listen| listen.addr) {
        if address.port() == 0 {
            checks.report(format!(
                "--listen {address}: an apiserver needs a fixed port: give a port, such as 6443"
            ));
        } else if address.ip().is_unspecified()
            && address.ip().is_ipv4()
            && address.port() == berth.port()
        {
            checks.report(describe_wildcard_clash(address, berth));
        }
    }
}

fn describe_wildcard_clash(address: SocketAddr, berth: SocketAddr) -> String {
    if berth.ip().is_unspecified() {
        // If the first address is a wildcard, its mistake is already reported.
        return format!(
            "--listen {address}: a wildcard listener clashes with the apiserver's own 127.x address"
        );
    }
    format!(
        "--listen {address}: a wildcard listener clashes with the apiserver's own 127.x address on port {}: list the \
         addresses instead, or give the berth another port (--listen {} --listen {address})",
        address.port(),
        SocketAddr::new(berth.ip(), if berth.port() == 7443 { 8443 } else { 7443 })
    )
}

/// Checks the options of `berth serve`.
///
/// # Errors
/// All mistakes of the command line.
pub fn check_serve(args: &ServeArgs) -> Result<Config, Mistakes> {
    let mut checks = Checks::default();
    let place = check_place(&args.place, &mut checks);
    let backend = args
        .backend
        .as_deref()
        .and_then(|text| checks.parse_address("--backend", text));
    if args.backend.is_none() && args.place.instance.is_none() && !args.discover {
        checks.report(
            "neither --backend, --instance nor --discover is given: name the apiserver's address, or the instance \
             that `berth exec` records, or serve all recorded instances",
        );
    }
    if let (Some(place), Some(backend)) = (&place, backend) {
        check_backend(place, backend, &mut checks);
    }
    if let (Some(place), None) = (&place, &args.backend) {
        check_instance_listen_addresses(&place.listen, &mut checks);
    }
    let config = build_config(place, backend, &args.shim, checks)?;
    Ok(Config {
        discover: args.discover,
        ..config
    })
}

/// Checks the options of `berth run`.
///
/// # Errors
/// All mistakes of the command line.
pub fn check_run(args: &RunArgs) -> Result<Config, Mistakes> {
    let mut checks = Checks::default();
    let place = check_instance(&args.place, &args.command, &mut checks);
    build_config(place, None, &args.shim, checks)
}

/// Checks the options of `berth exec`.
///
/// # Errors
/// All mistakes of the command line.
pub fn check_exec(args: &ExecArgs) -> Result<Place, Mistakes> {
    let mut checks = Checks::default();
    let place = check_instance(&args.place, &args.command, &mut checks);
    checks.finish(place)
}

/// Checks the options of an instance: where it belongs, and the command that starts it.
fn check_instance(args: &PlaceArgs, command: &[OsString], checks: &mut Checks) -> Option<Place> {
    let place = check_place(args, checks);
    if let Some(place) = &place {
        check_instance_listen_addresses(&place.listen, checks);
    }
    for error in berth_exec::args::check_command(command) {
        checks.report(format!("command after --: {error}"));
    }
    place
}

/// Returns the configuration of `berth serve --backend` with defaults and a TCP probe. Ignores
/// environment variables.
///
/// # Errors
/// The place is wrong.
pub fn default_config(place: Place, backend: SocketAddr) -> Result<Config, Mistakes> {
    let command = ShimArgs::augment_args(clap::Command::new("berth"))
        .mut_args(|arg| arg.env(Resettable::Reset));
    let parsed = command.try_get_matches_from(["berth", "--probe=tcp"]);
    let args = parsed.and_then(|matches| ShimArgs::from_arg_matches(&matches));
    let args = args.map_err(|error| Mistakes(vec![error.to_string()]))?;
    build_config(Some(place), Some(backend), &args, Checks::default())
}

fn build_config(
    place: Option<Place>,
    backend: Option<SocketAddr>,
    args: &ShimArgs,
    mut checks: Checks,
) -> Result<Config, Mistakes> {
    const TICK: Duration = Duration::from_millis(10);
    let c = &mut checks;
    let probe = check_probe(&args.probe, READY_PATH, true, c);
    let probe_interval = c.parse_duration("--probe-interval", &args.probe_interval, TICK);
    let fall = c.parse_number("--fall", &args.fall, 1..=100);
    let bind_wait = c.parse_duration("--bind-wait", &args.bind_wait, Duration::ZERO);
    let hold = c.parse_duration("--hold", &args.hold, Duration::ZERO);
    let drain_timeout = c.parse_duration("--drain-timeout", &args.drain_timeout, Duration::ZERO);
    let max_connections = args
        .max_connections
        .as_deref()
        .map(|text| c.parse_number("--max-connections", text, 1..=10_000_000));
    let max_openings = match args.max_openings.as_str() {
        "auto" => MaxOpenings::Auto,
        "off" => MaxOpenings::Off,
        text => {
            let number = text
                .parse()
                .ok()
                .filter(|number| *number <= MAX_OPENINGS)
                .map(MaxOpenings::Fixed);
            let wrong = || {
                format!(
                    "--max-openings {text}: give auto, off or a whole number from 1 to {MAX_OPENINGS}"
                )
            };
            c.ok_or_report(number.ok_or_else(wrong)).unwrap_or_default()
        }
    };
    let first = args
        .first
        .iter()
        .filter_map(|text| c.ok_or_report(parse_network_block(text)))
        .collect();
    let lease = c.parse_duration("--lease", &args.lease, Duration::from_millis(300));
    if lease > lease::LONGEST_DURATION {
        c.report(format!(
            "--lease {}: at most {}: siblings notice a shim that hangs only after this time",
            args.lease,
            format_duration(lease::LONGEST_DURATION)
        ));
    }
    let threads = args
        .threads
        .as_deref()
        .map(|text| c.parse_number("--threads", text, 1..=1024));
    let admin = args
        .admin
        .as_deref()
        .and_then(|text| c.parse_address("--admin", text));
    if let (Some(place), Some(admin)) = (&place, admin)
        && place
            .addresses()
            .any(|listen| addresses_overlap(listen, admin))
    {
        c.report(format!(
            "--admin {admin}: the apiserver's clients use this address: give another port"
        ));
    }
    let log_connections = args.log_connections;
    let cluster = place.as_ref().and_then(|place| {
        cluster::check_cluster(&args.cluster, place, &args.probe.probe_server_name, c)
    });
    let config = place.zip(probe).map(|(place, probe)| Config {
        place,
        backend,
        preferred: None,
        discover: false,
        lease,
        bind_wait,
        probe,
        probe_interval,
        fall,
        hold,
        drain_timeout,
        max_connections,
        threads,
        max_openings,
        first,
        admin,
        pass: args.pass,
        cluster,
        log_connections,
    });
    checks.finish(config)
}

/// Parses a range of IP addresses (CIDR), or a single address.
fn parse_network_block(text: &str) -> Result<IpNet, String> {
    let net = text
        .parse()
        .or_else(|_| text.parse().map(|address: IpAddr| IpNet::from(address)));
    match net {
        Ok(net) if net.trunc() == net => Ok(net),
        Ok(net) => Err(format!(
            "--first {text}: bits beyond the prefix are set: did you mean {}?",
            net.trunc()
        )),
        Err(_) => Err(format!(
            "--first {text}: give a block of addresses, such as 10.0.0.0/24 or fd00::/64"
        )),
    }
}

/// Checks the options of a probe. Does not read the files that they name, because the files may be
/// on another machine. With `strict`, an HTTPS probe needs a CA or explicit `--probe-insecure`.
pub fn check_probe(
    args: &ProbeArgs,
    path: &str,
    strict: bool,
    checks: &mut Checks,
) -> Option<ProbeConfig> {
    let https = args.probe == ProbeKind::Https;
    if https && args.probe_insecure && args.probe_ca.is_some() {
        checks.report(
            "--probe-insecure with --probe-ca: --probe-insecure turns off the check that --probe-ca configures: leave one of the options out",
        );
    }
    if https && strict && !args.probe_insecure && args.probe_ca.is_none() {
        checks.report(
            "--probe-ca is not given: name the file with the CA of the apiserver's serving certificate \
             (kubeadm: /etc/kubernetes/pki/ca.crt), or give --probe-insecure, or --probe tcp",
        );
    }
    let client = match (&args.probe_cert, &args.probe_key) {
        (Some(cert), Some(key)) => Some((cert.clone(), key.clone())),
        (None, None) => None,
        (Some(_), None) => {
            checks.report(
                "--probe-cert without --probe-key: name the file with the certificate's key",
            );
            None
        }
        (None, Some(_)) => {
            checks.report(
                "--probe-key without --probe-cert: name the file with the key's certificate",
            );
            None
        }
    };
    let checked = args.probe_ca.is_some();
    if https && !checked && (client.is_some() || args.probe_token_file.is_some()) {
        checks.report(
            "--probe-cert or --probe-token-file without --probe-ca: credentials go only to an apiserver whose \
             certificate is checked: name --probe-ca",
        );
    }
    let server_name = checks.ok_or_report(
        ServerName::try_from(args.probe_server_name.clone()).map_err(|_| {
            format!(
                "--probe-server-name {:?}: give a DNS name or IP address from the certificate",
                args.probe_server_name
            )
        }),
    );
    let timeout = checks.parse_duration(
        "--probe-timeout",
        &args.probe_timeout,
        Duration::from_millis(10),
    );
    Some(ProbeConfig {
        kind: args.probe,
        path: path.to_owned(),
        ca: args.probe_ca.clone(),
        client,
        token: args.probe_token_file.clone(),
        server_name: server_name?,
        timeout,
    })
}

/// Checks that the shim does not listen on the address of its own backend, to which it would
/// connect in a loop.
fn check_backend(place: &Place, backend: SocketAddr, checks: &mut Checks) {
    if backend.ip().is_unspecified() || backend.port() == 0 {
        checks.report(format!(
            "--backend {backend}: give the apiserver's own address and port"
        ));
        return;
    }
    for listen in place.addresses() {
        if listen == backend {
            checks.report(format!(
                "--backend {backend} is a --listen address: the shim would relay to itself; give the apiserver its own \
                 127.x address"
            ));
        } else if addresses_overlap(listen, backend) {
            checks.report(describe_wildcard_clash(listen, place.berth_address()));
        }
    }
}

/// True if two sockets cannot listen on these addresses together. They have the same port and
/// family, and the same IP address or a wildcard.
fn addresses_overlap(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() == b.port()
        && a.port() != 0
        && a.is_ipv4() == b.is_ipv4()
        && (a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::{InPod, PodCommand};
    use clap::Parser;

    fn parse_serve(args: &str) -> Result<Config, Vec<String>> {
        let cli = InPod::try_parse_from(
            ["berth", "serve"]
                .into_iter()
                .chain(args.split_whitespace()),
        )
        .unwrap();
        let PodCommand::Serve(args) = cli.command else {
            unreachable!()
        };
        check_serve(&args).map_err(|mistakes| mistakes.0)
    }

    /// Returns the mistakes that `berth serve` reports for `args`. A valid place and a valid probe
    /// are added.
    fn serve_mistakes(args: &str) -> Vec<String> {
        let place = "--listen 10.0.0.5:6443 --backend 127.1.2.3:6443 --probe tcp";
        parse_serve(&format!("{place} {args}"))
            .err()
            .unwrap_or_default()
    }

    #[test]
    fn every_mistake_is_reported_at_once() {
        let args = "--listen 10.0.0.5:6443 --listen nowhere --listen 10.0.0.5:6443 --listen [::]:6443,fast \
                    --instance .. --backend here --probe-ca /nonexistent/ca --probe-insecure --probe-key /nonexistent/key \
                    --probe-server-name a_b! --probe-interval 1 --probe-timeout 0s --fall many --hold 8 \
                    --drain-timeout -8s --max-connections 0 --threads 0 --admin 10.0.0.5:6443 --bind-wait soon"
            .replace("--drain-timeout -8s", "--drain-timeout=-8s");
        let errors = parse_serve(&args).unwrap_err();
        let expected = [
            "--listen \"nowhere\": ",
            "--listen \"[::]:6443,fast\": ",
            "--listen 10.0.0.5:6443: the address is given twice",
            "--instance: ",
            "--backend \"here\": ",
            "--probe-insecure with --probe-ca",
            "--probe-key without --probe-cert",
            "--probe-server-name \"a_b!\": ",
            "--probe-interval 1: ",
            "--probe-timeout 0s: ",
            "--fall many: ",
            "--hold 8: ",
            "--drain-timeout -8s: ",
            "--max-connections 0: ",
            "--threads 0: ",
            "--admin 10.0.0.5:6443: ",
            "--bind-wait soon: ",
        ];
        for start in expected {
            assert_eq!(
                errors
                    .iter()
                    .filter(|error| error.starts_with(start))
                    .count(),
                1,
                "{start} in {errors:#?}"
            );
        }
        assert_eq!(errors.len(), expected.len(), "{errors:#?}");
        assert!(
            errors
                .iter()
                .all(|error| !error.contains('\n') && error.contains(": ")),
            "{errors:#?}"
        );
    }

    /// A clock must be able to represent the end of each wait, so durations have a limit.
    #[test]
    fn an_infinite_duration_is_a_mistake() {
        for option in [
            "--hold",
            "--bind-wait",
            "--probe-interval",
            "--probe-timeout",
            "--drain-timeout",
        ] {
            let time = "18446744073709551615s";
            assert_eq!(
                serve_mistakes(&format!("{option} {time}")),
                [format!("{option} {time}: at most 365days")]
            );
        }
    }

    #[test]
    fn a_minimal_command_line_has_the_defaults() {
        let config = parse_serve("--listen 10.0.0.5:6443 --instance a --probe-insecure").unwrap();
        let seconds = Duration::from_secs;
        assert_eq!(config.backend, None);
        assert_eq!(
            (config.probe_interval, config.probe.timeout),
            (seconds(1), seconds(2))
        );
        assert_eq!(config.fall, 3);
        assert_eq!(
            (config.hold, config.drain_timeout),
            (seconds(8), seconds(60))
        );
        assert_eq!((config.max_connections, config.threads), (None, None));
        assert_eq!((config.bind_wait, config.admin), (Duration::ZERO, None));
        assert_eq!(config.probe.path, "/readyz");
    }

    #[test]
    fn the_apiserver_must_be_named() {
        let errors = parse_serve("--listen 10.0.0.5:6443 --probe tcp").unwrap_err();
        assert_eq!(errors.len(), 1);
        assert!(errors[0].contains("--backend"), "{errors:?}");
        // Without `--backend` an instance's name is required, because no record ever appears for a
        // random name. With `--backend`, no record is needed, so the name may be random.
        assert_eq!(
            parse_serve("--listen 10.0.0.5:6443 --probe tcp --backend 127.1.2.3:1")
                .unwrap()
                .place
                .instance,
            None
        );
    }

    #[test]
    fn an_https_probe_needs_a_ca_or_is_insecure() {
        let place = "--listen 10.0.0.5:6443 --instance a";
        let errors = |args: &str| {
            parse_serve(&format!("{place} {args}"))
                .err()
                .unwrap_or_default()
        };
        let none = errors("");
        assert!(
            none.len() == 1 && none[0].contains("--probe-insecure"),
            "{none:?}"
        );
        assert_eq!(errors("--probe-insecure"), [""; 0]);
        assert_eq!(errors("--probe tcp"), [""; 0]);
        assert_eq!(errors("--probe-ca /ca --probe-token-file /token"), [""; 0]);
        let leaked = errors("--probe-insecure --probe-token-file /token");
        assert!(
            leaked.len() == 1 && leaked[0].contains("credentials"),
            "{leaked:?}"
        );
    }

    #[test]
    fn listening_on_the_backends_address_is_refused() {
        assert_eq!(serve_mistakes(""), [""; 0]);
        let errors = |args: &str, part: &str| {
            let errors = parse_serve(&format!("--probe tcp {args}")).unwrap_err();
            assert!(
                errors.len() == 1 && errors[0].contains(part),
                "{part} in {errors:?}"
            );
        };
        errors(
            "--listen 127.1.2.3:6443 --backend 127.1.2.3:6443",
            "relay to itself",
        );
        errors(
            "--listen [::ffff:127.1.2.3]:6443 --backend 127.1.2.3:6443",
            "relay to itself",
        );
        errors(
            "--listen 10.0.0.5:6443 --listen 0.0.0.0:6443 --backend 127.1.2.3:6443",
            "--listen 10.0.0.5:7443",
        );
        errors(
            "--listen 10.0.0.5:7443 --listen 0.0.0.0:7443 --backend 127.1.2.3:7443",
            "--listen 10.0.0.5:8443",
        );
        errors(
            "--listen 0.0.0.0:6443 --backend 127.1.2.3:7443",
            "cannot be a wildcard",
        );
        errors(
            "--listen 10.0.0.5:6443 --backend 0.0.0.0:6443",
            "--backend 0.0.0.0:6443",
        );
        errors(
            "--listen 10.0.0.5:6443 --backend 127.1.2.3:0",
            "--backend 127.1.2.3:0",
        );
        errors(
            "--listen 10.0.0.5:6443 --instance a --listen 0.0.0.0:6443",
            "clashes",
        );
        errors(
            "--listen 10.0.0.5:0 --instance a",
            "an apiserver needs a fixed port",
        );
        assert!(
            parse_serve(
                "--probe tcp --listen 10.0.0.5:7443 --listen 0.0.0.0:6443 --backend 127.1.2.3:7443"
            )
            .is_ok()
        );
        assert!(
            parse_serve(
                "--probe tcp --listen 10.0.0.5:6443 --listen [::]:6443 --backend 127.1.2.3:6443"
            )
            .is_ok()
        );
        assert_eq!(serve_mistakes("--admin 10.0.0.5:6443").len(), 1);
        assert_eq!(serve_mistakes("--admin 0.0.0.0:6443").len(), 1);
        assert_eq!(serve_mistakes("--admin 10.0.0.5:6444"), [""; 0]);
    }

    #[test]
    fn addresses_of_both_families_are_parsed_and_mistakes_are_named() {
        let freebind = |text: &str| {
            parse_listen(text).map(|listen| (listen.addr.to_string(), listen.freebind))
        };
        assert_eq!(
            freebind("[fd00::5]:6443,freebind"),
            Ok(("[fd00::5]:6443".into(), true))
        );
        assert_eq!(
            freebind("[::ffff:10.0.0.5]:6443"),
            Ok(("10.0.0.5:6443".into(), false))
        );
        for bad in [
            "",
            "10.0.0.5",
            ":6443",
            "localhost:6443",
            "fd00::5:6443",
            "10.0.0.5:65536",
            " 10.0.0.5:6443",
        ] {
            assert!(parse_listen(bad).is_err(), "{bad:?}");
        }
    }
}
