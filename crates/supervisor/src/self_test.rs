//! Tests whether clients can be handed over on this machine.

use crate::drive::{Config, Supervisor};
use crate::obstacle::Obstacle;
use berth_node::instance_id::InstanceId;
use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::alarm;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;

/// Hands over one client to a child of this process, as a supervisor does to a server.
///
/// The process must have a single thread and no other child.
///
/// # Errors
/// See [`Obstacle`].
pub fn self_test() -> Result<(), Obstacle> {
    let mask = SigSet::thread_get_mask().map_err(io::Error::from)?;
    let tried = supervise_child();
    mask.thread_set_mask().map_err(io::Error::from)?;
    tried
}

fn supervise_child() -> Result<(), Obstacle> {
    // No shim connects.
    let (shims, _other_end) = UnixStream::pair()?;
    let instance = InstanceId::parse("self-test").map_err(io::Error::other)?;
    let config = Config {
        instance,
        address: (Ipv4Addr::LOCALHOST, 0).into(),
        shims: shims.into(),
        once: false,
    };
    let mut supervisor = Supervisor::launch(config, &Signal::SIGCHLD.into(), serve_one_client)
        .map_err(Obstacle::from_start_error)?;
    let status = supervisor.drive()?;
    supervisor.check_outcome(status)
}

/// Serves as the server of the self-test: listens, dials its own listener, and accepts the
/// connection.
fn serve_one_client() -> io::Error {
    // If the test hangs, the alarm ends this process.
    alarm::set(5);
    let served = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| {
        let mut client = TcpStream::connect(listener.local_addr()?)?;
        let (mut accepted, peer) = listener.accept()?;
        accepted.write_all(&[u8::from(peer == client.local_addr()?)])?;
        let mut is_known = [0];
        client.read_exact(&mut is_known)?;
        if is_known == [1] {
            Ok(())
        } else {
            Err(Errno::EADDRNOTAVAIL.into())
        }
    });
    served
        .err()
        .unwrap_or_else(|| io::Error::from_raw_os_error(0))
}
