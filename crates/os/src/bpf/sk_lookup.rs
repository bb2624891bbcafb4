//! The sk_lookup program that steers new connections, and [`Steerer`], which loads and controls the
//! program.

use super::asm::{Assembler, Helper, If, Instruction, Reg, Size};
use super::connect;
use super::parts::{
    CONTEXT, LISTENER, RESULT, SLOT, Slot, State, finish_program, jump_if_same, match_ipv4,
    match_ipv6, to_word,
};
use super::sys::{self, ProgramType, SharedValue};
use super::{Refused, Step};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The purpose of a program. It decides the program's name and the connections that the program may
/// steer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Bridge,
    /// For a bridge's relay to etcd. The program steers only connections with the same source and
    /// destination address, as the node's kube-apiserver makes them.
    Etcd,
    /// A test of whether the kernel steers connections at all.
    SelfTest,
}

impl Purpose {
    /// Returns the program's name, visible with CAP_SYS_ADMIN. The kernel accepts letters, digits,
    /// dots and underscores in a name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bridge => "berth_bridge",
            Self::Etcd => "berth_etcd",
            Self::SelfTest => "berth_test",
        }
    }
}

const SLOTS: u32 = 2;

/// The attachment of a program to the kernel. The kernel runs the program until this value is
/// dropped or the process ends.
#[derive(Debug)]
pub struct Link(OwnedFd);

impl Drop for Link {
    fn drop(&mut self) {
        // Closing the descriptor does not detach the program if another thread is between fork and
        // execve, because that thread's child has a duplicate of the descriptor. If the detach
        // fails, closing the descriptor is the fallback.
        let _ = sys::detach_link(self.0.as_fd());
    }
}

/// A loaded sk_lookup program. At first the program is off and attached to no network namespace.
#[derive(Debug)]
pub struct Steerer {
    program: OwnedFd,
    listeners: OwnedFd,
    state: SharedValue<State>,
}

impl Steerer {
    /// Loads a program for new TCP connections to a port on these addresses. `0.0.0.0` and `::`
    /// stand for every address of their family, and an empty list for every address of either
    /// family. Connections from 127.0.0.0/8 or `::1` are never steered, except for
    /// [`Purpose::Etcd`].
    ///
    /// # Errors
    /// The step that failed: see [`Refused`].
    pub fn load(purpose: Purpose, port: u16, addresses: &[IpAddr]) -> Result<Self, Refused> {
        let listeners = sys::create_socket_map(SLOTS)?;
        // SAFETY: `State` is made of atomics only.
        let state: SharedValue<State> = unsafe { SharedValue::new() }?;
        let program =
            build_lookup_program(purpose, port, addresses, listeners.as_fd(), state.as_fd())
                .map_err(Refused::at_step(Step::Assemble))?;
        Ok(Self {
            program: sys::load_program(ProgramType::SocketLookup, purpose.name(), &program)?,
            listeners,
            state,
        })
    }

    /// Attaches the program to a network namespace until the result is dropped. The kernel runs it
    /// after programs that are attached already, and its choice of a listener replaces theirs.
    ///
    /// # Errors
    /// `E2BIG` if 64 programs are attached; see [`Refused`].
    pub fn attach(&self, namespace: BorrowedFd<'_>) -> Result<Link, Refused> {
        let link = sys::create_link(ProgramType::SocketLookup, self.program.as_fd(), namespace);
        link.map(Link).map_err(Refused::at_step(Step::Link))
    }

    /// Steers connections to localhost from processes below a cgroup in the network namespace with
    /// this cookie. Only connections to the port on listed addresses in 127.0.0.0/16 or `::1` are
    /// steered (`0.0.0.0` and `::` list every address of their family), and connect(2) then goes to
    /// the listener's address. Threads named `exempt` are left alone. [`Steerer::set_steering`]
    /// switches this steering together with the steering of [`Steerer::attach`], until the result
    /// is dropped.
    ///
    /// # Errors
    /// The step that failed: see [`Refused`].
    pub fn attach_localhost_programs(
        &self,
        (cgroup, namespace): (BorrowedFd<'_>, u64),
        exempt: &str,
        port: u16,
        addresses: &[IpAddr],
    ) -> Result<Vec<Link>, Refused> {
        self.state.namespace.store(namespace, Relaxed);
        let cover = |slot| {
            let program = connect::build_connect_program(
                slot,
                exempt,
                port,
                addresses,
                self.listeners.as_fd(),
                self.state.as_fd(),
            )
            .map_err(Refused::at_step(Step::Assemble))?;
            let prog_type = if slot == Slot::Ipv4 {
                ProgramType::Connect4
            } else {
                ProgramType::Connect6
            };
            let program = sys::load_program(prog_type, "berth_localhost", &program)?;
            sys::create_link(prog_type, program.as_fd(), cgroup)
                .map(Link)
                .map_err(Refused::at_step(Step::Cgroup))
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

    /// Steers a family to this listener, and to listeners that share its address and port
    /// (`SO_REUSEPORT`): the kernel distributes connections among these as usual. The map does not
    /// keep the listener open. When the listener is closed or no longer listens, the program leaves
    /// the choice of a listener to the kernel. A socket that listens again has to be set again,
    /// because some kernels have removed the socket from the map and others have not.
    ///
    /// The kernel accepts a listener of another network namespace, but connections that are steered
    /// to such a listener are lost.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the socket does not listen.
    pub fn set_listener(&self, slot: Slot, listener: BorrowedFd<'_>) -> Result<(), Refused> {
        sys::set_socket(self.listeners.as_fd(), slot as u32, listener)
    }

    pub fn set_steering(&self, on: bool) {
        self.state.on.store(u64::from(on), Relaxed);
    }

    pub fn is_steering(&self) -> bool {
        self.state.on.load(Relaxed) != 0
    }

    /// Lets the program steer until this time on CLOCK_MONOTONIC, if the program is on. If this
    /// process hangs and does not extend the time, the program soon stops steering connections to
    /// it.
    pub fn steer_until(&self, monotonic: Duration) {
        self.state.until.store(to_nanos(monotonic), Relaxed);
    }

    /// Replaces the deadline `last` with `next`. Returns false if the deadline is another one.
    pub fn replace_deadline(&self, last: Duration, next: Duration) -> bool {
        let (last, next) = (to_nanos(last), to_nanos(next));
        let until = &self.state.until;
        until.compare_exchange(last, next, Relaxed, Relaxed).is_ok()
    }

    /// Returns the time that [`Steerer::steer_until`] or [`Steerer::replace_deadline`] set last.
    pub fn steering_deadline(&self) -> Duration {
        Duration::from_nanos(self.state.until.load(Relaxed))
    }

    /// Returns the number of new connections that were given to a listener since the program was
    /// loaded. Connections to localhost count if [`Steerer::attach_localhost_programs`] covers
    /// them.
    pub fn count_steered_connections(&self) -> u64 {
        self.state.steered.load(Relaxed)
    }
}

fn to_nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Offsets of fields in `struct bpf_sk_lookup` of linux/bpf.h. Addresses are in network byte order,
/// the local port is in host byte order.
mod context {
    pub(super) const FAMILY: i16 = 8;
    pub(super) const PROTOCOL: i16 = 12;
    pub(super) const REMOTE_IP4: i16 = 16;
    pub(super) const REMOTE_IP6: i16 = 20;
    pub(super) const LOCAL_IP4: i16 = 40;
    pub(super) const LOCAL_IP6: i16 = 44;
    pub(super) const LOCAL_PORT: i16 = 60;
}

/// Flag of bpf_sk_assign: replaces the socket that an earlier program chose.
const REPLACE_SOCKET: i32 = 1;

fn build_lookup_program(
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
        asm.mask(Reg::R2, to_word([255, 0, 0, 0]));
        asm.jump_if(If::Equal(Reg::R2, to_word([127, 0, 0, 0])), end);
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
    finish_program(asm, listeners, state, end, |asm| {
        asm.copy(Reg::R1, CONTEXT);
        asm.copy(Reg::R2, LISTENER);
        asm.set(Reg::R3, REPLACE_SOCKET);
        asm.call(Helper::SocketAssign);
        asm.copy(RESULT, Reg::R0);
    })
}

#[cfg(test)]
mod tests;
