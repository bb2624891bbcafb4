//! Connections to localhost. The sk_lookup program does not steer them, because kube-apiserver
//! connects to itself on localhost and trusts only a certificate that it generated at its start.
//! kube-apiserver's process is recognized by name, and all other processes get the bridge's
//! listeners.

use super::cgroup;
use berth_steering::{Error, Steering, self_test_of_localhost};
use std::ffi::OsStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

/// Process name (comm) of the node's kube-apiserver, before and after COMMAND.
pub const OWN_NAME: &str = "kube-apiserver";

/// Process name of the temporary instance, so that a command that stops the node's kube-apiserver
/// by name (`killall kube-apiserver`) spares the temporary instance. Connections of the temporary
/// instance to itself need no exemption: they go to a 127.x address on another port.
pub const TEMPORARY_NAME: &str = "berth-temporary";

/// Process names of the node's etcd and of the temporary etcd.
pub const ETCD: &str = "etcd";
pub const TEMPORARY_ETCD_NAME: &str = "berth-etcd";

/// The note for an operator if connections to localhost cannot be steered.
pub fn uncovered_note(why: &str) -> String {
    format!(
        "localhost is not covered: {why}; clients that dial localhost are refused while the node's kube-apiserver is away"
    )
}

/// The process name for a temporary copy of `program`. `None` keeps the program's name, since a
/// multi-call binary acts by name.
pub(super) fn temporary_process_name(program: &OsStr) -> Option<&'static str> {
    let all = [(OWN_NAME, TEMPORARY_NAME), (ETCD, TEMPORARY_ETCD_NAME)];
    all.into_iter()
        .find(|(own, _)| program == *own)
        .map(|(_, temporary)| temporary)
}

/// Everything needed to steer connections to localhost.
#[derive(Debug)]
pub struct Localhost {
    /// Mount point of cgroup v2: the program that steers connections to localhost is attached
    /// there.
    cgroup: PathBuf,
    /// Addresses of the port's listeners at localhost.
    addresses: Vec<IpAddr>,
}

impl Localhost {
    /// Checks that connections to localhost can be steered, too. `process` is the name of the
    /// kube-apiserver's process, `own` is the address at which the bridge probes it, and `listened`
    /// has the addresses on which kube-apiserver or a shim listens. `None` if nothing listens at
    /// localhost.
    ///
    /// # Errors
    /// The reason why connections to localhost cannot be steered.
    pub async fn new(
        process: &str,
        own: IpAddr,
        listened: &[IpAddr],
    ) -> Result<Option<Self>, String> {
        let at_localhost = |ip: &IpAddr| {
            ip.is_unspecified()
                || [
                    IpAddr::from(Ipv4Addr::LOCALHOST),
                    Ipv6Addr::LOCALHOST.into(),
                ]
                .contains(ip)
        };
        let addresses: Vec<_> = listened.iter().copied().filter(at_localhost).collect();
        if addresses.is_empty() {
            return Ok(None);
        }
        if process != OWN_NAME {
            return Err(format!(
                "kube-apiserver's process is called {process}: the bridge knows kube-apiserver's connections to itself only by the process name {OWN_NAME}"
            ));
        }
        if own.is_loopback() {
            return Err(
                "this node has no other address at which the bridge could probe kube-apiserver"
                    .into(),
            );
        }
        let cgroup = cgroup::find_cgroup_root()
            .ok_or("cgroup v2 is mounted nowhere (mount -t cgroup2 none DIRECTORY)")?;
        self_test_of_localhost(&cgroup)
            .await
            .map_err(|error| error.to_string())?;
        Ok(Some(Self { cgroup, addresses }))
    }

    /// Steers connections to localhost, too, whenever `steering` is on.
    ///
    /// # Errors
    /// A kernel feature or permission is missing.
    pub fn steer_localhost(&self, steering: &mut Steering, port: u16) -> Result<(), Error> {
        steering.cover_localhost(&self.cgroup, OWN_NAME, port, &self.addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// killall and pidof compare the whole name, pkill finds a part of the name, and the kernel
    /// truncates names to 15 bytes.
    #[test]
    fn a_programs_name_and_its_temporary_name_do_not_contain_each_other() {
        assert!(!TEMPORARY_NAME.contains(OWN_NAME) && !OWN_NAME.contains(TEMPORARY_NAME));
        assert!(
            [OWN_NAME, TEMPORARY_NAME]
                .iter()
                .all(|name| name.len() <= 15)
        );
    }
}
