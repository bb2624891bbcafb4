//! The temporary instance: program, arguments and environment of the running kube-apiserver, on a
//! separate address.
//!
//! Files that COMMAND may replace are copied first: the program, in memory, since an executed file
//! cannot be written to; and the certificates and keys that the arguments name, which
//! kube-apiserver reads again after a change.

use super::cgroup;
use super::etcd::temporary::{self, database::Database};
use super::localhost::{
    ETCD, OWN_NAME, TEMPORARY_ETCD_NAME, TEMPORARY_NAME, temporary_process_name,
};
use super::logs;
use super::plan::BridgePlan;
use super::pod::RunningPod;
use super::pod::container::{self, Container};
use berth_exec::args::{self, ArgsError, WantedValues};
use berth_manifest::command::{AUDIT_LOG, audit_log};
use berth_node::instance_id::InstanceId;
use berth_os::file::{create_program_in_memory, none_if_missing, open_regular_file};
use berth_os::namespaces::{Enclosure, SignWriter, open_signs_of_life, run_in_namespaces};
use berth_os::process::{KILL_CHILD, ProcessAttributes};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::fs::{Mode, OFlags};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{IpAddr, SocketAddrV4};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tokio::process::Child;
use tokio::time::Instant;

/// Directory and names of the certificate that kube-apiserver makes if none is given, and the
/// directory of the temporary instance's copy.
const CERTIFICATE_DIRECTORY: &str = "/var/run/kubernetes";
const CERTIFICATE_FILES: [&str; 2] = ["apiserver.crt", "apiserver.key"];
const TEMPORARY_CERT_DIR: &str = "bridge-cert-dir";

/// Directory for copies of files that the arguments name.
const COPIES_DIRECTORY: &str = "bridge-files";

/// Directory with a link to the copied program. The link has the temporary instance's name, and so
/// has the process that executes it.
const PROGRAM_DIRECTORY: &str = "bridge-program";

const DEBUG_SOCKET_FLAG: &str = "--debug-socket-path";

/// Shortest time between two starts of a temporary instance.
pub const RESTART: Duration = Duration::from_secs(1);

/// Time for which the temporary etcd lives without a sign of life from the bridge. If the bridge
/// hangs, the node's etcd gets the data after this time.
const SIGN_OF_LIFE_TIMEOUT: Duration = Duration::from_secs(10);

/// Everything needed to start a temporary instance.
#[derive(Debug)]
pub struct Template {
    pub address: SocketAddrV4,
    /// Name of the program: kube-apiserver or etcd.
    name: &'static str,
    executable: Executable,
    log: PathBuf,
    audit: Option<PathBuf>,
    /// SELinux label of files that a container may write to.
    label: Option<String>,
    /// etcd's database: a file that only one process may use at a time, and that the instance
    /// cannot replace. An instance with such a file is killed when the bridge gives no more signs
    /// of life.
    exclusive: Option<PathBuf>,
}

#[derive(Debug)]
enum Executable {
    Program {
        _program: File,
        named: OwnedFd,
        name: &'static str,
        argv: Vec<OsString>,
        like: ProcessAttributes,
    },
    Container(Container),
}

impl Executable {
    /// Copies the program of a running process into the directory, under the given name.
    fn from_process(
        (pid, name): (i32, &'static str),
        mut argv: Vec<OsString>,
        like: &ProcessAttributes,
        directory: &Path,
    ) -> io::Result<Self> {
        let program = copy_program(Path::new(&format!("/proc/{pid}/exe")), name)?;
        let renamed = argv.first_mut().filter(|own| {
            Path::new(own)
                .file_name()
                .and_then(temporary_process_name)
                .is_some()
        });
        if let Some(own) = renamed {
            *own = name.into();
        }
        let named = link_program(&program, &directory.join(PROGRAM_DIRECTORY), name)?;
        Ok(Self::Program {
            _program: program,
            named,
            name,
            argv,
            like: like.clone(),
        })
    }
}

impl Template {
    /// A template for the plan's temporary kube-apiserver. Copies go into the bridge's directory,
    /// which exists and belongs to root.
    ///
    /// # Errors
    /// The program, or a file that the arguments name, cannot be copied.
    pub fn new(plan: &BridgePlan) -> io::Result<Self> {
        plan.process
            .read_while_alive(|pid| Self::from_plan(plan, pid))
    }

    fn from_plan(plan: &BridgePlan, pid: i32) -> io::Result<Self> {
        let directory = plan.options.directory.clone();
        let executable = match &plan.pod {
            Some(pod) => {
                let cgroup = cgroup::name_container_cgroup(OWN_NAME, *plan.temporary.ip());
                Executable::Container(Container::new(
                    pod,
                    &plan.argv,
                    (&plan.like, pid),
                    None,
                    cgroup,
                    &directory,
                )?)
            }
            None => {
                let mut argv = plan.argv.clone();
                if runs_as_root(&plan.like) {
                    argv = copy_files(argv, &directory.join(COPIES_DIRECTORY))?;
                    copy_certificate(&plan.command, &directory.join(TEMPORARY_CERT_DIR))?;
                }
                Executable::from_process((pid, TEMPORARY_NAME), argv, &plan.like, &directory)?
            }
        };
        let label = plan
            .pod
            .as_ref()
            .and_then(RunningPod::selinux_label)
            .map(str::to_owned);
        let log = directory.join(logs::INSTANCE_LOG);
        Ok(Self {
            address: plan.temporary,
            name: OWN_NAME,
            executable,
            log,
            audit: plan.audit.clone(),
            label,
            exclusive: None,
        })
    }

    /// A template for the temporary etcd, with a separate directory.
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn from_etcd_plan(
        plan: &temporary::Plan,
        directory: &Path,
        log: &Path,
    ) -> io::Result<Self> {
        plan.process.read_while_alive(|pid| {
            let (like, argv, database) = (&plan.like, &plan.argv, plan.database.path());
            let executable = match &plan.pod {
                Some(pod) => {
                    let within = Database::from_directory(&plan.data).path();
                    let pinned = Some((database.as_path(), within.as_path()));
                    Executable::Container(Container::new(
                        pod,
                        argv,
                        (like, pid),
                        pinned,
                        plan.cgroup(),
                        directory,
                    )?)
                }
                None => Executable::from_process(
                    (pid, TEMPORARY_ETCD_NAME),
                    argv.clone(),
                    like,
                    directory,
                )?,
            };
            let label = plan
                .pod
                .as_ref()
                .and_then(RunningPod::selinux_label)
                .map(str::to_owned);
            let (address, log) = (plan.members.temporary, log.to_owned());
            Ok(Self {
                address,
                name: ETCD,
                executable,
                log,
                audit: None,
                label,
                exclusive: Some(database),
            })
        })
    }

    /// Starts the instance. Must be called on a thread that lives as long as this process: the
    /// instance gets SIGKILL when the thread ends.
    ///
    /// # Errors
    /// Errors of execve(2) and of its preparation.
    pub fn start(&self) -> io::Result<(Child, Option<SignWriter>)> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.log)?;
        container::allow_writes(&log, self.label.as_deref())?;
        let (writer, signs) = match &self.exclusive {
            Some(_) => open_signs_of_life(SIGN_OF_LIFE_TIMEOUT)
                .map(|(writer, signs)| (Some(writer), Some(signs)))?,
            None => (None, None),
        };
        let mut command = match &self.executable {
            Executable::Program {
                named,
                name,
                argv,
                like,
                ..
            } => {
                // The child inherits the descriptor, which keeps its number in the child and is not
                // closed by execve(2).
                let mut command =
                    Command::new(format!("/proc/self/fd/{}/{name}", named.as_raw_fd()));
                if let Some((name, arguments)) = argv.split_first() {
                    command.arg0(name).args(arguments);
                }
                match &self.exclusive {
                    Some(file) => {
                        let (pinned, like) = (vec![file.clone()], Some(like.clone()));
                        run_in_namespaces(
                            &mut command,
                            Enclosure {
                                pinned,
                                attributes: like,
                                signs,
                                ..Enclosure::default()
                            },
                        )?;
                    }
                    None => like.apply_attributes_to_command(&mut command),
                }
                command
            }
            Executable::Container(container) => container.command(signs)?,
        };
        command
            .stdin(std::process::Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = tokio::process::Command::from(command)
            .kill_on_drop(true)
            .spawn()?;
        if let Executable::Program { like, .. } = &self.executable
            && self.exclusive.is_none()
            && let Some(Err(error)) = child.id().map(|pid| like.set_oom_score(pid))
        {
            tracing::info!(%error, "the OOM score of the temporary {} differs from that of the running process", self.name);
        }
        Ok((child, writer))
    }

    /// The signal that kills the temporary instance. The supervisor of an instance with namespaces
    /// kills all processes in them, and removes the instance's cgroup.
    pub fn kill_signal(&self) -> Signal {
        match self.executable {
            Executable::Program { .. } if self.exclusive.is_none() => Signal::SIGKILL,
            Executable::Program { .. } | Executable::Container(_) => KILL_CHILD,
        }
    }

    /// Log files of the instance. They are kept when the bridge has ended.
    pub fn log_paths(&self) -> Vec<PathBuf> {
        [self.log.clone()]
            .into_iter()
            .chain(self.audit.clone())
            .collect()
    }
}

/// The process of a temporary instance. After its end, it can be started again from the template.
#[derive(Debug)]
pub struct TemporaryProcess {
    pub template: Template,
    child: Option<Child>,
    /// Sender of signs of life, if the process depends on them.
    signs: Option<SignWriter>,
    /// Number of exits and failed starts.
    pub ends: u32,
    /// Time of the last start.
    pub started: Option<Instant>,
}

impl TemporaryProcess {
    pub fn new(template: Template) -> Self {
        Self {
            template,
            child: None,
            signs: None,
            ends: 0,
            started: None,
        }
    }

    pub fn is_running(&self) -> bool {
        self.child.is_some()
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// Starts the process as [`Template::start`] does, unless the last start was less than `pause`
    /// ago. Returns true if a start was tried. A failed start counts as an exit.
    pub fn start(&mut self, pause: Duration) -> bool {
        if self
            .started
            .is_some_and(|started| started.elapsed() < pause)
        {
            return false;
        }
        let Template { name, address, .. } = &self.template;
        self.started = Some(Instant::now());
        match self.template.start() {
            Ok((child, signs)) => {
                tracing::info!(pid = child.id(), %address, "the temporary {name} starts");
                (self.child, self.signs) = (Some(child), signs);
            }
            Err(error) => {
                self.ends += 1;
                tracing::info!(%error, "the temporary {name} cannot be started");
            }
        }
        true
    }

    /// Gives a sign of life. Must be called repeatedly by the thread that decides: after 10 s
    /// without a sign, an etcd is killed.
    pub fn send_sign_of_life(&self) {
        if let Some(signs) = &self.signs {
            signs.send_sign();
        }
    }

    /// Reaps the process if it has exited.
    pub fn reap_if_exited(&mut self) {
        if let Some(Ok(Some(status))) = self.child.as_mut().map(Child::try_wait) {
            (self.child, self.signs) = (None, None);
            self.ends += 1;
            tracing::info!(%status, "the temporary {} ended", self.template.name);
        }
    }

    pub fn send_signal(&self, signal: Signal) {
        let pid = self.pid().and_then(|pid| i32::try_from(pid).ok());
        if let Some(Err(error)) = pid.map(|pid| kill(Pid::from_raw(pid), signal)) {
            tracing::info!(%error, %signal, "cannot signal the temporary {}", self.template.name);
        }
    }

    /// Waits for the process to exit. Never returns if the process does not run.
    pub async fn wait_for_exit(&mut self) {
        match &mut self.child {
            Some(child) => drop(child.wait().await),
            None => std::future::pending().await,
        }
    }
}

/// True if the instance may read root's files. An instance of another user reads the running
/// kube-apiserver's files, and writes only logs.
fn runs_as_root(like: &ProcessAttributes) -> bool {
    like.uid == 0
}

/// Command line of the temporary instance, which listens on `address`. `advertise` is the
/// advertised address if the running kube-apiserver's arguments name none. The temporary instance
/// writes its files to `directory`, except for the audit log, which goes beside the existing audit
/// log. `like` has the running process's attributes, and is `None` in a container, which has its
/// own copies of files.
///
/// # Errors
/// A flag that must be replaced has no value.
pub fn temporary_arguments(
    command: &[OsString],
    like: Option<&ProcessAttributes>,
    address: SocketAddrV4,
    advertise: IpAddr,
    instance: &InstanceId,
    directory: &Path,
) -> Result<Vec<OsString>, ArgsError> {
    let wanted = WantedValues {
        address: *address.ip(),
        port: address.port(),
        advertise,
        instance,
    };
    let mut argv = args::rewrite_command(command, &wanted)?.argv;
    // The node's kube-apiserver maintains the Service, and must be the only instance that removes
    // the node's address.
    args::set_flag(&mut argv, "--endpoint-reconciler-type", "none".as_ref());
    if let Some(audit) = audit_log(&argv) {
        let own = bridge_audit_log(&audit);
        args::set_flag(&mut argv, AUDIT_LOG, own.as_os_str());
    }
    // kube-apiserver writes to the directory only if no certificate is given.
    if like.is_some_and(runs_as_root) && args::flag_value(&argv, "--tls-cert-file").is_none() {
        args::set_flag(
            &mut argv,
            "--cert-dir",
            directory.join(TEMPORARY_CERT_DIR).as_os_str(),
        );
    }
    if args::flag_value(&argv, DEBUG_SOCKET_FLAG).is_some_and(|path| !path.is_empty()) {
        // The debug socket is turned off, because the temporary instance would take over the
        // running kube-apiserver's socket.
        args::set_flag(&mut argv, DEBUG_SOCKET_FLAG, "".as_ref());
    }
    Ok(argv)
}

/// The bridge's audit log: `audit.log` becomes `audit-bridge.log`.
fn bridge_audit_log(path: &Path) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push("-bridge");
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

/// Copies a program into memory. Children inherit the descriptor, because a script's interpreter
/// reads the script by its name in /proc.
fn copy_program(program: &Path, name: &str) -> io::Result<File> {
    let mut copy = create_program_in_memory(name)?;
    io::copy(&mut File::open(program)?, &mut copy)?;
    copy.set_permissions(fs::Permissions::from_mode(0o555))?;
    Ok(copy)
}

/// Creates a directory in which the program has the temporary instance's name, because a process is
/// named after the executed file. Through the returned descriptor, child processes reach the
/// directory, whichever user they run as.
fn link_program(program: &File, directory: &Path, name: &str) -> io::Result<OwnedFd> {
    fs::create_dir_all(directory)?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o711))?;
    symlink(
        format!("/proc/self/fd/{}", program.as_raw_fd()),
        directory.join(name),
    )?;
    Ok(rustix::fs::open(
        directory,
        OFlags::PATH | OFlags::DIRECTORY,
        Mode::empty(),
    )?)
}

/// Copies the files that the arguments name into a new directory, and returns the arguments with
/// the paths of the copies. Configuration is not copied, since it may name more files relative to
/// itself.
fn copy_files(argv: Vec<OsString>, directory: &Path) -> io::Result<Vec<OsString>> {
    fs::create_dir_all(directory)?;
    let mut flag = OsString::new();
    let mut copied = Vec::with_capacity(argv.len());
    for (at, arg) in argv.into_iter().enumerate() {
        let bytes = arg.as_bytes();
        let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
            Some(end) if bytes.starts_with(b"--") => (&bytes[..end], &bytes[end + 1..]),
            _ if bytes.starts_with(b"--") => {
                flag.clone_from(&arg);
                copied.push(arg);
                continue;
            }
            _ => (flag.as_bytes(), bytes),
        };
        let path = Path::new(OsStr::from_bytes(value));
        let name = String::from_utf8_lossy(name);
        let secret = ["cert", "key", "ca-file", "cafile", "token"]
            .iter()
            .any(|part| name.contains(part));
        if !secret || name.contains("config") || !path.is_absolute() || !path.is_file() {
            copied.push(arg);
            continue;
        }
        let own = directory.join(format!(
            "{at}-{}",
            path.file_name().unwrap_or_default().to_string_lossy()
        ));
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&own)?;
        let copy = open_regular_file(path).and_then(|mut from| io::copy(&mut from, &mut file));
        copy.map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("cannot copy {}: {error}", path.display()),
            )
        })?;
        let mut new = bytes[..bytes.len() - value.len()].to_vec();
        new.extend_from_slice(own.as_os_str().as_bytes());
        copied.push(OsString::from_vec(new));
    }
    Ok(copied)
}

/// Copies the certificate that the running kube-apiserver made, so that clients get the same
/// certificate.
fn copy_certificate(command: &[OsString], directory: &Path) -> io::Result<()> {
    if args::flag_value(command, "--tls-cert-file").is_some() {
        return Ok(());
    }
    fs::create_dir_all(directory)?;
    let from =
        args::flag_value(command, "--cert-dir").map_or(Path::new(CERTIFICATE_DIRECTORY), Path::new);
    for name in CERTIFICATE_FILES {
        none_if_missing(fs::copy(from.join(name), directory.join(name)))?;
    }
    Ok(())
}

/// Removes the files of a temporary instance, except for logs.
pub fn remove_files(directory: &Path) {
    container::remove_leftovers(directory);
    container::remove_leftovers(&directory.join(ETCD));
    for name in [
        TEMPORARY_CERT_DIR,
        COPIES_DIRECTORY,
        PROGRAM_DIRECTORY,
        ETCD,
    ] {
        let _ = fs::remove_dir_all(directory.join(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_argv(text: &str) -> Vec<OsString> {
        text.split(' ').map(OsString::from).collect()
    }

    fn render_temporary_arguments(uid: u32, text: &str) -> String {
        let address = "127.1.2.3:7000".parse().unwrap();
        let instance = InstanceId::parse("bridge").unwrap();
        let like = ProcessAttributes {
            uid,
            ..ProcessAttributes::of(std::process::id().try_into().unwrap()).unwrap()
        };
        let own = temporary_arguments(
            &parse_argv(text),
            Some(&like),
            address,
            [10, 0, 0, 5].into(),
            &instance,
            Path::new("/b"),
        )
        .unwrap();
        own.join(OsStr::new(" ")).into_string().unwrap()
    }

    #[test]
    fn the_temporary_instance_has_its_own_address_and_files() {
        let given = "kube-apiserver --secure-port 6443 --audit-log-path=/var/log/audit.log --debug_socket_path /run/x";
        assert_eq!(
            render_temporary_arguments(0, given),
            "kube-apiserver --bind-address=127.1.2.3 --secure-port=7000 --advertise-address=10.0.0.5 \
             --endpoint-reconciler-type=none --audit-log-path=/var/log/audit-bridge.log --cert-dir=/b/bridge-cert-dir \
             --debug-socket-path="
        );
        assert!(
            !render_temporary_arguments(1000, given).contains("--cert-dir"),
            "it could not write there"
        );
        let given = "k --bind-address=:: --advertise-address=10.9.9.9 --tls-cert-file=/c --audit-log-path=- --endpoint-reconciler-type=lease";
        assert_eq!(
            render_temporary_arguments(0, given),
            "k --advertise-address=10.9.9.9 --tls-cert-file=/c --audit-log-path=- --bind-address=127.1.2.3 --secure-port=7000 \
             --endpoint-reconciler-type=none"
        );
    }

    #[test]
    fn clients_see_the_certificate_that_the_running_instance_made() {
        let temp = tempfile::tempdir().unwrap();
        for name in CERTIFICATE_FILES {
            fs::write(temp.path().join(name), name).unwrap();
        }
        let own = temp.path().join(TEMPORARY_CERT_DIR);
        copy_certificate(
            &parse_argv(&format!("k --cert-dir={}", temp.path().display())),
            &own,
        )
        .unwrap();
        assert_eq!(
            CERTIFICATE_FILES.map(|name| fs::read_to_string(own.join(name)).unwrap()),
            CERTIFICATE_FILES
        );
        remove_files(temp.path());
        copy_certificate(&parse_argv("k --tls-cert-file=/c"), &own).unwrap();
        assert!(!own.exists());
    }

    #[test]
    fn files_that_the_arguments_name_are_copied() {
        let temp = tempfile::tempdir().unwrap();
        let path = |name: &str| temp.path().join(name).display().to_string();
        for name in ["ca.crt", "sa.key", "admission.yaml"] {
            fs::write(path(name), name).unwrap();
        }
        let (ca, key, config) = (path("ca.crt"), path("sa.key"), path("admission.yaml"));
        let given = parse_argv(&format!(
            "k --client-ca-file={ca} --service-account-key-file {key} --admission-control-config-file={config} \
             --etcd-cafile=/nonexistent --v=2 --log-file={ca}"
        ));
        let own = copy_files(given.clone(), &temp.path().join("files")).unwrap();
        let changed: Vec<_> = (0..given.len())
            .filter(|at| given[*at] != own[*at])
            .collect();
        assert_eq!(changed, [1, 3]);
        let copy = own[3].clone();
        fs::write(&key, "another").unwrap();
        assert_eq!(fs::read_to_string(&copy).unwrap(), "sa.key");
        assert_eq!(
            fs::metadata(&copy).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(
            own[1]
                .to_string_lossy()
                .starts_with(&format!("--client-ca-file={}", path("files/1-ca.crt")))
        );
    }
}
