//! Runs `berth grant`, which creates, prints or revokes credentials for the shims of a node.

use super::{
    CommandError, Exit, block_on, format_json, print, print_stderr, unavailable_error, usage_error,
};
use crate::cli::GrantArgs;
use anyhow::Context;
use berth_cluster::lease::NAMESPACE;
use berth_cluster::{Access, Client};
use berth_doctor::{ShimOf, find_shim};
use berth_manifest::file::read_manifest_text;
use berth_manifest::grant::{GrantError, GrantOptions, Granted, files, grant, objects, revoke};
use berth_manifest::{Manifest, write_document};
use berth_options::check::{self, Checks};
use berth_options::cluster::is_node_name;
use berth_options::probe::DEFAULT_NAME;
use berth_upgrade::journal::read_node_name;
use nix::unistd::geteuid;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

pub(super) fn run(args: &GrantArgs) -> anyhow::Result<Exit> {
    let mut checks = Checks::default();
    let nodes = check_nodes(args, &mut checks);
    if args.print {
        checks.finish(Some(())).map_err(usage_error)?;
        return print(&render_objects(&nodes, args.json));
    }
    let options = if args.revoke {
        None
    } else {
        check_options(args, &nodes, &mut checks)
    };
    let access = Access::read(&args.admin.kubeconfig).and_then(|access| {
        let client =
            Client::new(&access).map_err(|mistake| mistake.with_path(&args.admin.kubeconfig))?;
        Ok((access, client))
    });
    let checked = checks.finish(Some(()));
    // If both are wrong, print this error too. The mistake in the options decides the exit status.
    if let (Err(_), Err(error)) = (&checked, &access) {
        print_stderr(error);
    }
    checked.map_err(usage_error)?;
    let (access, client) = access.map_err(unavailable_error)?;
    match options {
        Some(options) => {
            let granted = block_on(grant(&access, &client, &options))?
                .map_err(|error| grant_error(&error))?;
            print(&if args.json {
                render_json(&granted)?
            } else {
                render_text(&granted)
            })
        }
        None => revoke_all(&client, &nodes, args.json),
    }
}

fn grant_error(error: &GrantError) -> anyhow::Error {
    let exit = if matches!(error, GrantError::Refused { .. }) {
        Exit::No
    } else {
        Exit::Unavailable
    };
    CommandError {
        exit,
        why: vec![error.to_string()],
    }
    .into()
}

/// Returns the names of the nodes, after a check: each name becomes a part of objects' names.
fn check_nodes(args: &GrantArgs, checks: &mut Checks) -> Vec<String> {
    let nodes = match &args.node[..] {
        [] => vec![read_node_name(Path::new("/proc")).unwrap_or_default()],
        given => given.to_vec(),
    };
    for node in nodes.iter().filter(|node| !is_node_name(node)) {
        checks.report(format!(
            "--node {node:?}: give the node's name as kubectl get nodes shows it, such as cp-1"
        ));
    }
    if nodes.len() > 1 && !args.revoke && !args.print {
        checks
            .report("--node: each node writes its own files: run `berth grant` on each node, with the name of that node");
    }
    nodes
}

fn check_options(args: &GrantArgs, nodes: &[String], checks: &mut Checks) -> Option<GrantOptions> {
    let shim = read_manifest_text(&args.manifest)
        .map_err(|error| error.to_string())
        .and_then(|text| {
            let manifest = Manifest::parse(&text)
                .map_err(|problem| format!("{}:{problem}", args.manifest.display()))?;
            Ok(find_shim(&manifest))
        });
    if let (Err(why), true) = (&shim, args.listen.is_empty() || args.uid.is_none()) {
        checks.report(format!("--manifest: {why}; or give --listen and --uid"));
    }
    let server = match &shim {
        _ if !args.listen.is_empty() => {
            check::check_addresses(&args.listen, checks).map(|listen| listen[0].addr)
        }
        Ok(ShimOf { berth: None, .. }) => {
            let manifest = args.manifest.display();
            checks.report(format!(
                "--listen is not given, and {manifest} leaves the address to the kubelet: give the berth's address, such as 10.0.0.5:6443"
            ));
            None
        }
        shim => shim.as_ref().ok().and_then(|shim| shim.berth),
    };
    let of_manifest = shim.as_ref().ok().map(|shim| shim.uid);
    let uid = args
        .uid
        .as_ref()
        .map(|uid| checks.parse_number("--uid", uid, 0..=u32::MAX - 1))
        .or(of_manifest);
    if let Some(uid) = uid.filter(|uid| !geteuid().is_root() && *uid != geteuid().as_raw()) {
        checks.report(format!(
            "--uid {uid}: only root can give files to another uid: run berth as root"
        ));
    }
    let (server_name, ca) = shim.map_or((DEFAULT_NAME.into(), Vec::new()), |shim| {
        let ca = shim.trusted_cas();
        (shim.server_name, ca)
    });
    let file = match &args.out {
        Some(file) => {
            let file = std::path::absolute(file).unwrap_or_else(|_| file.clone());
            checks
                .ok_or_report(files::check_directory(&file).map_err(|why| format!("--out {why}")));
            Some(file)
        }
        None => {
            checks.report(
                "--out is not given: name the shim's kubeconfig, in a directory of its own, such as \
                 /etc/kubernetes/berth-cluster/kubeconfig; or give --print or --revoke",
            );
            None
        }
    };
    Some(GrantOptions {
        node: nodes.first()?.clone(),
        server: server?,
        server_name,
        ca,
        uid: uid?,
        file: file?,
    })
}

fn revoke_all(client: &Client, nodes: &[String], as_json: bool) -> anyhow::Result<Exit> {
    let mut deleted = Vec::new();
    for node in nodes {
        deleted.extend(block_on(revoke(client, node))?.map_err(|error| grant_error(&error))?);
    }
    if as_json {
        return print(&format_json(
            &json!({"version": 1, "nodes": nodes, "deleted": deleted}),
        )?);
    }
    let nodes = nodes.join(", ");
    let mut text: String = deleted
        .iter()
        .map(|object| format!("deleted  {object}\n"))
        .collect();
    text += &match deleted.len() {
        0 => format!("{nodes}: there was nothing to delete\n"),
        _ => format!(
            "{nodes}: tokens are refused within 10 s, the time for which kube-apiserver caches a valid token. The names \
             of the node's slices stay in the Role default/berth, so that other nodes can remove the slices\n"
        ),
    };
    print(&text)
}

/// Formats the objects for the shims of the given nodes, as input for `kubectl apply` or a similar
/// program.
fn render_objects(nodes: &[String], as_json: bool) -> String {
    let shared = objects::shared_role(nodes.iter().map(String::as_str));
    let all = [objects::namespace_object(NAMESPACE), shared]
        .into_iter()
        .chain(
            nodes
                .iter()
                .flat_map(|node| objects::single_node_objects(node)),
        );
    if as_json {
        return format!(
            "{:#}\n",
            json!({"apiVersion": "v1", "kind": "List", "items": all.collect::<Vec<Value>>()})
        );
    }
    all.map(|object| write_document(&object))
        .collect::<Vec<_>>()
        .join("---\n")
}

fn render_json(granted: &Granted) -> anyhow::Result<String> {
    let mut value = serde_json::to_value(granted).context("cannot write JSON")?;
    value["version"] = json!(1);
    format_json(&value)
}

fn render_text(granted: &Granted) -> String {
    let Granted {
        service_account,
        may,
        server,
        kubeconfig,
        token,
        uid,
        expires,
        seconds,
    } = granted;
    let mut text: String = may
        .iter()
        .map(|request| format!("may      {request}\n"))
        .collect();
    for path in [kubeconfig, token] {
        text += &format!("written  {}, for uid {uid} alone\n", path.display());
    }
    let life = humantime::format_duration(Duration::from_secs(*seconds));
    text += &format!(
        "{service_account}: each request was tried at {server}. The token is valid for {life}, until {expires}; a \
         shim renews the token after a third of that time. Mount {} as a directory, writable\n",
        kubeconfig.parent().unwrap_or(Path::new("/")).display()
    );
    text
}
