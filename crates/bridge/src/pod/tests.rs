use super::spec::{Changes, Replacement, Spec};
use super::tree::{self, MountPoints, Size};
use super::{AUDIT_MOUNT, CopiedFile, RunningPod, container, runtime};
use crate::report::Report;
use berth_testing::namespace::{print_skipped, rerun_in_user_namespace};
use rustix::fs::FileType;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A specification that containerd 1.6 wrote for kubeadm's kube-apiserver, with shortened lists.
const CONTAINERD: &str = include_str!("samples/containerd.json");

const ID: &str = "157e1c37b1b87ea79d0c35a8f01293692bfbc5f1fa9ff797c924b49c8ca00885";

fn read_sample() -> Value {
    serde_json::from_str(CONTAINERD).unwrap()
}

fn parse_spec(json: &Value) -> Spec {
    Spec::parse(json.to_string().as_bytes()).unwrap()
}

fn apply_changes(json: &Value) -> Value {
    let instead = BTreeMap::from([
        (
            "/etc/kubernetes/pki".into(),
            Replacement::Copy("/b/files/6".into()),
        ),
        ("/dev/shm".into(), Replacement::Memory),
    ]);
    let changes = Changes {
        args: vec!["kube-apiserver".into(), "--secure-port=7000".into()],
        root: Path::new("/b/root"),
        cgroup: "/own",
        oom_score_adj: -997,
        limits: vec![("RLIMIT_NOFILE".into(), 1024, 4096)],
        replacements: &instead,
        extra_mounts: &[(Path::new("/run/audit"), Path::new(AUDIT_MOUNT))],
    };
    parse_spec(json).apply(changes).unwrap()
}

/// A mount of a directory or file of the node, which the container may write to.
fn make_bind(source: &str, place: &str) -> Value {
    json!({"destination": place, "source": source, "type": "bind", "options": ["rbind", "rw"]})
}

/// A pod with the given specification, and with copies of files of the node, each mounted at some
/// place.
fn make_pod(json: &Value, files: &[(&str, &str)]) -> RunningPod {
    let kept = |(path, mounted): &(&str, &str)| CopiedFile {
        path: path.into(),
        mounted: Some(mounted.into()),
    };
    RunningPod {
        spec: parse_spec(json),
        runtime: PathBuf::new(),
        manifest: super::MANIFEST.into(),
        files: files.iter().map(kept).collect(),
        memory: Vec::new(),
        bytes: 0,
    }
}

/// The node's files that have copies.
fn list_paths(pod: &RunningPod) -> Vec<&Path> {
    pod.files.iter().map(|kept| kept.path.as_path()).collect()
}

#[test]
fn only_what_must_differ_is_changed() {
    let mut wanted = read_sample();
    wanted.as_object_mut().unwrap().remove("annotations");
    wanted["root"] = json!({"path": "/b/root"});
    for (part, key, value) in [
        (
            "process",
            "args",
            json!(["kube-apiserver", "--secure-port=7000"]),
        ),
        ("process", "oomScoreAdj", json!(-997)),
        (
            "process",
            "rlimits",
            json!([{"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 4096}]),
        ),
        ("process", "terminal", json!(false)),
        ("linux", "cgroupsPath", json!("/own")),
        // The running pod has `hostNetwork`, so the temporary instance gets no network and no uts
        // namespace either.
        (
            "linux",
            "namespaces",
            json!([{"type": "pid"}, {"type": "ipc"}, {"type": "mount"}]),
        ),
    ] {
        wanted[part][key] = value;
    }
    // The CPU share of the running pod is left out: in the bridge's own cgroup, which competes with
    // the cgroup of all pods, that share would be too small.
    assert_eq!(
        wanted["linux"]["resources"]["cpu"]
            .as_object_mut()
            .unwrap()
            .remove("shares"),
        Some(256.into())
    );
    let mounts = wanted["mounts"].as_array_mut().unwrap();
    for mount in mounts.iter_mut() {
        match mount["destination"].as_str() {
            Some("/etc/kubernetes/pki") => mount["source"] = "/b/files/6".into(),
            Some(place @ "/dev/shm") => {
                let options = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"];
                *mount = json!({"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options});
            }
            _ => {}
        }
    }
    let options = ["bind", "rprivate", "rw"];
    mounts.push(
        json!({"destination": AUDIT_MOUNT, "type": "bind", "source": "/run/audit", "options": options}),
    );
    assert_eq!(apply_changes(&read_sample()), wanted);
}

#[test]
fn parts_that_belong_to_the_pod_are_dropped() {
    let mut json = read_sample();
    json["hooks"] = json!({"prestart": [{"path": "/bin/false"}]});
    json["hostname"] = "node".into();
    json["linux"]["intelRdt"] = json!({"closID": "x"});
    json["linux"]["mountLabel"] = "system_u:object_r:container_file_t:s0".into();
    json["process"]["terminal"] = true.into();
    let after = apply_changes(&json);
    assert_eq!(
        (
            after.get("hooks"),
            after.get("hostname"),
            after["linux"].get("intelRdt")
        ),
        (None, None, None)
    );
    assert_eq!(after["process"]["terminal"], false);
    assert_eq!(
        parse_spec(&after).selinux_label(),
        Some("system_u:object_r:container_file_t:s0")
    );
    assert!(!parse_spec(&json).has_namespace("user"));
    json["linux"]["namespaces"]
        .as_array_mut()
        .unwrap()
        .push(json!({"type": "user"}));
    assert!(parse_spec(&json).has_namespace("user"));
}

#[test]
fn json_that_is_no_specification_is_refused() {
    for (part, wrong) in [
        ("process", json!("x")),
        ("root", json!([])),
        ("mounts", json!([1])),
        ("linux", Value::Null),
    ] {
        let mut json = read_sample();
        json[part] = wrong;
        assert!(Spec::parse(json.to_string().as_bytes()).is_err(), "{part}");
    }
    for wrong in ["", "{", "[]", "null", "{}"] {
        assert!(Spec::parse(wrong.as_bytes()).is_err(), "{wrong}");
    }
}

#[test]
fn files_of_the_node_are_found_by_their_names_in_the_container() {
    let mut json = read_sample();
    json["mounts"]
        .as_array_mut()
        .unwrap()
        .push(make_bind("/srv/more", "/etc/kubernetes/pki/more"));
    let spec = parse_spec(&json);
    let on_node = |path: &str| {
        spec.find_mounted_path(Path::new(path))
            .map(|(_, on_node)| on_node)
    };
    assert_eq!(
        on_node("/etc/kubernetes/pki/ca.crt"),
        Some("/etc/kubernetes/pki/ca.crt".into())
    );
    assert_eq!(
        on_node("/etc/kubernetes/pki/more/x"),
        Some("/srv/more/x".into())
    );
    assert_eq!(
        on_node("/etc/kubernetes/pki/more"),
        Some("/srv/more".into())
    );
    assert_eq!(on_node("/etc/kubernetes/pkix"), None);
    assert_eq!(on_node("/sys/fs/cgroup/x"), None, "no file of the node");
}

#[test]
fn copies_replace_files_of_the_node() {
    let files = [
        ("/etc/kubernetes", "/k"),
        ("/etc/kubernetes/pki", "/k/pki"),
        ("/etc/hosts", "/etc/hosts"),
    ];
    let pod = make_pod(&read_sample(), &files);
    let copy = |path: &str| {
        pod.path_of_copy(Path::new(path), Path::new("/b"))
            .display()
            .to_string()
    };
    assert_eq!(
        copy("/etc/kubernetes/pki/ca.crt"),
        "/b/bridge-memory/files/1/ca.crt"
    );
    assert_eq!(
        copy("/etc/kubernetes/admin.conf"),
        "/b/bridge-memory/files/0/admin.conf"
    );
    assert_eq!(copy("/etc/hosts"), "/b/bridge-memory/files/2");
    assert_eq!(copy("/etc/hostname"), "/etc/hostname");
}

#[test]
fn the_audit_log_stays_on_the_node() {
    let mut json = read_sample();
    let mounts = json["mounts"].as_array_mut().unwrap();
    mounts.extend([
        make_bind("/var/log/k8s", "/audit"),
        make_bind("/var/log/one.log", "/one.log"),
    ]);
    let pod = make_pod(&json, &[("/etc/kubernetes/pki", "/etc/kubernetes/pki")]);
    let kept = |path: &str| {
        let mut argv: Vec<OsString> = vec!["k".into(), format!("--audit-log-path={path}").into()];
        let on_node = pod.keep_audit_log(&mut argv, Path::new("/b"));
        (
            argv[1].to_str().unwrap()["--audit-log-path=".len()..].to_owned(),
            on_node,
        )
    };
    assert_eq!(
        kept("/audit/x.log"),
        ("/audit/x.log".into(), Some("/var/log/k8s/x.log".into()))
    );
    for own in ["-", "/dev/stdout", "/proc/self/fd/2"] {
        assert_eq!(kept(own), (own.into(), None));
    }
    // Audit logs that are moved: a path that is not on the node, a path in memory, a mounted file
    // that cannot be rotated, and a path in a read-only directory.
    for path in [
        "/x.log",
        "/etc/kubernetes/pki/x.log",
        "/one.log",
        "/etc/ssl/certs/x.log",
    ] {
        let name = Path::new(path).file_name().unwrap().to_str().unwrap();
        assert_eq!(
            kept(path),
            (
                format!("{AUDIT_MOUNT}/{name}"),
                Some(format!("/b/audit/{name}").into())
            ),
            "{path}"
        );
    }
    // The audit log in the bridge's directory must not grow without limit, so the flags that rotate
    // it are set.
    let bounded = |path: &str| {
        let mut argv = vec![
            "k".into(),
            format!("--audit-log-path={path}").into(),
            "--audit-log-maxsize=100".into(),
        ];
        let _ = pod.keep_audit_log(&mut argv, Path::new("/b"));
        argv[2..]
            .iter()
            .map(|arg| arg.to_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(bounded("/audit/x.log"), ["--audit-log-maxsize=100"]);
    assert_eq!(
        bounded("/x.log"),
        ["--audit-log-maxsize=16", "--audit-log-maxbackup=1"]
    );
}

#[test]
fn containers_are_identified_by_their_cgroups() {
    for line in [
        format!("0::/kubepods/burstable/podc3f593b16839e7eddb23ded3c0f17b4a/{ID}\n"),
        format!(
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podc3f5.slice/cri-containerd-{ID}.scope\n"
        ),
        format!("0::/kubepods.slice/kubepods-podc3f5.slice/crio-{ID}.scope/container\n"),
        format!("12:pids:/\n1:name=systemd:/kubepods/podx/{ID}\n0::/\n"),
    ] {
        assert_eq!(runtime::parse_container_id(&line), Some(ID), "{line}");
    }
    for line in [
        "",
        "0::/",
        "0::/system.slice/kubelet.service",
        &format!("0::/{ID}0"),
        &format!("0::/{}", ID.to_uppercase()),
    ] {
        assert_eq!(runtime::parse_container_id(line), None, "{line}");
    }
}

/// A process that plays the shim of a container.
struct Parent(Child);

impl Parent {
    /// Starts a parent with the given name, arguments and directory; and returns the process in its
    /// container, too.
    fn start(name: &str, arguments: &[&str], directory: &Path) -> (Self, i32) {
        let mut shell = Command::new("sh");
        // The inner shell ends at the end of its input, when the parent is dropped.
        shell
            .arg0(name)
            .args(["-c", "sh -c 'echo $$; read line'; true"])
            .args(arguments)
            .current_dir(directory);
        shell.env(
            "PATH",
            format!("{}:/usr/bin:/bin", directory.join("bin").display()),
        );
        let mut child = shell
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        (Self(child), line.trim().parse().unwrap())
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn write_program(path: &Path) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, "").unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn containerds_shim_leads_to_the_specification() {
    let temp = tempfile::tempdir().unwrap();
    let sandbox = temp.path().join("sandbox");
    write_program(&sandbox.join("bin/crun"));
    fs::create_dir(temp.path().join(ID)).unwrap();
    fs::write(temp.path().join(ID).join("config.json"), CONTAINERD).unwrap();
    let (_parent, pid) = Parent::start(
        "/usr/bin/containerd-shim-runc-v2",
        &["-namespace", "k8s.io"],
        &sandbox,
    );
    let shim = runtime::Shim::of_process(pid);
    assert_eq!(
        runtime::read_spec(shim.as_ref(), ID).unwrap(),
        parse_spec(&read_sample())
    );
    // A program beside the shim, which this machine may have, has priority over a program in the
    // shim's PATH.
    let found = shim.as_ref().unwrap().find_program().unwrap();
    let beside = fs::canonicalize("/bin/sh").unwrap().with_file_name("runc");
    assert!(
        found == sandbox.join("bin/crun") || found == beside,
        "{}",
        found.display()
    );
    fs::write(temp.path().join(ID).join("config.json"), "{").unwrap();
    let tried = runtime::read_spec(shim.as_ref(), ID).unwrap_err();
    assert!(tried.contains(&format!("{ID}/config.json: EOF")), "{tried}");
}

#[test]
fn conmon_leads_to_the_specification_and_the_runtime() {
    let temp = tempfile::tempdir().unwrap();
    let (bundle, crun) = (temp.path().join("userdata"), temp.path().join("crun"));
    write_program(&crun);
    fs::create_dir(&bundle).unwrap();
    fs::write(bundle.join("config.json"), CONTAINERD).unwrap();
    let arguments = ["-b", bundle.to_str().unwrap(), "-r", crun.to_str().unwrap()];
    let (_parent, pid) = Parent::start("/usr/bin/conmon", &arguments, temp.path());
    let shim = runtime::Shim::of_process(pid);
    assert!(runtime::read_spec(shim.as_ref(), ID).is_ok());
    assert_eq!(shim.unwrap().find_program(), Some(crun));
    // The test process itself does not run in a container, so it has no shim.
    assert!(runtime::Shim::of_process(std::process::id().try_into().unwrap()).is_none());
}

/// etcd's manifest is not copied, whatever its name, because the bridge never restores it.
#[test]
fn a_manifest_is_copied_only_for_a_restore() {
    let temp = tempfile::tempdir().unwrap();
    let mut measured = make_pod(&read_sample(), &[]);
    measured.manifest = temp.path().join("manifests/etcd.yaml");
    measured.measure_mounts(&open_path(temp.path()), &mut Report::default());
    assert!(
        measured
            .files
            .iter()
            .all(|file| file.path != measured.manifest),
        "{:?}",
        measured.files
    );
    let path = measured.manifest.clone();
    assert_eq!(
        measured.with_manifest().files.pop(),
        Some(CopiedFile {
            path,
            mounted: None
        })
    );
}

#[test]
fn a_copy_has_modes_and_links_and_nothing_more() {
    let temp = tempfile::tempdir().unwrap();
    let (from, to) = (temp.path().join("from"), temp.path().join("to"));
    let allow =
        |path: PathBuf, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    fs::create_dir_all(from.join("a/b")).unwrap();
    fs::write(from.join("a/b/key"), "secret").unwrap();
    fs::write(from.join("a/program"), vec![7; 5000]).unwrap();
    for (path, mode) in [("a/b/key", 0o400), ("a/b", 0o500), ("a/program", 0o4755)] {
        allow(from.join(path), mode);
    }
    // Links are not followed: their targets are unreachable from here.
    symlink("/etc/passwd", from.join("link")).unwrap();
    symlink("../..", from.join("a/up")).unwrap();
    symlink("x/".repeat(64), from.join("a/long")).unwrap();
    let open = open_path(&from);
    // The entries are three directories, two files and three links. Their content is 6 bytes and
    // 5,000 bytes in the files, and 128 bytes in the long link.
    for (page, pages) in [(4096, 4), (65536, 3)] {
        let size = tree::measure_in_pages(&open, MountPoints::Leave, u64::MAX, page).unwrap();
        assert_eq!(
            size,
            Size {
                bytes: 8 * 4096 + pages * page,
                special: false
            },
            "{page}"
        );
    }
    let page = u64::try_from(
        nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
            .unwrap()
            .unwrap(),
    )
    .unwrap();
    let measured = tree::measure_tree(&open, MountPoints::Leave, u64::MAX).unwrap();
    assert_eq!(
        measured,
        tree::measure_in_pages(&open, MountPoints::Leave, u64::MAX, page).unwrap()
    );
    tree::copy_tree(&open, &to, MountPoints::Leave).unwrap();
    for path in [
        "",
        "a",
        "a/b",
        "a/b/key",
        "a/program",
        "link",
        "a/up",
        "a/long",
    ] {
        let [old, new] = [&from, &to].map(|root| {
            let meta = fs::symlink_metadata(root.join(path)).unwrap();
            (meta.mode(), meta.uid(), meta.gid())
        });
        assert_eq!(old, new, "{path}");
    }
    assert_eq!(fs::read_to_string(to.join("a/b/key")).unwrap(), "secret");
    assert_eq!(
        fs::read_link(to.join("link")).unwrap(),
        Path::new("/etc/passwd")
    );
    assert!(
        tree::copy_tree(&open, &to, MountPoints::Leave).is_err(),
        "nothing is written into what is there"
    );
    // A mount may be a single file instead of a directory.
    let one = temp.path().join("one");
    tree::copy_tree(&open_path(&from.join("a/b/key")), &one, MountPoints::Follow).unwrap();
    assert_eq!(fs::read_to_string(one).unwrap(), "secret");
    let _socket = UnixListener::bind(from.join("a/socket")).unwrap();
    assert!(
        tree::measure_tree(&open, MountPoints::Leave, u64::MAX)
            .unwrap()
            .special
    );
    // Let the owner remove the files again.
    for root in [from, to] {
        allow(root.join("a/b"), 0o700);
    }
}

#[test]
fn a_large_directory_is_not_searched_and_an_unreadable_one_is_noted() {
    let temp = tempfile::tempdir().unwrap();
    let etc = temp.path().join("etc");
    fs::create_dir(&etc).unwrap();
    for number in 0..100 {
        let file = fs::File::create(etc.join(number.to_string())).unwrap();
        file.set_len(1 << 20).unwrap();
    }
    let most = 10 << 20;
    let size = tree::measure_tree(&open_path(&etc), MountPoints::Follow, most).unwrap();
    assert!(
        size.bytes > most && size.bytes <= most + (1 << 20) + 4096,
        "{size:?}"
    );

    fs::create_dir(temp.path().join("small")).unwrap();
    let deep = temp.path().join("deep").join("d/".repeat(120));
    fs::create_dir_all(&deep).unwrap();
    let mut json = read_sample();
    let read_only =
        |place| json!({"destination": place, "source": place, "type": "bind", "options": ["ro"]});
    json["mounts"] = ["/etc", "/gone", "/deep", "/small"]
        .map(read_only)
        .to_vec()
        .into();
    let (mut pod, mut report) = (make_pod(&json, &[]), Report::default());
    pod.measure_mounts(&open_path(temp.path()), &mut report);
    assert_eq!(report.errors, [""; 0]);
    for (note, part) in report.notes.iter().zip([
        "/etc has more than 64 MiB",
        "/gone cannot be copied",
        "/deep cannot be copied",
    ]) {
        assert!(
            note.starts_with(part) && note.ends_with("sees the changes that COMMAND makes"),
            "{note}"
        );
    }
    assert_eq!(
        (report.notes.len(), list_paths(&pod)),
        (3, vec![Path::new("/small")])
    );
}

#[test]
fn files_that_the_container_writes_have_its_label() {
    let temp = tempfile::tempdir().unwrap();
    let mut json = read_sample();
    json["linux"]["mountLabel"] = "system_u:object_r:container_file_t:s0:c1,c2".into();
    let labelled = make_pod(&json, &[]);
    let directory = fs::File::open(temp.path()).unwrap();
    let label = || {
        let mut value = [0; 64];
        rustix::fs::fgetxattr(&directory, "security.selinux", &mut value)
            .map(|length| value[..length].to_vec())
    };
    let before = label();
    container::allow_writes(&directory, make_pod(&read_sample(), &[]).selinux_label()).unwrap();
    assert_eq!(
        label(),
        before,
        "where there is no SELinux, there is no label"
    );
    match container::allow_writes(&directory, labelled.selinux_label()) {
        Err(error) if error.to_string().contains("not supported") => {
            print_skipped(&error.to_string());
        }
        done => {
            done.unwrap();
            assert_eq!(
                label().unwrap(),
                b"system_u:object_r:container_file_t:s0:c1,c2\0"
            );
        }
    }
}

#[test]
fn directories_that_the_runtime_made_for_the_container_are_copied() {
    let temp = tempfile::tempdir().unwrap();
    fs::create_dir_all(temp.path().join("run/secrets")).unwrap();
    fs::create_dir_all(temp.path().join("var/log")).unwrap();
    // The source of a mount as CRI-O makes it by default. CRI-O removes this directory together
    // with the container.
    let own = format!("/run/containers/storage/overlay-containers/{ID}/userdata/run/secrets");
    let mut json = read_sample();
    json["mounts"] = json!([
        make_bind(&own, "/run/secrets"),
        make_bind("/var/log", "/var/log")
    ]);
    let mut pod = make_pod(&json, &[]);
    pod.measure_mounts(&open_path(temp.path()), &mut Report::default());
    assert_eq!(list_paths(&pod), [Path::new(&own)]);
}

#[test]
fn a_fifo_in_place_of_a_file_does_not_block() {
    let temp = tempfile::tempdir().unwrap();
    nix::unistd::mkfifo(&temp.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (directory, fifo) = (open_path(temp.path()), open_path(&temp.path().join("fifo")));
    let (to, opened) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = to.send([
            tree::open_file(directory.as_fd(), c"fifo"),
            tree::open_file(fifo.as_fd(), c""),
        ]);
    });
    for opened in opened
        .recv_timeout(std::time::Duration::from_secs(30))
        .expect("it waits")
    {
        assert_eq!(opened.unwrap_err().kind(), std::io::ErrorKind::Other);
    }
}

fn open_path(path: &Path) -> std::os::fd::OwnedFd {
    let root = tree::open_root(std::process::id().try_into().unwrap()).unwrap();
    tree::open_within(&root, path).unwrap()
}

#[test]
fn mounts_in_a_containers_root_are_left_out() {
    let temp = tempfile::tempdir().unwrap();
    let (root, to) = (temp.path().join("root"), temp.path().join("to"));
    fs::create_dir_all(root.join("proc")).unwrap();
    fs::create_dir_all(root.join("etc")).unwrap();
    for file in ["etc/hosts", "etc/os-release"] {
        fs::write(root.join(file), file).unwrap();
    }
    let mounts = format!(
        "mount -t tmpfs x {root}/proc && echo x > {root}/proc/x && mount --bind {root}/etc/os-release {root}/etc/hosts && echo $$ && read line",
        root = root.display()
    );
    let mut shell = Command::new("unshare");
    shell
        .args(["--mount", "sh", "-c", &mounts])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = shell.stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let Ok(pid) = line.trim().parse() else {
        child.wait().unwrap();
        return rerun_in_user_namespace("no mount namespace can be had");
    };
    let seen = tree::open_root(pid).unwrap();
    let root = tree::open_within(&seen, &root).unwrap();
    tree::copy_tree(&root, &to, MountPoints::Leave).unwrap();
    let names = |path: &Path| {
        let mut names: Vec<_> = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(&to), ["etc"]);
    assert_eq!(names(&to.join("etc")), ["os-release"]);
    let followed = temp.path().join("followed");
    tree::copy_tree(&root, &followed, MountPoints::Follow).unwrap();
    assert_eq!(names(&followed.join("proc")), ["x"]);
    assert_eq!(
        tree::read_file_type(&tree::open_within(&seen, Path::new("/etc/passwd")).unwrap()).unwrap(),
        FileType::RegularFile
    );
    drop(child.stdin.take());
    child.wait().unwrap();
}
