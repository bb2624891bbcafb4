//! `berth bridge`: whatever is done to a node's kube-apiserver, clients lose nothing.
//!
//! A *temporary* instance with the running one's arguments serves meanwhile, behind a shim on loopback to which the kernel
//! steers the port's new connections. All of it ends with the process that holds it, and then the port is as it was.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`machine`] | the steps: what is seen, to what is done next. Pure |

#![allow(missing_docs, reason = "the crate is not published: what its name says needs no comment")]

pub mod machine;
