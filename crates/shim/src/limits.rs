//! The number of relaying threads, and the number of connections within the limit of open files.
//! Pure.
//!
//! An accepted connection without a descriptor left for its instance would be lost. So the
//! descriptors for everything else are counted beforehand: too many rather than too few.

use crate::admin::MAX_CONNECTIONS;
use crate::handover::MAX_PASSES;
use crate::relay::bulk::MAX_PIPES;
use berth_node::ipc::MAX_REQUESTS;

/// Maximum number of relaying threads by default. Eight threads relay more than the network of a
/// control-plane node carries, and on a node with many cores the apiserver should have the other
/// cores.
const MAX_THREADS: usize = 8;

/// Number of descriptors that belong to neither threads nor relayed connections: listeners,
/// siblings' listeners, probes, the run directory, the shim's socket, and the connections of the
/// admin port (two siblings are asked for each).
const RESERVED_DESCRIPTORS: u64 = 64 + 3 * MAX_CONNECTIONS as u64 + MAX_REQUESTS as u64;

/// Number of descriptors that a client passed to or from a sibling needs, besides those of its
/// connection.
const DESCRIPTORS_PER_PASS: u64 = 4;

/// Number of descriptors of a thread: its epoll (twice), its waker, and the signals' pipe.
const DESCRIPTORS_PER_THREAD: u64 = 4;

const DESCRIPTORS_PER_PIPE: u64 = 2;

/// Number of descriptors of a connection: the client's socket and the instance's.
const DESCRIPTORS_PER_CONNECTION: u64 = 2;

/// Number of connections that a small cluster has. If fewer fit, a warning is logged.
pub const FEW_CONNECTIONS: u64 = 1000;

/// Returns the number of relaying threads: as configured, else one per core, up to a maximum.
pub(crate) fn thread_count(configured: Option<usize>) -> usize {
    choose_thread_count(
        configured,
        std::thread::available_parallelism().map_or(1, Into::into),
    )
}

fn choose_thread_count(configured: Option<usize>, cores: usize) -> usize {
    configured.unwrap_or(cores.clamp(1, MAX_THREADS))
}

/// Returns the descriptors that are not for connections, as text and as a number.
pub(crate) fn reserved_descriptors(threads: usize) -> (String, u64) {
    let of_threads =
        threads as u64 * (DESCRIPTORS_PER_THREAD + u64::from(MAX_PIPES) * DESCRIPTORS_PER_PIPE);
    let others = RESERVED_DESCRIPTORS + MAX_PASSES as u64 * DESCRIPTORS_PER_PASS;
    (
        format!("{threads} threads need {of_threads} descriptors, listeners and siblings {others}"),
        of_threads + others,
    )
}

/// Returns the number of connections within a limit of open files.
pub(crate) fn connection_limit(files: u64, threads: usize) -> u64 {
    files.saturating_sub(reserved_descriptors(threads).1) / DESCRIPTORS_PER_CONNECTION
}

/// Returns the number of connections within a limit of open files, with the default number of
/// threads.
pub fn default_connection_limit(files: u64) -> u64 {
    connection_limit(files, thread_count(None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_all_of_many_cores_get_a_thread() {
        assert_eq!(choose_thread_count(None, 2), 2);
        assert_eq!(choose_thread_count(None, 64), 8);
        assert_eq!(choose_thread_count(Some(64), 2), 64);
        assert!(
            connection_limit(4096, choose_thread_count(None, 64)) > FEW_CONNECTIONS,
            "a common limit is enough"
        );
    }

    #[test]
    fn more_threads_allow_fewer_connections() {
        assert!(connection_limit(4096, 2) < connection_limit(4096, 1));
        assert_eq!(connection_limit(4096, 1024), 0);
        assert_eq!(
            connection_limit(1024 * 1024, 1),
            (1024 * 1024 - reserved_descriptors(1).1) / 2
        );
    }
}
