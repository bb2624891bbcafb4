//! The driver: a loop over epoll(7) that passes each event to the machine and carries out the
//! machine's actions.

use crate::machine::{Action, Client, Machine, Phase};
use crate::obstacle::Obstacle;
use berth_node::instance::InstanceId;
use berth_node::ipc::supervisor::{FromShim, LATER, TOGETHER, ToShim, VERSION, parse_message};
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

/// Numbers of descriptors in epoll. Connections of shims have higher numbers.
const CALLS: u64 = 0;
const SIGNALS: u64 = 1;
const SHIMS: u64 = 2;
const LISTENER: u64 = 3;

#[derive(Debug)]
pub struct Config {
    pub instance: InstanceId,
    /// Address that the server will bind, in exactly this form.
    pub address: SocketAddr,
    /// Listener for shims, in a directory that nobody else can enter: see
    /// [`berth_node::ipc::listen_at`].
    pub shims: OwnedFd,
    /// Forward each signal only once, however often it comes: when a parent with several threads
    /// dies, its death signal comes once for each thread.
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
    /// Signals that were forwarded.
    forwarded: BTreeSet<u32>,
    began: Instant,
    /// A duplicate of the server's listener.
    listener: Option<OwnedFd>,
    /// A connection of the supervisor itself, with its address. The peer stays in the accept queue:
    /// without a queued connection epoll reports no bell.
    parked: Option<(TcpStream, SocketAddr)>,
    shims: BTreeMap<u64, OwnedFd>,
    /// Clients of shims that the server has accepted and the shims do not know of yet, and the time
    /// to send the message. A message wakes a shim, so accepted clients are collected.
    taken: BTreeMap<u64, Vec<u64>>,
    taken_due: Option<Duration>,
    /// The number of the latest shim.
    latest_shim: u64,
    /// True if a shim's connection could not be accepted.
    accept_failed: bool,
    /// Reason why the server accepts clients by itself.
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
        // Job control stops this process alone, and SIGPIPE concerns writes of this process.
        let own = [
            Signal::SIGTSTP,
            Signal::SIGTTIN,
            Signal::SIGTTOU,
            Signal::SIGPIPE,
        ];
        own.into_iter().for_each(|signal| signals.remove(signal));
        let supervisor = Self::launch(config, &signals, run)?;
        supervisor.child.await_exec()?;
        // Only now, because the server inherits limits.
        raise_file_limit()?;
        Ok(supervisor)
    }

    /// Like [`Supervisor::start`], but `run` need not execute a program. This process receives
    /// `signals`, which include SIGCHLD.
    pub(crate) fn launch(
        config: Config,
        signals: &SigSet,
        run: impl FnOnce() -> io::Error,
    ) -> io::Result<Self> {
        // The signals are blocked before the fork, so that no signal is missed.
        let mask = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let child = seccomp::start_filtered(|| {
            // The supervisor forwards a terminal's signals: in the supervisor's process group, the
            // server would get them twice.
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
            latest_shim: LISTENER,
            accept_failed: false,
            obstacle: None,
        };
        supervisor.watch(&supervisor.child, EpollFlags::EPOLLIN, CALLS)?;
        supervisor.watch(&supervisor.signals, EpollFlags::EPOLLIN, SIGNALS)?;
        supervisor.watch(
            &supervisor.config.shims,
            EpollFlags::EPOLLIN | EpollFlags::EPOLLET,
            SHIMS,
        )?;
        Ok(supervisor)
    }

    /// The server's process ID.
    pub fn pid(&self) -> i32 {
        self.child.pid
    }

    /// Serves until the server has ended, and returns its status.
    ///
    /// # Errors
    /// Errors of indispensable system calls. The server ends with this process.
    pub fn run(mut self) -> io::Result<ExitStatus> {
        let status = self.drive()?;
        // The listener ended with the server.
        self.machine.on_listener_checked(false);
        self.carry_out();
        self.send_taken();
        Ok(status)
    }

    /// Runs the loop until the server has ended.
    pub(crate) fn drive(&mut self) -> io::Result<ExitStatus> {
        let mut events = [EpollEvent::empty(); 64];
        loop {
            // Round up, because epoll counts whole milliseconds.
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
            self.carry_out();
            if self.taken_due.is_some_and(|at| at <= now) {
                self.send_taken();
            }
            for event in &events[..count] {
                match event.data() {
                    CALLS if event.events().contains(EpollFlags::EPOLLIN) => self.receive_call()?,
                    // No process is under the filter any more; the end of the server comes next.
                    CALLS => {}
                    SIGNALS => {
                        if let Some(status) = self.receive_signals()? {
                            return Ok(status);
                        }
                    }
                    SHIMS => self.accept_shims(),
                    // The server has ended its listener by shutdown(2). (Epoll reports EPOLLHUP
                    // also before listen(2).)
                    LISTENER
                        if event.events().contains(EpollFlags::EPOLLHUP) && self.is_listening() =>
                    {
                        self.machine.on_listener_checked(false);
                    }
                    LISTENER => self.accept_own(),
                    shim => self.read_shim(shim),
                }
                self.carry_out();
            }
            if self.accept_failed {
                self.accept_shims();
            }
        }
    }

    fn watch(&self, what: impl AsFd, events: EpollFlags, number: u64) -> io::Result<()> {
        Ok(self.epoll.add(what, EpollEvent::new(events, number))?)
    }

    fn receive_call(&mut self) -> io::Result<()> {
        let Some(call) = self.child.receive()? else {
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
            let its_address = match self.child.binds(&call, self.config.address) {
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

    /// True if the server has the descriptor of its listener, or if /proc does not show
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

    /// Result of [`crate::self_test()`]: Ok if the server accepted a client that was handed over,
    /// and `run` ended without an error.
    pub(crate) fn outcome(self, status: ExitStatus) -> Result<(), Obstacle> {
        match (self.obstacle, self.machine.phase(), status.code()) {
            (Some(obstacle), ..) => Err(obstacle),
            (None, Phase::Listening(_), Some(_)) => Ok(self.child.await_exec()?),
            _ => Err(io::Error::other(format!("the server ends with {status}")).into()),
        }
    }

    /// Logs and keeps an obstacle.
    fn record_obstacle(&mut self, obstacle: Obstacle) {
        tracing::warn!(
            code = %explained::SUPERVISOR,
            "the server accepts clients by itself: {obstacle}"
        );
        self.obstacle = Some(obstacle);
    }

    /// Forwards signals. Returns the server's status once it has ended.
    fn receive_signals(&mut self) -> io::Result<Option<ExitStatus>> {
        while let Some(signal) = self.signals.read_signal()? {
            let is_repeated = !self.forwarded.insert(signal.ssi_signo) && self.config.once;
            let signal = signal.ssi_signo.cast_signed();
            if signal != Signal::SIGCHLD as i32 && !is_repeated {
                self.forward(signal);
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

    fn forward(&mut self, signal: i32) {
        let signal = if signal == KILL_CHILD as i32 {
            Signal::SIGKILL as i32
        } else {
            signal
        };
        if let Err(error) = send_signal(self.child.pid, signal) {
            tracing::warn!(signal, %error, "cannot signal the server");
        }
        if signal == Signal::SIGTERM as i32 {
            // A stopped server handles SIGTERM only after SIGCONT. systemd also sends both.
            let _ = send_signal(self.child.pid, Signal::SIGCONT as i32);
        }
        self.machine.on_signal();
    }

    fn is_listening(&self) -> bool {
        matches!(self.machine.phase(), Phase::Listening(_))
    }

    /// Accepts connections of shims. If no descriptor is left, the connections wait for the next
    /// event of any kind.
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
        self.watch(&shim, EpollFlags::EPOLLIN, self.latest_shim)?;
        self.shims.insert(self.latest_shim, shim);
        self.send(
            self.latest_shim,
            &ToShim::Hello {
                version: VERSION,
                instance: self.config.instance.clone(),
            },
        );
        match self.machine.phase() {
            Phase::Listening(_) => self.send(self.latest_shim, &ToShim::Listening),
            Phase::Closed => self.send(self.latest_shim, &ToShim::Closed),
            Phase::Starting | Phase::Bound(_) => {}
        }
        Ok(())
    }

    /// Sends a message to a shim, if it is still connected. There is room: a shim that reads
    /// nothing does not send more clients.
    fn send(&self, shim: u64, message: &ToShim) {
        let Some(socket) = self.shims.get(&shim) else {
            return;
        };
        let sent = serde_json::to_vec(message).map_err(io::Error::from);
        // An error means that the shim has ended.
        let _ = sent.and_then(|message| seqpacket::transmit(socket.as_fd(), &message, &[]));
    }

    fn send_all(&self, message: &ToShim) {
        self.shims.keys().for_each(|shim| self.send(*shim, message));
    }

    fn read_shim(&mut self, number: u64) {
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
                    // The client has left.
                    Err(error) => {
                        tracing::debug!(%error, "a client was given back to the shim");
                        self.send(number, &ToShim::Back { seq });
                    }
                }
            }
            Ok((FromShim::Recall { seq }, _)) => self.machine.recall(number, seq),
            Ok(_) => {}
            // The shim died with unread messages. Its own messages can still be read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => {
                if error.kind() != io::ErrorKind::UnexpectedEof {
                    tracing::warn!(
                        code = %explained::SUPERVISOR,
                        %error,
                        "the connection of a shim is ended"
                    );
                    self.machine.discard(number);
                    self.carry_out();
                    // The shim takes back every client without an acknowledgement.
                    self.send_taken();
                }
                self.shims.remove(&number);
            }
        }
    }

    /// Accepts the clients that dialled the server's own address. At most as many as a shim may
    /// send; further clients wait in the accept queue.
    fn accept_own(&mut self) {
        let mut unparked = false;
        while self.is_listening()
            && !self.machine.is_full(None)
            && let Some(listener) = &self.listener
        {
            // The queue is checked first: accept(2) would wait if the listener is blocking.
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
            self.park();
        }
    }

    fn park(&mut self) {
        let Some(listener) = &self.listener else {
            return;
        };
        // False if somebody else has a duplicate of the listener and has accepted the connection.
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
                    "cannot wake the server: cannot connect to its address"
                );
            };
            self.parked = parked.inspect_err(warn).ok();
        }
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.machine.next_action() {
            match action {
                Action::Continue(call) => self.answer(call, Answer::Continue),
                Action::Fail(call, errno) => self.answer(call, Answer::Error(errno)),
                Action::Swap(call) => match self.swap(&call) {
                    Ok(()) => self.answer(call, Answer::Value(0)),
                    Err(obstacle) => {
                        self.record_obstacle(obstacle);
                        self.answer(call, Answer::Continue);
                    }
                },
                Action::Listening => {
                    self.send_all(&ToShim::Listening);
                    self.accept_own();
                }
                Action::HandOver(call, client) => {
                    let how = self
                        .child
                        .hand_over(&call, client.socket.as_fd(), client.peer);
                    if let Err(error) = &how {
                        tracing::debug!(peer = %client.peer, %error, "the server did not accept a client");
                    }
                    self.machine.on_handed_over(call, client, &how);
                }
                Action::Taken(Client {
                    from: Some((shim, seq)),
                    ..
                }) => self.record_taken(shim, seq),
                Action::Back(Client {
                    from: Some((shim, seq)),
                    ..
                }) => self.send(shim, &ToShim::Back { seq }),
                // Another client of the server's own address may be accepted.
                Action::Taken(_) | Action::Back(_) => self.accept_own(),
                Action::Ring => {
                    self.park();
                    self.listener
                        .as_ref()
                        .inspect(|listener| socket::wake_pollers(listener.as_fd()));
                }
                Action::Look => self.machine.on_listener_checked(self.has_listener()),
                Action::Close => {
                    self.send_all(&ToShim::Closed);
                    (self.listener, self.parked) = (None, None);
                }
            }
        }
    }

    fn answer(&self, call: Notification, answer: Answer) {
        // An error means that the call no longer waits.
        let _ = self.child.answer(call.id, answer);
    }

    /// Replaces the socket that the server binds by a new socket, which the supervisor holds, too.
    fn swap(&mut self, bind: &Notification) -> Result<(), Obstacle> {
        let nonblocking = self
            .child
            .is_nonblocking(bind.socket)
            .map_err(Obstacle::Proc)?;
        let listener = socket::bind_as_apiserver(self.config.address, nonblocking)?;
        self.watch(
            &listener,
            EpollFlags::EPOLLIN | EpollFlags::EPOLLET,
            LISTENER,
        )?;
        self.child
            .replace(bind, listener.as_fd())
            .map_err(Obstacle::Descriptor)?;
        self.listener = Some(listener);
        self.machine.on_bound(bind.socket);
        Ok(())
    }

    fn record_taken(&mut self, shim: u64, seq: u64) {
        self.taken_due.get_or_insert(self.began.elapsed() + LATER);
        let seqs = self.taken.entry(shim).or_default();
        seqs.push(seq);
        if seqs.len() == TOGETHER {
            self.send_taken();
        }
    }

    fn send_taken(&mut self) {
        self.taken_due = None;
        for (shim, seqs) in std::mem::take(&mut self.taken) {
            self.send(shim, &ToShim::Taken { seqs });
        }
    }
}

/// Reads the next message of a shim, with the client's socket if the message is a client.
fn read_message(shim: &OwnedFd) -> io::Result<(FromShim, Option<OwnedFd>)> {
    let mut buffer = [0; 1024];
    let received = seqpacket::receive(shim.as_fd(), &mut buffer)?;
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
