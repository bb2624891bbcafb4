//! Calls of bpf(2), for maps, programs and links. Commands, types and structures are from
//! linux/bpf.h. Each structure is the beginning of `union bpf_attr`, without padding.

use super::asm::Instruction;
use super::{Refused, Step};
use crate::process::raise_locked_memory_limit;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::{CStr, c_int, c_long};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{NonNull, from_mut, from_ref};

const MAP_CREATE: c_int = 0;
const MAP_UPDATE_ELEM: c_int = 2;
const PROG_LOAD: c_int = 5;
const PROG_GET_FD_BY_ID: c_int = 13;
const OBJ_GET_INFO_BY_FD: c_int = 15;
const PROG_QUERY: c_int = 16;
const LINK_CREATE: c_int = 28;
const LINK_DETACH: c_int = 34;

const MAP_TYPE_ARRAY: u32 = 2;
const MAP_TYPE_SOCKMAP: u32 = 15;
const ATTACH_SK_LOOKUP: u32 = 36;

/// The type of a program: the event for which the kernel runs it.
#[derive(Debug, Clone, Copy)]
pub(super) enum ProgramType {
    /// The program runs when the kernel looks up the listener for a new connection.
    SocketLookup,
    /// The program runs for connect(2) of an IPv4 socket. For IPv6 there is `Connect6`.
    /// (BPF_PROG_TYPE_CGROUP_SOCK_ADDR)
    Connect4,
    Connect6,
}

impl ProgramType {
    /// Returns the kernel's numbers for the type of the program, and for the event to which it is
    /// attached.
    const fn program_and_attach_types(self) -> (u32, u32) {
        match self {
            Self::SocketLookup => (30, ATTACH_SK_LOOKUP),
            Self::Connect4 => (18, 10),
            Self::Connect6 => (18, 11),
        }
    }
}

/// Flag for a map that lets a process map the map's memory (BPF_F_MMAPABLE).
const MMAPABLE: u32 = 1 << 10;

/// Flag of a program: the verifier refuses unaligned access (BPF_F_STRICT_ALIGNMENT). Without the
/// flag the verifier accepts unaligned access on amd64 and arm64, and refuses it on some other
/// machines.
const STRICT_ALIGNMENT: u32 = 1;

/// The licence need not be the GPL, because the program calls no function that requires the GPL.
const LICENSE: &CStr = c"Apache-2.0";

/// Size of the verifier's log, in bytes.
const LOG_BYTES: usize = 1 << 20;

/// Limit of the sk_lookup programs in a network namespace, from kernel/bpf/net_namespace.c.
const MOST_PROGRAMS: usize = 64;

/// # Safety
/// `attr` is the structure that the command takes. Each address in `attr` is valid for the
/// command's reads and writes.
unsafe fn bpf<T>(command: c_int, attr: &mut T) -> io::Result<c_long> {
    // SAFETY: `attr` lives for the call and has the given length; the rest is the caller's promise.
    match unsafe { libc::syscall(libc::SYS_bpf, command, from_mut(attr), size_of::<T>()) } {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

/// Calls [`bpf`] for a command that returns a descriptor. The kernel sets close-on-exec.
///
/// # Safety
/// The promises of [`bpf`], and the command returns a descriptor.
unsafe fn call_bpf_for_descriptor<T>(command: c_int, attr: &mut T) -> io::Result<OwnedFd> {
    #[cfg(debug_assertions)]
    if super::is_steering_turned_off() {
        return super::unsteered::stand_in_descriptor();
    }
    // SAFETY: the caller's promise.
    let fd = unsafe { bpf(command, attr) }?;
    // SAFETY: the descriptor is new, so nothing else owns it; the kernel's descriptors fit into an
    // int.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) })
}

/// Calls `make`. If that fails with `EPERM`, raises the limit of locked memory and calls `make`
/// again. Before Linux 5.11, maps and programs count as locked memory. Beyond the limit the kernel
/// returns `EPERM`, as for a missing capability.
fn retry_with_higher_memory_limit<T>(
    mut make: impl FnMut() -> io::Result<T>,
    raise: impl FnOnce() -> bool,
) -> io::Result<T> {
    make().or_else(|error| {
        if error.raw_os_error() == Some(libc::EPERM) && raise() {
            make()
        } else {
            Err(error)
        }
    })
}

fn fd_number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

/// Returns the name of a map, a program or a thread as the kernel stores the name: at most 15
/// bytes.
pub(super) fn object_name(text: &str) -> [u8; 16] {
    let mut name = [0; 16];
    name.iter_mut()
        .take(15)
        .zip(text.bytes())
        .for_each(|(to, from)| *to = from);
    name
}

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
    inner_map_fd: u32,
    numa_node: u32,
    map_name: [u8; 16],
}

fn create_map(
    map_type: u32,
    value_size: usize,
    max_entries: u32,
    map_flags: u32,
) -> Result<OwnedFd, Refused> {
    let mut attr = MapCreate {
        map_type,
        key_size: size_of::<u32>() as u32,
        value_size: value_size as u32,
        max_entries,
        map_flags,
        map_name: object_name("berth"),
        ..MapCreate::default()
    };
    // SAFETY: `attr` contains no address, and the command returns a descriptor.
    retry_with_higher_memory_limit(
        || unsafe { call_bpf_for_descriptor(MAP_CREATE, &mut attr) },
        raise_locked_memory_limit,
    )
    .map_err(Refused::at_step(Step::Map))
}

/// Makes a map of listening sockets.
pub(super) fn create_socket_map(entries: u32) -> Result<OwnedFd, Refused> {
    create_map(MAP_TYPE_SOCKMAP, size_of::<u64>(), entries, 0)
}

#[repr(C)]
struct MapElement {
    map_fd: u32,
    reserved: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Puts a socket into a map. The map does not keep the socket open.
pub(super) fn set_socket(
    map: BorrowedFd<'_>,
    key: u32,
    socket: BorrowedFd<'_>,
) -> Result<(), Refused> {
    #[cfg(debug_assertions)]
    if super::is_steering_turned_off() {
        return super::unsteered::check_listens(socket);
    }
    let value = u64::from(fd_number(socket));
    let (key, value) = (from_ref(&key) as u64, from_ref(&value) as u64);
    let mut attr = MapElement {
        map_fd: fd_number(map),
        reserved: 0,
        key,
        value,
        flags: 0,
    };
    // SAFETY: `key` and `value` live for the call and have the sizes of the map's keys and values.
    unsafe { bpf(MAP_UPDATE_ELEM, &mut attr) }
        .map(drop)
        .map_err(Refused::at_step(Step::Listener))
}

/// The value of an array map that has only one. The value is mapped into the memory of this
/// process, and begins as zeroes.
#[derive(Debug)]
pub(super) struct SharedValue<T> {
    map: OwnedFd,
    address: NonNull<T>,
}

// SAFETY: the mapping belongs to no thread, and only shared references to it are given out.
unsafe impl<T: Sync> Send for SharedValue<T> {}
// SAFETY: see `Send`.
unsafe impl<T: Sync> Sync for SharedValue<T> {}

impl<T> SharedValue<T> {
    const BYTES: NonZeroUsize =
        NonZeroUsize::new(size_of::<T>()).expect("a map's value has a size");

    /// # Safety
    /// `T` is made of atomics only: the kernel writes to the value at any time. Zeroes are a valid
    /// `T`.
    pub(super) unsafe fn new() -> Result<Self, Refused> {
        let map = create_map(MAP_TYPE_ARRAY, size_of::<T>(), 1, MMAPABLE)?;
        // SAFETY: the caller's promise.
        unsafe { Self::of(map) }
    }

    /// # Safety
    /// The promises of [`Self::new`], and the map has room for a `T`.
    unsafe fn of(map: OwnedFd) -> Result<Self, Refused> {
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: the kernel chooses the address.
        let address = unsafe { mmap(None, Self::BYTES, access, MapFlags::MAP_SHARED, &map, 0) };
        let address = address.map_err(|error| Refused::at_step(Step::Map)(error.into()))?;
        Ok(Self {
            map,
            address: address.cast(),
        })
    }
}

impl<T> AsFd for SharedValue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }
}

impl<T> Deref for SharedValue<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the value is mapped until `self` is dropped, begins at a page, is large enough,
        // and holds atomics.
        unsafe { self.address.as_ref() }
    }
}

impl<T> Drop for SharedValue<T> {
    fn drop(&mut self) {
        // SAFETY: `of` made this mapping, and no reference outlives `self`. A failure leaks the
        // mapping and does no more harm.
        let _ = unsafe { munmap(self.address.cast(), size_of::<T>()) };
    }
}

#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// Loads a program.
///
/// # Errors
/// If the verifier refuses the program, the error contains the verifier's log.
pub(super) fn load_program(
    prog_type: ProgramType,
    as_name: &str,
    program: &[Instruction],
) -> Result<OwnedFd, Refused> {
    let (prog_type, expected_attach_type) = prog_type.program_and_attach_types();
    let load = |log: &mut [u8]| {
        let mut attr = ProgLoad {
            prog_type,
            insn_cnt: program.len() as u32,
            insns: program.as_ptr() as u64,
            license: LICENSE.as_ptr() as u64,
            log_level: u32::from(!log.is_empty()),
            log_size: log.len() as u32,
            log_buf: if log.is_empty() {
                0
            } else {
                log.as_mut_ptr() as u64
            },
            kern_version: 0,
            prog_flags: STRICT_ALIGNMENT,
            prog_name: object_name(as_name),
            prog_ifindex: 0,
            expected_attach_type,
        };
        // SAFETY: program, licence and log live for the call and have the given lengths. The
        // licence ends with NUL.
        unsafe { call_bpf_for_descriptor(PROG_LOAD, &mut attr) }
    };
    // Request the log only after a refusal, because it costs time and memory.
    retry_with_higher_memory_limit(|| load(&mut []), raise_locked_memory_limit).or_else(|_| {
        let mut log = vec![0; LOG_BYTES];
        load(&mut log).map_err(|source| {
            let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
            Refused {
                step: Step::Program,
                source,
                log: String::from_utf8_lossy(text).trim_end().to_owned(),
            }
        })
    })
}

#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

/// Attaches a program until the link is closed. A program for connect(2) is attached to a cgroup,
/// an sk_lookup program to a network namespace.
pub(super) fn create_link(
    prog_type: ProgramType,
    program: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
) -> io::Result<OwnedFd> {
    let ((_, attach_type), prog_fd, target_fd) = (
        prog_type.program_and_attach_types(),
        fd_number(program),
        fd_number(target),
    );
    // SAFETY: the structure contains no address, and the command returns a descriptor.
    unsafe {
        call_bpf_for_descriptor(
            LINK_CREATE,
            &mut LinkCreate {
                prog_fd,
                target_fd,
                attach_type,
                flags: 0,
            },
        )
    }
}

#[repr(C)]
struct LinkDetach {
    link_fd: u32,
}

/// Detaches a program, even if duplicates of its link's descriptor are open.
pub(super) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the structure contains no address.
    unsafe {
        bpf(
            LINK_DETACH,
            &mut LinkDetach {
                link_fd: fd_number(link),
            },
        )
    }
    .map(drop)
}

#[repr(C)]
struct ProgQuery {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    reserved: u32,
}

/// Returns the IDs of the programs that steer in a network namespace, in the order in which the
/// programs run.
pub(super) fn list_attached(namespace: BorrowedFd<'_>) -> Result<Vec<u32>, Refused> {
    #[cfg(debug_assertions)]
    if super::is_steering_turned_off() {
        return Ok(Vec::new());
    }
    let mut ids = vec![0_u32; MOST_PROGRAMS];
    let mut attr = ProgQuery {
        target_fd: fd_number(namespace),
        attach_type: ATTACH_SK_LOOKUP,
        query_flags: 0,
        attach_flags: 0,
        prog_ids: ids.as_mut_ptr() as u64,
        prog_cnt: ids.len() as u32,
        reserved: 0,
    };
    // SAFETY: `ids` lives for the call and has the given number of places.
    unsafe { bpf(PROG_QUERY, &mut attr) }.map_err(Refused::at_step(Step::Query))?;
    ids.truncate(attr.prog_cnt as usize);
    Ok(ids)
}

#[repr(C)]
struct GetById {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

#[repr(C)]
struct GetInfo {
    fd: u32,
    info_len: u32,
    info: u64,
}

/// The first fields of the kernel's `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct ProgInfo {
    prog_type: u32,
    id: u32,
    tag: [u8; 8],
    jited_len: u32,
    xlated_len: u32,
    jited: u64,
    xlated: u64,
    load_time: u64,
    uid: u32,
    map_count: u32,
    maps: u64,
    name: [u8; 16],
}

/// Returns the name of a program, and the user ID that loaded the program.
///
/// # Errors
/// `EPERM` without CAP_SYS_ADMIN, `ENOENT` if the program does not exist any more.
pub(super) fn read_program_info(id: u32) -> io::Result<(String, u32)> {
    // SAFETY: the structure contains no address, and the command returns a descriptor.
    let program = unsafe {
        call_bpf_for_descriptor(
            PROG_GET_FD_BY_ID,
            &mut GetById {
                id,
                next_id: 0,
                open_flags: 0,
            },
        )
    }?;
    let mut info = ProgInfo::default();
    let (info_len, address) = (size_of::<ProgInfo>() as u32, from_mut(&mut info) as u64);
    // SAFETY: `info` lives for the call, has the given length, and holds numbers only.
    unsafe {
        bpf(
            OBJ_GET_INFO_BY_FD,
            &mut GetInfo {
                fd: fd_number(program.as_fd()),
                info_len,
                info: address,
            },
        )
    }?;
    let name = info
        .name
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    Ok((String::from_utf8_lossy(name).into_owned(), info.uid))
}

#[cfg(test)]
pub(super) mod test_run;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_locked_memory_raises_the_limit_and_tries_once_more() {
        let tried = |errors: &[i32], raises: bool| {
            let (mut errors, mut count) = (errors.iter(), 0);
            let made = retry_with_higher_memory_limit(
                || {
                    count += 1;
                    errors
                        .next()
                        .map_or(Ok(()), |error| Err(io::Error::from_raw_os_error(*error)))
                },
                || raises,
            );
            (made.err().and_then(|error| error.raw_os_error()), count)
        };
        let (lacks, other) = (libc::EPERM, libc::EINVAL);
        assert_eq!(tried(&[], true), (None, 1));
        assert_eq!(tried(&[lacks], true), (None, 2));
        assert_eq!(
            tried(&[lacks, lacks], true),
            (Some(lacks), 2),
            "a capability is what it lacks"
        );
        assert_eq!(tried(&[lacks], false), (Some(lacks), 1));
        assert_eq!(tried(&[other], true), (Some(other), 1));
    }
}
