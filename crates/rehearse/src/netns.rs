//! A network namespace of this process's own: nothing outside can be reached from it, and nothing in
//! it from outside. And further ones, for nodes. The kernel removes each when no process is in it or holds it.

use super::address;
use berth_os::netdevice::{self, InterfaceSetting};
use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{getegid, geteuid, sethostname};
use std::fs::{self, File};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;

/// The one interface that a new namespace has.
const LOOPBACK: &str = "lo";

/// A further address of it.
pub const ALIAS: &str = "lo:1";

/// A further network of it: a loopback interface has all addresses of its networks.
const STORM_ALIAS: &str = "lo:2";

/// Why there is no namespace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel does not make one.
    #[error(
        "cannot make a network namespace: {0} (root can, or any user where unprivileged user namespaces are allowed: \
         see the sysctls user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns)"
    )]
    Unshare(io::Error),
    /// It was made, and has no usable interface.
    #[error("cannot set up the interface {LOOPBACK} of a network namespace: {0} (root can)")]
    Interface(io::Error),
}

/// Moves this process, which must have one thread only, to a new network namespace whose loopback
/// interface is up and has `address` in addition to 127.0.0.0/8. Without the privilege, it comes with a user
/// namespace in which this user is the same.
///
/// # Errors
/// What the kernel refused. Nothing has changed if it was the namespace.
pub fn enter(address: Ipv4Addr) -> Result<(), Error> {
    let (uid, gid) = (geteuid(), getegid());
    match enter_as_root(address) {
        Err(Error::Unshare(error)) if error.raw_os_error() == Some(Errno::EPERM as i32) => {
            unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET).map_err(|e| Error::Unshare(e.into()))?;
            fs::write("/proc/self/uid_map", format!("{uid} {uid} 1")).map_err(Error::Unshare)?;
            // Without it, a process without privilege may not map its group.
            fs::write("/proc/self/setgroups", "deny").map_err(Error::Unshare)?;
            fs::write("/proc/self/gid_map", format!("{gid} {gid} 1")).map_err(Error::Unshare)?;
        }
        done => return done,
    }
    set_up(address).map_err(Error::Interface)
}

/// The same without a user namespace, in which no BPF program may be loaded.
///
/// # Errors
/// What the kernel refused. Nothing has changed if it was the namespace.
pub fn enter_as_root(address: Ipv4Addr) -> Result<(), Error> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| Error::Unshare(errno.into()))?;
    set_up(address).map_err(Error::Interface)
}

/// An address on loopback is as good as one on a dummy or a veth, which not every kernel has: the kernel
/// sends what goes to any address of its own by way of it.
fn set_up(address: Ipv4Addr) -> io::Result<()> {
    netdevice::set(LOOPBACK, InterfaceSetting::Up)?;
    netdevice::set(ALIAS, InterfaceSetting::Address(address))?;
    netdevice::set(ALIAS, InterfaceSetting::Netmask(Ipv4Addr::BROADCAST))?;
    let [_, storm] = address::STORM;
    netdevice::set(STORM_ALIAS, InterfaceSetting::Address(Ipv4Addr::from_bits(storm.to_bits() + 1)))?;
    netdevice::set(STORM_ALIAS, InterfaceSetting::Netmask(Ipv4Addr::new(255, 255, 0, 0)))
}

/// A network namespace in addition to this process's own, whose host has a name of its own: kube-apiservers know one another
/// by that. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Namespace {
    net: Arc<OwnedFd>,
    uts: Arc<OwnedFd>,
}

impl Namespace {
    /// A new one, with nothing in it but a loopback interface that is down.
    pub(crate) fn new(host: &str) -> io::Result<Self> {
        let open =
            |kind: &str| Ok::<_, io::Error>(Arc::new(File::open(format!("/proc/thread-self/ns/{kind}"))?.into()));
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWUTS)?;
            sethostname(host)?;
            Ok::<_, io::Error>(Self { net: open("net")?, uts: open("uts")? })
        };
        aside(make)
    }

    /// Does something on a thread that is in it: a socket belongs to where it was made.
    pub(crate) fn within<T: Send>(&self, act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        let there = || {
            setns(&*self.net, CloneFlags::CLONE_NEWNET)?;
            act()
        };
        aside(there)
    }

    /// Lets a command run in it.
    pub(crate) fn enter(&self, command: &mut Command) {
        for namespace in [&self.net, &self.uts] {
            berth_os::process::in_namespace(command, Arc::clone(namespace));
        }
    }

    /// Its name for `ip`, while this process lives.
    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.net.as_raw_fd())
    }
}

/// On a thread of its own, which alone changes its namespaces. Its panic is a bug, which is reported as one.
fn aside<T: Send>(act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| scope.spawn(act).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs lines of ip(8), in a namespace or in this process's own.
pub(crate) fn ip(namespace: Option<&Namespace>, lines: &str) -> io::Result<()> {
    let mut command = Command::new("ip");
    // Not in the terminal's group: Ctrl-C must end the rehearsal, and not leave half a network.
    command.process_group(0).args(["-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    if let Some(namespace) = namespace {
        namespace.enter(&mut command);
    }
    let mut child = command.spawn()?;
    // Taken, so that it is closed. If ip ends before it has read all, its status is the error.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(lines.as_bytes()));
    let output = child.wait_with_output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("ip: {}", String::from_utf8_lossy(&output.stderr).trim()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::namespace::{refused, skipped};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_further_namespace_has_a_host_of_its_own() {
        let namespace = match Namespace::new("cp-9") {
            Ok(namespace) => namespace,
            Err(error) => return refused(&format!("no network namespace can be had: {error}")),
        };
        let lines = "link set lo up\naddr add 10.99.0.1/32 dev lo\n";
        if let Err(error) = ip(Some(&namespace), lines) {
            assert_eq!(error.kind(), io::ErrorKind::NotFound, "{error}");
            return skipped("it needs ip");
        }
        let listener = namespace.within(|| TcpListener::bind("10.99.0.1:6443")).unwrap();
        let address = listener.local_addr().unwrap();
        namespace.within(|| TcpStream::connect(address)).unwrap();
        assert!(TcpListener::bind(address).is_err(), "it is there alone");
        let mut command = Command::new("uname");
        namespace.enter(command.arg("-n"));
        assert_eq!(command.output().unwrap().stdout, b"cp-9\n");
        assert!(ip(Some(&namespace), "link set nothing up\n").unwrap_err().to_string().contains("nothing"));
    }

    /// What a thread unshares is its own; its descendants share it.
    #[test]
    fn a_namespace_has_the_address_and_nothing_else() {
        let outside = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = outside.local_addr().unwrap().port();
        // One thread among others can have no user namespace: this needs the privilege.
        if let Err(error) = thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join().unwrap() {
            return refused(&format!("no network namespace can be had: {error}"));
        }
        let inside = thread::spawn(move || {
            let address = Ipv4Addr::new(10, 123, 0, 5);
            enter(address).unwrap();
            let listener = TcpListener::bind((address, 6443)).unwrap();
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            TcpListener::bind("127.8.9.10:6443").unwrap();
            assert!(TcpListener::bind("10.123.0.6:6443").is_err());
            assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
        });
        inside.join().unwrap();
        TcpStream::connect(("127.0.0.1", port)).unwrap();
    }
}
