//! The program that steers new connections, and its holder.

use super::asm::{Assembler, Helper, If, Instruction, Reg, Size};
use super::connect;
use super::parts::{
    CONTEXT, LISTENER, RESULT, SLOT, Slot, State, finish, jump_if_same, match_ipv4, match_ipv6,
    word,
};
use super::sys::{self, ProgramType, SharedValue};
use super::{Refused, Step};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// What a program steers for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Bridge,
    /// A bridge's relay to etcd: it steers only what comes from the address that it goes to, as the node's kube-apiserver's does.
    Etcd,
    /// Whether the kernel steers at all.
    SelfTest,
}

impl Purpose {
    /// The program's name, visible with CAP_SYS_ADMIN. The kernel takes letters, digits, dots and underscores.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bridge => "berth_bridge",
            Self::Etcd => "berth_etcd",
            Self::SelfTest => "berth_test",
        }
    }
}

const SLOTS: u32 = 2;

/// What makes the kernel run a program, until it is dropped or its process ends.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Drop for Link {
    fn drop(&mut self) {
        // Closing is not enough at this moment if another thread is between fork and execve: its child has a duplicate. If it
        // fails, closing is what remains.
        let _ = sys::detach(self.0.as_fd());
    }
}

/// The program, loaded, off, and attached nowhere.
#[derive(Debug)]
pub struct Steerer {
    program: OwnedFd,
    listeners: OwnedFd,
    state: SharedValue<State>,
}

impl Steerer {
    /// For new connections of TCP to a port, on these addresses: `0.0.0.0` and `::` are all of their family, and no
    /// address is all of both. What comes from 127.0.0.0/8 or `::1` is never steered, but for [`Purpose::Etcd`].
    ///
    /// # Errors
    /// What is missing: see [`Refused`].
    pub fn load(purpose: Purpose, port: u16, addresses: &[IpAddr]) -> Result<Self, Refused> {
        let listeners = sys::socket_map(SLOTS)?;
        // SAFETY: it is made of atomics only.
        let state: SharedValue<State> = unsafe { SharedValue::new() }?;
        let program = program(purpose, port, addresses, listeners.as_fd(), state.as_fd())
            .map_err(Refused::at(Step::Assemble))?;
        Ok(Self {
            program: sys::load_program(ProgramType::SocketLookup, purpose.name(), &program)?,
            listeners,
            state,
        })
    }

    /// From here on the kernel runs the program, until the result is dropped. It runs after those that are attached
    /// already, and its choice replaces theirs.
    ///
    /// # Errors
    /// `E2BIG` if there are 64; see [`Refused`].
    pub fn attach(&self, namespace: BorrowedFd<'_>) -> Result<Link, Refused> {
        let link = sys::link(ProgramType::SocketLookup, self.program.as_fd(), namespace);
        link.map(Link).map_err(Refused::at(Step::Link))
    }

    /// Steers what processes below a cgroup connect to localhost, too: in the network namespace with this cookie, to the port on those of
    /// the addresses that are in 127.0.0.0/16 or `::1`, by connect(2) to the listener's address instead; but not for threads of this
    /// name. It is on with the other, until the result is dropped.
    ///
    /// # Errors
    /// What is missing: see [`Refused`].
    pub fn cover_localhost(
        &self,
        (cgroup, namespace): (BorrowedFd<'_>, u64),
        exempt: &str,
        port: u16,
        addresses: &[IpAddr],
    ) -> Result<Vec<Link>, Refused> {
        self.state.namespace.store(namespace, Relaxed);
        let cover = |slot| {
            let program = connect::program(
                slot,
                exempt,
                port,
                addresses,
                self.listeners.as_fd(),
                self.state.as_fd(),
            )
            .map_err(Refused::at(Step::Assemble))?;
            let prog_type = if slot == Slot::Ipv4 {
                ProgramType::Connect4
            } else {
                ProgramType::Connect6
            };
            let program = sys::load_program(prog_type, "berth_localhost", &program)?;
            sys::link(prog_type, program.as_fd(), cgroup)
                .map(Link)
                .map_err(Refused::at(Step::Cgroup))
        };
        let has = |slot: &Slot| {
            addresses
                .iter()
                .any(|ip| ip.to_canonical().is_ipv4() == (*slot == Slot::Ipv4))
        };
        [Slot::Ipv4, Slot::Ipv6]
            .into_iter()
            .filter(has)
            .map(cover)
            .collect()
    }

    /// Steers a family to this listener, which is not kept open, and to those that share its address and port
    /// (`SO_REUSEPORT`): among these the kernel distributes as usual. When it is closed or no longer listens, the program passes. One
    /// that listens again has to be set again: kernels differ in whether they forget it.
    ///
    /// The kernel takes a listener of another network namespace, and connections that are steered to it are lost.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if it does not listen.
    pub fn set_listener(&self, slot: Slot, listener: BorrowedFd<'_>) -> Result<(), Refused> {
        sys::set_socket(self.listeners.as_fd(), slot as u32, listener)
    }

    pub fn switch(&self, on: bool) {
        self.state.on.store(u64::from(on), Relaxed);
    }

    pub fn is_on(&self) -> bool {
        self.state.on.load(Relaxed) != 0
    }

    /// Lets it steer, if it is on, until then on CLOCK_MONOTONIC: a holder that hangs steers nothing to itself for long.
    pub fn steer_until(&self, monotonic: Duration) {
        self.state.until.store(
            u64::try_from(monotonic.as_nanos()).unwrap_or(u64::MAX),
            Relaxed,
        );
    }

    /// The last [`Steerer::steer_until`].
    pub fn until(&self) -> Duration {
        Duration::from_nanos(self.state.until.load(Relaxed))
    }

    /// New connections that were given to a listener since the program was loaded, with those to localhost that
    /// [`Steerer::cover_localhost`] covers.
    pub fn steered(&self) -> u64 {
        self.state.steered.load(Relaxed)
    }
}

/// Offsets in `struct bpf_sk_lookup` of linux/bpf.h. Addresses are in network byte order, the local port in that of this
/// host.
mod context {
    pub(super) const FAMILY: i16 = 8;
    pub(super) const PROTOCOL: i16 = 12;
    pub(super) const REMOTE_IP4: i16 = 16;
    pub(super) const REMOTE_IP6: i16 = 20;
    pub(super) const LOCAL_IP4: i16 = 40;
    pub(super) const LOCAL_IP6: i16 = 44;
    pub(super) const LOCAL_PORT: i16 = 60;
}

/// Flag of bpf_sk_assign: instead of what a program before this one chose.
const REPLACE: i32 = 1;

fn program(
    purpose: Purpose,
    port: u16,
    addresses: &[IpAddr],
    listeners: BorrowedFd<'_>,
    state: BorrowedFd<'_>,
) -> io::Result<Vec<Instruction>> {
    let mut asm = Assembler::default();
    let [ipv6, matched, end] = std::array::from_fn(|_| asm.label());
    asm.copy(CONTEXT, Reg::R1);
    asm.load(Size::U32, Reg::R2, CONTEXT, context::LOCAL_PORT);
    asm.jump_if(If::NotEqual(Reg::R2, i32::from(port)), end);
    asm.load(Size::U32, Reg::R2, CONTEXT, context::PROTOCOL);
    asm.jump_if(If::NotEqual(Reg::R2, libc::IPPROTO_TCP), end);
    asm.load(Size::U32, Reg::R2, CONTEXT, context::FAMILY);
    asm.jump_if(If::Equal(Reg::R2, libc::AF_INET6), ipv6);
    asm.jump_if(If::NotEqual(Reg::R2, libc::AF_INET), end);
    asm.set(SLOT, Slot::Ipv4 as i32);
    asm.load(Size::U32, Reg::R2, CONTEXT, context::REMOTE_IP4);
    if purpose == Purpose::Etcd {
        asm.load(Size::U32, Reg::R3, CONTEXT, context::LOCAL_IP4);
        asm.jump_if(If::Differs(Reg::R2, Reg::R3), end);
    } else {
        asm.mask(Reg::R2, word([255, 0, 0, 0]));
        asm.jump_if(If::Equal(Reg::R2, word([127, 0, 0, 0])), end);
    }
    match_ipv4(&mut asm, context::LOCAL_IP4, addresses, matched, end);
    asm.place(ipv6);
    asm.set(SLOT, Slot::Ipv6 as i32);
    jump_if_same(
        &mut asm,
        CONTEXT,
        context::REMOTE_IP6,
        Ipv6Addr::LOCALHOST.octets(),
        end,
    );
    match_ipv6(&mut asm, context::LOCAL_IP6, addresses, matched, end);

    asm.place(matched);
    finish(asm, listeners, state, end, |asm| {
        asm.copy(Reg::R1, CONTEXT);
        asm.copy(Reg::R2, LISTENER);
        asm.set(Reg::R3, REPLACE);
        asm.call(Helper::SocketAssign);
        asm.copy(RESULT, Reg::R0);
    })
}

#[cfg(test)]
mod tests;
