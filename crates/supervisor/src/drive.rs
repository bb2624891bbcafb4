//! One loop over epoll(7): each event goes to the machine, and the machine's actions are carried out.

use crate::machine::{Action, Client, Machine, Phase};
use crate::obstacle::Obstacle;
use berth_node::instance::InstanceId;
use berth_node::ipc::supervisor::{FromShim, LATER, TOGETHER, ToShim, VERSION, parse};
use berth_os::process::{KILL_CHILD, raise_file_limit, reap, send_signal};
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

/// Numbers of descriptors in epoll. Connections of shims have the numbers above.
const CALLS: u64 = 0;
const SIGNALS: u64 = 1;
const SHIMS: u64 = 2;
const LISTENER: u64 = 3;

#[derive(Debug)]
pub struct Config {
    pub instance: InstanceId,
    /// What the server will bind, in exactly this form.
    pub address: SocketAddr,
    /// Where shims connect, in a directory that lets in nobody else: see [`berth_node::ipc::listen`].
    pub shims: OwnedFd,
    /// Forward each signal once, however often it comes: a parent of several threads sends its death's signal once for each thread.
    pub once: bool,
}

/// A server that runs, as a child of this process.
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
    /// A connection of the supervisor's own, with its address. The other end stays in the accept queue: without a connection there, epoll reports
    /// no bell.
    parked: Option<(TcpStream, SocketAddr)>,
    shims: BTreeMap<u64, OwnedFd>,
    /// Clients of shims that the server has accepted, and when the shims are told of the first: each message wakes a shim.
    taken: BTreeMap<u64, Vec<u64>>,
    told: Option<Duration>,
    /// The number of the shim that came last.
    last: u64,
    /// A shim's connection could not be taken.
    untaken: bool,
    /// Why the server accepts clients by itself.
    obstacle: Option<Obstacle>,
}

impl Supervisor {
    /// Starts the server: `run` executes the program, in a new process, and returns only on failure. From now on this process receives all
    /// signals, and [`Supervisor::run`] forwards them.
    ///
    /// To be called by a process with one thread: the server ends with that thread.
    ///
    /// # Errors
    /// That of `run`, and those of [`seccomp::start`] and other system calls.
    pub fn start(config: Config, run: impl FnOnce() -> io::Error) -> io::Result<Self> {
        let mut signals = SigSet::all();
        // Job control stops this process alone, and SIGPIPE is for a write of this process.
        let own = [
            Signal::SIGTSTP,
            Signal::SIGTTIN,
            Signal::SIGTTOU,
            Signal::SIGPIPE,
        ];
        own.into_iter().for_each(|signal| signals.remove(signal));
        let supervisor = Self::launch(config, &signals, run)?;
        supervisor.child.await_exec()?;
        // Not before: the server inherits limits.
        raise_file_limit()?;
        Ok(supervisor)
    }

    /// [`Supervisor::start`] for a `run` that need not execute a program. This process receives `signals`, SIGCHLD among them.
    pub(crate) fn launch(
        config: Config,
        signals: &SigSet,
        run: impl FnOnce() -> io::Error,
    ) -> io::Result<Self> {
        // Blocked before the fork: no signal is missed.
        let mask = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let child = seccomp::start(|| {
            // The supervisor forwards a terminal's signals: in its process group, the server would get them twice.
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
            told: None,
            last: LISTENER,
            untaken: false,
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

    /// The server's process.
    pub fn pid(&self) -> i32 {
        self.child.pid
    }

    /// Serves until the server has ended; gives its status.
    ///
    /// # Errors
    /// Those of the system calls without which nothing can be done. The server ends when this process does.
    pub fn run(mut self) -> io::Result<ExitStatus> {
        let status = self.drive()?;
        // The listener ended with the server.
        self.machine.looked(false);
        self.carry_out();
        self.tell_of_taken();
        Ok(status)
    }

    /// Until the server has ended.
    pub(crate) fn drive(&mut self) -> io::Result<ExitStatus> {
        let mut events = [EpollEvent::empty(); 64];
        loop {
            // Later rather than earlier: epoll counts whole milliseconds.
            let wake = self.machine.wake().into_iter().chain(self.told).min();
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
            if self.told.is_some_and(|at| at <= now) {
                self.tell_of_taken();
            }
            for event in &events[..count] {
                match event.data() {
                    CALLS if event.events().contains(EpollFlags::EPOLLIN) => self.receive_call()?,
                    // No process is under the filter any more: its end comes next.
                    CALLS => {}
                    SIGNALS => {
                        if let Some(status) = self.receive_signals()? {
                            return Ok(status);
                        }
                    }
                    SHIMS => self.accept_shims(),
                    // The server has ended it by shutdown(2). (Before listen(2), epoll says so too.)
                    LISTENER
                        if event.events().contains(EpollFlags::EPOLLHUP) && self.is_listening() =>
                    {
                        self.machine.looked(false);
                    }
                    LISTENER => self.accept_own(),
                    shim => self.read_shim(shim),
                }
                self.carry_out();
            }
            if self.untaken {
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
            self.machine.accepts(call, by_server, blocking);
        } else {
            self.machine.looked(self.has_listener());
            let its_address = match self.child.binds(&call, self.config.address) {
                Err(error) if by_server => Err(Obstacle::Memory(error)),
                Ok(true) if !by_server && self.machine.phase() == Phase::Starting => {
                    Err(Obstacle::Descendant)
                }
                named => Ok(by_server && named.unwrap_or(false)),
            };
            let its_address = its_address.unwrap_or_else(|obstacle| {
                self.hinder(obstacle);
                false
            });
            self.machine.binds(call, its_address);
        }
        Ok(())
    }

    /// Whether the server has the descriptor of its listener. True if /proc does not show descriptors.
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

    /// Whether a client was handed over, in [`crate::self_test()`]: the server accepted one, and `run` has ended without an error.
    pub(crate) fn outcome(self, status: ExitStatus) -> Result<(), Obstacle> {
        match (self.obstacle, self.machine.phase(), status.code()) {
            (Some(obstacle), ..) => Err(obstacle),
            (None, Phase::Listening(_), Some(_)) => Ok(self.child.await_exec()?),
            _ => Err(io::Error::other(format!("the server ends with {status}")).into()),
        }
    }

    /// Logs and keeps an obstacle.
    fn hinder(&mut self, obstacle: Obstacle) {
        tracing::warn!("the server accepts clients by itself: {obstacle}");
        self.obstacle = Some(obstacle);
    }

    /// Forwards signals, and gives the server's status once it has ended.
    fn receive_signals(&mut self) -> io::Result<Option<ExitStatus>> {
        while let Some(signal) = self.signals.read_signal()? {
            let is_repeated = !self.forwarded.insert(signal.ssi_signo) && self.config.once;
            let signal = signal.ssi_signo.cast_signed();
            if signal != Signal::SIGCHLD as i32 && !is_repeated {
                self.forward(signal);
            }
        }
        loop {
            match reap() {
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
            // A stopped server handles SIGTERM only then. As systemd does.
            let _ = send_signal(self.child.pid, Signal::SIGCONT as i32);
        }
        self.machine.signalled();
    }

    fn is_listening(&self) -> bool {
        matches!(self.machine.phase(), Phase::Listening(_))
    }

    /// Those that cannot be taken (no descriptor is left) wait for the next event, whichever that is.
    fn accept_shims(&mut self) {
        loop {
            match self.accept_shim() {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    break self.untaken = false;
                }
                Err(_) if self.untaken => break,
                Err(error) => {
                    tracing::warn!(%error, "cannot take the connection of a shim");
                    break self.untaken = true;
                }
            }
        }
    }

    fn accept_shim(&mut self) -> io::Result<()> {
        let shim = seqpacket::accept(self.config.shims.as_fd())?;
        self.last += 1;
        self.watch(&shim, EpollFlags::EPOLLIN, self.last)?;
        self.shims.insert(self.last, shim);
        self.tell(
            self.last,
            &ToShim::Hello {
                version: VERSION,
                instance: self.config.instance.clone(),
            },
        );
        match self.machine.phase() {
            Phase::Listening(_) => self.tell(self.last, &ToShim::Listening),
            Phase::Closed => self.tell(self.last, &ToShim::Closed),
            Phase::Starting | Phase::Bound(_) => {}
        }
        Ok(())
    }

    /// Sends a message to a shim, if that is there. There is room: one that reads nothing does not send more clients.
    fn tell(&self, shim: u64, message: &ToShim) {
        let Some(socket) = self.shims.get(&shim) else {
            return;
        };
        let sent = serde_json::to_vec(message).map_err(io::Error::from);
        // An error means that the shim has ended.
        let _ = sent.and_then(|message| seqpacket::transmit(socket.as_fd(), &message, &[]));
    }

    fn tell_all(&self, message: &ToShim) {
        self.shims.keys().for_each(|shim| self.tell(*shim, message));
    }

    fn read_shim(&mut self, number: u64) {
        let Some(shim) = self.shims.get(&number) else {
            return;
        };
        match read_message(shim) {
            Ok((FromShim::Client { seq }, Some(socket))) => {
                match socket::check_connection(socket.as_fd()) {
                    Ok(peer) => self.machine.came(Client {
                        socket,
                        peer,
                        from: Some((number, seq)),
                    }),
                    // The client has left.
                    Err(error) => {
                        tracing::debug!(%error, "a client is given back");
                        self.tell(number, &ToShim::Back { seq });
                    }
                }
            }
            Ok((FromShim::Recall { seq }, _)) => self.machine.recall(number, seq),
            Ok(_) => {}
            // The shim died with unread messages. Its own can still be read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
            Err(error) => {
                if error.kind() != io::ErrorKind::UnexpectedEof {
                    tracing::warn!(%error, "the connection of a shim is ended");
                    self.machine.discard(number);
                    self.carry_out();
                    // What the shim is not told of, it has back.
                    self.tell_of_taken();
                }
                self.shims.remove(&number);
            }
        }
    }

    /// Takes the clients that dialled the server's own address; no more than a shim may send, others wait in the accept queue.
    fn accept_own(&mut self) {
        let mut unparked = false;
        while self.is_listening()
            && !self.machine.is_full(None)
            && let Some(listener) = &self.listener
        {
            // Checked: accept(2) would wait if the listener is blocking.
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
                Ok((socket, peer)) => self.machine.came(Client {
                    socket: socket.into(),
                    peer,
                    from: None,
                }),
                Err(error) => {
                    tracing::warn!(%error, "cannot take a client of the server's own address");
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
        // Not so if somebody else has a duplicate of the listener, and has accepted it.
        let is_there = |(end, _): &(TcpStream, _)| {
            socket::queue_length(listener.as_fd()).is_ok_and(|length| length > 0)
                || end.peer_addr().is_err()
        };
        if !self.parked.as_ref().is_some_and(is_there) {
            let end = socket::connect(self.config.address, None);
            let parked = end.and_then(|end| end.local_addr().map(|address| (end, address)));
            let warn = |error: &io::Error| tracing::warn!(%error, "cannot wake the server: it cannot be dialled");
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
                        self.hinder(obstacle);
                        self.answer(call, Answer::Continue);
                    }
                },
                Action::Listening => {
                    self.tell_all(&ToShim::Listening);
                    self.accept_own();
                }
                Action::HandOver(call, client) => {
                    let how = self
                        .child
                        .hand_over(&call, client.socket.as_fd(), client.peer);
                    if let Err(error) = &how {
                        tracing::debug!(peer = %client.peer, %error, "the server does not take a client now");
                    }
                    self.machine.handed(call, client, &how);
                }
                Action::Taken(Client {
                    from: Some((shim, seq)),
                    ..
                }) => self.taken(shim, seq),
                Action::Back(Client {
                    from: Some((shim, seq)),
                    ..
                }) => self.tell(shim, &ToShim::Back { seq }),
                // Another client of the server's own address may be taken.
                Action::Taken(_) | Action::Back(_) => self.accept_own(),
                Action::Ring => {
                    self.park();
                    self.listener
                        .as_ref()
                        .inspect(|listener| socket::wake_pollers(listener.as_fd()));
                }
                Action::Look => self.machine.looked(self.has_listener()),
                Action::Close => {
                    self.tell_all(&ToShim::Closed);
                    (self.listener, self.parked) = (None, None);
                }
            }
        }
    }

    fn answer(&self, call: Notification, answer: Answer) {
        // An error means that the call waits no more.
        let _ = self.child.answer(call.id, answer);
    }

    /// Replaces the socket that the server binds by a new one, which the supervisor holds too.
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
        self.machine.bound(bind.socket);
        Ok(())
    }

    fn taken(&mut self, shim: u64, seq: u64) {
        self.told.get_or_insert(self.began.elapsed() + LATER);
        let seqs = self.taken.entry(shim).or_default();
        seqs.push(seq);
        if seqs.len() == TOGETHER {
            self.tell_of_taken();
        }
    }

    fn tell_of_taken(&mut self) {
        self.told = None;
        for (shim, seqs) in std::mem::take(&mut self.taken) {
            self.tell(shim, &ToShim::Taken { seqs });
        }
    }
}

/// The next message of a shim; with the client's socket, if it is a client.
fn read_message(shim: &OwnedFd) -> io::Result<(FromShim, Option<OwnedFd>)> {
    let mut buffer = [0; 1024];
    let received = seqpacket::receive(shim.as_fd(), &mut buffer)?;
    if received.length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let message = parse(&buffer[..received.length]).map_err(io::Error::other)?;
    let FromShim::Client { .. } = message else {
        return Ok((message, None));
    };
    let several = |all: Vec<_>| {
        io::Error::other(format!(
            "{} descriptors came with a client, not one",
            all.len()
        ))
    };
    let [socket] = <[OwnedFd; 1]>::try_from(received.descriptors).map_err(several)?;
    Ok((message, Some(socket)))
}
