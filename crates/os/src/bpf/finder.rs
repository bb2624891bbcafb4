//! Adds the listener of another process to a map, by its address.
//!
//! A program that the kernel runs once, on demand (`BPF_PROG_TEST_RUN`), and that is attached nowhere: it looks the socket up, as the
//! kernel would for a packet to that address, and adds it to the map. Linux 5.10, with the capabilities that steering
//! needs. What listens in another network namespace, and would swallow what is steered to it, is not found.
//!
//! Two other ways were tried, each with CAP_BPF and CAP_NET_ADMIN alone. pidfd_getfd(2) is refused (EPERM: between containers
//! it needs CAP_SYS_PTRACE), and a pidfd has to be sent. A program of type sock_ops on the instance's cgroup adds its
//! listener to the map at listen(2), but none that listened before: after a restart of the shim there would be no direct path until
//! its instance restarts too, and a node needs cgroup v2.

use super::asm::{Assembler, Helper, If, Instruction, MapAs, Reg, Size};
use super::sys::{self, ProgramType};
use super::{Refused, Step};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Offsets in `struct bpf_sock` of linux/bpf.h. Addresses are in network byte order, the port in that of this host.
pub(super) mod socket {
    pub(in crate::bpf) const LOCAL_IP4: i16 = 24;
    pub(in crate::bpf) const LOCAL_IP6: i16 = 28;
    pub(in crate::bpf) const LOCAL_PORT: i16 = 44;
    pub(in crate::bpf) const STATE: i16 = 72;
}

/// State of a socket that listens (`BPF_TCP_LISTEN`).
pub(super) const LISTEN: i32 = 10;

/// The network namespace in which the program is run (`BPF_F_CURRENT_NETNS`).
const CURRENT_NAMESPACE: i32 = -1;

/// The least that the kernel takes for a packet is an Ethernet header with something after it.
const PACKET: [u8; 64] = [0; 64];

/// Adds the listener at exactly this address to a map of sockets.
pub(super) fn add_listener(map: BorrowedFd<'_>, key: u32, address: SocketAddrV4) -> Result<(), Refused> {
    #[cfg(debug_assertions)]
    if super::is_unsteered() {
        return super::unsteered::check_at(address);
    }
    let program = program(map, key, address).map_err(Refused::at(Step::Assemble))?;
    let program = sys::load_program(ProgramType::Packet, "berth_find", &program)?;
    match sys::run(program.as_fd(), &PACKET).map_err(Refused::at(Step::Find))? {
        0 => Ok(()),
        error => Err(Refused::at(Step::Listener)(io::Error::from_raw_os_error(-error))),
    }
}

/// It returns 0, or a negative error number.
fn program(map: BorrowedFd<'_>, key: u32, address: SocketAddrV4) -> io::Result<Vec<Instruction>> {
    let found = Reg::R6;
    let ip = i32::from_ne_bytes(address.ip().octets());
    let [port_high, port_low] = address.port().to_be_bytes();
    let mut asm = Assembler::default();
    let [none, other, end] = std::array::from_fn(|_| asm.label());
    // struct bpf_sock_tuple: from port 0 of loopback, of which there is no connection, and which no program of berth's
    // steers; both ports in one word.
    asm.set(Reg::R2, i32::from_ne_bytes(Ipv4Addr::LOCALHOST.octets()));
    asm.store(Size::U32, Reg::R10, -12, Reg::R2);
    asm.set(Reg::R2, ip);
    asm.store(Size::U32, Reg::R10, -8, Reg::R2);
    asm.set(Reg::R2, i32::from_ne_bytes([0, 0, port_high, port_low]));
    asm.store(Size::U32, Reg::R10, -4, Reg::R2);
    asm.copy(Reg::R2, Reg::R10);
    asm.add(Reg::R2, -12);
    asm.set(Reg::R3, 12);
    asm.set(Reg::R4, CURRENT_NAMESPACE);
    asm.set(Reg::R5, 0);
    asm.call(Helper::SocketLookup);
    asm.jump_if(If::Zero(Reg::R0), none);
    asm.copy(found, Reg::R0);
    // One of 0.0.0.0, too, gets packets to this address.
    asm.load(Size::U32, Reg::R7, found, socket::LOCAL_IP4);
    asm.jump_if(If::NotEqual(Reg::R7, ip), other);
    asm.load(Size::U32, Reg::R7, found, socket::STATE);
    asm.jump_if(If::NotEqual(Reg::R7, LISTEN), other);

    asm.set(Reg::R2, key.cast_signed());
    asm.store(Size::U32, Reg::R10, -4, Reg::R2);
    asm.load_map(Reg::R1, map.as_raw_fd(), MapAs::Map);
    asm.copy(Reg::R2, Reg::R10);
    asm.add(Reg::R2, -4);
    asm.copy(Reg::R3, found);
    asm.set(Reg::R4, 0);
    asm.call(Helper::MapUpdate);
    asm.copy(Reg::R7, Reg::R0);
    asm.copy(Reg::R1, found);
    asm.call(Helper::SocketRelease);
    asm.copy(Reg::R0, Reg::R7);
    asm.jump(end);

    asm.place(other);
    asm.copy(Reg::R1, found);
    asm.call(Helper::SocketRelease);
    asm.place(none);
    asm.set(Reg::R0, -libc::ENOENT);
    asm.place(end);
    asm.exit();
    asm.finish()
}
