//! A node's only etcd, restarted or replaced by COMMAND: clients wait for a second, and lose nothing.
//!
//! A *temporary* etcd of the same version serves from the same data directory while the node's own is away, under the same name, on
//! ports of its own. There is no change of membership, and nothing is left behind.
//!
//! The bridge orders the two. The temporary etcd is started only while nobody has the data, and is ended for the node's own. It cannot
//! replace the database (a defragmentation does): in its mount namespace the file is mounted onto itself. So the node's own may wait for
//! etcd's lock on that file, as it does when the kubelet starts it: a new process opens its listener, then its database, whose lock it
//! waits for, and reads its log only then (`etcdserver/bootstrap.go` of 3.5 and 3.6). Whoever serves is looked at again and again: a process
//! whose database is another file than the one that its path names gets no client, and is ended where that loses nothing.
//!
//! The temporary kube-apiserver dials a relay. While the node's own etcd is away the node's own kube-apiserver comes to it, too: the
//! kernel steers what dials etcd's address from that address, and the relay dials from another.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`plan`] | the node's etcd, whether it can be stood in for, and the temporary one's arguments |
//! | [`probe`] | whether an etcd answers |
//! | [`database`] | who has the lock on the database, who waits for it, and which file that is |
//! | [`machine`] | from observations to what is wanted. Pure |
//! | [`rescue`] | saves the database of a process that serves from another file |
//! | [`relay`] | what kube-apiserver dials |
//! | [`revisions`] | whether the node's own goes on from what the temporary one wrote |
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
