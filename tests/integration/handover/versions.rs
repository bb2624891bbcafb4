//! Upgrades of berth itself: shims of two versions on one node.
//!
//! Until there is a release, the other version is built from a copy of the current sources. In the
//! copy, the messages are changed as a later version may change them. The sources themselves have
//! no switch for such a change.

use super::node::{Node, make_runtime};
use super::passing::many_at_once;
use super::upgrades::run_upgrades;
use crate::support::process::BERTH;
use crate::support::shim::send_ask;
use berth_node::ipc::wire::{Ask, Reply, Share, VERSION};
use berth_node::terms::Phase;
use berth_os::seqpacket;
use std::ffi::OsString;
use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;

const THIS: &str = env!("CARGO_PKG_VERSION");
/// Source files of messages among shims and of files that shims read.
const MESSAGES: [&str; 4] = ["ipc/wire.rs", "terms.rs", LEASE, "registry/instance.rs"];
/// Source file of leases. The lower version keeps the optional fields of a lease, because a shim
/// without an instance record needs them.
const LEASE: &str = "registry/lease.rs";

/// Upgrades to the other version and back, again and again under load. Then two shims of both
/// versions run side by side.
#[test]
#[ignore = "builds berth twice more; run by .ci/run nightly"]
fn upgrades_of_berth_itself_lose_nothing() {
    let own = Path::new(BERTH);
    let mut others = [VERSION - 1, VERSION + 1]
        .map(|version| (build_version(version), Some(version)))
        .to_vec();
    // `BERTH_PREVIOUS` is the path of the last release, if there is one.
    others.extend(std::env::var_os("BERTH_PREVIOUS").map(|previous| (previous.into(), None)));
    for (other, version) in &others {
        let known = [(own, Some(VERSION)), (other, *version)];
        println!("{} and {}:", own.display(), other.display());
        test_pair(known);
        test_pair([known[1], known[0]]);
        many_at_once([own, other]);
        many_at_once([other, own]);
        run_upgrades(&[own, other], 10);
    }
}

/// Starts a shim of the first version beside a shim of the second version. Commands of the second
/// version ask the first shim, which then leaves.
#[track_caller]
fn test_pair([(first, version), (second, version_of_second)]: [(&Path, Option<u32>); 2]) {
    let node = Node::new();
    let [(a, _of_a), (b, _of_b)] = [("a", first), ("b", second)].map(|(id, program)| {
        node.install(program);
        let instance = node.exec(id);
        (node.launch(id, &[]), instance)
    });
    for shim in [&a, &b] {
        shim.until_joined();
        shim.until("both records read", |status| status.instances.len() == 2);
        shim.until_counted("guard", 1);
    }
    for (shim, version) in [(&a, version), (&b, version_of_second)] {
        let Some(version) = version else { continue };
        let refused = refusal_of_unknown_version(&shim.path);
        let built = if version == VERSION {
            THIS.to_owned()
        } else {
            format!("{THIS}-wire.{version}")
        };
        let says = format!("this is berth {built} with version {version}");
        assert!(
            refused.ends_with(&says),
            "not the version that was built: {refused}"
        );
        let [old, new] = ["a", "b"].map(|id| id.parse().unwrap());
        let share = Share {
            old,
            new,
            permille: 500,
            salt: 7,
            lease_ms: 1,
            local: true,
        };
        match send_ask(&make_runtime(), &shim.path, &Ask::Share(share)).unwrap() {
            Reply::Refused(why) if version < 2 => {
                assert!(why.starts_with("version 2 is not known"), "{why}");
            }
            reply => assert!(
                reply == Reply::Done && version >= 2,
                "version {version}: {reply:?}"
            ),
        }
    }
    let (code, out, log) = node.ask_shims(&["status"]);
    assert!(
        code == Some(0) && out.matches("joined").count() == 2,
        "{code:?}: {out}{log}"
    );
    let (code, out, log) = node.ask_shims(&["drain", "--instance", "a", "--wait", "--if-sibling"]);
    assert!(
        code == Some(0) && !out.contains("not drained"),
        "{code:?}: {out}{log}"
    );
    assert_eq!(a.status().state, Phase::Left);
    a.leave();
    b.leave();
}

/// Returns the reason for which a shim refuses a request of a far newer version. The reason
/// includes the version that the shim knows.
fn refusal_of_unknown_version(path: &Path) -> String {
    let socket = seqpacket::dial_path(path).unwrap();
    seqpacket::transmit_message(socket.as_fd(), br#"{"version":99,"ask":"status"}"#, &[]).unwrap();
    let mut reply = [0; 1024];
    let length = crate::support::eventually("a reply", || {
        Some(
            seqpacket::receive_message(socket.as_fd(), &mut reply)
                .ok()?
                .length,
        )
    });
    match berth_node::ipc::wire::parse_reply(&reply[..length]).unwrap() {
        Reply::Refused(why) => why,
        other => panic!("version 99 is not refused: {other:?}"),
    }
}

/// Builds berth with another version of its messages. A lower version leaves out the optional
/// fields, and a higher version sends unknown fields.
fn build_version(version: u32) -> PathBuf {
    let (root, tmp) = (
        Path::new(env!("CARGO_MANIFEST_DIR")),
        Path::new(env!("CARGO_TARGET_TMPDIR")),
    );
    let name = format!("berth-wire-{version}");
    let (copy, target) = (tmp.join(&name), tmp.parent().unwrap());
    let _ = fs::remove_dir_all(&copy);
    fs::create_dir(&copy).unwrap();
    let sources =
        ["Cargo.toml", "Cargo.lock", "src", "crates", "fuzz", "tests"].map(|name| root.join(name));
    expect_success(
        Command::new("cp")
            .args(["-r", "--symbolic-link"])
            .args(sources)
            .arg(&copy),
    );
    for file in MESSAGES {
        let path = copy.join("crates/node/src").join(file);
        let mut text = fs::read_to_string(&path).unwrap();
        let before = text.clone();
        if version < VERSION && file != LEASE {
            text = text.replace(
                "#[serde(default, skip_serializing_if",
                "#[serde(skip, default, skip_serializing_if",
            );
        } else if version > VERSION {
            // Add a field "later" to each message.
            for name in ["Update", "Announce", "Status", "Lease", "Record"] {
                let begin = format!("pub struct {name} {{");
                text = text.replace(&begin, &format!("#[serde(tag = \"later\")]\n{begin}"));
            }
            text = text.replace(
                "pub const STATE_VERSION: u32 = 1;",
                "pub const STATE_VERSION: u32 = 2;",
            );
        }
        text = text.replace(
            &format!("const VERSION: u32 = {VERSION};"),
            &format!("const VERSION: u32 = {version};"),
        );
        assert!(
            text != before || (version < VERSION && file == LEASE),
            "nothing is changed in {file}"
        );
        replace_link(&path, &text);
    }
    // Build in the target directory that has the dependencies. The package gets another version and
    // name, so that the build replaces no file of this berth.
    let manifest = copy.join("Cargo.toml");
    let text = fs::read_to_string(&manifest)
        .unwrap()
        .replace("run = \"berth\"", &format!("run = {name:?}"));
    let text = text.replacen(THIS, &format!("{THIS}-wire.{version}"), 1);
    replace_link(
        &manifest,
        &format!("{text}\n[[bin]]\nname = {name:?}\npath = \"src/main.rs\"\n"),
    );
    replace_link(
        &copy.join("Cargo.lock"),
        &fs::read_to_string(root.join("Cargo.lock")).unwrap(),
    );
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args([
            "build",
            "--offline",
            "--bin",
            &name,
            "--no-default-features",
            "--target-dir",
        ])
        .arg(target);
    // Cargo sets these variables for tests. A dependency that reads them would be built again.
    let given = |name: &OsString| {
        ["CARGO_MANIFEST_", "CARGO_PKG_"]
            .iter()
            .any(|of| name.to_string_lossy().starts_with(of))
    };
    for (name, _) in std::env::vars_os().filter(|(name, _)| given(name)) {
        cargo.env_remove(name);
    }
    expect_success(cargo.current_dir(&copy));
    target.join("debug").join(name)
}

/// Replaces a symbolic link, not its target.
fn replace_link(link: &Path, text: &str) {
    fs::remove_file(link).unwrap();
    fs::write(link, text).unwrap();
}

#[track_caller]
fn expect_success(command: &mut Command) {
    assert!(command.status().unwrap().success(), "{command:?}");
}
