//! The program that steers connections to localhost. `sk_lookup` leaves connections from localhost
//! alone, because kube-apiserver dials itself at localhost. The kernel runs this program for
//! connect(2), so the program knows the thread that connects. The program replaces the dialled
//! address by the listener's address. The program is attached to a cgroup; a comparison of the
//! network namespace's cookie keeps the program to one network namespace.

use super::asm::{Assembler, Helper, If, Instruction, MapAs, Reg, Size};
use super::parts::{
    CONTEXT, LISTENER, RESULT, SLOT, Slot, State, finish_program, jump_if_same, match_ipv4,
    match_ipv6, to_word,
};
use super::sys;
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Offsets of fields in `struct bpf_sock` of linux/bpf.h. Addresses are in network byte order, the
/// port is in host byte order.
mod socket {
    pub(super) const LOCAL_IP4: i16 = 24;
    pub(super) const LOCAL_IP6: i16 = 28;
    pub(super) const LOCAL_PORT: i16 = 44;
    pub(super) const STATE: i16 = 72;
}

/// The state number of a socket that listens (`BPF_TCP_LISTEN`).
const LISTEN: i32 = 10;

/// Offsets of fields in `struct bpf_sock_addr` of linux/bpf.h. Addresses and the port are in
/// network byte order.
mod context {
    pub(super) const IP4: i16 = 4;
    pub(super) const IP6: i16 = 8;
    pub(super) const PORT: i16 = 24;
    pub(super) const PROTOCOL: i16 = 36;
}

pub(super) fn build_connect_program(
    slot: Slot,
    exempt: &str,
    port: u16,
    addresses: &[IpAddr],
    listeners: BorrowedFd<'_>,
    state: BorrowedFd<'_>,
) -> io::Result<Vec<Instruction>> {
    let mut asm = Assembler::default();
    let [local, matched, end] = std::array::from_fn(|_| asm.label());
    asm.copy(CONTEXT, Reg::R1);
    asm.load(Size::U32, Reg::R2, CONTEXT, context::PORT);
    asm.jump_if(If::NotEqual(Reg::R2, i32::from(port.to_be())), end);
    asm.load(Size::U32, Reg::R2, CONTEXT, context::PROTOCOL);
    asm.jump_if(If::NotEqual(Reg::R2, libc::IPPROTO_TCP), end);
    asm.set(SLOT, slot as i32);
    match slot {
        Slot::Ipv4 => {
            asm.load(Size::U32, Reg::R2, CONTEXT, context::IP4);
            asm.mask(Reg::R2, to_word([255, 255, 0, 0]));
            asm.jump_if(If::NotEqual(Reg::R2, to_word([127, 0, 0, 0])), end);
            match_ipv4(&mut asm, context::IP4, addresses, matched, end);
        }
        Slot::Ipv6 => {
            jump_if_same(
                &mut asm,
                CONTEXT,
                context::IP6,
                Ipv6Addr::LOCALHOST.octets(),
                local,
            );
            asm.jump(end);
            asm.place(local);
            match_ipv6(&mut asm, context::IP6, addresses, matched, end);
        }
    }

    asm.place(matched);
    asm.copy(Reg::R1, Reg::R10);
    asm.add(Reg::R1, -16);
    asm.set(Reg::R2, 16);
    asm.call(Helper::CurrentName);
    jump_if_same(&mut asm, Reg::R10, -16, sys::object_name(exempt), end);
    asm.copy(Reg::R1, CONTEXT);
    asm.call(Helper::NamespaceCookie);
    asm.load_map(Reg::R1, state.as_raw_fd(), MapAs::Value);
    asm.load(
        Size::U64,
        Reg::R2,
        Reg::R1,
        offset_of!(State, namespace) as i16,
    );
    asm.jump_if(If::Differs(Reg::R0, Reg::R2), end);
    finish_program(asm, listeners, state, end, |asm| {
        let done = asm.label();
        asm.set(RESULT, libc::ECONNREFUSED);
        asm.load(Size::U32, Reg::R2, LISTENER, socket::STATE);
        asm.jump_if(If::NotEqual(Reg::R2, LISTEN), done);
        let (from, to, words) = match slot {
            Slot::Ipv4 => (socket::LOCAL_IP4, context::IP4, 1),
            Slot::Ipv6 => (socket::LOCAL_IP6, context::IP6, 4),
        };
        for offset in (0..).step_by(4).take(words) {
            asm.load(Size::U32, Reg::R2, LISTENER, from + offset);
            asm.store(Size::U32, CONTEXT, to + offset, Reg::R2);
        }
        asm.load(Size::U32, Reg::R2, LISTENER, socket::LOCAL_PORT);
        asm.convert_to_network_order(Reg::R2);
        asm.store(Size::U32, CONTEXT, context::PORT, Reg::R2);
        asm.set(RESULT, 0);
        asm.place(done);
    })
}

#[cfg(test)]
mod tests;
