//! `berth doctor`: checks of a manifest, its node and its cluster for what would make an upgrade lose requests.

use super::{Exit, block_on, mistaken, print, print_stderr, refused};
use crate::cli::DoctorArgs;
use berth_cluster::Client;
use berth_cluster::kubeconfig::given_or_admin;
use berth_operate::doctor::cluster::Cluster;
use berth_operate::doctor::release::{Question, survey};
use berth_operate::doctor::{Case, beside, examine, excuse, node, text};
use berth_operate::manifest::Manifest;
use berth_operate::manifest::file::{is_in, read};
use berth_operate::report::Severity;
use berth_operate::upgrade::begin::FILE;
use berth_operate::upgrade::state::interrupted;
use berth_options::check::Mistakes;
use std::io::IsTerminal;
use std::path::Path;

pub(super) fn run(args: &DoctorArgs) -> anyhow::Result<Exit> {
    let name = match args.manifest.to_str() {
        Some("-") => "standard input".into(),
        _ => args.manifest.display().to_string(),
    };
    let manifest = Manifest::parse(&read(&args.manifest).map_err(refused)?);
    let manifest = manifest.map_err(|problem| mistaken(Mistakes(vec![format!("{name}:{problem}")])))?;
    // What cannot be read is reported, and everything else is checked all the same.
    let mut exit = Exit::Ok;
    let mut missing = |error: &dyn std::fmt::Display| {
        print_stderr(error);
        exit = Exit::Unavailable;
    };
    let is_static = is_in(&args.manifest, &args.kubelet.manifests_dir);
    let on_node = args.node || (args.to.is_some() && is_static);
    let beside = match on_node && is_static {
        true => beside::gather(&args.manifest).map_err(|error| missing(&format!("{name}: {error}"))).ok(),
        false => None,
    };
    let unconnected = match on_node {
        true => block_on(node::unconnected(Path::new("/"), &manifest))?,
        false => Vec::new(),
    };
    let node = on_node.then(|| node::Facts {
        unconnected,
        interrupted: interrupted(&args.kept.backup_dir),
        ..node::Facts::gather(Path::new("/"), &manifest)
    });
    let kubeconfig = match args.to {
        Some(_) => given_or_admin(args.kubeconfig.as_deref()),
        None => args.kubeconfig.as_deref(),
    };
    let client = kubeconfig.and_then(|path| Client::from_kubeconfig(path).map_err(|error| missing(&error)).ok());
    let cluster = match &client {
        Some(client) => block_on(Cluster::ask(client))?.map_err(|error| missing(&error)).ok(),
        None => None,
    };
    // The manifest that this one is to replace, if it is another.
    let running = args.kubelet.manifests_dir.join(FILE);
    let running = (on_node && beside.is_none()).then(|| read(&running).ok()).flatten();
    let running = running.and_then(|text| Manifest::parse(&text).ok());
    let case = Case {
        name: &name,
        manifest: &manifest,
        running: running.as_ref(),
        beside: beside.as_deref(),
        node: node.as_ref(),
        cluster: cluster.as_ref(),
    };
    let mut findings = examine(&case);
    if let Some(to) = args.to {
        let root = on_node.then_some(Path::new("/"));
        let (client, binary) = (client.as_ref(), args.apiserver.as_deref());
        let question = Question { to, client, name: &name, manifest: &manifest, root, binary };
        findings.extend(block_on(survey(question))?);
    }
    excuse(&mut findings, &args.excused.ignore_errors);
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let output = if args.json { text::json(&findings) } else { text::text(&name, &findings, color) };
    print(&output)?;
    let fails = findings.iter().any(|finding| finding.severity == Severity::Error);
    Ok(if fails { Exit::No } else { exit })
}
