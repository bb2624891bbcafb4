//! A shim among its siblings: leases, guards, who accepts from what.
//!
//! [`machine`] decides (pure), [`peers`] talks to siblings, and here is what does it: the listeners'
//! descriptors and the accept loops. `leases` keeps the own lease and reads the siblings', `siblings` passes
//! clients.
//!
//! Better than a graceful close of one's own listener: it does not close while a sibling lives. Every shim holds a
//! duplicate of every sibling's listener, so a queue survives its shim, whatever ended it.

mod leases;
pub mod machine;
pub mod peers;
mod siblings;
mod strangers;

pub use siblings::PASSES;

use crate::accept::{Accepting, Dealer};
use crate::backend::Table;
use crate::drain::Stop;
use crate::metrics::{HandoverLabels, Metrics};
use crate::relay::Pass;
use berth_node::instance::InstanceId;
use berth_node::ipc::Asked;
use berth_node::registry::BerthDir;
use berth_node::registry::lease;
use berth_node::registry::watch::Watch;
use berth_node::terms::{Cookie, Holder, Phase, Standing};
use berth_os::socket::Keepalive;
use berth_os::{clock, proc_net, socket};
use machine::{Action, Facts, Machine, Rules, Time};
use peers::{Desk, Event, lock, talk};
use siblings::Connecting;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use strangers::Strangers;
use tokio::runtime::Handle;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

/// How long a socket that cannot listen or be accepted from is left alone.
const RETRY: Duration = Duration::from_millis(250);

/// What a shim brings to its berth.
#[derive(Debug)]
pub struct Setup {
    /// The berth's folder.
    pub berth: BerthDir,
    /// The own instance's name.
    pub instance: InstanceId,
    /// Its address, where it was given and not recorded by `berth exec`.
    pub backend: Option<SocketAddr>,
    /// A node shim: any ready instance makes it ready.
    pub any: bool,
    /// Bound sockets that do not listen, by their addresses; the first names the berth.
    pub sockets: Vec<(SocketAddr, OwnedFd)>,
    /// Addresses that may not be there yet.
    pub freebind: BTreeSet<SocketAddr>,
    /// What accepted connections inherit, whoever made the listener.
    pub keepalive: Keepalive,
    /// Length of the accept queue.
    pub backlog: u32,
    /// How long nothing may be reachable before clients are refused.
    pub hold: Duration,
    /// Duration of a lease.
    pub lease: Duration,
    /// Hidden option of the tests: closes plainly, as a proxy without guards does.
    pub plain_close: bool,
    /// Deals accepted connections.
    pub dealer: Arc<Dealer>,
    /// Every worker, for the proof of life that a lease is.
    pub workers: Vec<Handle>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Whether connections that the own instance cannot serve are to be passed on.
    pub pass_on: Arc<AtomicBool>,
    /// Whether the shim was told to leave.
    pub leaving: Arc<AtomicBool>,
    /// Whether a worker gives no sign of life: better a sibling takes the connections.
    pub blocked: Arc<AtomicBool>,
    /// Connections to pass on.
    pub passes: mpsc::UnboundedReceiver<Pass>,
    /// Requests of siblings on the shim's socket.
    pub asked: mpsc::UnboundedReceiver<Asked>,
    /// The instances.
    pub table: watch::Receiver<Arc<Table>>,
    /// What the shim is told from outside.
    pub stop: watch::Receiver<Stop>,
    /// Where the siblings are named that live and have no connection to this shim.
    pub unconnected: watch::Sender<Vec<InstanceId>>,
    /// Where the phase is told.
    pub phase: watch::Sender<(Phase, SystemTime)>,
}

/// What an accept loop tells.
#[derive(Debug)]
enum OfLoop {
    /// It takes clients out.
    Runs(Cookie),
    /// It has ended, as it was told, or since the listener listens no more.
    Ended(Cookie),
    /// It could not start or go on, and why.
    Failed(Cookie, SocketAddr, String),
}

/// The running of it.
struct Keeper {
    setup: Setup,
    machine: Machine,
    me: Holder,
    boot_id: String,
    desk: Arc<Mutex<Desk>>,
    /// Own sockets that do not listen yet.
    waiting: BTreeMap<SocketAddr, Arc<OwnedFd>>,
    /// What tells the accept loops, from their start until they have ended.
    loops: BTreeMap<Cookie, watch::Sender<Accepting>>,
    /// What tells the writers of the connections to siblings.
    writers: BTreeMap<Holder, Arc<Notify>>,
    /// Instances of the siblings that have a lease, for their sockets.
    siblings: BTreeMap<Holder, InstanceId>,
    connecting: BTreeMap<Holder, Connecting>,
    /// Why the last dial of a sibling came to nothing.
    unreachable: BTreeMap<Holder, String>,
    /// Siblings without a connection that were logged.
    told_unconnected: BTreeSet<Holder>,
    passing: Arc<siblings::Passing>,
    events: mpsc::UnboundedSender<Event>,
    of_loops: mpsc::UnboundedSender<OfLoop>,
    /// Workers that answered since the last renewal.
    alive: Arc<AtomicU64>,
    transitions: u32,
    acquired: SystemTime,
    /// On the clock of leases.
    renewed: Time,
    /// The last write of the lease went well.
    lease_written: bool,
    retry: Option<Instant>,
    /// Addresses whose own socket could not listen.
    deaf: BTreeSet<SocketAddr>,
    /// Listeners that could not be accepted from.
    failed: BTreeSet<Cookie>,
    told_problems: BTreeSet<String>,
    strangers: Strangers,
}

/// Runs the shim's part in its berth until it has left for good (told by [`Stop::Drain`]) and whoever
/// holds it drops the future; guards are held until then.
///
/// # Errors
/// There is no clock or no boot ID: leases cannot be kept.
pub async fn keep(setup: Setup) -> io::Result<()> {
    let me = Holder(getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?);
    let now = clock::boottime()?;
    let rules = Rules {
        addresses: setup.sockets.iter().map(|(address, _)| *address).collect(),
        hold: setup.hold,
        lease: setup.lease,
    };
    let (events, mut heard) = mpsc::unbounded_channel();
    let (of_loops, mut loops) = mpsc::unbounded_channel();
    let mut setup = setup;
    let waiting = setup.sockets.drain(..).map(|(address, socket)| (address, Arc::new(socket))).collect();
    let mut table = setup.table.clone();
    let mut stop = setup.stop.clone();
    let mut passes = std::mem::replace(&mut setup.passes, mpsc::unbounded_channel().1);
    let mut asked = std::mem::replace(&mut setup.asked, mpsc::unbounded_channel().1);
    let mut watch = Watch::new(&setup.berth);
    let third = setup.lease / 3;
    let mut keeper = Keeper {
        machine: Machine::new(rules, now),
        me,
        boot_id: clock::boot_id()?,
        desk: Arc::default(),
        waiting,
        loops: BTreeMap::new(),
        writers: BTreeMap::new(),
        siblings: BTreeMap::new(),
        connecting: BTreeMap::new(),
        unreachable: BTreeMap::new(),
        told_unconnected: BTreeSet::new(),
        passing: Arc::new(siblings::Passing::new(setup.lease, setup.hold)),
        events,
        of_loops,
        alive: Arc::new(AtomicU64::new(0)),
        transitions: 0,
        acquired: SystemTime::now(),
        renewed: now,
        lease_written: true,
        retry: None,
        deaf: BTreeSet::new(),
        failed: BTreeSet::new(),
        told_problems: BTreeSet::new(),
        strangers: Strangers::default(),
        setup,
    };
    keeper.transitions = keeper.transitions();
    keeper.write_lease();
    keeper.ping();
    keeper.read_leases();
    let mut renew = tokio::time::interval_at(Instant::now() + third, third);
    renew.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        // It takes in the time too: a wake-up for its own sake has nothing else to do.
        keeper.facts(&mut table, &mut stop);
        keeper.tell_who_takes();
        let wake = keeper.wake();
        tokio::select! {
            changed = table.changed() => if changed.is_err() { return Ok(()) },
            changed = stop.changed() => if changed.is_err() { return Ok(()) },
            Some(event) = heard.recv() => keeper.hear(event),
            Some(of_loop) = loops.recv() => keeper.hear_of_loop(of_loop),
            Some(pass) = passes.recv() => keeper.pass(pass),
            Some(asked) = asked.recv() => keeper.asked(asked),
            () = watch.changed() => keeper.read_leases(),
            _ = renew.tick() => keeper.renew(),
            () = tokio::time::sleep_until(wake) => {}
        }
    }
}

impl Keeper {
    fn now(&self) -> Time {
        clock::boottime().unwrap_or(self.renewed)
    }

    fn wake(&self) -> Instant {
        let now = self.now();
        let machine = self.machine.wake().map(|at| Instant::now() + at.saturating_sub(now));
        // An hour: something else wakes it before.
        machine.into_iter().chain(self.retry).min().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600))
    }

    fn facts(&mut self, table: &mut watch::Receiver<Arc<Table>>, stop: &mut watch::Receiver<Stop>) {
        self.tick();
        let facts = {
            let table = table.borrow_and_update();
            let own = table.own().is_some_and(|own| own.standing == Standing::Ready);
            let any = self.setup.any && table.instances.iter().any(|instance| instance.standing == Standing::Ready);
            Facts {
                ready: (own || any) && !self.is_blocked(),
                reachable: table.pick(|_| true).is_some(),
                leaving: *stop.borrow_and_update() != Stop::No,
                blocked: self.is_blocked(),
            }
        };
        // From now on, not from when siblings took over: what is still accepted until then must not go to an
        // instance that ends.
        self.setup.leaving.store(facts.leaving, Relaxed);
        self.setup.pass_on.store(!self.setup.any || facts.leaving, Relaxed);
        let actions = self.machine.facts(facts);
        self.act(actions);
    }

    fn is_blocked(&self) -> bool {
        self.setup.blocked.load(Relaxed)
    }

    fn tick(&mut self) {
        self.retry = self.retry.filter(|at| *at > Instant::now());
        let now = self.now();
        let mut actions = self.machine.tick(now);
        if self.retry.is_none() {
            for address in std::mem::take(&mut self.deaf) {
                actions.extend(self.machine.listen_again(address));
            }
            // What could not be accepted from is as if it had been refused: the machine tries again.
            for cookie in std::mem::take(&mut self.failed) {
                actions.extend(self.machine.ended(cookie));
            }
        }
        self.act(actions);
    }

    fn hear(&mut self, event: Event) {
        self.tick();
        let actions = match event {
            Event::Connected(holder, socket) => {
                self.connecting.remove(&holder);
                self.unreachable.remove(&holder);
                self.told_unconnected.remove(&holder);
                // Both dialled, and the other connection stands already: this one ends here.
                let Entry::Vacant(free) = self.writers.entry(holder) else { return };
                let changed = free.insert(Arc::default()).clone();
                self.count("connect", "ok");
                let addresses: Arc<[SocketAddr]> = self.machine.addresses().into();
                tokio::spawn(talk(socket, holder, addresses, self.desk.clone(), changed, self.events.clone()));
                self.machine.connected(holder)
            }
            Event::Told(holder, announce, guards) => {
                let mut known = Vec::new();
                for (cookie, address, descriptor) in guards {
                    self.count("guard", "ok");
                    known.push((cookie, address));
                    lock(&self.desk).held.entry(cookie).or_insert_with(|| (address, Arc::new(descriptor)));
                }
                self.machine.told(holder, announce, &known)
            }
            Event::Alone(holder, why) => {
                // Unless both dialled, and it is the other connection that stands.
                if self.not_dialled(holder, &why) {
                    if self.told_problems.insert(format!("{holder:?} {why}")) {
                        tracing::warn!("a sibling does not share its listeners: {why}");
                    }
                    self.count("connect", "refused");
                }
                return;
            }
            Event::Conflict(holder, why) => {
                self.not_dialled(holder, &why);
                self.conflict(&why);
                return;
            }
            Event::Unreachable(holder, why) => {
                self.not_dialled(holder, &why);
                tracing::debug!("cannot reach a sibling: {why}");
                return;
            }
            Event::Gone(holder) => {
                if self.writers.remove(&holder).is_none() {
                    // It went before its connection stood.
                    self.connecting.remove(&holder);
                    return;
                }
                let instance = self.siblings.get(&holder).map(tracing::field::display);
                tracing::info!(instance, "a sibling is gone; its listeners are accepted from here if it had any");
                self.machine.gone(holder)
            }
        };
        self.act(actions);
    }

    fn hear_of_loop(&mut self, of_loop: OfLoop) {
        let actions = match of_loop {
            OfLoop::Runs(cookie) => self.machine.accepting(cookie),
            OfLoop::Ended(cookie) => {
                self.loops.remove(&cookie);
                self.machine.ended(cookie)
            }
            OfLoop::Failed(cookie, address, why) => {
                self.loops.remove(&cookie);
                self.cannot_accept(cookie, address, &why)
            }
        };
        self.act(actions);
    }

    /// Does what the machine wants, and what follows from it.
    fn act(&mut self, actions: Vec<Action>) {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            match action {
                Action::Listen(address) => actions.extend(self.listen(address)),
                Action::Accept(cookie) => actions.extend(self.accept(cookie)),
                Action::Guard(cookie) => self.end_loop(cookie, Accepting::No),
                Action::Refuse(cookie) => {
                    if let Some((address, listener)) = lock(&self.desk).held.get(&cookie) {
                        match socket::refuse(listener.as_fd()) {
                            Ok(()) => tracing::warn!(%address, "nothing is reachable: clients are refused"),
                            Err(error) => tracing::warn!(%address, %error, "cannot end listening"),
                        }
                    }
                    self.count("refuse", "ok");
                    self.end_loop(cookie, Accepting::No);
                }
                Action::Close(cookie) => {
                    self.strangers.tell_of_close();
                    // The loop's own duplicate is the last: it closes when the queue is empty.
                    lock(&self.desk).held.remove(&cookie);
                    self.end_loop(cookie, if self.setup.plain_close { Accepting::No } else { Accepting::Rest });
                    if !self.loops.contains_key(&cookie) {
                        actions.extend(self.machine.ended(cookie));
                    }
                    self.count("close", "ok");
                }
                Action::Announce => {
                    {
                        let mut desk = lock(&self.desk);
                        desk.announce = self.machine.announce();
                        desk.guards = self.machine.guards().into_iter().map(|(cookie, _)| cookie).collect();
                    }
                    for writer in self.writers.values() {
                        writer.notify_one();
                    }
                    self.write_lease();
                }
                Action::Phase(phase) => {
                    if phase == Phase::Left {
                        // It would hold the port until the last connection ended. Who comes back binds anew.
                        self.waiting.clear();
                    }
                    let siblings = self.writers.len();
                    let connections = self.setup.metrics.open();
                    tracing::info!(connections, siblings, "{}", phase.as_str());
                    self.count(phase.as_str(), "ok");
                    self.setup.phase.send_replace((phase, SystemTime::now()));
                    if phase == Phase::Joined {
                        self.look_for_strangers();
                    }
                }
            }
        }
    }

    fn listen(&mut self, address: SocketAddr) -> Vec<Action> {
        let listened = self.bound(address).and_then(|own| {
            socket::start_listening(own.as_fd(), self.setup.backlog)?;
            socket::cookie(own.as_fd())
        });
        match listened {
            Ok(cookie) => {
                let cookie = Cookie(cookie);
                if let Some(own) = self.waiting.remove(&address) {
                    lock(&self.desk).held.insert(cookie, (address, own));
                }
                self.count("listen", "ok");
                let trouble = listen_trouble(address);
                self.told_problems.retain(|told| !told.starts_with(&trouble));
                self.machine.listening(address, cookie)
            }
            Err(error) => {
                // Who holds the port is read from every socket of the host: once, not at each try.
                if self.told_problems.insert(listen_trouble(address) + &error.to_string()) {
                    let why = match error.raw_os_error() {
                        Some(libc::EADDRINUSE) => proc_net::explain(address, nix::unistd::geteuid().as_raw()),
                        _ => error.to_string(),
                    };
                    tracing::error!(%address, "cannot listen, trying again: {why}");
                }
                self.count("listen", "failed");
                self.deaf.insert(address);
                self.retry = Some(Instant::now() + RETRY);
                Vec::new()
            }
        }
    }

    /// The own socket of an address that does not listen; a new one where the last was handed over.
    fn bound(&mut self, address: SocketAddr) -> io::Result<Arc<OwnedFd>> {
        Ok(match self.waiting.entry(address) {
            Entry::Occupied(own) => own.get().clone(),
            Entry::Vacant(free) => {
                let own = socket::bind(address, self.setup.freebind.contains(&address))?;
                free.insert(Arc::new(own)).clone()
            }
        })
    }

    /// Takes a listener into use, whoever made it: what its connections inherit is this shim's choice.
    fn accept(&mut self, cookie: Cookie) -> Vec<Action> {
        let held = lock(&self.desk).held.get(&cookie).cloned();
        let Some((address, listener)) = held else { return self.machine.failed(cookie) };
        let ready = socket::set_options(listener.as_fd(), &self.setup.keepalive)
            .and_then(|()| socket::start_listening(listener.as_fd(), self.setup.backlog))
            .and_then(|()| listener.as_fd().try_clone_to_owned());
        match ready {
            Ok(duplicate) => {
                tracing::debug!(%address, listener = cookie.0, "accepting");
                let told = watch::Sender::new(Accepting::Yes);
                let (runs, ends) = (self.of_loops.clone(), self.of_loops.clone());
                // Said by the loop itself: a sibling lets go on the strength of it.
                let runs = move || drop(runs.send(OfLoop::Runs(cookie)));
                let accepting = self.setup.dealer.spawn(duplicate, told.subscribe(), runs);
                self.loops.insert(cookie, told);
                tokio::spawn(async move {
                    let _ = ends.send(match accepting.await {
                        Ok(Ok(())) => OfLoop::Ended(cookie),
                        Ok(Err(error)) => OfLoop::Failed(cookie, address, error.to_string()),
                        Err(error) => {
                            tracing::error!(%address, %error, "an accept loop ended: a bug");
                            OfLoop::Failed(cookie, address, error.to_string())
                        }
                    });
                });
                self.count("accept", "ok");
                // Else the next tick would end, for the machine, a loop that runs.
                self.failed.remove(&cookie);
                Vec::new()
            }
            Err(error) => self.cannot_accept(cookie, address, &error.to_string()),
        }
    }

    fn cannot_accept(&mut self, cookie: Cookie, address: SocketAddr, why: &str) -> Vec<Action> {
        if self.told_problems.insert(format!("accept {address}: {why}")) {
            tracing::error!(%address, "cannot accept, trying again: {why}");
        }
        self.count("accept", "failed");
        self.retry = Some(Instant::now() + RETRY);
        self.failed.insert(cookie);
        self.machine.failed(cookie)
    }

    fn end_loop(&self, cookie: Cookie, how: Accepting) {
        if let Some(told) = self.loops.get(&cookie) {
            told.send_replace(how);
        }
    }

    fn look_for_strangers(&mut self) {
        if !self.machine.has_all_guards() {
            // What is not known may be that sibling's; it is told of as one without a connection.
            return self.strangers.forget_suspects();
        }
        let ours: BTreeSet<_> =
            lock(&self.desk).held.values().filter_map(|(_, listener)| socket::inode(listener.as_fd())).collect();
        self.strangers.look(self.machine.addresses(), &ours, &self.setup.metrics);
    }

    fn count(&self, phase: &'static str, result: &'static str) {
        self.setup.metrics.handover.get_or_create(&HandoverLabels { phase, result }).inc();
    }
}

/// How what is told begins of an address that cannot be listened on.
fn listen_trouble(address: SocketAddr) -> String {
    format!("listen {address}: ")
}

impl Drop for Keeper {
    fn drop(&mut self) {
        for told in self.loops.values() {
            told.send_replace(Accepting::No);
        }
        let _ = lease::remove(&self.setup.berth, &self.lease());
    }
}
