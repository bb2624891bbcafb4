//! Runs a program and all its children under a supervisor. seccomp's user notification
//! (seccomp_unotify(2)) stops each call that has a side effect, and the test decides what becomes
//! of the call. Calls are counted for the whole process tree.

#![allow(
    unsafe_code,
    reason = "system calls that no safe crate has, for tests alone"
)]

use libc::{
    AT_FDCWD, BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, O_CREAT, O_TRUNC,
    SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV,
    SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND, SECCOMP_RET_ALLOW, SECCOMP_RET_USER_NOTIF,
    SECCOMP_USER_NOTIF_FLAG_CONTINUE, c_int, seccomp_data, seccomp_notif, seccomp_notif_resp,
    sock_filter, sock_fprog,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, MultiHeaders, SockFlag, SockType,
    recvmsg, sendmmsg, socketpair,
};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::from_mut;

/// A call that has a side effect, and that the kernel has not carried out yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effect {
    /// ID of the process that made the call.
    pub process: i32,
    /// Name of the call, such as `rename`.
    pub call: &'static str,
    /// The path, address or command on which the call acts. For a rename, the new path. For a
    /// `send`, the address to which the call's socket is connected.
    pub object: String,
    /// The old path of a rename.
    pub from: Option<PathBuf>,
}

/// The answer of the supervisor to a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The kernel carries the call out.
    Continue,
    /// The call fails.
    Fail(Errno),
    /// The supervisor never answers, because `decide` has killed the process. After an answer, the
    /// kernel might still carry out the call before the process ends.
    Never,
}

/// Puts a program under a supervisor, which asks `decide` about each call. The supervisor is a
/// thread. It ends when the last process of the program's tree has ended.
///
/// # Panics
/// The supervisor cannot be set up.
pub fn supervise_program(
    command: &mut Command,
    mut decide: impl FnMut(&Effect) -> Act + Send + 'static,
) {
    let none = None;
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        none,
        SockFlag::SOCK_CLOEXEC,
    )
    .unwrap();
    // SAFETY: the closure only makes system calls.
    unsafe { command.pre_exec(move || install_filter(&theirs)) };
    std::thread::spawn(move || {
        let Some(calls) = receive_descriptor(&ours) else {
            return;
        };
        let mut peers = Peers::new();
        while let Some(call) = next_call(&calls) {
            let act = effect_of(&call, &mut peers).map_or(Act::Continue, |effect| decide(&effect));
            answer_call(&calls, call.id, act);
        }
    });
}

/// Returns the reason why no program can be supervised on this machine. `None` if supervision
/// works.
#[must_use]
pub fn find_obstacle() -> Option<String> {
    if ARCHITECTURE == 0 {
        return Some("the supervisor does not support this architecture".to_owned());
    }
    let mut command = Command::new("true");
    supervise_program(&mut command, |_| Act::Continue);
    command
        .status()
        .err()
        .map(|error| format!("seccomp notification is not available: {error}"))
}

/// The number of this machine's architecture in linux/audit.h: AUDIT_ARCH_X86_64 or
/// AUDIT_ARCH_AARCH64.
const ARCHITECTURE: u32 = match () {
    () if cfg!(target_arch = "x86_64") => 0xc000_003e,
    () if cfg!(all(target_arch = "aarch64", target_endian = "little")) => 0xc000_00b7,
    () => 0,
};

/// Tells which arguments of a call name the object on which it acts.
#[derive(Clone, Copy)]
enum ObjectAt {
    /// A path.
    Path(usize),
    /// Two arguments: a directory's descriptor, and a path below this directory.
    At(usize, usize),
    /// Four arguments: the old path and the new path, each with a directory as in `At`.
    FromTo((usize, usize), (usize, usize)),
    /// The old path and the new path, the two arguments of rename(2). arm64 does not have this
    /// call.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    OldNew,
    /// An open file or a connected socket. The value is the number of the argument with its
    /// descriptor.
    File(usize),
    /// A socket address, to which the second argument points.
    Address,
    /// The fifth argument of sendto(2).
    SendTo,
    /// The first field of the second argument of sendmsg(2).
    SendMsg,
    /// A number, such as a signal. The value is the number of the argument with it.
    Number(usize),
    /// A command of bpf(2).
    Bpf,
}

/// The calls that the supervisor stops: those with a side effect that berth and its libraries make.
/// It stops the calls in [`WITH`] only with some arguments.
///
/// A send counts if the program connected its socket, or if the call has an address. A send on an
/// accepted socket does not count: a server's answers depend on its clients.
const CALLS: &[(libc::c_long, &str, ObjectAt)] = &[
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_rename, "rename", ObjectAt::OldNew),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_unlink, "unlink", ObjectAt::Path(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_rmdir, "rmdir", ObjectAt::Path(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mkdir, "mkdir", ObjectAt::Path(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chmod, "chmod", ObjectAt::Path(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_chown, "chown", ObjectAt::Path(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_symlink, "symlink", ObjectAt::Path(1)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_link, "link", ObjectAt::Path(1)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mknod, "mknod", ObjectAt::Path(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, "create", ObjectAt::Path(0)),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_creat, "create", ObjectAt::Path(0)),
    (libc::SYS_openat, "create", ObjectAt::At(0, 1)),
    (libc::SYS_openat2, OPEN_HOW, ObjectAt::At(0, 1)),
    (
        libc::SYS_renameat,
        "rename",
        ObjectAt::FromTo((0, 1), (2, 3)),
    ),
    (
        libc::SYS_renameat2,
        "rename",
        ObjectAt::FromTo((0, 1), (2, 3)),
    ),
    (libc::SYS_unlinkat, "unlink", ObjectAt::At(0, 1)),
    (libc::SYS_mkdirat, "mkdir", ObjectAt::At(0, 1)),
    (libc::SYS_fchmodat, "chmod", ObjectAt::At(0, 1)),
    (libc::SYS_fchownat, "chown", ObjectAt::At(0, 1)),
    (libc::SYS_symlinkat, "symlink", ObjectAt::At(1, 2)),
    (libc::SYS_linkat, "link", ObjectAt::At(2, 3)),
    (libc::SYS_mknodat, "mknod", ObjectAt::At(0, 1)),
    (libc::SYS_truncate, "truncate", ObjectAt::Path(0)),
    (libc::SYS_write, "write", ObjectAt::File(0)),
    (libc::SYS_pwrite64, "write", ObjectAt::File(0)),
    (libc::SYS_writev, "write", ObjectAt::File(0)),
    (libc::SYS_ioctl, "write", ObjectAt::File(0)),
    (libc::SYS_copy_file_range, "write", ObjectAt::File(2)),
    (libc::SYS_sendfile, "write", ObjectAt::File(0)),
    (libc::SYS_ftruncate, "truncate", ObjectAt::File(0)),
    (libc::SYS_fallocate, "truncate", ObjectAt::File(0)),
    (libc::SYS_fchmod, "chmod", ObjectAt::File(0)),
    (libc::SYS_fchown, "chown", ObjectAt::File(0)),
    (libc::SYS_fsetxattr, "setxattr", ObjectAt::File(0)),
    (libc::SYS_utimensat, "touch", ObjectAt::File(0)),
    (libc::SYS_fsync, "sync", ObjectAt::File(0)),
    (libc::SYS_fdatasync, "sync", ObjectAt::File(0)),
    (libc::SYS_mount, "mount", ObjectAt::Path(1)),
    (libc::SYS_umount2, "umount", ObjectAt::Path(0)),
    (libc::SYS_move_mount, "mount", ObjectAt::At(2, 3)),
    (libc::SYS_unshare, "unshare", ObjectAt::Number(0)),
    (libc::SYS_connect, "connect", ObjectAt::Address),
    (libc::SYS_bind, "bind", ObjectAt::Address),
    (libc::SYS_sendto, SEND, ObjectAt::SendTo),
    (libc::SYS_sendmsg, SEND, ObjectAt::SendMsg),
    (libc::SYS_kill, "kill", ObjectAt::Number(1)),
    (libc::SYS_tgkill, "kill", ObjectAt::Number(2)),
    (libc::SYS_pidfd_send_signal, "kill", ObjectAt::Number(1)),
    (libc::SYS_bpf, "bpf", ObjectAt::Bpf),
];

/// Name of a send on a connected socket, whichever call it is.
const SEND: &str = "send";

/// Name of openat2(2), of which the supervisor itself reads the flags.
const OPEN_HOW: &str = "openat2";

/// Flags with which an open has a side effect.
const CREATES: u32 = (O_CREAT | O_TRUNC) as u32;

/// Calls that are stopped only with some arguments: the number of the argument, and the condition
/// of the BPF program.
const WITH: &[(libc::c_long, usize, u32, u32)] = &[
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, 1, BPF_JSET, CREATES),
    (libc::SYS_openat, 2, BPF_JSET, CREATES),
    (libc::SYS_ioctl, 1, BPF_JEQ, libc::FICLONE as u32),
];

/// Returns the filter as a BPF program, which the kernel runs for each system call.
fn build_filter() -> Vec<sock_filter> {
    let make = |code: u32, jt, jf, k: u32| sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let load = |at: usize| make(BPF_LD | BPF_W | BPF_ABS, 0, 0, at as u32);
    let end = |act| make(BPF_RET | BPF_K, 0, 0, act);
    // Skips instructions unless the loaded word meets the condition.
    let skip = |count, condition, k| make(BPF_JMP | condition | BPF_K, 0, count, k);
    let mut program = vec![
        load(offset_of!(seccomp_data, arch)),
        make(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, ARCHITECTURE),
        end(SECCOMP_RET_ALLOW),
        load(offset_of!(seccomp_data, nr)),
    ];
    for (number, ..) in CALLS {
        match WITH.iter().find(|(it, ..)| it == number) {
            None => program.push(skip(1, BPF_JEQ, *number as u32)),
            Some((_, argument, condition, value)) => program.extend([
                skip(4, BPF_JEQ, *number as u32),
                load(offset_of!(seccomp_data, args) + argument * 8),
                make(BPF_JMP | condition | BPF_K, 1, 0, *value),
                end(SECCOMP_RET_ALLOW),
            ]),
        }
        program.push(end(SECCOMP_RET_USER_NOTIF));
    }
    program.push(end(SECCOMP_RET_ALLOW));
    program
}

/// Installs the filter in the child, and sends the parent the descriptor from which the child's
/// calls are received.
fn install_filter(to: &OwnedFd) -> io::Result<()> {
    prctl::set_no_new_privs()?;
    let mut filter = build_filter();
    let program = sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let flags = SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    // SAFETY: the program and its instructions live for the call, and the length is correct.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    };
    // SAFETY: the descriptor is new. Nothing below makes a call that waits for the supervisor:
    // sendmmsg(2) passes the filter.
    let fd = unsafe { OwnedFd::from_raw_fd(Errno::result(fd)? as RawFd) };
    let (data, fds) = ([IoSlice::new(b"f")], [fd.as_raw_fd()]);
    sendmmsg(
        to.as_raw_fd(),
        &mut MultiHeaders::<()>::preallocate(1, Some(nix::cmsg_space!(RawFd))),
        [&data],
        [None],
        [ControlMessage::ScmRights(&fds)],
        MsgFlags::empty(),
    )?;
    Ok(())
}

/// Receives the descriptor from the child. Returns `None` if the child was not started.
fn receive_descriptor(from: &OwnedFd) -> Option<OwnedFd> {
    let (mut byte, mut space) = ([0], nix::cmsg_space!(RawFd));
    let mut data = [IoSliceMut::new(&mut byte)];
    let received = recvmsg::<()>(
        from.as_raw_fd(),
        &mut data,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )
    .ok()?;
    let fd = received.cmsgs().ok()?.find_map(|message| match message {
        ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
        _ => None,
    })?;
    // SAFETY: the kernel has just created the descriptor for this process.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Receives the next call that waits. Returns `None` once no process of the tree is left.
fn next_call(calls: &OwnedFd) -> Option<seccomp_notif> {
    loop {
        let mut ready = [PollFd::new(calls.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            polled => polled.unwrap(),
        };
        if !ready[0].any().unwrap_or_default() || ready[0].revents()?.contains(PollFlags::POLLHUP) {
            return None;
        }
        // SAFETY: the struct has only numbers, and the kernel wants zeroes.
        let mut call: seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: `call` has the type that the request needs.
        match unsafe { run_ioctl(calls, SECCOMP_IOCTL_NOTIF_RECV, &mut call) } {
            Err(Errno::ENOENT | Errno::EINTR) => {}
            received => return received.ok().map(|_| call),
        }
    }
}

fn answer_call(calls: &OwnedFd, id: u64, act: Act) {
    let (error, flags) = match act {
        Act::Continue => (0, SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        Act::Fail(errno) => (-(errno as c_int), 0),
        Act::Never => return,
    };
    let mut response = seccomp_notif_resp {
        id,
        val: 0,
        error,
        flags,
    };
    // An error means that the process has ended, and needs no answer. SAFETY: `response` has the
    // type that the request needs.
    let _ = unsafe { run_ioctl(calls, SECCOMP_IOCTL_NOTIF_SEND, &mut response) };
}

/// # Safety
/// `value` must have the type that the request needs.
unsafe fn run_ioctl<T>(calls: &OwnedFd, request: libc::Ioctl, value: &mut T) -> nix::Result<c_int> {
    // SAFETY: `value` lives for the call; the caller promises its type.
    Errno::result(unsafe { libc::ioctl(calls.as_raw_fd(), request, from_mut(value)) })
}

/// Addresses to which sockets were connected, by the link of a socket's descriptor.
type Peers = BTreeMap<PathBuf, String>;

/// Describes the effect of a call. Returns `None` if the call has no lasting effect that another
/// process sees, such as a write to a pipe.
fn effect_of(call: &seccomp_notif, peers: &mut Peers) -> Option<Effect> {
    let (_, mut name, about) = *CALLS
        .iter()
        .find(|(number, ..)| *number == libc::c_long::from(call.data.nr))?;
    let thread = Thread(call.pid.cast_signed());
    let arguments = call.data.args;
    let path = |at: usize| thread.read_path(AT_FDCWD, arguments[at]);
    let path_at = |directory: usize, at: usize| {
        thread.read_path(arguments[directory] as RawFd, arguments[at])
    };
    let shown = |path: PathBuf| path.display().to_string();
    let opened = |at: usize| thread.read_link(&format!("fd/{}", arguments[at] as RawFd));
    let mut from = None;
    let object = match about {
        ObjectAt::Path(at) => shown(path(at)?),
        ObjectAt::At(directory, at) => {
            if name == OPEN_HOW {
                let flags = thread.read_word(arguments[2])?;
                name = (flags as u32 & CREATES != 0).then_some("create")?;
            }
            shown(path_at(directory, at)?)
        }
        ObjectAt::FromTo(old, new) => {
            from = path_at(old.0, old.1);
            shown(path_at(new.0, new.1)?)
        }
        ObjectAt::OldNew => {
            from = path(0);
            shown(path(1)?)
        }
        ObjectAt::File(at) => {
            let file = opened(at)?;
            let is_device = file.starts_with("/dev") && !file.starts_with("/dev/shm");
            let is_memory = file.to_string_lossy().starts_with("/memfd:");
            match peers.get(&file) {
                Some(peer) => {
                    name = SEND;
                    peer.clone()
                }
                None => {
                    shown(Some(file).filter(|file| file.is_absolute() && !is_device && !is_memory)?)
                }
            }
        }
        ObjectAt::Address => {
            let address = thread.read_socket_address(arguments[1], arguments[2] as usize)?;
            if name == "connect" {
                peers.insert(opened(0)?, address.clone());
            }
            address
        }
        ObjectAt::SendTo | ObjectAt::SendMsg => {
            let (at, length) = match about {
                ObjectAt::SendTo => (arguments[4], arguments[5]),
                _ => (
                    thread.read_word(arguments[1])?,
                    thread.read_word(arguments[1] + 8)? & u64::from(u32::MAX),
                ),
            };
            match at {
                0 => peers.get(&opened(0)?)?.clone(),
                at => thread.read_socket_address(at, length as usize)?,
            }
        }
        ObjectAt::Number(at) => Some(arguments[at])
            .filter(|number| *number != 0)?
            .to_string(),
        ObjectAt::Bpf => match arguments[0] {
            0 => "map create",
            2 => "map update",
            5 => "prog load",
            28 => "link create",
            34 => "link detach",
            _ => return None,
        }
        .to_owned(),
    };
    Some(Effect {
        process: thread.process_id()?,
        call: name,
        object,
        from,
    })
}

/// A thread of which a call waits for the supervisor's answer.
struct Thread(i32);

impl Thread {
    fn read_link(&self, name: &str) -> Option<PathBuf> {
        fs::read_link(format!("/proc/{}/{name}", self.0)).ok()
    }

    fn process_id(&self) -> Option<i32> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("Tgid:"))?
            .trim()
            .parse()
            .ok()
    }

    fn read_memory(&self, at: u64, most: usize) -> Option<Vec<u8>> {
        let memory = File::open(format!("/proc/{}/mem", self.0)).ok()?;
        let mut bytes = vec![0; most];
        // Read to the end of the page only: the next page may not be mapped.
        let within = most.min(4096 - (at % 4096) as usize);
        let read = memory
            .read_at(&mut bytes, at)
            .or_else(|_| memory.read_at(&mut bytes[..within], at))
            .ok()?;
        bytes.truncate(read);
        Some(bytes)
    }

    fn read_word(&self, at: u64) -> Option<u64> {
        Some(u64::from_ne_bytes(
            self.read_memory(at, 8)?.try_into().ok()?,
        ))
    }

    fn read_path(&self, directory: RawFd, at: u64) -> Option<PathBuf> {
        let bytes = self.read_memory(at, 4096)?;
        let text = String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next()?).into_owned();
        if Path::new(&text).is_absolute() {
            return Some(text.into());
        }
        let above = if directory == AT_FDCWD {
            self.read_link("cwd")
        } else {
            self.read_link(&format!("fd/{directory}"))
        };
        Some(above?.join(text))
    }

    /// Reads the socket address at `at` in the thread's memory, as text. Returns `None` for a
    /// netlink socket, because its bind(2) has no effect that another process sees.
    fn read_socket_address(&self, at: u64, length: usize) -> Option<String> {
        let bytes = self.read_memory(at, length.min(128))?;
        let family = c_int::from(u16::from_ne_bytes([*bytes.first()?, *bytes.get(1)?]));
        let port = || Some(u16::from_be_bytes([*bytes.get(2)?, *bytes.get(3)?]));
        match family {
            libc::AF_UNIX => {
                let name = bytes.get(2..)?;
                let (sign, name) = if let Some(name) = name.strip_prefix(b"\0") {
                    ("@", name)
                } else {
                    ("", name)
                };
                Some(format!(
                    "{sign}{}",
                    String::from_utf8_lossy(name.split(|byte| *byte == 0).next()?)
                ))
            }
            libc::AF_INET => {
                let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
                Some(format!("{}:{}", std::net::Ipv4Addr::from(ip), port()?))
            }
            libc::AF_INET6 => {
                let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
                Some(format!("[{}]:{}", std::net::Ipv6Addr::from(ip), port()?))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::{print_skipped, test_name};
    use nix::sched::{CloneFlags, unshare};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::sync::{Arc, Mutex};

    /// A directory. If the variable is set, this process makes calls there.
    const CALLS_IN: &str = "BERTH_TEST_CALLS_IN";

    /// Makes calls of each kind that is not the call of a path.
    fn make_system_calls(directory: &Path) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        fs::write(directory.join("address"), address.to_string()).unwrap();
        let mut client = TcpStream::connect(address).unwrap();
        let (mut served, _) = listener.accept().unwrap();
        // sendto(2), writev(2), sendmsg(2), and an answer, which does not count.
        client.write_all(b"a").unwrap();
        assert_eq!(client.write_vectored(&[IoSlice::new(b"a")]).unwrap(), 1);
        let data = [IoSlice::new(b"a")];
        let fd = client.as_raw_fd();
        nix::sys::socket::sendmsg::<()>(fd, &data, &[], MsgFlags::empty(), None).unwrap();
        served.write_all(b"a").unwrap();
        client.read_exact(&mut [0]).unwrap();
        // A datagram, which has an address.
        let datagram = UdpSocket::bind("127.0.0.1:0").unwrap();
        datagram.send_to(b"a", address).unwrap();
        let file = File::create(directory.join("file")).unwrap();
        let fd = file.as_raw_fd();
        let name = directory.join("opened").display().to_string() + "\0";
        // SAFETY: each pointer lives for its call, and each length is correct.
        unsafe {
            libc::ioctl(fd, libc::FICLONE, fd);
            libc::ioctl(fd, libc::FIONREAD, &mut 0);
            libc::fsetxattr(fd, c"user.a".as_ptr(), c"".as_ptr().cast(), 0, 0);
            for flags in [libc::O_RDONLY, O_CREAT | libc::O_WRONLY] {
                let mut how: libc::open_how = std::mem::zeroed();
                how.flags = flags as u64;
                how.mode = if flags == 0 { 0 } else { 0o600 };
                let (at, size) = (name.as_ptr(), size_of::<libc::open_how>());
                libc::syscall(libc::SYS_openat2, AT_FDCWD, at, &raw const how, size);
            }
        }
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        let _ = unshare(CloneFlags::CLONE_FILES);
    }

    #[test]
    fn calls_with_a_side_effect_are_stopped() {
        if let Some(directory) = std::env::var_os(CALLS_IN) {
            return make_system_calls(Path::new(&directory));
        }
        if let Some(why) = find_obstacle() {
            return print_skipped(&why);
        }
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", &test_name()])
            .env(CALLS_IN, directory.path());
        let seen = Arc::<Mutex<Vec<_>>>::default();
        let noted = seen.clone();
        supervise_program(&mut command, move |effect| {
            let Effect { call, object, .. } = effect;
            noted.lock().unwrap().push(format!("{call} {object}"));
            Act::Continue
        });
        assert!(command.output().unwrap().status.success());
        let address = fs::read_to_string(directory.path().join("address")).unwrap();
        let [text, file, opened] = ["address", "file", "opened"]
            .map(|name| directory.path().join(name).display().to_string());
        let expected = [
            "bind 127.0.0.1:0".to_owned(),
            format!("create {text}"),
            format!("write {text}"),
            format!("connect {address}"),
            format!("send {address}"),
            format!("send {address}"),
            format!("send {address}"),
            "bind 127.0.0.1:0".to_owned(),
            format!("send {address}"),
            format!("create {file}"),
            format!("write {file}"),
            format!("setxattr {file}"),
            format!("create {opened}"),
            format!("touch {file}"),
            format!("unshare {}", CloneFlags::CLONE_FILES.bits()),
        ];
        let seen = seen.lock().unwrap();
        let others = ["/proc/", "/sys/"];
        let seen: Vec<_> = seen
            .iter()
            .filter(|it| !others.iter().any(|other| it.contains(other)))
            .collect();
        assert_eq!(seen, expected.iter().collect::<Vec<_>>());
    }
}
