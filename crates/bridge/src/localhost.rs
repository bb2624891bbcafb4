//! What is dialled at localhost, which sk_lookup's program leaves alone, since kube-apiserver dials itself there and trusts no other
//! certificate than its own of that moment. It is known by the name of its process; all others are given the bridge's listeners.

use super::cgroup;
use berth_steering::{Error, Steering, self_test_of_localhost};
use std::ffi::OsStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

/// What a kube-apiserver's process is called (comm): the node's own, before and after COMMAND.
pub const OWN: &str = "kube-apiserver";

/// And the temporary one's, so that what stops the node's own by its name (`killall kube-apiserver`) does not stop that. It needs no
/// exemption: it dials itself at its own 127.x address, on another port.
pub const TEMPORARY: &str = "berth-temporary";

/// What an etcd's process is called, and the temporary etcd's.
pub const ETCD: &str = "etcd";
pub const TEMPORARY_ETCD: &str = "berth-etcd";

/// The note for an operator where localhost cannot be covered.
pub fn not_covered(why: &str) -> String {
    format!(
        "localhost is not covered: {why}; what dials localhost is refused while the node's own kube-apiserver is away"
    )
}

/// What the temporary one's program is called. None: a program with several in one goes by its name.
pub(super) fn temporary_name(program: &OsStr) -> Option<&'static str> {
    let all = [(OWN, TEMPORARY), (ETCD, TEMPORARY_ETCD)];
    all.into_iter()
        .find(|(own, _)| program == *own)
        .map(|(_, temporary)| temporary)
}

/// How localhost can be covered.
#[derive(Debug)]
pub struct Localhost {
    /// The root of version 2.
    cgroup: PathBuf,
    /// Of the port's listeners.
    addresses: Vec<IpAddr>,
}

impl Localhost {
    /// For a kube-apiserver's process, which is probed at `own` and listens, it or a shim, on these addresses. None: nothing listens at
    /// localhost.
    ///
    /// # Errors
    /// Why it cannot be covered here.
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
        if process != OWN {
            return Err(format!(
                "its process is called {process}, not {OWN}, by which its dials to itself are known"
            ));
        }
        if own.is_loopback() {
            return Err("this node has no other address at which the bridge could ask it".into());
        }
        let cgroup = cgroup::root()
            .ok_or("cgroup v2 is mounted nowhere (mount -t cgroup2 none DIRECTORY)")?;
        self_test_of_localhost(&cgroup)
            .await
            .map_err(|error| error.to_string())?;
        Ok(Some(Self { cgroup, addresses }))
    }

    /// From here on, whenever that steers.
    ///
    /// # Errors
    /// Something necessary is missing.
    pub fn cover(&self, steering: &mut Steering, port: u16) -> Result<(), Error> {
        steering.cover_localhost(&self.cgroup, OWN, port, &self.addresses)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// killall and pidof go by the whole name, pkill by a part of it, and the kernel cuts names.
    #[test]
    fn the_two_names_cannot_be_mistaken_for_one_another() {
        assert!(!TEMPORARY.contains(OWN) && !OWN.contains(TEMPORARY));
        assert!([OWN, TEMPORARY].iter().all(|name| name.len() <= 15));
    }
}
