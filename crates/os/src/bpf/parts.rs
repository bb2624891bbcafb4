//! Code that the two programs have in common. It lays out the memory that a program shares with its
//! process, compares addresses, and writes the end of a program.

use super::asm::{Assembler, Helper, If, Instruction, Label, MapAs, Reg, Size};
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;

/// Indexes of listeners in a program's map, one for each address family of clients. A listener of
/// one family cannot serve the other family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    Ipv4 = 0,
    Ipv6 = 1,
}

/// Memory that a program shares with the process that loaded it. If the memory is zero, the program
/// does not steer.
#[repr(C)]
#[derive(Debug)]
pub(super) struct State {
    /// 1 if the program steers, 0 if not.
    pub(super) on: AtomicU64,
    /// The time on CLOCK_MONOTONIC, in nanoseconds, at which the program stops steering.
    pub(super) until: AtomicU64,
    /// The cookie of the network namespace in which connections to localhost are steered.
    pub(super) namespace: AtomicU64,
    pub(super) steered: AtomicU64,
}

/// A program's result after which the kernel continues: `SK_PASS` for a lookup, permission to
/// connect for connect(2).
const PASS: i32 = 1;

// Registers that keep their meaning throughout a program. SLOT and LISTENER are the same register:
// the listener replaces its index in the map.
pub(super) const CONTEXT: Reg = Reg::R6;
pub(super) const SLOT: Reg = Reg::R7;
pub(super) const LISTENER: Reg = SLOT;
/// 0 if `assign` gave the connection to the listener, otherwise an error.
pub(super) const RESULT: Reg = Reg::R8;
const STATE: Reg = Reg::R9;

/// Writes the end of a program, which runs for a connection that matches. If steering is on, the
/// code that `assign` writes gives the connection to the listener in the map.
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
    // The lookup above took a reference to the listener. The program gives the reference back
    // below, after success and after failure.
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

/// Selects the addresses of one family. Returns `None` if an unspecified address or an empty list
/// means that the program steers all addresses of the family.
fn addresses_of_family<A: PartialEq>(
    addresses: &[IpAddr],
    any: &A,
    of: impl Fn(IpAddr) -> Option<A>,
) -> Option<Vec<A>> {
    // An IPv6 socket that is bound to 10.0.0.5 shows the address ::ffff:10.0.0.5, so compare
    // canonical addresses.
    let found: Vec<_> = addresses
        .iter()
        .filter_map(|address| of(address.to_canonical()))
        .collect();
    (!addresses.is_empty() && !found.contains(any)).then_some(found)
}

pub(super) fn to_word(bytes: [u8; 4]) -> i32 {
    i32::from_ne_bytes(bytes)
}

/// Writes a jump to `matched` if the IPv4 address at this offset of the context is one that the
/// program steers, else a jump to `end`.
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
        asm.jump_if(If::Equal(Reg::R2, to_word(address.octets())), matched);
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

/// Writes a jump to `label` for the case that 16 bytes of memory equal `bytes`.
pub(super) fn jump_if_same(asm: &mut Assembler, from: Reg, at: i16, bytes: [u8; 16], label: Label) {
    let other = asm.label();
    for (offset, bytes) in (at..).step_by(4).zip(bytes.as_chunks::<4>().0) {
        asm.load(Size::U32, Reg::R2, from, offset);
        asm.jump_if(If::NotEqual(Reg::R2, to_word(*bytes)), other);
    }
    asm.jump(label);
    asm.place(other);
}
