//! The number of relaying threads, and the number of connections within the limit of open files.
//! Pure.
//!
//! An accepted connection without a descriptor left for its instance would be lost. So the
//! descriptors for everything else are counted beforehand: too many rather than too few.

use crate::admin::CONNECTIONS;
use crate::handover::PASSES;
use crate::relay::bulk::PIPES;
use berth_node::ipc::REQUESTS;

/// Most relaying threads by default. Eight threads relay more than the network of a control-plane
/// node carries, and on a node with many cores the apiserver should have the other cores.
const THREADS: usize = 8;

/// Descriptors for neither threads nor connections: listeners, guards, probes and run directory,
/// the admin port's connections, with two siblings asked for each, and the shim's socket.
const RESERVED: u64 = 64 + 3 * CONNECTIONS as u64 + REQUESTS as u64;

/// Descriptors of a client that is passed to or from a sibling, in addition to its connection's.
const PER_PASS: u64 = 4;

/// Descriptors of a thread: its epoll (twice), its waker, and the signals' pipe.
const PER_THREAD: u64 = 4;

const PER_PIPE: u64 = 2;

/// Descriptors of a connection: client and instance.
const PER_CONNECTION: u64 = 2;

/// Connections of a small cluster. Room for fewer causes a warning.
pub const FEW: u64 = 1000;

/// Returns the number of relaying threads: as configured, else one per core, up to a maximum.
pub(crate) fn thread_count(configured: Option<usize>) -> usize {
    choose_thread_count(
        configured,
        std::thread::available_parallelism().map_or(1, Into::into),
    )
}

fn choose_thread_count(configured: Option<usize>, cores: usize) -> usize {
    configured.unwrap_or(cores.clamp(1, THREADS))
}

/// Returns the descriptors that are not for connections, as text and as a number.
pub(crate) fn reserved_descriptors(threads: usize) -> (String, u64) {
    let of_threads = threads as u64 * (PER_THREAD + u64::from(PIPES) * PER_PIPE);
    let others = RESERVED + PASSES as u64 * PER_PASS;
    (
        format!("{threads} threads need {of_threads} of them, listeners and siblings {others}"),
        of_threads + others,
    )
}

/// Returns the number of connections within a limit of open files.
pub(crate) fn connection_limit(files: u64, threads: usize) -> u64 {
    files.saturating_sub(reserved_descriptors(threads).1) / PER_CONNECTION
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
    fn many_cores_are_not_all_taken() {
        assert_eq!(choose_thread_count(None, 2), 2);
        assert_eq!(choose_thread_count(None, 64), 8);
        assert_eq!(choose_thread_count(Some(64), 2), 64);
        assert!(
            connection_limit(4096, choose_thread_count(None, 64)) > FEW,
            "a common limit is enough"
        );
    }

    #[test]
    fn threads_cost_connections() {
        assert!(connection_limit(4096, 2) < connection_limit(4096, 1));
        assert_eq!(connection_limit(4096, 1024), 0);
        assert_eq!(
            connection_limit(1024 * 1024, 1),
            (1024 * 1024 - reserved_descriptors(1).1) / 2
        );
    }
}
