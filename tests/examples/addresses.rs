//! The layouts of addresses, with the variables of the manifests' containers: a shim runs in a
//! network namespace with these addresses.

use crate::support::eventually;
use crate::support::net::{client_hello, connect_from, find_listening, ping};
use crate::support::process::{Running, berth_command};
use crate::{no_namespace, read_example};
use berth_rehearse::testbed::netns;
use libtest_mimic::{Completion, Failed};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

/// The node's address in all examples.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 5);

/// A virtual IP that is added later.
const VIRTUAL: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 100);

pub(crate) fn several_addresses_answer() -> Result<Completion, Failed> {
    if let Some(ignored) = no_namespace() {
        return Ok(ignored);
    }
    netns::enter_netns(HOST).map_err(|error| error.to_string())?;
    let pod = Pod::start("addresses/several.yaml", "127.0.0.77:6443");
    for ip in [HOST, Ipv4Addr::LOCALHOST] {
        pod.answers((ip, 6443).into());
    }
    // The shim listens before the address exists, and serves from the moment when it is added.
    assert_eq!(find_listening((VIRTUAL, 6443).into()).len(), 1);
    let address = format!("{VIRTUAL}/32");
    let added = Command::new("ip")
        .args(["address", "add", &address, "dev", "lo"])
        .status();
    if !added.is_ok_and(|status| status.success()) {
        return Ok(Completion::ignored_with(
            "it needs ip, for the virtual address; the others answered",
        ));
    }
    pod.answers((VIRTUAL, 6443).into());
    Ok(Completion::Completed)
}

/// A manifest's shim before an echo server on a 127.x address.
struct Pod {
    _shim: Running,
    _dir: tempfile::TempDir,
}

impl Pod {
    #[track_caller]
    fn start(manifest: &str, backend: &str) -> Self {
        let text = read_example(manifest);
        let name = "    - name: BERTH_LISTEN\n      value: ";
        let listens: Vec<_> = text
            .match_indices(name)
            .map(|(at, _)| text[at + name.len()..].lines().next())
            .collect();
        // The two containers of a pod must agree.
        assert!(
            listens.len() == 2 && listens[0] == listens[1],
            "{listens:?}"
        );
        let listen = listens[0].unwrap().trim_matches('"');
        let address: SocketAddr = backend.parse().unwrap();
        crate::support::net::Backend::at(address).serve(crate::support::net::echo);
        let dir = tempfile::tempdir().unwrap();
        let mut command =
            berth_command(["serve", "--probe=tcp", "--instance=a", "--backend", backend]);
        command.arg("--run-dir").arg(dir.path().join("run"));
        let shim = Running::start(command.env("BERTH_LISTEN", listen));
        shim.logs("joined");
        Self {
            _shim: shim,
            _dir: dir,
        }
    }

    #[track_caller]
    fn answers(&self, to: SocketAddr) {
        eventually(&format!("{to} to be there"), || {
            std::net::TcpStream::connect(to).ok()
        });
        ping(
            &mut connect_from(Ipv4Addr::new(127, 5, 5, 5).into(), to),
            &client_hello(64),
        );
    }
}
