//! The files of a release (`scripts/release.sh`), installed as docs/get.md says: on a node with the
//! fewest packages of Debian and without a compiler, from a registry and a file server with the
//! names of the real ones.

use crate::support::process::{Running, expect_status, output_of};
use crate::support::{eventually, net::find_listening};
use berth_rehearse::record::log::Recorder;
use berth_rehearse::testbed::{
    certs,
    store::{self, Store},
};
use libtest_mimic::Failed;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

pub(crate) const TOOLS: &[&str] = &["curl", "debootstrap", "docker-registry", "skopeo"];

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Name of the image's registry in the documents.
const REGISTRY: &str = "registry.example";
/// Programs that the node must not have.
const COMPILERS: [&str; 5] = ["cargo", "cc", "gcc", "go", "rustc"];

/// Returns the directory that scripts/release.sh made, or the reason why there is none.
pub(crate) fn find_release() -> Result<PathBuf, String> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    let release = target.join(format!("release-{VERSION}"));
    if release.join("SHA256SUMS").is_file() {
        Ok(release)
    } else {
        Err("it needs scripts/release.sh to have run".into())
    }
}

pub(crate) fn on_a_node_without_a_compiler(release: &Path) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let root = temp.path().join("root");
    let suite = of_this_machine("VERSION_CODENAME")?;
    let packages = "--include=ca-certificates,containerd,curl,rpm,runc";
    expect_success(
        Command::new("debootstrap")
            .args(["--variant=minbase", packages, &suite])
            .arg(&root),
    );
    std::thread::scope(|scope| {
        scope
            .spawn(|| install_and_run(release, temp.path(), &root))
            .join()
    })
    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Installs and runs berth in namespaces of the current thread.
fn install_and_run(release: &Path, temp: &Path, root: &Path) -> Result<(), Failed> {
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)?;
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        None::<&str>,
    )?;
    for command in ["link set lo up", "addr add 10.77.0.1/32 dev lo"] {
        expect_success(Command::new("ip").args(command.split(' ')));
    }
    let bind = |from: &Path, to: &Path| {
        mount(
            Some(from),
            to,
            None::<&str>,
            MsFlags::MS_BIND | MsFlags::MS_REC,
            None::<&str>,
        )
    };
    // A mount point, like the root of a machine.
    bind(root, root)?;
    for directory in ["proc", "sys", "dev"] {
        bind(&Path::new("/").join(directory), &root.join(directory))?;
    }
    let host = env!("CARGO_PKG_REPOSITORY").split('/').nth(2).unwrap();
    let hosts = root.join("etc/hosts");
    fs::write(
        &hosts,
        format!("127.0.0.1 localhost {host}\n127.0.0.2 {REGISTRY}\n"),
    )?;
    bind(&hosts, Path::new("/etc/hosts"))?;
    for compiler in COMPILERS {
        let (code, out, _) = output_of(&mut command_at(root, &format!("command -v {compiler}")));
        assert!(code != Some(0), "the node has {out}");
    }

    // Both servers share a certificate, and the node trusts it.
    let [certificate, key] = ["servers.crt", "servers.key"].map(|name| temp.join(name));
    let names = format!("subjectAltName=DNS:{host},DNS:{REGISTRY}");
    let mut request = Command::new("openssl");
    request.args([
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=servers",
        "-addext",
        &names,
        "-keyout",
    ]);
    expect_success(request.arg(&key).arg("-out").arg(&certificate));
    fs::copy(&certificate, root.join("etc/ssl/certs/ca-certificates.crt"))?;
    let _files = serve_files(release, temp, &certificate, &key)?;
    let (_registry, digest) = start_registry(release, temp, &certificate, &key)?;
    let _containerd = Running::start(&mut command_at(root, "exec containerd"));
    eventually("containerd", || {
        root.join("run/containerd/containerd.sock")
            .exists()
            .then_some(())
    });

    let (command, _own) = kube_apiserver(root)?;
    // The command line on the page is for a node of kubeadm. This node has another layout, so the
    // test adds options.
    let told = format!(
        "berth bridge --dry-run --command '{command}' --probe-ca /etc/kubernetes/pki/ca.crt"
    );
    let blocks = list_blocks()?;
    let lines = blocks
        .join("\n")
        .replace("DIGEST", &digest)
        .replace("berth bridge --dry-run", &told);
    assert!(
        lines.contains(&told) && lines.contains("sha256sum --check"),
        "{lines}"
    );
    let (code, out, err) = output_of(&mut command_at(
        root,
        &format!("set -x; cd \"$(mktemp -d)\"; {lines}"),
    ));
    println!("{err}{out}");
    assert_eq!(code, Some(0), "{err}{out}");
    assert!(
        out.contains("kube-apiserver is ready at 10.77.0.1:6443"),
        "{out}"
    );
    let (code, out, _) = output_of(&mut command_at(root, "ctr -n k8s.io images ls -q"));
    let pulled = format!("{REGISTRY}/berth@sha256:{digest}");
    let imported = format!("localhost/berth:v{VERSION}");
    assert!(
        code == Some(0)
            && [pulled, imported]
                .iter()
                .all(|image| out.lines().any(|line| line == image)),
        "{out}"
    );
    // A changed file is not installed.
    for file in fs::read_dir(temp.join("files"))?.flatten() {
        if file.file_name().to_string_lossy().ends_with(".deb") {
            fs::remove_file(file.path())?;
            fs::write(file.path(), "another")?;
        }
    }
    let (code, out, err) = output_of(&mut command_at(
        root,
        &format!("cd \"$(mktemp -d)\"; {}", blocks[0]),
    ));
    assert!(
        code != Some(0) && out.contains("FAILED"),
        "{code:?}: {out}{err}"
    );
    assert!(!root.join("usr/bin/berth").exists(), "{out}{err}");
    Ok(())
}

/// Returns the blocks of commands in docs/get.md that install a release, in order. The Debian
/// package comes first. Commands in lists are for other systems, or build from source.
fn list_blocks() -> Result<Vec<String>, Failed> {
    let text = fs::read_to_string(crate::root().join("docs/get.md"))?;
    let blocks = text
        .split("\n```sh\n")
        .skip(1)
        .filter_map(|block| block.split("\n```\n").next());
    Ok(blocks.map(str::to_owned).collect())
}

/// Starts a server at the repository's address, with the release's files.
fn serve_files(
    release: &Path,
    temp: &Path,
    certificate: &Path,
    key: &Path,
) -> Result<Running, Failed> {
    let path = env!("CARGO_PKG_REPOSITORY").splitn(4, '/').last().unwrap();
    let (base, directory) = (
        temp.join("www"),
        temp.join("www")
            .join(path)
            .join(format!("releases/download/v{VERSION}")),
    );
    fs::create_dir_all(directory.parent().unwrap())?;
    symlink(temp.join("files"), &directory)?;
    expect_success(
        Command::new("cp")
            .arg("-r")
            .arg(release)
            .arg(temp.join("files")),
    );
    let mut server = Command::new("openssl");
    server
        .args([
            "s_server",
            "-quiet",
            "-accept",
            "127.0.0.1:443",
            "-WWW",
            "-cert",
        ])
        .arg(certificate)
        .arg("-key")
        .arg(key);
    let server = Running::start(server.current_dir(base));
    wait_until_up("127.0.0.1:443");
    Ok(server)
}

/// Starts a registry, pushes the image as RELEASING.md says, and returns the image's digest.
fn start_registry(
    release: &Path,
    temp: &Path,
    certificate: &Path,
    key: &Path,
) -> Result<(Running, String), Failed> {
    let config = temp.join("registry.yml");
    fs::write(
        &config,
        format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {}}}}}\n\
             http: {{addr: '127.0.0.2:443', tls: {{certificate: {}, key: {}}}}}\n",
            temp.join("registry").display(),
            certificate.display(),
            key.display()
        ),
    )?;
    let registry = Running::start(Command::new("docker-registry").arg("serve").arg(config));
    wait_until_up("127.0.0.2:443");
    let image = format!("docker://{REGISTRY}/berth:v{VERSION}");
    let skopeo = || {
        let mut skopeo = Command::new("skopeo");
        skopeo
            .args(["--insecure-policy"])
            .env("SSL_CERT_FILE", certificate);
        skopeo
    };
    let archive = fs::read_dir(release)?
        .flatten()
        .find(|file| file.file_name().to_string_lossy().ends_with(".oci.tar"));
    expect_success(
        skopeo()
            .args(["copy", "--all"])
            .arg(format!("oci-archive:{}", archive.unwrap().path().display()))
            .arg(&image),
    );
    let (digest, _) = expect_status(
        skopeo().args(["inspect", "--format", "{{.Digest}}", &image]),
        0,
        &[],
    );
    Ok((
        registry,
        digest.trim().trim_start_matches("sha256:").to_owned(),
    ))
}

/// Starts the node's kube-apiserver, which is simulated, and returns its command line.
fn kube_apiserver(root: &Path) -> Result<(String, Running), Failed> {
    let pki = root.join("etc/kubernetes/pki");
    fs::create_dir_all(&pki)?;
    let certs = certs::make_certs(&pki, &["10.77.0.1".parse()?])?;
    certs.issue_certificate("own")?;
    fs::copy(crate::BERTH, root.join("usr/local/bin/kube-apiserver"))?;
    let listener = std::os::unix::net::UnixListener::bind(root.join("store"))?;
    listener.set_nonblocking(true)?;
    std::thread::spawn(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            store::serve(
                listener,
                Arc::<Store>::default(),
                Arc::<Recorder>::default(),
            )
            .await;
        });
    });
    let command = "/usr/local/bin/kube-apiserver stand-in --bind-address=0.0.0.0 --secure-port=6443 --stand-in-name=own \
                   --etcd-servers=unix:///store --tls-cert-file=/etc/kubernetes/pki/own.crt \
                   --tls-private-key-file=/etc/kubernetes/pki/own.key --client-ca-file=/etc/kubernetes/pki/ca.crt";
    let own = Running::start(&mut command_at(root, &format!("exec {command}")));
    wait_until_up("0.0.0.0:6443");
    Ok((command.to_owned(), own))
}

/// Returns a command that runs a script on the node.
fn command_at(root: &Path, script: &str) -> Command {
    let mut chroot = Command::new("chroot");
    chroot
        .arg(root)
        .args(["/bin/bash", "-euc", script])
        .env_clear();
    chroot.env(
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    );
    chroot
}

#[track_caller]
fn wait_until_up(address: &str) {
    eventually(address, || {
        (!find_listening(address.parse().unwrap()).is_empty()).then_some(())
    });
}

/// Returns a value of /etc/os-release.
fn of_this_machine(key: &str) -> Result<String, Failed> {
    let text = fs::read_to_string("/etc/os-release")?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    Ok(value
        .ok_or(format!("/etc/os-release has no {key}"))?
        .trim_matches('"')
        .to_owned())
}

#[track_caller]
fn expect_success(command: &mut Command) {
    expect_status(command, 0, &[]);
}
