//! Runs `berth inject` and `berth eject`, which put berth into a manifest and take it out again.

use super::bridge::{command_line_without, is_bridge_on, run_under_bridge};
use super::{Exit, print, print_stderr, refusal_error, unavailable_error, usage_error};
use crate::cli::{InjectArgs, ManifestArgs};
use berth_doctor::{Case, examine, node, other_files, text};
use berth_manifest::edit::Edit;
use berth_manifest::file::{
    Backups, is_in_directory, read_manifest_text, replace_file, resolve_links, suggest_fix,
};
use berth_manifest::inject::{Addresses, InjectOptions, Probing, inject_with_backup};
use berth_manifest::report::{Finding, Refusal, Severity};
use berth_manifest::{Manifest, Problem, eject as ejecting, kubeadm};
use berth_options::check::{self, Checks, Mistakes, READY_PATH, check_probe};
use berth_options::probe::{DEFAULT_NAME, ProbeArgs};
use berth_shim::backend::probe::ProbeKind;
use berth_upgrade::state::check_writable;
use similar::TextDiff;
use std::path::{Path, PathBuf};

/// The directory in which a kubelet looks for static pods by default.
const MANIFEST_DIRECTORY: &str = "/etc/kubernetes/manifests";

pub(super) fn inject(args: &InjectArgs) -> anyhow::Result<Exit> {
    let mut checks = Checks::default();
    let options = check_options(args, &mut checks);
    let file = Target::check_manifest_args(&args.file, &mut checks);
    if let Some(directory) = &args.kubeadm_patch {
        file.check_directory("--kubeadm-patch", directory, &mut checks);
    }
    let (options, file) = checks
        .finish(options.map(|options| (options, file)))
        .map_err(usage_error)?;
    let text = file.read_text()?;
    let original = file.find_backup(&text)?.map(|(_, original)| original);
    let outcome = inject_with_backup(&text, original, &options)
        .map_err(|problems| file.make_refusal(&problems))?;
    for note in &outcome.notes {
        print_stderr(format_args!("note: {note}"));
    }
    let injected = Some(&outcome.manifest).filter(|manifest| manifest.kind() == "Pod");
    let found = injected
        .into_iter()
        .flat_map(|manifest| node::find_harm_to_clients(Path::new("/"), manifest));
    for Finding {
        place, cause, fix, ..
    } in found
    {
        print_stderr(format_args!("note: {place}: {cause}: {fix}"));
    }
    if let Some(directory) = &args.kubeadm_patch {
        return write_patches(&file, &outcome.options, &outcome.base, directory);
    }
    if let Some(manifest) = injected.filter(|_| file.args.bridge && outcome.text != text) {
        diagnose_manifest(&file.args.path, manifest, &args.ignored.ignore_errors)
            .map_err(refusal_error)?;
    }
    file.write_result(&text, &outcome.text, &outcome.edits, Some(&outcome.base))
}

/// Looks for three problems that the bridge cannot see: clients that the new shim would always
/// refuse, errors that keep the shim from getting ready, and other manifests of the same pod in the
/// kubelet's directory.
fn diagnose_manifest(
    path: &Path,
    manifest: &Manifest,
    ignore_errors: &[String],
) -> Result<(), Refusal> {
    let name = "the new manifest";
    let gathered = node::Facts::gather(Path::new("/"), manifest);
    let facts = node::Facts {
        obstacle: node::find_pass_obstacle(manifest),
        ..gathered
    };
    let other_files = other_files::gather_files(path, manifest).ok();
    let mut findings = examine(&Case {
        node: Some(&facts),
        other_files: other_files.as_deref(),
        ..Case::new(name, manifest)
    });
    findings.retain(|finding| finding.severity == Severity::Error);
    if findings.is_empty() {
        Ok(())
    } else {
        text::refuse_errors(name, findings, ignore_errors)
    }
}

pub(super) fn eject(args: &ManifestArgs) -> anyhow::Result<Exit> {
    let mut checks = Checks::default();
    let file = Target::check_manifest_args(args, &mut checks);
    let file = checks.finish(Some(file)).map_err(usage_error)?;
    let text = file.read_text()?;
    if let Some((backup, original)) = file.find_backup(&text)? {
        print_stderr(format_args!("note: the original is {}", backup.display()));
        return file.write_result(&text, &original, &[], None);
    }
    let parsed = Manifest::parse(&text);
    // If an eject was killed at its end, the manifest is already without berth, and there is
    // nothing to undo.
    if parsed.as_ref().is_ok_and(ejecting::is_without_berth) {
        return file.write_result(&text, &text, &[], None);
    }
    let ejected = parsed.and_then(|manifest| ejecting::undo_injection(&manifest));
    let ejected = ejected.map_err(|problem| file.make_refusal(&[problem]))?;
    print_stderr("note: no backup matches this manifest, so each change by berth is undone");
    file.write_result(&text, &ejected.text, &ejected.edits, None)
}

/// The manifest that is read, and the place to which the result is written.
struct Target<'a> {
    args: &'a ManifestArgs,
    backups: Backups,
}

impl<'a> Target<'a> {
    fn check_manifest_args(args: &'a ManifestArgs, checks: &mut Checks) -> Self {
        let file = Self {
            args,
            backups: Backups::new(&args.state.state_dir),
        };
        if args.write && file.is_stdin() {
            checks.report("--write with -: standard input cannot be written: give the file's path");
        }
        if args.write {
            file.check_directory("--state-dir", &args.state.state_dir, checks);
        }
        file
    }

    /// Reports a mistake if `directory` is one of manifests, because the kubelet reads every file
    /// there as a manifest.
    fn check_directory(&self, option: &str, directory: &Path, checks: &mut Checks) {
        let kubelets = resolve_links(directory) == resolve_links(Path::new(MANIFEST_DIRECTORY));
        if kubelets || is_in_directory(&self.args.path, directory) {
            checks.report(format!(
                "{option} {}: a kubelet reads every file in this directory as a manifest: give another directory",
                directory.display()
            ));
        }
    }

    fn is_stdin(&self) -> bool {
        self.args.path == Path::new("-")
    }

    fn manifest_name(&self) -> String {
        if self.is_stdin() {
            "standard input".into()
        } else {
            self.args.path.display().to_string()
        }
    }

    fn read_text(&self) -> anyhow::Result<String> {
        read_manifest_text(&self.args.path).map_err(refusal_error)
    }

    /// Finds the backup of the original manifest. Returns `None` if `text` is not the manifest that
    /// berth wrote in place of the original.
    fn find_backup(&self, text: &str) -> anyhow::Result<Option<(PathBuf, String)>> {
        if self.is_stdin() {
            return Ok(None);
        }
        self.backups
            .find_original(&self.args.path, text)
            .map_err(unavailable_error)
    }

    fn make_refusal(&self, problems: &[Problem]) -> anyhow::Error {
        usage_error(Mistakes(
            problems
                .iter()
                .map(|problem| format!("{}:{problem}", self.manifest_name()))
                .collect(),
        ))
    }

    /// Prints the new text or writes it to the file. Before it writes, saves `original` as a backup
    /// if given.
    fn write_result(
        &self,
        old: &str,
        new: &str,
        edits: &[Edit],
        original: Option<&str>,
    ) -> anyhow::Result<Exit> {
        if self.args.diff {
            edits.iter().for_each(print_stderr);
            let name = self.manifest_name();
            let name = name.trim_start_matches('/');
            let (before, after) = (format!("a/{name}"), format!("b/{name}"));
            let diff = TextDiff::from_lines(old, new);
            return print(&diff.unified_diff().header(&before, &after).to_string());
        }
        if !self.args.write {
            return print(new);
        }
        if old == new {
            print_stderr(format_args!(
                "{} needs no change: not written",
                self.manifest_name()
            ));
            return Ok(Exit::Ok);
        }
        check_writable(self.backups.directory(), &self.args.path).map_err(unavailable_error)?;
        if self.args.bridge {
            return run_under_bridge(
                &["--manifest".as_ref(), self.args.path.as_os_str()],
                &command_line_without("--bridge")?,
            );
        }
        if Manifest::parse(new).is_ok_and(|manifest| manifest.kind() == "Pod") && !is_bridge_on() {
            print_stderr(
                "note: a kubelet that runs this file restarts kube-apiserver now, and clients are refused until \
                 kube-apiserver is ready: --write --bridge prevents that (Linux 5.9)",
            );
        }
        if !edits.is_empty() {
            print_stderr(format_args!("{} changes, see --diff", edits.len()));
        }
        if let Some(original) = original {
            let path = self
                .backups
                .keep_original(&self.args.path, original, new)
                .map_err(unavailable_error)?;
            print_stderr(format_args!("the original is {}", path.display()));
        }
        replace_file(&self.args.path, new).map_err(unavailable_error)?;
        print_stderr(format_args!("{} is written", self.manifest_name()));
        Ok(Exit::Ok)
    }
}

fn write_patches(
    file: &Target<'_>,
    options: &InjectOptions,
    base: &str,
    directory: &Path,
) -> anyhow::Result<Exit> {
    let listed = |problem| vec![problem];
    let patches = Manifest::parse(base).map_err(listed).and_then(|manifest| {
        let (edits, _) = berth_manifest::inject::plan_edits(&manifest, options)?;
        kubeadm::make_patches(&manifest, &edits).map_err(listed)
    });
    let patches = patches.map_err(|problems| file.make_refusal(&problems))?;
    std::fs::create_dir_all(directory).map_err(|error| {
        let fix = suggest_fix("make", &error);
        unavailable_error(format!(
            "cannot make the directory {}: {error}{fix}",
            directory.display()
        ))
    })?;
    for patch in patches {
        let path = directory.join(patch.name);
        replace_file(&path, &patch.text).map_err(unavailable_error)?;
        print_stderr(format_args!("{} is written", path.display()));
    }
    Ok(Exit::Ok)
}

fn check_options(args: &InjectArgs, checks: &mut Checks) -> Option<InjectOptions> {
    if args.image.is_empty() || args.image.contains(char::is_whitespace) {
        checks.report(format!(
            "--image {:?}: name an image with berth as its entrypoint",
            args.image
        ));
    }
    if !args.run_dir.starts_with('/') || args.run_dir.contains("..") || args.run_dir.contains(':') {
        checks.report(format!(
            "--run-dir {:?}: give an absolute path without .. and colons",
            args.run_dir
        ));
    }
    let addresses = if args.listen.is_empty() {
        Some(Addresses::OfManifest)
    } else {
        let listen = check::check_addresses(&args.listen, checks);
        if let Some(listen) = &listen {
            check::check_instance_listen_addresses(listen, checks);
        }
        listen.map(Addresses::Given)
    };
    check_probe(&args.probe, READY_PATH, false, checks);
    let probing = build_probing(&args.probe, checks);
    Some(InjectOptions {
        image: args.image.clone(),
        run_dir: args.run_dir.clone(),
        addresses: addresses?,
        probing,
        service: check_service(args.service.as_deref(), checks),
        pass: args.pass,
        added: Vec::new(),
    })
}

/// Checks the path of the shim's kubeconfig. The kubeconfig's directory is mounted into the
/// container at the same path, and should contain nothing else.
fn check_service(kubeconfig: Option<&str>, checks: &mut Checks) -> Option<String> {
    let kubeconfig = kubeconfig?;
    let directory = Path::new(kubeconfig)
        .parent()
        .filter(|directory| directory.components().count() > 2);
    if !kubeconfig.starts_with('/')
        || kubeconfig.contains("..")
        || kubeconfig.contains(':')
        || directory.is_none()
    {
        checks.report(format!(
            "--service {kubeconfig:?}: give the absolute path of a kubeconfig in a directory of its own, such as \
             /etc/kubernetes/berth-cluster/kubeconfig, which `berth grant` writes"
        ));
    }
    Some(kubeconfig.to_owned())
}

/// Turns the probe's options into environment variables for the containers.
fn build_probing(args: &ProbeArgs, checks: &mut Checks) -> Probing {
    let files = [
        ("--probe-ca", "BERTH_PROBE_CA", &args.probe_ca),
        ("--probe-cert", "BERTH_PROBE_CERT", &args.probe_cert),
        ("--probe-key", "BERTH_PROBE_KEY", &args.probe_key),
        (
            "--probe-token-file",
            "BERTH_PROBE_TOKEN_FILE",
            &args.probe_token_file,
        ),
    ];
    let mut probing = Probing {
        trusts: args.probe_ca.is_some() || args.probe_insecure || args.probe == ProbeKind::Tcp,
        credentials: args.probe_cert.is_some()
            || args.probe_token_file.is_some()
            || args.probe == ProbeKind::Tcp,
        ..Probing::default()
    };
    for (option, variable, file) in files {
        let Some(file) = file else { continue };
        match file.to_str().filter(|file| file.starts_with('/')) {
            Some(file) => {
                probing.files.push(file.to_owned());
                probing.variables.push((variable, file.to_owned()));
            }
            None => {
                checks.report(format!(
                    "{option} {}: give an absolute path in the apiserver's container",
                    file.display()
                ));
            }
        }
    }
    let others = [
        ("BERTH_PROBE", "tcp", args.probe == ProbeKind::Tcp),
        ("BERTH_PROBE_INSECURE", "true", args.probe_insecure),
        (
            "BERTH_PROBE_SERVER_NAME",
            &args.probe_server_name,
            args.probe_server_name != DEFAULT_NAME,
        ),
        (
            "BERTH_PROBE_TIMEOUT",
            &args.probe_timeout,
            args.probe_timeout != "2s",
        ),
    ];
    let given = others.into_iter().filter(|(.., given)| *given);
    probing
        .variables
        .extend(given.map(|(variable, value, _)| (variable, value.to_owned())));
    probing
}
