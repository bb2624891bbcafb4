//! A node's only etcd, while COMMAND restarts or replaces it: clients wait for a second, and lose
//! nothing.
//!
//! A *temporary* etcd of the same version serves from the same data directory while the node's etcd
//! is away, under the same name, on separate ports. The membership does not change, and nothing is
//! left behind.
//!
//! The bridge orders the two processes. The temporary etcd is started only while no process has the
//! data, and is ended for the node's etcd. The temporary etcd cannot replace the database (a
//! defragmentation does), because the file is mounted onto itself in a mount namespace. So the
//! node's etcd may safely wait for etcd's lock on the file, as it does when the kubelet starts it:
//! a new process opens its listener, then its database, waits for the lock, and only then reads its
//! log (`etcdserver/bootstrap.go` of 3.5 and 3.6). The serving process is checked repeatedly: a
//! process that has opened another file than the database's path names gets no client, and is ended
//! if nothing is lost.
//!
//! The temporary kube-apiserver dials a relay. While the node's etcd is away, the node's
//! kube-apiserver reaches the relay, too: the kernel steers connections to etcd's address that come
//! from the same address, and the relay dials from another address.
//!
//! | module | contents |
//! | --- | --- |
//! | [`plan`] | the node's etcd, checks that a temporary etcd is possible, and its arguments |
//! | [`probe`] | probes of an etcd |
//! | [`database`] | the database's file, the holder of its lock, and waiting processes |
//! | [`machine`] | from observations to wanted states. Pure |
//! | [`rescue`] | saves the database of a process that serves from another file |
//! | [`relay`] | the relay that kube-apiserver dials |
//! | [`revisions`] | checks that no write is missing after a change of hands |
//! | [`drive`] | observes, and does what the machine wants |

pub mod database;
pub mod drive;
pub mod machine;
pub mod plan;
pub mod probe;
pub mod relay;
pub mod rescue;
pub mod revisions;

pub use drive::EtcdDaemon;
pub use plan::Plan;
pub use revisions::Revisions;
