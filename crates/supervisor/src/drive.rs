//! The driver of the state machine. Its loop over epoll(7) passes each event to the machine and
//! carries out the machine's actions.

use crate::machine::{Action, Client, Machine, Phase};
use crate::obstacle::Obstacle;
use berth_node::instance_id::InstanceId;
use berth_node::ipc::supervisor::{
    FromShim, MAX_TAKEN, TAKEN_DELAY, ToShim, VERSION, parse_message,
};
use berth_os::explained;
use berth_os::process::{KILL_CHILD, raise_file_limit, reap_child, send_signal};
use berth_os::seccomp::{self, Answer, Call, Child, Notification};
use berth_os::{seqpacket, socket};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, setpgid};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// Numbers that identify descriptors in epoll's events. The connection of a shim has a higher
/// number.
const CALLS_EVENT: u64 = 0;
const SIGNALS_EVENT: u64 = 1;
const SHIMS_EVENT: u64 = 2;
const LISTENER_EVENT: u64 = 3;

#[derive(Debug)]
pub struct Config {
    pub instance: InstanceId,
    /// Address that the server will bind. The supervisor recognises the server's bind(2) only by
    /// exactly this address.
    pub address: SocketAddr,
    /// The listener on which shims connect to the supervisor. Its directory is closed to other
    /// users: see [`berth_node::ipc::listen_at`].
    pub shims: OwnedFd,
    /// Forward each signal only once, however often it comes. When a parent with several threads
    /// dies, the kernel sends its death signal once for each thread.
    pub once: bool,
}

/// A running server, which is a child of this process.
#[derive(Debug)]
pub struct Supervisor {
    config: Config,
    child: Child,
    machine: Machine<OwnedFd>,
    epoll: Epoll,
    signals: SignalFd,
    /// Signals that the supervisor has forwarded to the server.
    forwarded: BTreeSet<u32>,
    began: Instant,
    /// A duplicate of the server's listener.
    listener: Option<OwnedFd>,
    /// A connection that the supervisor itself has made to the server's listener, with its local
    /// address. It stays in the accept queue, because the server can be woken ([`Action::Ring`])
    /// only while a connection is queued.
    parked: Option<(TcpStream, SocketAddr)>,
    shims: BTreeMap<u64, OwnedFd>,
    /// Clients that the server has accepted, by shim, and the time at which to report them by
    /// [`ToShim::Taken`]. Each message wakes a shim, so one message reports several clients.
    taken: BTreeMap<u64, Vec<u64>>,
    taken_due: Option<Duration>,
    /// The number of the shim that connected last.
    latest_shim: u64,
    /// True if the last connection of a shim could not be accepted.
    accept_failed: bool,
    /// Reason why the supervisor cannot hand over clients, and the server accepts clients by
    /// itself.
    obstacle: Option<Obstacle>,
}

impl Supervisor {
    /// Starts the server: `run` executes the program, in a new process, and returns only on
    /// failure. From now on this process receives all signals, and [`Supervisor::run`] forwards
    /// them.
    ///
    /// The process must have a single thread: the server ends with that thread.
    ///
    /// # Errors
    /// The error of `run`, and errors of [`seccomp::start_filtered`] and other system calls.
    pub fn start(config: Config, run: impl FnOnce() -> io::Error) -> io::Result<Self> {
        let mut signals = SigSet::all();
        // These signals are not forwarded. A signal of job control should stop this process alone,
        // and SIGPIPE concerns writes of this process.
        let own = [
            Signal::SIGTSTP,
            Signal::SIGTTIN,
            Signal::SIGTTOU,
            Signal::SIGPIPE,
        ];
        own.into_iter().for_each(|signal| signals.remove(signal));
        let supervisor = Self::launch(config, &signals, run)?;
        supervisor.child.await_exec()?;
        // Raise the limit after the server has started, because the server would inherit it.
        raise_file_limit()?;
        Ok(supervisor)
    }

    /// Starts the server like [`Supervisor::start`], but `run` may serve without executing a
    /// program. This process receives `signals`, which include SIGCHLD.
    pub(crate) fn launch(
        config: Config,
        signals: &SigSet,
        run: impl FnOnce() -> io::Error,
    ) -> io::Result<Self> {
        // Block the signals before the fork, so that none is lost.
        let mask = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let child = seccomp::start_filtered(|| {
            // Give the server a process group of its own. In the supervisor's group, it would get a
            // terminal's signals twice, because the supervisor forwards them.
            let group = setpgid(Pid::from_raw(0), Pid::from_raw(0));
            group
                .and_then(|()| mask.thread_set_mask())
                .map_or_else(io::Error::from, |()| run())
        })?;
        let supervisor = Self {
            config,
            child,
            machine: Machine::new(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            signals: SignalFd::with_flags(signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?,
            forwarded: BTreeSet::new(),
            began: Instant::now(),
            listener: None,
            parked: None,
            shims: BTreeMap::new(),
            taken: BTreeMap::new(),
            taken_due: None,
            latest_shim: LISTENER_EVENT,
            accept_failed: false,
            obstacle: None,
        };
        supervisor.watch_descriptor(&supervisor.child, EpollFlags::EPOLLIN, CALLS_EVENT)?;
        supervisor.watch_descriptor(&supervisor.signals, EpollFlags::EPOLLIN, SIGNALS_EVENT)?;
        supervisor.watch_descriptor(
            &supervisor.config.shims,
            EpollFlags::EPOLLIN | EpollFlags::EPOLLET,
            SHIMS_EVENT,
        )?;
        Ok(supervisor)
    }

    /// Returns the server's process ID.
    pub fn pid(&self) -> i32 {
        self.child.pid
    }

    /// Serves until the server has ended, and returns its status.
    ///
    /// # Errors
    /// Errors of indispensable system calls. The server ends with this process.
    pub fn run(mut self) -> io::Result<ExitStatus> {
        let status = self.drive()?;
        // The server's listener has ended with the server.
        self.machine.on_listener_checked(false);
        self.carry_out_actions();
        self.send_taken_clients();
        Ok(status)
    }

    /// Runs the loop until the server has ended.
    pub(crate) fn drive(&mut self) -> io::Result<ExitStatus> {
        let mut events = [EpollEvent::empty(); 64];
        loop {
            // epoll counts whole milliseconds: round up, so as not to wake early.
            let wake = self
                .machine
                .wake_at()
                .into_iter()
                .chain(self.taken_due)
                .min();
            let wait =
                wake.map(|at| at.saturating_sub(self.began.elapsed()) + Duration::from_millis(1));
            let wait = wait.map_or(EpollTimeout::NONE, |wait| {
                wait.try_into().unwrap_or(EpollTimeout::MAX)
            });
            let count = match self.epoll.wait(&mut events, wait) {
                Err(Errno::EINTR) => 0,
                count => count?,
            };
            let now = self.began.elapsed();
            self.machine.tick(now);
            self.carry_out_actions();
            if self.taken_due.is_some_and(|at| at <= now) {
                self.send_taken_clients();
            }
            for event in &events[..count] {
                match event.data() {
                    CALLS_EVENT if event.events().contains(EpollFlags::EPOLLIN) => {
                        self.receive_call()?;
                    }
                    // The last process under the filter has ended. The signal SIGCHLD follows.
                    CALLS_EVENT => {}
                    SIGNALS_EVENT => {
                        if let Some(status) = self.receive_signals()? {
                            return Ok(status);
                        }
                    }
                    SHIMS_EVENT => self.accept_shims(),
                    // The server has shut down its listener by shutdown(2). (Before listen(2),
                    // epoll reports EPOLLHUP too.)
                    LISTENER_EVENT
                        if event.events().contains(EpollFlags::EPOLLHUP) && self.is_listening() =>
                    {
                        self.machine.on_listener_checked(false);
                    }
                    LISTENER_EVENT => self.accept_client(),
                    shim => self.handle_shim_message(shim),
                }
                self.carry_out_actions();
            }
            if self.accept_failed {
                self.accept_shims();
            }
        }
    }

    fn watch_descriptor(&self, what: impl AsFd, events: EpollFlags, number: u64) -> io::Result<()> {
        Ok(self.epoll.add(what, EpollEvent::new(events, number))?)
    }

    fn receive_call(&mut self) -> io::Result<()> {
        let Some(call) = self.child.receive_notification()? else {
            return Ok(());
        };
        let by_server = self.child.has_thread(call.thread);
        if call.call == Call::Accept {
            let flags = self
                .listener
                .as_ref()
                .and_then(|listener| fcntl(listener, FcntlArg::F_GETFL).ok());
            let blocking = flags.is_some_and(|flags| flags & OFlag::O_NONBLOCK.bits() == 0);
            self.machine.on_accept(call, by_server, blocking);
        } else {
            self.machine.on_listener_checked(self.has_listener());
            let its_address = match self.child.check_bind(&call, self.config.address) {
                Err(error) if by_server => Err(Obstacle::Memory(error)),
                Ok(true) if !by_server && self.machine.phase() == Phase::Starting => {
                    Err(Obstacle::Descendant)
                }
                named => Ok(by_server && named.unwrap_or(false)),
            };
            let its_address = its_address.unwrap_or_else(|obstacle| {
                self.record_obstacle(obstacle);
                false
            });
            self.machine.on_bind(call, its_address);
        }
        Ok(())
    }

    /// True if the server still has its listener open, or if /proc does not show the server's
    /// descriptors.
    fn has_listener(&self) -> bool {
        let (Phase::Bound(number) | Phase::Listening(number)) = self.machine.phase() else {
            return false;
        };
        let has = |listener: &OwnedFd| {
            self.child
                .has_socket(number, listener.as_fd())
                .unwrap_or(true)
        };
        self.listener.as_ref().is_some_and(has)
    }

    /// Returns the result of [`crate::self_test()`]. The result is Ok if the server accepted a
    /// client that was handed over, and `run` ended without an error.
    pub(crate) fn check_outcome(self, status: ExitStatus) -> Result<(), Obstacle> {
        match (self.obstacle, self.machine.phase(), status.code()) {
            (Some(obstacle), ..) => Err(obstacle),
            (None, Phase::Listening(_), Some(_)) => Ok(self.child.await_exec()?),
            _ => Err(
                io::Error::other(format!("the server of the self-test ended with {status}")).into(),
            ),
        }
    }

    /// Logs an obstacle, and keeps it for [`Self::check_outcome`].
    fn record_obstacle(&mut self, obstacle: Obstacle) {
        tracing::warn!(
            code = %explained::SUPERVISOR,
            "the server accepts clients by itself: {obstacle}"
        );
        self.obstacle = Some(obstacle);
    }

    /// Reads and forwards this process's signals. Returns the server's status once the server has
    /// ended.
    fn receive_signals(&mut self) -> io::Result<Option<ExitStatus>> {
        while let Some(signal) = self.signals.read_signal()? {
            let is_repeated = !self.forwarded.insert(signal.ssi_signo) && self.config.once;
            let signal = signal.ssi_signo.cast_signed();
            if signal != Signal::SIGCHLD as i32 && !is_repeated {
                self.forward_signal(signal);
            }
        }
        loop {
            match reap_child() {
                Ok(Some((pid, status))) if pid == self.child.pid => return Ok(Some(status)),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return Ok(None),
            }
        }
    }

    fn forward_signal(&mut self, signal: i32) {
        let signal = if signal == KILL_CHILD as i32 {
            Signal::SIGKILL as i32
        } else {
            signal
        };
        if let Err(error) = send_signal(self.child.pid, signal) {
            tracing::warn!(signal, %error, "cannot signal the server");
        }
        if signal == Signal::SIGTERM as i32 {
            // If the server is stopped, it handles SIGTERM only after SIGCONT. systemd also sends
            // both.
            let _ = send_signal(self.child.pid, Signal::SIGCONT as i32);
        }
        self.machine.on_signal();
    }

    fn is_listening(&self) -> bool {
        matches!(self.machine.phase(), Phase::Listening(_))
    }

    /// Accepts connections of shims. If this process has no descriptor left, the connections wait,
    /// and the next event of any kind makes the driver try again.
    fn accept_shims(&mut self) {
        loop {
            match self.accept_shim() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    break self.accept_failed = false;
                }
                Err(_) if self.accept_failed => break,
                Err(error) => {
                    tracing::warn!(
                        code = %explained::SUPERVISOR,
                        %error,
                        "cannot accept the connection of a shim"
                    );
                    break self.accept_failed = true;
                }
            }
        }
    }

    fn accept_shim(&mut self) -> io::Result<()> {
        let shim = seqpacket::accept(self.config.shims.as_fd())?;
        self.latest_shim += 1;
        self.watch_descriptor(&shim, EpollFlags::EPOLLIN, self.latest_shim)?;
        self.shims.insert(self.latest_shim, shim);
        self.send_to_shim(
            self.latest_shim,
            &ToShim::Hello {
                version: VERSION,
                instance: self.config.instance.clone(),
            },
        );
        match self.machine.phase() {
            Phase::Listening(_) => self.send_to_shim(self.latest_shim, &ToShim::Listening),
            Phase::Closed => self.send_to_shim(self.latest_shim, &ToShim::Closed),
            Phase::Starting | Phase::Bound(_) => {}
        }
        Ok(())
    }

    /// Sends a message to a shim, if it is still connected. The socket has room for the message,
    /// because a shim that reads nothing sends no more clients.
    fn send_to_shim(&self, shim: u64, message: &ToShim) {
        let Some(socket) = self.shims.get(&shim) else {
            return;
        };
        let sent = serde_json::to_vec(message).map_err(io::Error::from);
        // If this fails, the shim has ended.
        let _ = sent.and_then(|message| seqpacket::transmit_message(socket.as_fd(), &message, &[]));
    }

    fn send_to_all_shims(&self, message: &ToShim) {
        self.shims
            .keys()
            .for_each(|shim| self.send_to_shim(*shim, message));
    }

    fn handle_shim_message(&mut self, number: u64) {
        let Some(shim) = self.shims.get(&number) else {
            return;
        };
        match read_message(shim) {
            Ok((FromShim::Client { seq }, Some(socket))) => {
                match socket::check_connection(socket.as_fd()) {
                    Ok(peer) => self.machine.on_client(Client {
                        socket,
                        peer,
                        from: Some((number, seq)),
                    }),
                    // The client has closed its connection, and has no address any more.
                    Err(error) => {
                        tracing::debug!(%error, "gave a client back to the shim");
                        self.send_to_shim(number, &ToShim::Back { seq });
                    }
                }
            }
            Ok((FromShim::Recall { seq }, _)) => self.machine.recall_client(number, seq),
            Ok(_) => {}
            // The shim died before it read every message. The messages that it sent can still be
            // read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => {
                if error.kind() != io::ErrorKind::UnexpectedEof {
                    tracing::warn!(
                        code = %explained::SUPERVISOR,
                        %error,
                        "the connection of a shim is ended"
                    );
                    self.machine.discard_clients_of_shim(number);
                    self.carry_out_actions();
                    // The shim takes back every client that has no acknowledgement, so send the
                    // pending acknowledgements.
                    self.send_taken_clients();
                }
                self.shims.remove(&number);
            }
        }
    }

    /// Accepts clients that dialled the server's own address, at most as many as a shim may send.
    /// Further clients wait in the accept queue.
    fn accept_client(&mut self) {
        let mut unparked = false;
        while self.is_listening()
            && !self.machine.is_shim_queue_full(None)
            && let Some(listener) = &self.listener
        {
            // Check the queue first: if the listener is blocking and the queue is empty, accept(2)
            // would wait.
            if socket::queue_length(listener.as_fd()).unwrap_or_default()
                <= u32::from(self.parked.is_some())
            {
                break;
            }
            match socket::accept(listener.as_fd()) {
                Ok((_, peer))
                    if self
                        .parked
                        .as_ref()
                        .is_some_and(|(_, parked)| *parked == peer) =>
                {
                    (self.parked, unparked) = (None, true);
                }
                Ok((socket, peer)) => self.machine.on_client(Client {
                    socket: socket.into(),
                    peer,
                    from: None,
                }),
                Err(error) => {
                    tracing::warn!(
                        code = %explained::SUPERVISOR,
                        %error,
                        "cannot accept a client of the server's own address"
                    );
                    break;
                }
            }
        }
        if unparked {
            self.park_connection();
        }
    }

    fn park_connection(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        // True if the supervisor's own connection still waits in the accept queue. False if another
        // process, with a duplicate of the listener, has accepted it.
        let is_there = |(end, _): &(TcpStream, _)| {
            socket::queue_length(listener.as_fd()).is_ok_and(|length| length > 0)
                || end.peer_addr().is_err()
        };
        if !self.parked.as_ref().is_some_and(is_there) {
            let end = socket::connect(self.config.address, None);
            let parked = end.and_then(|end| end.local_addr().map(|address| (end, address)));
            let warn = |error: &io::Error| {
                tracing::warn!(
                    code = %explained::SUPERVISOR,
                    %error,
                    "cannot wake the server: cannot connect to the server's address"
                );
            };
            self.parked = parked.inspect_err(warn).ok();
        }
    }

    fn carry_out_actions(&mut self) {
        while let Some(action) = self.machine.next_action() {
            match action {
                Action::Continue(call) => self.answer(call, Answer::Continue),
                Action::Fail(call, errno) => self.answer(call, Answer::Error(errno)),
                Action::Swap(call) => match self.swap_socket(&call) {
                    Ok(()) => self.answer(call, Answer::Value(0)),
                    Err(obstacle) => {
                        self.record_obstacle(obstacle);
                        self.answer(call, Answer::Continue);
                    }
                },
                Action::Listening => {
                    self.send_to_all_shims(&ToShim::Listening);
                    self.accept_client();
                }
                Action::HandOver(call, client) => {
                    let how =
                        self.child
                            .hand_over_client(&call, client.socket.as_fd(), client.peer);
                    if let Err(error) = &how {
                        tracing::debug!(peer = %client.peer, %error, "the server did not accept a client");
                    }
                    self.machine.on_handed_over(call, client, &how);
                }
                Action::Taken(Client {
                    from: Some((shim, seq)),
                    ..
                }) => self.record_taken_client(shim, seq),
                Action::Back(Client {
                    from: Some((shim, seq)),
                    ..
                }) => self.send_to_shim(shim, &ToShim::Back { seq }),
                // A client of the server's own address is done with, so there is room for another
                // one.
                Action::Taken(_) | Action::Back(_) => self.accept_client(),
                Action::Ring => {
                    self.park_connection();
                    self.listener
                        .as_ref()
                        .inspect(|listener| socket::wake_pollers(listener.as_fd()));
                }
                Action::Look => self.machine.on_listener_checked(self.has_listener()),
                Action::Close => {
                    self.send_to_all_shims(&ToShim::Closed);
                    (self.listener, self.parked) = (None, None);
                }
            }
        }
    }

    fn answer(&self, call: Notification, answer: Answer) {
        // If this fails, the call no longer waits.
        let _ = self.child.answer(call.id, answer);
    }

    /// Replaces the socket that the server is binding by a new socket, of which the supervisor
    /// keeps a duplicate.
    fn swap_socket(&mut self, bind: &Notification) -> Result<(), Obstacle> {
        let nonblocking = self
            .child
            .is_nonblocking(bind.socket)
            .map_err(Obstacle::Proc)?;
        let listener = socket::bind_as_apiserver(self.config.address, nonblocking)?;
        self.watch_descriptor(
            &listener,
            EpollFlags::EPOLLIN | EpollFlags::EPOLLET,
            LISTENER_EVENT,
        )?;
        self.child
            .replace_bound_socket(bind, listener.as_fd())
            .map_err(Obstacle::Descriptor)?;
        self.listener = Some(listener);
        self.machine.on_bound(bind.socket);
        Ok(())
    }

    fn record_taken_client(&mut self, shim: u64, seq: u64) {
        self.taken_due
            .get_or_insert(self.began.elapsed() + TAKEN_DELAY);
        let seqs = self.taken.entry(shim).or_default();
        seqs.push(seq);
        if seqs.len() == MAX_TAKEN {
            self.send_taken_clients();
        }
    }

    fn send_taken_clients(&mut self) {
        self.taken_due = None;
        for (shim, seqs) in std::mem::take(&mut self.taken) {
            self.send_to_shim(shim, &ToShim::Taken { seqs });
        }
    }
}

/// Reads the next message of a shim. A message with a client comes with the client's socket.
fn read_message(shim: &OwnedFd) -> io::Result<(FromShim, Option<OwnedFd>)> {
    let mut buffer = [0; 1024];
    let received = seqpacket::receive_message(shim.as_fd(), &mut buffer)?;
    if received.length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let message = parse_message(&buffer[..received.length]).map_err(io::Error::other)?;
    let FromShim::Client { .. } = message else {
        return Ok((message, None));
    };
    let several = |all: Vec<_>| {
        io::Error::other(format!(
            "{} descriptors came with a client, expected one descriptor",
            all.len()
        ))
    };
    let [socket] = <[OwnedFd; 1]>::try_from(received.descriptors).map_err(several)?;
    Ok((message, Some(socket)))
}
