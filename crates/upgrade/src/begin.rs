//! Preparation before the first step: checks the manifests, runs doctor, and checks for anything
//! else that could stop an upgrade halfway. Finds interrupted upgrades.

use super::drive::{self, UpgradeContext};
use super::judge::{JudgeOptions, check_judge};
use super::lock::{Claim, Holder, LOCK_NAME, Lock, LockError, NAMESPACE};
use super::machine::{InstanceObservation, Limits, Position};
use super::observer::{NodeDetails, NodeObserver};
use super::pod::{self, ApiserverPod, EMULATION_FLAG};
use super::progress::Progress;
use super::state::{self, EmulatedManifest, State, Store};
use berth_cluster::Client;
use berth_cluster::kubeconfig::choose_kubeconfig;
use berth_doctor::cluster::Cluster;
use berth_doctor::service::{Purpose, ServiceKeeper};
use berth_doctor::{Case, examine, node, other_files, text};
use berth_manifest::file::{Access, is_in_directory, read_manifest_text};
use berth_manifest::report::Refusal;
use berth_manifest::wait::ask_until;
use berth_manifest::{Manifest, Problem};
use berth_node::registry::RunDir;
use hyper::StatusCode;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Name of kube-apiserver's manifest in the kubelet's directory, as kubeadm writes it.
pub const MANIFEST_NAME: &str = "kube-apiserver.yaml";

/// Says what happens to the Service `kubernetes` if the upgrade has no kubeconfig.
const SERVICE_GAPS: &str = "the Service kubernetes is without this node for up to 10 s whenever an instance stops (with several \
                    control-plane nodes, also whenever an instance starts)";

/// Says what may happen if the cluster has no lock for upgrades.
const UNLOCKED_RISK: &str =
    "nothing keeps another control-plane node from being upgraded at the same time";

/// The first release that can emulate its predecessor.
const FIRST_EMULATING_RELEASE: (u64, u64) = (1, 32);

/// How long a kubelet may need to stop a pod, beyond the grace period.
const STOP_MARGIN: Duration = Duration::from_secs(60);

/// The operator's choices for an upgrade.
#[derive(Debug)]
pub struct UpgradeOptions {
    /// The new manifest. `None` for a rolling restart with the current one.
    pub manifest: Option<PathBuf>,
    pub canonical: PathBuf,
    /// The manifest file of the temporary pod, in the directory of `canonical`.
    pub temporary: PathBuf,
    /// The directory for the original manifests and the state.
    pub state_dir: PathBuf,
    /// How long a new instance may take until it is ready and its shim listens.
    pub ready: Duration,
    /// How long a ready instance must stay ready.
    pub settle: Duration,
    /// The directory where the kubelet writes container logs.
    pub pod_logs_dir: PathBuf,
    pub kubeconfig: Option<PathBuf>,
    /// Doctor checks. Errors of these checks count as warnings.
    pub ignore_errors: Vec<String>,
    /// How the new instance is judged, and whether it emulates the old release until the verdict.
    pub judge: Option<JudgeOptions>,
    pub emulate: bool,
    /// True if the upgrade takes the cluster's lock away from another upgrade.
    pub break_lock: bool,
}

impl UpgradeOptions {
    /// Returns what is wrong with the given paths, as messages for the operator.
    pub fn find_mistakes(&self) -> Vec<String> {
        let mut mistakes = Vec::new();
        if is_in_directory(&self.canonical, &self.state_dir) {
            mistakes.push(format!(
                "--state-dir {} is the kubelet's directory, and the kubelet would run the manifests kept there: give another directory",
                self.state_dir.display()
            ));
        }
        if let Some(manifest) = &self.manifest
            && self
                .canonical
                .parent()
                .is_some_and(|directory| is_in_directory(manifest, directory))
        {
            mistakes.push(format!(
                "{} is in the kubelet's directory, and the kubelet already runs this manifest: keep the new manifest elsewhere",
                manifest.display()
            ));
        }
        if std::fs::symlink_metadata(&self.canonical).is_ok_and(|meta| meta.is_symlink()) {
            mistakes.push(format!(
                "{} is a symbolic link, which an upgrade would replace by a file: replace the link by the file first",
                self.canonical.display()
            ));
        }
        if let Some(path) = self.kubeconfig.as_deref().filter(|path| !path.exists()) {
            mistakes.push(format!(
                "--kubeconfig {}: there is no such file",
                path.display()
            ));
        }
        mistakes
    }

    fn make_limits(&self, old: &ApiserverPod, new: &ApiserverPod) -> Limits {
        Limits {
            ready: self.ready,
            settle: self.settle,
            stop: old.grace.max(new.grace) + STOP_MARGIN,
        }
    }

    /// Makes a client of the cluster's API with an administrator's credentials. `None` if no
    /// kubeconfig is given and the default one is missing. `before` is the kubeconfig that an
    /// interrupted upgrade began with.
    fn make_client(
        &self,
        before: Option<&Path>,
        progress: &Progress,
    ) -> Result<Option<Client>, Refusal> {
        let given = self.kubeconfig.as_deref();
        let Some(path) = choose_kubeconfig(given.or(before)) else {
            return Ok(None);
        };
        match Client::from_kubeconfig(path) {
            Ok(client) => Ok(Some(client)),
            Err(error) if given.is_some() => Err(Refusal::usage(vec![error.to_string()])),
            Err(error) => {
                progress.print_line(&format!("     note: {error}"));
                Ok(None)
            }
        }
    }
}

/// An upgrade that is ready to be driven.
#[derive(Debug)]
pub struct StartedUpgrade {
    pub state: State,
    pub store: Store,
    pub context: UpgradeContext,
}

/// Lists the steps that an upgrade would take, or the remaining steps of an interrupted upgrade.
///
/// # Errors
/// The upgrade cannot begin.
pub async fn dry_run(
    options: &UpgradeOptions,
    progress: &Progress,
) -> Result<Vec<String>, Refusal> {
    let (state, context) = match state::find_state(&options.state_dir)? {
        Some(state) => resume_upgrade(options, state, progress)?,
        None => prepare_new_upgrade(options, progress).await?,
    };
    Ok(drive::describe_plan(&state, &context.limits, &context.pod))
}

/// Begins an upgrade, or resumes an interrupted one.
///
/// # Errors
/// The upgrade cannot begin. Nothing was changed.
pub async fn begin_upgrade(
    options: &UpgradeOptions,
    progress: &Progress,
) -> Result<StartedUpgrade, Refusal> {
    if state::find_state(&options.state_dir)?.is_none() {
        // An unreadable manifest is reported before the state directory is created.
        ManifestPair::read_manifest_pair(options)?;
    }
    let store = Store::open(&options.state_dir)?;
    if let Some(state) = store.load()? {
        let (state, mut context) = resume_upgrade(options, state, progress)?;
        context.lock = acquire_lock(options, &state, &context, true, progress).await?;
        return Ok(StartedUpgrade {
            state,
            store,
            context,
        });
    }
    let (state, mut context) = prepare_new_upgrade(options, progress).await?;
    context.lock = acquire_lock(options, &state, &context, false, progress).await?;
    let begun = async {
        // The state is saved before the lock is marked. An upgrade that is killed in between has
        // not marked its lock, and can be resumed.
        store.save(&state)?;
        match &context.lock {
            Some(lock) => lock
                .mark_node_changed(progress)
                .await
                .map_err(|error| Refusal::unavailable(&format!("nothing was changed: {error}"))),
            None => Ok(()),
        }
    };
    if let Err(why) = begun.await {
        let _ = store.remove();
        if let Some(lock) = &context.lock {
            lock.release(progress).await;
        }
        return Err(why);
    }
    Ok(StartedUpgrade {
        state,
        store,
        context,
    })
}

/// Acquires the lock that keeps other nodes from being upgraded. `None` if no cluster is known, or
/// if the cluster cannot provide the lock. A cluster that the operator has named must provide the
/// lock. A resumed upgrade may have changed the node, and continues even if the cluster does not
/// answer, because the changed node may be the reason why there is no answer.
async fn acquire_lock(
    options: &UpgradeOptions,
    state: &State,
    context: &UpgradeContext,
    resumed: bool,
    progress: &Progress,
) -> Result<Option<Lock>, Refusal> {
    let Some(client) = &context.client else {
        progress.print_detail(&format!("no --kubeconfig: {UNLOCKED_RISK}"));
        return Ok(None);
    };
    let lock = Lock::new(
        client,
        Claim::new(
            Holder::from_this_process(&state.uid, resumed),
            options.break_lock,
        ),
    );
    match lock.acquire(progress).await {
        Ok(()) => {
            progress.print_detail(&format!(
                "this upgrade holds the cluster's lock: no other node is upgraded meanwhile (Lease {NAMESPACE}/{LOCK_NAME})"
            ));
            Ok(Some(lock))
        }
        Err(LockError::Api(error)) if !resumed && options.kubeconfig.is_some() => {
            Err(Refusal::unavailable(&format!(
                "--kubeconfig: {error}: {UNLOCKED_RISK}, so nothing was changed: give a kubeconfig of a user who may create and update Leases in \
             {NAMESPACE} (if the namespace does not exist, run `kubectl create namespace {NAMESPACE}`), or try again"
            )))
        }
        Err(LockError::Api(error)) if error.status() != Some(StatusCode::CONFLICT) => {
            progress.print_detail(&format!("{error}: {UNLOCKED_RISK}"));
            Ok(resumed.then_some(lock))
        }
        Err(error) => Err(Refusal::unavailable(&error)),
    }
}

/// Resumes an interrupted upgrade.
fn resume_upgrade(
    options: &UpgradeOptions,
    mut state: State,
    progress: &Progress,
) -> Result<(State, UpgradeContext), Refusal> {
    let Position {
        step, target, why, ..
    } = &state.position;
    let under_way = format!(
        "an upgrade that began at {} is under way (step {step})",
        state.started
    );
    let mut mistakes = Vec::new();
    if state.canonical != options.canonical {
        let parent = state.canonical.parent().unwrap_or(&state.canonical);
        mistakes.push(format!(
            "{under_way} in another directory: give --manifests-dir {}",
            parent.display()
        ));
    }
    if let Some(path) = &options.manifest
        && read_manifest_text(path)? != state.new
    {
        mistakes.push(format!(
            "{under_way}, to another manifest than {}: run `berth upgrade` without a manifest to finish that upgrade first",
            path.display()
        ));
    }
    if options.judge.is_some() && state.judge.is_none() {
        mistakes.push(format!(
            "{under_way}, and began without --judge: run `berth upgrade` without --judge to bring this upgrade to its end"
        ));
    }
    if !mistakes.is_empty() {
        return Err(Refusal::usage(mistakes));
    }
    let pods = [&state.old, &state.new].map(|text| {
        Manifest::parse(text).and_then(|manifest| ApiserverPod::from_manifest(&manifest))
    });
    let [Ok(old), Ok(new)] = pods else {
        return Err(Refusal::unavailable(&format!(
            "{under_way}, and the manifests of that upgrade cannot be read any more"
        )));
    };
    progress.print_line(&format!("{under_way}; it goes on to the {target} manifest"));
    if let Some(why) = why {
        progress.print_detail(&format!("the upgrade goes back because: {why}"));
    }
    let client = options.make_client(state.kubeconfig.as_deref(), progress)?;
    state.judge = options.judge.clone().or(state.judge);
    Ok((state, make_context(options, &old, new, client)))
}

fn make_context(
    options: &UpgradeOptions,
    old: &ApiserverPod,
    new: ApiserverPod,
    client: Option<Client>,
) -> UpgradeContext {
    UpgradeContext {
        limits: options.make_limits(old, &new),
        run_dir: new.run_dir.clone().unwrap_or_else(RunDir::default_path),
        pod_logs: options.pod_logs_dir.clone(),
        client,
        lock: None,
        pod: new,
    }
}

async fn prepare_new_upgrade(
    options: &UpgradeOptions,
    progress: &Progress,
) -> Result<(State, UpgradeContext), Refusal> {
    let ManifestPair {
        old_text,
        new_text,
        old,
        new,
        old_manifest,
        new_manifest,
    } = ManifestPair::read_manifest_pair(options)?;
    let uid = pod::draw_uid().map_err(|error| Refusal::unavailable(&error))?;
    let name = options
        .manifest
        .as_ref()
        .unwrap_or(&options.canonical)
        .display()
        .to_string();
    let problem = |problem| Refusal::usage(vec![format!("{name}:{problem}")]);
    let judge = options.judge.clone();
    let emulated = match &judge {
        Some(_) if options.emulate => {
            emulate_old_release(&old_manifest, &new_manifest).map_err(problem)?
        }
        _ => None,
    };
    let temporary_text = match &emulated {
        Some(emulated) => Manifest::parse(&emulated.text)
            .and_then(|manifest| pod::make_temporary(&manifest, &uid)),
        None => pod::make_temporary(&new_manifest, &uid),
    };
    let temporary_text = temporary_text.map_err(problem)?;
    let context = make_context(options, &old, new, options.make_client(None, progress)?);
    let address = find_advertised_address(&context, &uid, options).await?;
    let mut state = State {
        version: State::FORMAT_VERSION,
        berth: berth_node::VERSION.to_owned(),
        started: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        position: Position::initial(),
        canonical: options.canonical.clone(),
        temporary: options.temporary.clone(),
        uid,
        address,
        service: false,
        old: old_text,
        new: new_text,
        temporary_text,
        access: Access::of_file(&options.canonical),
        kubeconfig: options
            .kubeconfig
            .as_deref()
            .and_then(|path| std::path::absolute(path).ok()),
        judge,
        emulated,
    };
    let all = drive::STEP_COUNT;
    let what = match (state.is_restart(), old.image == context.pod.image) {
        (true, _) => format!("rolling restart of {}", old.image),
        (false, true) => format!("{} with another manifest", old.image),
        (false, false) => format!("{} to {}", old.image, context.pod.image),
    };
    progress.print_line(&format!(
        "1/{all}  {address}: {what}; first, the checks of berth doctor"
    ));
    run_doctor(&name, &new_manifest, &old_manifest, &context, options).await?;
    if state.judge.is_some() {
        let client = context
            .client
            .as_ref()
            .map(|client| context.pod.shim.trusting_client(client));
        check_judge(&context.run_dir, client.as_ref(), &state.uid).await?;
        let emulates = state
            .emulated
            .as_ref()
            .map(|emulated| format!(", and behaves as {} until the verdict", emulated.release));
        progress.print_detail(&format!(
            "the new instance is judged beside the old one{}",
            emulates.unwrap_or_default()
        ));
    }
    state.service = check_service(&context, address, options, progress).await?;
    Ok((state, context))
}

/// The new manifest with emulation of the old release. `None` if the old release is not the
/// previous minor version: not every kube-apiserver emulates an older one. `None` also if a
/// release is unknown or the manifest has its own emulation flag.
fn emulate_old_release(
    old: &Manifest,
    new: &Manifest,
) -> Result<Option<EmulatedManifest>, Problem> {
    let (Some((major, minor)), Some(to)) = (old.version(), new.version()) else {
        return Ok(None);
    };
    if (major, minor + 1) != to
        || to < FIRST_EMULATING_RELEASE
        || new.flag(EMULATION_FLAG).is_some()
    {
        return Ok(None);
    }
    let release = format!("{major}.{minor}");
    Ok(Some(EmulatedManifest {
        text: pod::add_emulation(new, &release)?,
        release,
    }))
}

/// Runs the checks of `berth doctor`. An error there ends the upgrade before any change.
async fn run_doctor(
    name: &str,
    manifest: &Manifest,
    running: &Manifest,
    context: &UpgradeContext,
    options: &UpgradeOptions,
) -> Result<(), Refusal> {
    let directory = options.canonical.display();
    let other_files = other_files::gather_files(&options.canonical, manifest)
        .map_err(|error| Refusal::unavailable(&format!("{directory}: {error}")))?;
    let mut facts = node::Facts::gather(Path::new("/"), manifest);
    facts.unconnected = node::find_unconnected_shims(Path::new("/"), manifest).await;
    let cluster = match &context.client {
        Some(client) => Cluster::fetch(client).await.ok(),
        None => None,
    };
    let (other_files, node, cluster) = (Some(&other_files[..]), Some(&facts), cluster.as_ref());
    let case = Case {
        name,
        manifest,
        running: Some(running),
        other_files,
        node,
        cluster,
    };
    text::refuse_errors(name, examine(&case), &options.ignore_errors)
}

/// True if the Service `kubernetes` names this node. The upgrade then keeps the node's address in
/// the Service while instances stop.
async fn check_service(
    context: &UpgradeContext,
    address: SocketAddr,
    options: &UpgradeOptions,
    progress: &Progress,
) -> Result<bool, Refusal> {
    let Some(client) = &context.client else {
        progress.print_detail(&format!("no --kubeconfig: {SERVICE_GAPS}"));
        return Ok(false);
    };
    let named = async {
        let service = ServiceKeeper::new(client, Purpose::Upgrade, address)?;
        let named = service
            .service_names_node()
            .await
            .map_err(|error| error.to_string())?;
        if named {
            service.check_access().await?;
        }
        Ok::<_, String>(named)
    };
    match named.await {
        Ok(true) => {
            progress.print_detail(&format!(
                "Service kubernetes: berth keeps {} in the Service, through {}",
                address.ip(),
                client.server()
            ));
            Ok(true)
        }
        Ok(false) => {
            progress.print_detail(&format!(
                "Service kubernetes: {} has not been in the Service for 11 s, so berth does not keep that address there",
                address.ip()
            ));
            Ok(false)
        }
        Err(why) if options.kubeconfig.is_some() => {
            Err(Refusal::unavailable(&format!("--kubeconfig: {why}")))
        }
        Err(why) => {
            progress.print_detail(&format!("{why}: {SERVICE_GAPS}"));
            Ok(false)
        }
    }
}

/// How long a shim may take to answer before its instance counts as not serving: a busy node needs
/// seconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Time between two requests to a shim that did not answer.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Checks that the old instance serves, and returns its advertised address.
async fn find_advertised_address(
    context: &UpgradeContext,
    uid: &berth_node::instance_id::InstanceId,
    options: &UpgradeOptions,
) -> Result<SocketAddr, Refusal> {
    let mut observer = NodeObserver::new(&context.run_dir);
    let ask = async || {
        let looked = observer
            .sample_instances(uid)
            .await
            .map_err(|error| Refusal::unavailable(&error));
        looked.map(|looked| {
            (
                looked.1.silent,
                find_sampled_advertised_address(context, looked, options),
            )
        })
    };
    let counts = |seen: &Result<(bool, Result<_, _>), Refusal>| !matches!(seen, Ok((true, Err(_))));
    ask_until(ANSWER_TIMEOUT, RETRY_PAUSE, ask, counts).await?.1
}

/// Checks in one sample of the node that the old instance serves, and returns its advertised
/// address.
fn find_sampled_advertised_address(
    context: &UpgradeContext,
    ([canonical, _], details): ([InstanceObservation; 2], NodeDetails),
    options: &UpgradeOptions,
) -> Result<SocketAddr, Refusal> {
    let run_dir = context.run_dir.display();
    let file = options.canonical.display();
    let detail = &details.canonical;
    let why = match details.others {
        0 => format!(
            "no instance runs in {run_dir}: is {file} what the kubelet runs? (see `berth status`)"
        ),
        1 if !canonical.in_group => format!(
            "the current instance does not serve ({}), so an upgrade cannot keep the API available: put the new manifest into the kubelet's directory by hand",
            detail.reason
        ),
        1 => {
            let advertised = detail.advertised.or(detail.berth);
            return advertised.ok_or_else(|| {
                Refusal::unavailable(&format!("the instance's address is not known in {run_dir}"))
            });
        }
        more => format!(
            "{more} instances run in {run_dir}, and only the pod of {file} should run: stop the other instances"
        ),
    };
    Err(Refusal::unavailable(&why))
}

struct ManifestPair {
    old_text: String,
    new_text: String,
    old: ApiserverPod,
    new: ApiserverPod,
    old_manifest: Manifest,
    new_manifest: Manifest,
}

impl ManifestPair {
    /// Reads the manifests, and checks that the new one can replace the old one.
    fn read_manifest_pair(options: &UpgradeOptions) -> Result<Self, Refusal> {
        let UpgradeOptions {
            manifest,
            canonical,
            temporary,
            ..
        } = options;
        let old_text = read_manifest_text(canonical)?;
        let new_path = manifest.as_ref().unwrap_or(canonical);
        let new_text = read_manifest_text(new_path)?;
        let mut mistakes = Vec::new();
        let mut parsed = |path: &Path, text: &str| {
            let found = Manifest::parse(text)
                .and_then(|manifest| Ok((ApiserverPod::from_manifest(&manifest)?, manifest)));
            found
                .map_err(|problem| mistakes.push(format!("{}:{problem}", path.display())))
                .ok()
        };
        let old = parsed(canonical, &old_text);
        let new = parsed(new_path, &new_text);
        let (Some((old, old_manifest)), Some((new, new_manifest))) = (old, new) else {
            mistakes.dedup();
            return Err(Refusal::usage(mistakes));
        };
        check_pair(options, &old, &new, &mut mistakes);
        if temporary.exists() {
            mistakes.push(format!(
                "{} exists, and {} records no upgrade: if `berth status` shows another instance that serves, remove that file",
                temporary.display(),
                options.state_dir.display()
            ));
        }
        if !mistakes.is_empty() {
            return Err(Refusal::usage(mistakes));
        }
        Ok(Self {
            old_text,
            new_text,
            old,
            new,
            old_manifest,
            new_manifest,
        })
    }
}

/// Finds the reasons why the pods of two manifests cannot run on one node at the same time.
fn check_pair(
    options: &UpgradeOptions,
    old: &ApiserverPod,
    new: &ApiserverPod,
    mistakes: &mut Vec<String>,
) {
    let UpgradeOptions { canonical, .. } = options;
    let path = options
        .manifest
        .as_ref()
        .unwrap_or(canonical)
        .display()
        .to_string();
    if !old.behind {
        let file = canonical.display();
        mistakes.push(format!(
            "{file} is not behind berth: its kube-apiserver holds the port alone, and no second kube-apiserver can start. First run \
             `berth inject {file} --image IMAGE --write --bridge`, which restarts kube-apiserver once and loses nothing. If no bridge \
             is possible (Linux before 5.9, or kernel lockdown), leave out --bridge: clients are then refused until the new \
             kube-apiserver is ready, and `berth eject {file} --write` undoes the change"
        ));
        return;
    }
    if !new.behind {
        let canonical = canonical.display();
        mistakes.push(format!(
            "{path} is not behind berth: run `berth inject {path} --image IMAGE --write` first, with a --listen for each address in \
             BERTH_LISTEN of {canonical}"
        ));
        return;
    }
    if !new.by_uid {
        mistakes.push(format!(
            "{path}: BERTH_INSTANCE is not the pod's UID (fieldRef metadata.uid), so two pods would be one instance: see \
             `berth inject`"
        ));
    }
    if (&old.namespace, &old.name) != (&new.namespace, &new.name) {
        mistakes.push(format!(
            "{path} is the pod {}/{}, and the pod that runs is {}/{}: give the new pod the same name",
            new.namespace, new.name, old.namespace, old.name
        ));
    }
    let first = |pod: &ApiserverPod| {
        pod.listen
            .as_deref()
            .and_then(|all| all.split_whitespace().next().map(ToOwned::to_owned))
    };
    if (first(old), &old.run_dir) != (first(new), &new.run_dir) {
        mistakes.push(format!(
            "{path} has another first BERTH_LISTEN or another run directory than {}: the shims of the two manifests would not find each other; keep both settings for an upgrade, and change the settings at another time",
            canonical.display()
        ));
    }
}
