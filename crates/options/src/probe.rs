//! Options for the probe of an apiserver.

use berth_shim::backend::probe::ProbeKind;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::path::PathBuf;

/// The heading under which help texts list these options.
pub const PROBE_HEADING: &str = "Probe";

/// A name that is in the certificate of every kube-apiserver that kubeadm set up.
pub const DEFAULT_NAME: &str = "kubernetes";

/// Options for the probe of a kube-apiserver.
#[derive(Debug, Clone, Args)]
pub struct ProbeArgs {
    /// Probe by HTTPS, or only check that the port accepts connections
    #[arg(long, env = "BERTH_PROBE", default_value = "https", value_name = "KIND", value_parser = kind_parser(), help_heading = PROBE_HEADING)]
    pub probe: ProbeKind,
    /// PEM file with the CAs that verify kube-apiserver's certificate
    #[arg(long, env = "BERTH_PROBE_CA", value_name = "FILE", help_heading = PROBE_HEADING)]
    pub probe_ca: Option<PathBuf>,
    /// PEM file with the probe's client certificate, for a kube-apiserver without anonymous access
    #[arg(long, env = "BERTH_PROBE_CERT", value_name = "FILE", help_heading = PROBE_HEADING)]
    pub probe_cert: Option<PathBuf>,
    /// PEM file with the key of --probe-cert
    #[arg(long, env = "BERTH_PROBE_KEY", value_name = "FILE", help_heading = PROBE_HEADING)]
    pub probe_key: Option<PathBuf>,
    /// File with a bearer token for the probe
    #[arg(long, env = "BERTH_PROBE_TOKEN_FILE", value_name = "FILE", help_heading = PROBE_HEADING)]
    pub probe_token_file: Option<PathBuf>,
    /// Name that kube-apiserver's certificate must carry
    #[arg(long, env = "BERTH_PROBE_SERVER_NAME", default_value = DEFAULT_NAME, value_name = "NAME", help_heading = PROBE_HEADING)]
    pub probe_server_name: String,
    /// Do not verify kube-apiserver's certificate; no credentials are sent then
    #[arg(long, env = "BERTH_PROBE_INSECURE", help_heading = PROBE_HEADING)]
    pub probe_insecure: bool,
    /// Time limit for an answer; a kube-apiserver also counts as stalled if clients' TLS handshakes
    /// are in flight and none ends for this long
    #[arg(long, env = "BERTH_PROBE_TIMEOUT", default_value = "2s", value_name = "DURATION", help_heading = PROBE_HEADING)]
    pub probe_timeout: String,
}

fn kind_parser() -> impl TypedValueParser<Value = ProbeKind> {
    let kinds = [
        (ProbeKind::Https, "GET /readyz by HTTPS"),
        (ProbeKind::Tcp, "Connect only"),
    ];
    PossibleValuesParser::new(
        kinds.map(|(kind, help)| PossibleValue::new(kind.as_str()).help(help)),
    )
    .map(|text| {
        if text == ProbeKind::Tcp.as_str() {
            ProbeKind::Tcp
        } else {
            ProbeKind::Https
        }
    })
}
