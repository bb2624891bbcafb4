//! Parts that the programs have in common: the memory that a program shares with its holder, the
//! comparison of addresses, and the end of a program.

use super::asm::{Assembler, Helper, If, Instruction, Label, MapAs, Reg, Size};
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;

/// Places for listeners, by the client's address family: a listener of one family cannot serve the
/// other family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    Ipv4 = 0,
    Ipv6 = 1,
}

/// Memory shared by the program and its holder. Zeroed memory means off.
#[repr(C)]
#[derive(Debug)]
pub(super) struct State {
    /// 1 if the program steers, 0 if not.
    pub(super) on: AtomicU64,
    /// The time until which the program steers, on CLOCK_MONOTONIC, in nanoseconds.
    pub(super) until: AtomicU64,
    /// The cookie of the network namespace in which connections to localhost are steered.
    pub(super) namespace: AtomicU64,
    pub(super) steered: AtomicU64,
}

/// The result with which the kernel goes on: `SK_PASS`, and for connect(2) the permission to
/// connect.
const PASS: i32 = 1;

// Contents of registers throughout a program. SLOT and LISTENER share a register: the listener
// replaces its slot's number.
pub(super) const CONTEXT: Reg = Reg::R6;
pub(super) const SLOT: Reg = Reg::R7;
pub(super) const LISTENER: Reg = SLOT;
/// 0 if `assign` gave the connection to the listener, or an error.
pub(super) const RESULT: Reg = Reg::R8;
const STATE: Reg = Reg::R9;

/// Writes the rest of a program, for a connection that matches. If steering is on, `assign` gives
/// the connection to LISTENER, the socket found in SLOT.
pub(super) fn finish_program(
    mut asm: Assembler,
    listeners: BorrowedFd<'_>,
    state: BorrowedFd<'_>,
    end: Label,
    assign: impl FnOnce(&mut Assembler),
) -> io::Result<Vec<Instruction>> {
    asm.load_map(STATE, state.as_raw_fd(), MapAs::Value);
    asm.load(Size::U64, Reg::R2, STATE, offset_of!(State, on) as i16);
    asm.jump_if(If::Zero(Reg::R2), end);
    asm.load(Size::U64, Reg::R8, STATE, offset_of!(State, until) as i16);
    asm.call(Helper::MonotonicTime);
    asm.jump_if(If::Greater(Reg::R0, Reg::R8), end);

    asm.store(Size::U32, Reg::R10, -4, SLOT);
    asm.load_map(Reg::R1, listeners.as_raw_fd(), MapAs::Map);
    asm.copy(Reg::R2, Reg::R10);
    asm.add(Reg::R2, -4);
    asm.call(Helper::MapLookup);
    asm.jump_if(If::Zero(Reg::R0), end);
    // The lookup took a reference to the listener. The reference is given back after success and
    // after failure.
    asm.copy(LISTENER, Reg::R0);
    assign(&mut asm);
    asm.copy(Reg::R1, LISTENER);
    asm.call(Helper::SocketRelease);
    asm.jump_if(If::NotEqual(RESULT, 0), end);
    asm.set(Reg::R1, 1);
    asm.atomic_add(STATE, offset_of!(State, steered) as i16, Reg::R1);
    asm.place(end);
    asm.set(Reg::R0, PASS);
    asm.exit();
    asm.finish()
}

/// Returns the addresses of one family, or `None` if the program steers all addresses of that
/// family.
fn addresses_of_family<A: PartialEq>(
    addresses: &[IpAddr],
    any: &A,
    of: impl Fn(IpAddr) -> Option<A>,
) -> Option<Vec<A>> {
    // ::ffff:10.0.0.5 is the address of an IPv6 socket that is bound to 10.0.0.5.
    let found: Vec<_> = addresses
        .iter()
        .filter_map(|address| of(address.to_canonical()))
        .collect();
    (!addresses.is_empty() && !found.contains(any)).then_some(found)
}

pub(super) fn as_word(bytes: [u8; 4]) -> i32 {
    i32::from_ne_bytes(bytes)
}

/// Jumps to `matched` if the program steers the IPv4 address at this offset of the context, else to
/// `end`.
pub(super) fn match_ipv4(
    asm: &mut Assembler,
    at: i16,
    addresses: &[IpAddr],
    matched: Label,
    end: Label,
) {
    let ipv4 = |address| {
        if let IpAddr::V4(address) = address {
            Some(address)
        } else {
            None
        }
    };
    let Some(addresses) = addresses_of_family(addresses, &Ipv4Addr::UNSPECIFIED, ipv4) else {
        return asm.jump(matched);
    };
    asm.load(Size::U32, Reg::R2, CONTEXT, at);
    for address in addresses {
        asm.jump_if(If::Equal(Reg::R2, as_word(address.octets())), matched);
    }
    asm.jump(end);
}

pub(super) fn match_ipv6(
    asm: &mut Assembler,
    at: i16,
    addresses: &[IpAddr],
    matched: Label,
    end: Label,
) {
    let ipv6 = |address| {
        if let IpAddr::V6(address) = address {
            Some(address)
        } else {
            None
        }
    };
    let Some(addresses) = addresses_of_family(addresses, &Ipv6Addr::UNSPECIFIED, ipv6) else {
        return asm.jump(matched);
    };
    for address in addresses {
        jump_if_same(asm, CONTEXT, at, address.octets(), matched);
    }
    asm.jump(end);
}

/// Jumps to `label` if 16 bytes of memory equal `bytes`.
pub(super) fn jump_if_same(asm: &mut Assembler, from: Reg, at: i16, bytes: [u8; 16], label: Label) {
    let other = asm.label();
    for (offset, bytes) in (at..).step_by(4).zip(bytes.as_chunks::<4>().0) {
        asm.load(Size::U32, Reg::R2, from, offset);
        asm.jump_if(If::NotEqual(Reg::R2, as_word(*bytes)), other);
    }
    asm.jump(label);
    asm.place(other);
}
