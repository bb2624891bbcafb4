//! Seccomp's user notification (seccomp_unotify(2)): bind(2), accept(2) and accept4(2) of a child
//! wait until this process answers the calls.
//!
//! A child gets a socket in two steps: the kernel adds a descriptor, then the call returns the
//! descriptor's number. (SECCOMP_ADDFD_FLAG_SEND combines the steps. But if this process is stopped
//! meanwhile, the call returns 0, which is the descriptor of the child's standard input, and the
//! child takes that for a client.) Between the two steps only the child's death may end the call:
//! the flag SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV of Linux 5.19 sees to that. Before Linux 6.17,
//! the flag has no effect on a call that is answered before the child has slept a second time, and
//! a signal then repeats the call after its answer. Here the child does sleep a second time: the
//! added descriptor wakes the child, which then sleeps again before the answer.

use crate::file::none_if_missing;
use crate::process::{check_single_threaded, die_with_process};
use crate::seqpacket;
use crate::socket::read_inode;
use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, SECCOMP_RET_ALLOW,
    SECCOMP_RET_USER_NOTIF, seccomp_data, seccomp_notif, seccomp_notif_addfd, seccomp_notif_resp,
    sock_filter, sock_fprog,
};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, getpid};
use socket2::SockAddr;
use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr::from_mut;
use std::slice;

/// AUDIT_ARCH_X86_64 and AUDIT_ARCH_AARCH64 of linux/audit.h; 0 on other architectures, for which
/// nobody has checked the filter.
const ARCHITECTURE: u32 = match () {
    () if cfg!(target_arch = "x86_64") => 0xc000_003e,
    () if cfg!(all(target_arch = "aarch64", target_endian = "little")) => 0xc000_00b7,
    () => 0,
};

/// SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP of linux/seccomp.h. With this flag, the process that answers
/// a call runs on the CPU of the calling thread, and the calling thread then continues on the same
/// CPU.
const SYNC_WAKE_UP: libc::c_ulong = 1;

// The kernel reads and writes whole structures, so their sizes must be those of linux/seccomp.h.
const _: () = assert!(size_of::<seccomp_data>() == 64 && size_of::<seccomp_notif>() == 80);
const _: () =
    assert!(size_of::<seccomp_notif_resp>() == 24 && size_of::<seccomp_notif_addfd>() == 24);

/// A child that runs under the filter. The value's descriptor is readable while a call of the child
/// waits to be received.
#[derive(Debug)]
pub struct Child {
    pub pid: i32,
    notifications: OwnedFd,
    /// A socket on which the child reports before execve(2): the descriptor for notifications, or
    /// an error.
    report: OwnedFd,
    /// The child's memory (/proc/PID/mem), opened at its last bind(2).
    memory: Option<File>,
}

/// Forks a child. The child installs the filter and calls `run`, which executes a program and
/// returns only on failure. The child has no_new_privs, and gets SIGKILL when this process ends.
/// (The kernel forgets the SIGKILL if an ordinary user executes a program with file capabilities.
/// When this process has ended, such a child gets `ENOSYS` from its next call. But if this process
/// was PID 1 of a container, the kernel ends every process of the container.) This process never
/// drops `run`: a lock that `run` owns stays locked for the child.
///
/// Calls of a child's children, which inherit the filter, wait as well. A received call ends by its
/// answer or by the death of the child: after a signal to the child, answer the call, so that the
/// signal's handler can run.
///
/// Must be called by a process with one thread.
///
/// # Errors
/// Errors of seccomp(2): `EBUSY` if another process receives this process's notifications, `EINVAL`
/// before Linux 5.19, `ENOSYS` without seccomp, `EPERM` and `EACCES` by a policy. Also errors of
/// fork(2) and socketpair(2).
pub fn start_filtered(run: impl FnOnce() -> io::Error) -> io::Result<Child> {
    check_single_threaded()?;
    let (report, reports) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?;
    let parent = getpid();
    // SAFETY: with one thread, no other thread holds a lock for which the child would wait.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(report);
            let filtered =
                die_with_process(parent, Signal::SIGKILL).and_then(|()| install_filter());
            let sent = filtered.and_then(|fd| {
                seqpacket::transmit_message(reports.as_fd(), &[0; 4], &[fd.as_fd()])
            });
            let error = sent.map_or_else(|error| error, |()| run());
            let number = error.raw_os_error().unwrap_or(libc::ECANCELED);
            let _ = seqpacket::transmit_message(reports.as_fd(), &number.to_ne_bytes(), &[]);
            // SAFETY: _exit only ends the process: no value of the parent is dropped here.
            unsafe { libc::_exit(127) }
        }
        ForkResult::Parent { child } => {
            drop(reports);
            std::mem::forget(run);
            let fd = receive_reported_descriptor(&report)
                .and_then(|fd| fd.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()));
            // The child could not install the filter and ends. Collect its status, so that no
            // zombie remains.
            let fd = fd.inspect_err(|_| {
                let _ = waitpid(child, None);
            })?;
            let child = Child {
                pid: child.as_raw(),
                notifications: fd,
                report,
                memory: None,
            };
            // The flag is new with Linux 6.6. Without it, each call waits twice until another CPU
            // is free. SAFETY: the request takes a number.
            unsafe {
                libc::ioctl(
                    child.notifications.as_raw_fd(),
                    libc::SECCOMP_IOCTL_NOTIF_SET_FLAGS,
                    SYNC_WAKE_UP,
                )
            };
            Ok(child)
        }
    }
}

/// A system call of the child that the filter makes wait for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notification {
    pub id: u64,
    pub thread: i32,
    pub call: Call,
    pub socket: RawFd,
    /// The call's argument for an address: a pointer, or 0.
    pub address: u64,
    /// The call's argument for a length: the length for bind(2), a pointer to the length for
    /// accept(2).
    pub length: u64,
    /// Flags of accept4(2).
    pub flags: c_int,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    Bind,
    /// accept(2) or accept4(2).
    Accept,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Value(c_int),
    Error(Errno),
    /// Let the kernel carry out the call itself.
    Continue,
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.notifications.as_fd()
    }
}

impl Child {
    /// Waits until the child executes a program.
    ///
    /// # Errors
    /// The error that `run` returned.
    pub fn await_exec(&self) -> io::Result<()> {
        receive_reported_descriptor(&self.report).map(drop)
    }

    /// True if a thread belongs to the child. False for a thread of a process that the child
    /// started: such a process inherits the filter.
    pub fn has_thread(&self, thread: i32) -> bool {
        // SAFETY: the call takes numbers only, and signal 0 is never delivered.
        unsafe { libc::syscall(libc::SYS_tgkill, self.pid, thread, 0) == 0 }
    }

    /// True if a descriptor of the child is non-blocking.
    ///
    /// # Errors
    /// The descriptor is closed, or /proc does not show it.
    pub fn is_nonblocking(&self, number: RawFd) -> io::Result<bool> {
        let info = std::fs::read_to_string(format!("/proc/{}/fdinfo/{number}", self.pid))?;
        // In /proc/PID/fdinfo, the flags follow the position, as an octal number.
        let flags = info
            .split_whitespace()
            .nth(3)
            .and_then(|flags| c_int::from_str_radix(flags, 8).ok());
        flags
            .map(|flags| flags & libc::O_NONBLOCK != 0)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// True if a descriptor of the child is this socket.
    ///
    /// # Errors
    /// /proc does not show the descriptor.
    pub fn has_socket(&self, number: RawFd, socket: BorrowedFd<'_>) -> io::Result<bool> {
        let target = none_if_missing(std::fs::read_link(format!(
            "/proc/{}/fd/{number}",
            self.pid
        )))?;
        Ok(target == read_inode(socket).map(|inode| format!("socket:[{inode}]").into()))
    }

    /// Waits for the next notification. `None` if a signal interrupted the child's call, or this
    /// process, before the notification was received: wait until the descriptor is readable again.
    ///
    /// # Errors
    /// Errors of ioctl(2).
    pub fn receive_notification(&self) -> io::Result<Option<Notification>> {
        // SAFETY: the structure holds numbers, and the kernel requires zeroes.
        let mut got: seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request takes a `seccomp_notif`.
        match unsafe { self.run_ioctl(libc::SECCOMP_IOCTL_NOTIF_RECV, &mut got) } {
            Err(Errno::ENOENT | Errno::EINTR) => return Ok(None),
            result => result?,
        };
        let [socket, address, length, flags, ..] = got.data.args;
        let is = |number| libc::c_long::from(got.data.nr) == number;
        Ok(Some(Notification {
            id: got.id,
            thread: got.pid.cast_signed(),
            call: if is(libc::SYS_bind) {
                Call::Bind
            } else {
                Call::Accept
            },
            socket: socket as RawFd,
            address,
            length,
            flags: if is(libc::SYS_accept4) {
                flags as c_int
            } else {
                0
            },
        }))
    }

    /// Ends the wait of a call with an answer.
    ///
    /// # Errors
    /// `ENOENT` if the call waits no more.
    pub fn answer(&self, id: u64, answer: Answer) -> io::Result<()> {
        let (val, error, flags) = match answer {
            Answer::Value(value) => (value.into(), 0, 0),
            Answer::Error(errno) => (0, -(errno as c_int), 0),
            Answer::Continue => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        };
        let mut answer = seccomp_notif_resp {
            id,
            val,
            error,
            flags,
        };
        // SAFETY: the request takes a `seccomp_notif_resp`.
        unsafe { self.run_ioctl(libc::SECCOMP_IOCTL_NOTIF_SEND, &mut answer) }?;
        Ok(())
    }

    /// True if a call of bind(2) names this address. If the child itself made the call, this keeps
    /// the child's memory open, to write clients' addresses into it later.
    ///
    /// # Errors
    /// The memory cannot be opened or read.
    pub fn check_bind(&mut self, bind: &Notification, wanted: SocketAddr) -> io::Result<bool> {
        let memory = open_memory(bind.thread)?;
        let mut id = bind.id;
        // The call must still wait after the memory was opened. Otherwise the kernel may have given
        // the thread's number to another process.
        // SAFETY: the request takes a notification's ID.
        unsafe { self.run_ioctl(libc::SECCOMP_IOCTL_NOTIF_ID_VALID, &mut id) }?;
        let named = is_bind_to_address(bind, wanted, &memory);
        if self.has_thread(bind.thread) {
            self.memory = Some(memory);
        }
        named
    }

    /// Replaces the socket that is being bound by another socket, close-on-exec. The call still
    /// waits.
    ///
    /// # Errors
    /// `ENOENT` if the call does not wait any more, or the refusal of a policy.
    pub fn replace_bound_socket(&self, bind: &Notification, by: BorrowedFd<'_>) -> io::Result<()> {
        self.add_descriptor(bind.id, by, Some(bind.socket), true)
            .map(drop)
    }

    /// Makes a client's socket the result of a call of accept(2) or accept4(2).
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the call does not wait any more: a signal ended the call, or the
    /// child ends. `EMFILE` if the child has no room for another descriptor. Errors of writing the
    /// client's address. After an error the child does not have the client.
    pub fn hand_over_client(
        &self,
        accept: &Notification,
        client: BorrowedFd<'_>,
        peer: SocketAddr,
    ) -> io::Result<()> {
        let wanted = if accept.flags & libc::SOCK_NONBLOCK == 0 {
            OFlag::empty()
        } else {
            OFlag::O_NONBLOCK
        };
        fcntl(client, FcntlArg::F_SETFL(wanted))?;
        if accept.address != 0 {
            write_address(accept, peer, self.memory.as_ref().ok_or(Errno::EFAULT)?)?;
        }
        let number = self.add_descriptor(
            accept.id,
            client,
            None,
            accept.flags & libc::SOCK_CLOEXEC != 0,
        )?;
        self.answer(accept.id, Answer::Value(number))
    }

    fn add_descriptor(
        &self,
        id: u64,
        socket: BorrowedFd<'_>,
        over: Option<RawFd>,
        close_on_exec: bool,
    ) -> io::Result<RawFd> {
        let mut added = seccomp_notif_addfd {
            id,
            flags: if over.is_some() {
                libc::SECCOMP_ADDFD_FLAG_SETFD as u32
            } else {
                0
            },
            srcfd: socket.as_raw_fd().cast_unsigned(),
            newfd: over.unwrap_or(0).cast_unsigned(),
            newfd_flags: if close_on_exec {
                libc::O_CLOEXEC.cast_unsigned()
            } else {
                0
            },
        };
        loop {
            // SAFETY: the request takes a `seccomp_notif_addfd`.
            match unsafe { self.run_ioctl(libc::SECCOMP_IOCTL_NOTIF_ADDFD, &mut added) } {
                // A signal interrupted the request. The kernel has not added the socket, so repeat
                // the request.
                Err(Errno::EINTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// # Safety
    /// `value` has the type that the request takes.
    unsafe fn run_ioctl<T>(&self, request: libc::Ioctl, value: &mut T) -> nix::Result<c_int> {
        // SAFETY: `value` lives for the call; the rest is the caller's promise.
        Errno::result(unsafe {
            libc::ioctl(self.notifications.as_raw_fd(), request, from_mut(value))
        })
    }
}

/// Reads the next report of a child. The report is a descriptor or an error. `None` means that the
/// child has executed a program or ended.
fn receive_reported_descriptor(report: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut number = [0; 4];
    let received = seqpacket::receive_message(report.as_fd(), &mut number)?;
    match i32::from_ne_bytes(number) {
        0 => Ok(received.descriptors.into_iter().next()),
        number => Err(io::Error::from_raw_os_error(number)),
    }
}

/// Returns the filter as a BPF program, which the kernel runs for each system call of the child.
fn build_filter() -> [sock_filter; 8] {
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
    [
        make(load, 0, 0, offset_of!(seccomp_data, arch) as u32),
        make(equal, 0, 5, ARCHITECTURE),
        make(load, 0, 0, offset_of!(seccomp_data, nr) as u32),
        make(equal, 2, 0, libc::SYS_accept4 as u32),
        make(equal, 1, 0, libc::SYS_accept as u32),
        make(equal, 0, 1, libc::SYS_bind as u32),
        make(end, 0, 0, SECCOMP_RET_USER_NOTIF),
        make(end, 0, 0, SECCOMP_RET_ALLOW),
    ]
}

/// Installs the filter on this thread. The filter stays for the life of the thread, and children
/// inherit it.
fn install_filter() -> io::Result<OwnedFd> {
    if ARCHITECTURE == 0 {
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    }
    prctl::set_no_new_privs()?;
    let mut filter = build_filter();
    let program = sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let flags =
        libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
    // SAFETY: the program and its instructions live for the call, and the length is correct.
    match unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            flags,
            &raw const program,
        )
    } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: the descriptor is new, so nothing else owns it; the kernel's descriptors fit
        // into an int.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd as c_int) }),
    }
}

/// True if a call of bind(2) names this address.
fn is_bind_to_address(bind: &Notification, wanted: SocketAddr, memory: &File) -> io::Result<bool> {
    // In a struct sockaddr_in or sockaddr_in6, only padding or a scope follows the bytes that are
    // compared.
    let (wanted, known) = (
        SockAddr::from(wanted),
        if wanted.is_ipv4() { 8 } else { 24 },
    );
    if bind.length < known as u64 {
        return Ok(false);
    }
    let mut named = [0; 24];
    memory.read_exact_at(&mut named[..known], bind.address)?;
    Ok(named[..known] == sockaddr_bytes(&wanted)[..known])
}

/// Writes a client's address and its length into the caller's memory, cut to the caller's room as
/// accept(2) does.
fn write_address(accept: &Notification, client: SocketAddr, memory: &File) -> io::Result<()> {
    let (mut room, client) = ([0; 4], SockAddr::from(client));
    memory.read_exact_at(&mut room, accept.length)?;
    let room = usize::try_from(i32::from_ne_bytes(room)).map_err(|_| Errno::EINVAL)?;
    let bytes = sockaddr_bytes(&client);
    memory.write_all_at(&bytes[..bytes.len().min(room)], accept.address)?;
    memory.write_all_at(&client.len().to_ne_bytes(), accept.length)
}

/// Returns an address as the bytes of a struct sockaddr_in or sockaddr_in6.
fn sockaddr_bytes(address: &SockAddr) -> &[u8] {
    // SAFETY: the address has this length, and lives as long as the result.
    unsafe { slice::from_raw_parts(address.as_ptr().cast(), address.len() as usize) }
}

/// Opens the memory of a thread in /proc. (process_vm_writev(2) needs the same right, and a seccomp
/// profile may forbid it.)
fn open_memory(thread: i32) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{thread}/mem"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::SocketAddrV6;
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    /// Returns the filter's action for a call.
    fn filter_verdict(arch: u32, number: i64) -> u32 {
        let (filter, mut at, mut loaded) = (build_filter(), 0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = filter[at];
            at += 1;
            match u32::from(code) & 7 {
                BPF_LD if k as usize == offset_of!(seccomp_data, arch) => loaded = arch,
                BPF_LD if k as usize == offset_of!(seccomp_data, nr) => loaded = number as u32,
                BPF_JMP => at += usize::from(if loaded == k { jt } else { jf }),
                BPF_RET => return k,
                _ => panic!("{code}"),
            }
        }
    }

    #[test]
    fn only_bind_accept_and_accept4_of_this_architecture_wait() {
        let waiting = [libc::SYS_accept, libc::SYS_accept4, libc::SYS_bind];
        for number in 0..1000 {
            let waits = waiting.contains(&number);
            assert_eq!(
                filter_verdict(ARCHITECTURE, number),
                if waits {
                    SECCOMP_RET_USER_NOTIF
                } else {
                    SECCOMP_RET_ALLOW
                }
            );
            assert_eq!(
                filter_verdict(0x4000_0003, number),
                SECCOMP_RET_ALLOW,
                "i386 has other numbers"
            );
        }
    }

    fn own_memory() -> File {
        open_memory(nix::unistd::gettid().as_raw()).unwrap()
    }

    /// Memory of this process to which the arguments of a system call point.
    struct Memory {
        address: Vec<AtomicU8>,
        length: Vec<AtomicU8>,
    }

    impl Memory {
        fn new(address: &[u8], length: i32) -> Self {
            let own = |bytes: &[u8]| bytes.iter().copied().map(AtomicU8::new).collect();
            Self {
                address: own(address),
                length: own(&length.to_ne_bytes()),
            }
        }

        fn notification_of(&self, call: Call) -> Notification {
            let (thread, address) = (nix::unistd::gettid().as_raw(), self.address.as_ptr() as u64);
            let length = if call == Call::Bind {
                self.address.len() as u64
            } else {
                self.length.as_ptr() as u64
            };
            Notification {
                id: 0,
                thread,
                call,
                socket: 0,
                address,
                length,
                flags: 0,
            }
        }

        /// Returns the address and the length that were written into the memory.
        fn read_address_and_length(&self) -> (Vec<u8>, [u8; 4]) {
            let read = |bytes: &[AtomicU8]| {
                bytes
                    .iter()
                    .map(|byte| byte.load(Relaxed))
                    .collect::<Vec<_>>()
            };
            (read(&self.address), read(&self.length).try_into().unwrap())
        }
    }

    /// Returns the address 127.1.2.3:6443 as the bytes of a struct sockaddr_in.
    fn ipv4_sockaddr() -> Vec<u8> {
        [
            &(libc::AF_INET as u16).to_ne_bytes()[..],
            &[0x19, 0x2b, 127, 1, 2, 3],
            &[0; 8],
        ]
        .concat()
    }

    #[test]
    fn the_address_of_a_bind_is_compared() {
        let wanted = "127.1.2.3:6443".parse().unwrap();
        let binds = |bytes: &[u8], wanted| {
            is_bind_to_address(
                &Memory::new(bytes, 0).notification_of(Call::Bind),
                wanted,
                &own_memory(),
            )
        };
        assert!(binds(&ipv4_sockaddr(), wanted).unwrap());
        assert!(
            binds(&[&ipv4_sockaddr()[..8], &[1; 8]].concat(), wanted).unwrap(),
            "the padding was compared"
        );
        assert!(!binds(&ipv4_sockaddr(), "127.1.2.4:6443".parse().unwrap()).unwrap());
        assert!(!binds(&ipv4_sockaddr(), "127.1.2.3:6444".parse().unwrap()).unwrap());
        let six = SockAddr::from("[::1]:6443".parse::<SocketAddr>().unwrap());
        assert!(binds(sockaddr_bytes(&six), "[::1]:6443".parse().unwrap()).unwrap());
        assert!(!binds(sockaddr_bytes(&six), wanted).unwrap());
        let short = Memory::new(&ipv4_sockaddr(), 0).notification_of(Call::Bind);
        assert!(
            !is_bind_to_address(&Notification { length: 4, ..short }, wanted, &own_memory())
                .unwrap()
        );
        assert!(
            is_bind_to_address(
                &Notification {
                    address: 0,
                    ..short
                },
                wanted,
                &own_memory()
            )
            .is_err()
        );
    }

    #[test]
    fn a_clients_address_is_cut_to_the_room_of_the_call() {
        let client = "127.1.2.3:6443".parse().unwrap();
        for room in [0, 7, 16, 40] {
            let memory = Memory::new(&[0xff; 40], room);
            write_address(&memory.notification_of(Call::Accept), client, &own_memory()).unwrap();
            let mut expected = [0xff; 40];
            let written = 16.min(room as usize);
            expected[..written].copy_from_slice(&ipv4_sockaddr()[..written]);
            assert_eq!(
                memory.read_address_and_length(),
                (expected.into(), 16_i32.to_ne_bytes()),
                "{room}"
            );
        }
        let negative = Memory::new(&[0xff; 40], -1);
        let call = negative.notification_of(Call::Accept);
        assert_eq!(
            write_address(&call, client, &own_memory())
                .unwrap_err()
                .raw_os_error(),
            Some(libc::EINVAL)
        );
        assert!(write_address(&Notification { length: 8, ..call }, client, &own_memory()).is_err());
        assert_eq!(negative.read_address_and_length().0, [0xff; 40]);
    }

    proptest! {
        #[test]
        fn an_address_that_accept_writes_is_read_back_by_bind(ip: [u8; 16], port: u16, flow: u32, scope: u32, is_four: bool) {
            let six = SocketAddrV6::new(ip.into(), port, flow, scope).into();
            let address = if is_four { SocketAddr::from(([ip[0], ip[1], ip[2], ip[3]], port)) } else { six };
            let memory = Memory::new(&[0; 28], 28);
            write_address(&memory.notification_of(Call::Accept), address, &own_memory()).unwrap();
            prop_assert!(is_bind_to_address(&memory.notification_of(Call::Bind), address, &own_memory()).unwrap());
            let (written, length) = memory.read_address_and_length();
            prop_assert_eq!(i32::from_ne_bytes(length), if is_four { 16 } else { 28 });
            prop_assert_eq!(&written[2..4], port.to_be_bytes());
        }
    }
}
