//! A program, with all its children, under a supervisor: seccomp's user notification
//! (seccomp_unotify(2)) stops each call with a side effect, and the test decides about the call.
//! Calls are counted for the whole process tree.

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
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::from_mut;

/// A call with a side effect that has not been carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effect {
    /// ID of the calling process.
    pub process: i32,
    /// Name of the call, such as `rename`.
    pub call: &'static str,
    /// The path, address or command of the call. For a rename the new path.
    pub object: String,
    /// The old path of a rename.
    pub from: Option<PathBuf>,
}

/// What the supervisor does with a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The kernel carries the call out.
    Continue,
    /// The call fails.
    Fail(Errno),
    /// The call is never answered: `decide` has killed the process. After an answer, the kernel
    /// might carry the call out before the process ends.
    Never,
}

/// Puts a program under a supervisor, which asks `decide` about each call, on a thread that ends
/// with the last process of the tree.
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
        while let Some(call) = next_call(&calls) {
            let act = effect_of(&call).map_or(Act::Continue, |effect| decide(&effect));
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

/// AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64 of linux/audit.h.
const ARCHITECTURE: u32 = match () {
    () if cfg!(target_arch = "x86_64") => 0xc000_003e,
    () if cfg!(all(target_arch = "aarch64", target_endian = "little")) => 0xc000_00b7,
    () => 0,
};

/// Location of a call's object among its arguments.
#[derive(Clone, Copy)]
enum ObjectAt {
    /// A path.
    Path(usize),
    /// A directory's descriptor, and a path.
    At(usize, usize),
    /// The old path and the new path, each as in `At`.
    FromTo((usize, usize), (usize, usize)),
    /// The old path and the new path of rename(2), which arm64 does not have.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
    OldNew,
    /// An open file; the number of the argument with its descriptor.
    File(usize),
    /// An address in the second argument.
    Address,
    /// A signal; the number of its argument.
    Signal(usize),
    /// A command of bpf(2).
    Bpf,
}

/// The calls that are stopped. openat(2) is stopped only if it creates or truncates a file.
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
    (libc::SYS_openat, "create", ObjectAt::At(0, 1)),
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
    (libc::SYS_copy_file_range, "write", ObjectAt::File(2)),
    (libc::SYS_sendfile, "write", ObjectAt::File(0)),
    (libc::SYS_ftruncate, "truncate", ObjectAt::File(0)),
    (libc::SYS_fallocate, "truncate", ObjectAt::File(0)),
    (libc::SYS_fchmod, "chmod", ObjectAt::File(0)),
    (libc::SYS_fchown, "chown", ObjectAt::File(0)),
    (libc::SYS_fsync, "sync", ObjectAt::File(0)),
    (libc::SYS_fdatasync, "sync", ObjectAt::File(0)),
    (libc::SYS_mount, "mount", ObjectAt::Path(1)),
    (libc::SYS_umount2, "umount", ObjectAt::Path(0)),
    (libc::SYS_move_mount, "mount", ObjectAt::At(2, 3)),
    (libc::SYS_connect, "connect", ObjectAt::Address),
    (libc::SYS_bind, "bind", ObjectAt::Address),
    (libc::SYS_kill, "kill", ObjectAt::Signal(1)),
    (libc::SYS_tgkill, "kill", ObjectAt::Signal(2)),
    (libc::SYS_pidfd_send_signal, "kill", ObjectAt::Signal(1)),
    (libc::SYS_bpf, "bpf", ObjectAt::Bpf),
];

/// Returns the BPF program that the kernel runs for each call.
fn build_filter() -> Vec<sock_filter> {
    let (load, equal, end) = (
        BPF_LD | BPF_W | BPF_ABS,
        BPF_JMP | BPF_JEQ | BPF_K,
        BPF_RET | BPF_K,
    );
    let make = |code: u32, jt, jf, k: u32| sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let count = CALLS.len() as u8;
    let mut program = vec![
        make(load, 0, 0, offset_of!(seccomp_data, arch) as u32),
        make(equal, 1, 0, ARCHITECTURE),
        make(end, 0, 0, SECCOMP_RET_ALLOW),
        make(load, 0, 0, offset_of!(seccomp_data, nr) as u32),
    ];
    // After the calls: allow, then the flags of openat(2), then notify.
    for (at, (number, ..)) in (0..).zip(CALLS) {
        let is_open = *number == libc::SYS_openat;
        program.push(make(
            equal,
            count - at - 1 + if is_open { 1 } else { 3 },
            0,
            *number as u32,
        ));
    }
    program.extend([
        make(end, 0, 0, SECCOMP_RET_ALLOW),
        make(load, 0, 0, (offset_of!(seccomp_data, args) + 16) as u32),
        make(BPF_JMP | BPF_JSET | BPF_K, 0, 1, (O_CREAT | O_TRUNC) as u32),
        make(end, 0, 0, SECCOMP_RET_USER_NOTIF),
        make(end, 0, 0, SECCOMP_RET_ALLOW),
    ]);
    program
}

/// Installs the filter in the child, and sends the descriptor that receives the child's calls.
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
    // SAFETY: the descriptor is new. Nothing below makes a call that waits for the supervisor.
    let fd = unsafe { OwnedFd::from_raw_fd(Errno::result(fd)? as RawFd) };
    let (data, fds) = ([IoSlice::new(b"f")], [fd.as_raw_fd()]);
    sendmsg::<()>(
        to.as_raw_fd(),
        &data,
        &[ControlMessage::ScmRights(&fds)],
        MsgFlags::empty(),
        None,
    )?;
    Ok(())
}

/// Receives the descriptor. Returns `None` if the child was not started.
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

/// Receives the next call. Returns `None` once no process of the tree is left.
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
        match unsafe { request(calls, SECCOMP_IOCTL_NOTIF_RECV, &mut call) } {
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
    // A process that has ended needs no answer.
    // SAFETY: `response` has the type that the request needs.
    let _ = unsafe { request(calls, SECCOMP_IOCTL_NOTIF_SEND, &mut response) };
}

/// # Safety
/// `value` must have the type that the request needs.
unsafe fn request<T>(calls: &OwnedFd, request: libc::Ioctl, value: &mut T) -> nix::Result<c_int> {
    // SAFETY: `value` lives for the call; the caller promises its type.
    Errno::result(unsafe { libc::ioctl(calls.as_raw_fd(), request, from_mut(value)) })
}

/// Describes the effect of a call. Returns `None` if the call has no lasting effect that another
/// process sees, such as a write to a pipe.
fn effect_of(call: &seccomp_notif) -> Option<Effect> {
    let (_, name, about) = *CALLS
        .iter()
        .find(|(number, ..)| *number == libc::c_long::from(call.data.nr))?;
    let thread = Thread(call.pid.cast_signed());
    let arguments = call.data.args;
    let path = |at: usize| thread.path(AT_FDCWD, arguments[at]);
    let path_at =
        |directory: usize, at: usize| thread.path(arguments[directory] as RawFd, arguments[at]);
    let shown = |path: PathBuf| path.display().to_string();
    let mut from = None;
    let object = match about {
        ObjectAt::Path(at) => shown(path(at)?),
        ObjectAt::At(directory, at) => shown(path_at(directory, at)?),
        ObjectAt::FromTo(old, new) => {
            from = path_at(old.0, old.1);
            shown(path_at(new.0, new.1)?)
        }
        ObjectAt::OldNew => {
            from = path(0);
            shown(path(1)?)
        }
        ObjectAt::File(at) => {
            let file = thread.read_link(&format!("fd/{}", arguments[at] as RawFd))?;
            let is_device = file.starts_with("/dev") && !file.starts_with("/dev/shm");
            let is_memory = file.to_string_lossy().starts_with("/memfd:");
            shown(Some(file).filter(|file| file.is_absolute() && !is_device && !is_memory)?)
        }
        ObjectAt::Address => thread.address(arguments[1], arguments[2] as usize)?,
        ObjectAt::Signal(at) => Some(arguments[at])
            .filter(|signal| *signal != 0)?
            .to_string(),
        ObjectAt::Bpf => match arguments[0] {
            0 => "map create",
            2 => "map update",
            3 => "map delete",
            5 => "prog load",
            6 => "pin",
            8 => "attach",
            9 => "detach",
            28 => "link create",
            29 => "link update",
            _ => return None,
        }
        .to_owned(),
    };
    Some(Effect {
        process: thread.process()?,
        call: name,
        object,
        from,
    })
}

/// A thread with a waiting call.
struct Thread(i32);

impl Thread {
    fn read_link(&self, name: &str) -> Option<PathBuf> {
        fs::read_link(format!("/proc/{}/{name}", self.0)).ok()
    }

    fn process(&self) -> Option<i32> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("Tgid:"))?
            .trim()
            .parse()
            .ok()
    }

    fn memory(&self, at: u64, most: usize) -> Option<Vec<u8>> {
        let memory = File::open(format!("/proc/{}/mem", self.0)).ok()?;
        let mut bytes = vec![0; most];
        // The next page may not be mapped.
        let within = most.min(4096 - (at % 4096) as usize);
        let read = memory
            .read_at(&mut bytes, at)
            .or_else(|_| memory.read_at(&mut bytes[..within], at))
            .ok()?;
        bytes.truncate(read);
        Some(bytes)
    }

    fn path(&self, directory: RawFd, at: u64) -> Option<PathBuf> {
        let bytes = self.memory(at, 4096)?;
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

    /// Reads an address. Returns `None` for a netlink socket, because its bind(2) has no effect
    /// that another process sees.
    fn address(&self, at: u64, length: usize) -> Option<String> {
        let bytes = self.memory(at, length.min(128))?;
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
