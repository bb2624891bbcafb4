//! A node's only etcd, restarted or replaced by COMMAND: clients wait for a second, and lose nothing.
//!
//! A *temporary* etcd of the same version serves from the same data directory while the node's own is away, under the same name, on
//! ports of its own. There is no change of membership, and nothing is left behind. etcd's lock on its database orders the two: a new
//! process opens its listener, then its database, whose lock it waits for, and reads its log only then (`etcdserver/bootstrap.go` of
//! 3.5 and 3.6). So at no time can both write, whatever the bridge does or whenever it is killed.
//!
//! The temporary kube-apiserver dials a relay. While the node's own etcd is away the node's own kube-apiserver comes to it, too: the
//! kernel steers what dials etcd's address from that address, and the relay dials from another.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`plan`] | the node's etcd, whether it can be stood in for, and the temporary one's arguments |
//! | [`probe`] | whether an etcd answers |
//! | [`database`] | who has the lock on the database, and who waits for it |
//! | [`machine`] | from observations to what is wanted. Pure |
//! | [`relay`] | what kube-apiserver dials |
//! | [`drive`] | observes, and does what the machine wants |

pub mod database;
pub mod drive;
pub mod machine;
pub mod plan;
pub mod probe;
pub mod relay;

pub use drive::EtcdDaemon;
pub use plan::Plan;
