//! Runs `berth doctor`, which checks a manifest, its node and its cluster for what would make an
//! upgrade lose requests.

use super::{Exit, block_on, print, print_stderr, refusal_error, usage_error};
use crate::cli::DoctorArgs;
use berth_cluster::Client;
use berth_doctor::cluster::Cluster;
use berth_doctor::{Case, examine, excuse_findings, node, other_files, text};
use berth_manifest::Manifest;
use berth_manifest::file::{is_in_directory, read_manifest_text};
use berth_manifest::report::Severity;
use berth_options::check::Mistakes;
use berth_os::file::none_if_missing;
use berth_upgrade::begin::MANIFEST_NAME;
use berth_upgrade::state::describe_interrupted;
use std::io::IsTerminal;
use std::path::Path;

pub(super) fn run(args: &DoctorArgs) -> anyhow::Result<Exit> {
    let directory = &args.kubelet.manifests_dir;
    let path = args
        .manifest
        .clone()
        .unwrap_or_else(|| directory.join(MANIFEST_NAME));
    let name = match path.to_str() {
        Some("-") => "standard input".into(),
        _ => path.display().to_string(),
    };
    let manifest = Manifest::parse(&read_manifest_text(&path).map_err(refusal_error)?);
    let manifest =
        manifest.map_err(|problem| usage_error(Mistakes(vec![format!("{name}:{problem}")])))?;
    // If something cannot be read, report that and go on, because everything else can be checked.
    let mut exit = Exit::Ok;
    let mut missing = |error: &dyn std::fmt::Display| {
        print_stderr(error);
        exit = Exit::Unavailable;
    };
    let is_static = is_in_directory(&path, directory);
    // If the manifest is outside of the kubelet's directory, check it as the replacement of the
    // running manifest.
    let own = path.canonicalize().ok().filter(|_| is_static);
    let own = directory.join(
        own.as_deref()
            .and_then(Path::file_name)
            .unwrap_or(MANIFEST_NAME.as_ref()),
    );
    let other_files = match args.node && manifest.kind() == "Pod" {
        true => none_if_missing(other_files::gather_files(&own, &manifest))
            .map_err(|error| missing(&format!("{}: {error}", directory.display())))
            .ok()
            .flatten(),
        false => None,
    };
    // The test forks, so it must come before the runtime starts threads.
    let obstacle = args
        .node
        .then(|| node::find_pass_obstacle(&manifest))
        .flatten();
    let unconnected = match args.node {
        true => block_on(node::find_unconnected_shims(Path::new("/"), &manifest))?,
        false => Vec::new(),
    };
    let node = args.node.then(|| node::Facts {
        unconnected,
        obstacle,
        interrupted: describe_interrupted(&args.state.state_dir)
            .map_err(|error| missing(&error))
            .ok()
            .flatten(),
        ..node::Facts::gather(Path::new("/"), &manifest)
    });
    let client = args.kubeconfig.as_deref().map(Client::from_kubeconfig);
    let cluster = match client.and_then(|client| client.map_err(|error| missing(&error)).ok()) {
        Some(client) => block_on(Cluster::fetch(&client))?
            .map_err(|error| missing(&error))
            .ok(),
        None => None,
    };
    // If `path` is a file that will replace the running manifest, read the running one too.
    let running = (args.node && !is_static)
        .then(|| read_manifest_text(&directory.join(MANIFEST_NAME)).ok())
        .flatten();
    let running = running.and_then(|text| Manifest::parse(&text).ok());
    let case = Case {
        name: &name,
        manifest: &manifest,
        running: running.as_ref(),
        other_files: other_files.as_deref(),
        node: node.as_ref(),
        cluster: cluster.as_ref(),
    };
    let mut findings = examine(&case);
    excuse_findings(&mut findings, &args.ignored.ignore_errors);
    let color = std::io::stdout().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let output = if args.json {
        text::render_json(&findings)
    } else {
        text::render_text(&name, &findings, color)
    };
    print(&output)?;
    let fails = findings
        .iter()
        .any(|finding| finding.severity == Severity::Error);
    Ok(if fails { Exit::No } else { exit })
}
