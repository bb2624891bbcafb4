//! A client's first bytes, relayed over real sockets. A leg is a connection from the relay to an
//! instance. Each leg gets a prefix of the client's bytes, and the client gets bytes of at most one
//! leg: the whole answer, unless that leg or the client ends the connection early. The client may
//! send any bytes in any pieces, and the instances may do anything before their first byte.
//!
//! Inputs are a script (see [`Script`]) and the client's bytes. The checks look at the sockets, and
//! at the relay's counters of connections.
#![no_main]

use berth_node::instance_id::InstanceId;
use berth_os::socket::{self, reset_on_close};
use berth_shim::backend::TableWriter;
use berth_shim::backend::health::Observation;
use berth_shim::metrics::Metrics;
use berth_shim::relay::client_hello::is_whole_hello;
use berth_shim::relay::source::Sources;
use berth_shim::relay::{Context, OpenConnection, relay_client};
use berth_shim::state::ShimState;
use libfuzzer_sys::fuzz_target;
use std::cell::{Cell, RefCell};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream as StdTcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::yield_now;
use tokio::time::timeout;

/// Number of a client's bytes that the relay keeps.
const KEPT: usize = 16 * 1024;

/// First byte of a TLS client. Only a TLS client's bytes are replayed to a further leg.
const TLS_HANDSHAKE: u8 = 0x16;

/// Maximum number of bytes that a client sends.
const MOST: usize = 40 * 1024;

/// Maximum number of legs to each of the two instances.
const LEGS: usize = 2;

/// Number of pieces with a length in the script. A further piece has all bytes that are left.
const PIECES: usize = 6;

/// Limit that only a hang reaches: no part of a script waits for a time.
const PATIENCE: Duration = Duration::from_secs(60);

/// How an instance ends a leg, after [`Plan::read`] bytes of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Fin,
    Reset,
    /// Answers, reads the client's other bytes, and closes the connection (FIN).
    Answer,
    /// Answers, and resets the connection.
    Break,
}

#[derive(Debug, Clone, Copy)]
struct Plan {
    /// Bytes of the client that the instance reads before the end or the answer.
    read: usize,
    end: End,
    /// Bytes of the answer.
    answer: usize,
}

/// How the client ends its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leave {
    /// Closes the connection after the relay does.
    Last,
    /// Half-closes the connection after its last byte (FIN), and reads on.
    HalfClosed,
    /// Resets the connection after its last byte.
    Reset,
}

#[derive(Debug)]
struct Script {
    leave: Leave,
    /// Number of turns ([`turns`]) that the client has before the relay serves it.
    before: u8,
    /// True if connections to the own instance, and to the sibling's instance, are refused.
    refuses: [bool; 2],
    plans: [[Plan; LEGS]; 2],
    /// The length of each piece, and the number of turns that other tasks get before the piece.
    pieces: [(usize, u8); PIECES],
    /// Number of bytes that a sibling read before passing the client on. `None` if no sibling
    /// passed the client on.
    said: Option<usize>,
    /// All bytes of the client.
    text: Vec<u8>,
}

/// The bytes of the input. Reads after the last byte return zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or_default()
    }

    fn number(&mut self) -> usize {
        u16::from_be_bytes([self.byte(), self.byte()]).into()
    }

    fn plan(&mut self) -> Plan {
        let end = [End::Fin, End::Reset, End::Answer, End::Break][usize::from(self.byte() % 4)];
        Plan {
            end,
            read: self.number(),
            answer: self.number() % 20_000 + 1,
        }
    }
}

impl Script {
    fn of(input: &[u8]) -> Self {
        let mut input = Input(input);
        let flags = input.byte();
        let leave =
            [Leave::Last, Leave::HalfClosed, Leave::Last, Leave::Reset][usize::from(flags & 3)];
        let plans = [(); 2].map(|()| [(); LEGS].map(|()| input.plan()));
        let pieces = [(); PIECES].map(|()| (input.number(), input.byte() % 8));
        let (said, length) = (input.number(), input.number() % (MOST + 1));
        // Noise follows the input's own bytes. A byte in the wrong place shows, since the noise has
        // no short period.
        let text: Vec<u8> = input
            .0
            .iter()
            .copied()
            .chain(noise(u32::MAX))
            .take(length)
            .collect();
        let said = (flags & 16 != 0).then(|| said % (text.len().min(KEPT) + 1));
        Self {
            leave,
            before: flags >> 5,
            refuses: [flags & 4 != 0, flags & 8 != 0],
            plans,
            pieces,
            said,
            text,
        }
    }

    /// True if the relay can replay all bytes of the client to a further leg.
    fn is_replayable(&self) -> bool {
        self.text
            .first()
            .is_none_or(|first| *first == TLS_HANDSHAKE)
            && self.text.len() <= KEPT
    }

    /// Returns the possible legs in their order: the instance, and the number of the leg to that
    /// instance.
    fn legs(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..2)
            .filter(|at| !self.refuses[*at])
            .flat_map(|at| (0..LEGS).map(move |leg| (at, leg)))
    }

    fn answer(&self, (at, leg): (usize, usize)) -> Vec<u8> {
        noise((at * LEGS + leg) as u32)
            .take(self.plans[at][leg].answer)
            .collect()
    }
}

fn noise(seed: u32) -> impl Iterator<Item = u8> {
    let next = |state: &u32| Some(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    std::iter::successors(Some(seed.wrapping_mul(0x9e37_79b9)), next)
        .map(|state| (state >> 24) as u8)
}

/// An instance's record of a leg.
struct Leg {
    name: (usize, usize),
    got: Vec<u8>,
    /// Number of the answer's bytes that the instance could write.
    answered: usize,
}

/// An instance that the relay connects to.
struct Host {
    listener: tokio::net::TcpListener,
    /// A duplicate of `listener` for accepts without a wait, after the relay has ended.
    left: TcpListener,
    address: SocketAddr,
    /// An address at which connections are refused: a bound socket that does not listen.
    refusing: SocketAddr,
    _bound: OwnedFd,
}

impl Host {
    fn new(address: [u8; 4]) -> Self {
        let left = TcpListener::bind((Ipv4Addr::from(address), 0)).expect("a free port");
        left.set_nonblocking(true).expect("it is a socket");
        let listener = left
            .try_clone()
            .and_then(tokio::net::TcpListener::from_std)
            .expect("a listener");
        let bound = socket::bind((Ipv4Addr::from(address), 0).into(), false).expect("a free port");
        let refusing = socket::local_address(bound.as_fd()).expect("it is bound");
        Self {
            address: left.local_addr().expect("it is bound"),
            listener,
            left,
            refusing,
            _bound: bound,
        }
    }

    /// Serves the instance's legs one after the other, until the relay has ended and no connection
    /// is left to accept.
    async fn run(&self, at: usize, script: &Script, legs: &RefCell<Vec<Leg>>, over: &Notify) {
        let mut own = 0;
        let mut is_over = false;
        loop {
            let stream = tokio::select! {
                biased;
                accepted = self.listener.accept(), if !is_over => accepted.expect("it listens").0,
                () = over.notified(), if !is_over => {
                    is_over = true;
                    continue;
                }
                accepted = async { self.left.accept() }, if is_over => match accepted {
                    Ok((stream, _)) => nonblocking(stream),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                    Err(error) => panic!("{error}"),
                },
            };
            assert!(
                own < LEGS,
                "more legs to an instance than one epoch of it has"
            );
            let leg = leg(stream, (at, own), script).await;
            own += 1;
            legs.borrow_mut().push(leg);
        }
    }
}

async fn leg(mut stream: TcpStream, name: (usize, usize), script: &Script) -> Leg {
    let plan = script.plans[name.0][name.1];
    let mut leg = Leg {
        name,
        got: Vec::new(),
        answered: 0,
    };
    // An instance that wants more bytes than the client has waits for the client's FIN or reset. A
    // client that leaves last sends neither, so the wanted number is at most the client's bytes.
    let all = if script.leave == Leave::Last {
        script.text.len()
    } else {
        usize::MAX
    };
    hear(&mut stream, &mut leg.got, plan.read.min(all)).await;
    if matches!(plan.end, End::Answer | End::Break) {
        let answer = script.answer(name);
        while leg.answered < answer.len()
            && let Ok(written) = stream.write(&answer[leg.answered..]).await
        {
            leg.answered += written;
        }
    }
    if plan.end == End::Answer {
        // A client that half-closes or resets is read up to its FIN or reset.
        hear(&mut stream, &mut leg.got, all).await;
    }
    // Bytes in the socket count as received, though the instance's plan has not read them.
    while stream.try_read_buf(&mut leg.got).is_ok_and(|read| read > 0) {}
    if matches!(plan.end, End::Reset | End::Break) {
        reset_on_close(&stream);
    }
    leg
}

/// Reads until `got` has the wanted number of bytes, or the connection ends.
async fn hear(stream: &mut TcpStream, got: &mut Vec<u8>, wanted: usize) {
    while got.len() < wanted && stream.read_buf(got).await.is_ok_and(|read| read > 0) {}
}

/// The client's record of its connection.
struct Client {
    /// Number of bytes sent.
    said: Cell<usize>,
    /// Bytes received.
    got: RefCell<Vec<u8>>,
}

impl Client {
    async fn run(&self, mut stream: TcpStream, script: &Script) {
        let (mut reader, mut writer) = stream.split();
        let says = async {
            let mut pieces = script.pieces.iter();
            while self.said.get() < script.text.len() {
                let (length, before) = pieces.next().copied().unwrap_or((usize::MAX, 0));
                turns(before).await;
                let rest = &script.text[self.said.get()..];
                let Ok(said) = writer.write(&rest[..length.clamp(1, rest.len())]).await else {
                    break;
                };
                self.said.set(self.said.get() + said);
            }
            if script.leave == Leave::HalfClosed {
                let _ = writer.shutdown().await;
            }
            if script.leave != Leave::Reset {
                std::future::pending::<()>().await;
            }
        };
        let hears = async {
            let mut got = Vec::new();
            while reader.read_buf(&mut got).await.is_ok_and(|read| read > 0) {}
            self.got.replace(got);
        };
        tokio::select! {
            biased;
            () = says => reset_on_close(&stream),
            () = hears => {}
        }
    }
}

/// Yields to the other tasks, and to the kernel's events, the given number of times.
async fn turns(number: u8) {
    for _ in 0..number {
        yield_now().await;
    }
}

fn nonblocking(stream: StdTcpStream) -> TcpStream {
    stream
        .set_nonblocking(true)
        .and_then(|()| TcpStream::from_std(stream))
        .expect("a socket")
}

/// Shim, clients and instances for all inputs.
struct Stage {
    runtime: Runtime,
    front: TcpListener,
    hosts: [Host; 2],
    metrics: Arc<Metrics>,
    sources: Arc<Sources>,
    ids: [InstanceId; 2],
    clients: u32,
}

impl Stage {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let _entered = runtime.enter();
        let ids: [InstanceId; 2] = ["own", "sibling"].map(|name| name.parse().expect("a name"));
        let metrics = Metrics::new(
            &ids[0],
            1,
            1,
            TableWriter::new(1, 1).subscribe(),
            watch::channel(ShimState::default()).1,
            Vec::new(),
        );
        Self {
            front: TcpListener::bind("127.0.0.1:0").expect("a free port"),
            hosts: [Host::new([127, 1, 0, 1]), Host::new([127, 2, 0, 1])],
            sources: Arc::new(Sources::new("")),
            metrics: metrics.into(),
            ids,
            clients: 0,
            runtime,
        }
    }

    /// Returns the relay's context, and the writer of its table. The caller keeps the writer as
    /// long as the relay runs.
    fn context(&self, script: &Script) -> (TableWriter, Arc<Context>) {
        let mut writer = TableWriter::new(1, 1);
        for (at, host) in self.hosts.iter().enumerate() {
            let address = if script.refuses[at] {
                host.refusing
            } else {
                host.address
            };
            let epoch = writer
                .insert(&self.ids[at], address, at == 0, false)
                .expect("it is new");
            writer.observe(&self.ids[at], epoch, Observation::Pass, "");
        }
        let context = Context {
            table: writer.subscribe(),
            // Holding a client would be in vain: the table does not change.
            hold: Duration::ZERO,
            // A gate would wait 5 s for the rest of an incomplete ClientHello.
            gate: None,
            share: Arc::default(),
            sources: self.sources.clone(),
            from_loopback: false,
            peeks: false,
            held: self.metrics.held.clone(),
            refusals: mpsc::unbounded_channel().0,
            stats: self.metrics.workers()[0].clone(),
            connect_seconds: self.metrics.connect_seconds.clone(),
            first_byte_seconds: self.metrics.first_byte_seconds.clone(),
            ended: Arc::new(Notify::new()),
            state: watch::channel(ShimState::default()).1,
            stays: true,
            passes: mpsc::unbounded_channel().0,
            log_connections: false,
        };
        (writer, context.into())
    }

    fn play(&mut self, script: &Script) {
        // Addresses differ from client to client, so that no address runs out of ports.
        self.clients = self.clients % 0x3f_ffff + 1;
        let [_, b, c, d] = self.clients.to_be_bytes();
        let peer = (Ipv4Addr::new(10, 64 + b, c, d), 1).into();
        let (_book, context) = self.context(script);
        let to = self.front.local_addr().expect("it is bound");
        let ours = socket::connect(to, Some(Ipv4Addr::new(127, 128 + b, c, d).into()))
            .expect("it listens");
        let theirs = self.front.accept().expect("a client is there").0;
        theirs.set_nonblocking(true).expect("a socket");
        let said = script.said.map(|said| script.text[..said].to_vec());
        let client = Client {
            said: Cell::new(script.said.unwrap_or_default()),
            got: RefCell::default(),
        };
        let (legs, over) = (RefCell::new(Vec::new()), [Notify::new(), Notify::new()]);
        self.runtime.block_on(async {
            let ours = TcpStream::from_std(ours).expect("a socket");
            let relayed = async {
                let served = async {
                    turns(script.before).await;
                    relay_client(OpenConnection::new(&context), theirs, peer, said).await;
                };
                tokio::join!(client.run(ours, script), served);
                over.iter().for_each(Notify::notify_one);
            };
            let hosts = [0, 1].map(|at| self.hosts[at].run(at, script, &legs, &over[at]));
            let [own, sibling] = hosts;
            let all = async { tokio::join!(relayed, own, sibling) };
            assert!(
                timeout(PATIENCE, all).await.is_ok(),
                "the relay or an instance hangs: {script:?}"
            );
        });
        judge(
            script,
            client.said.get(),
            &client.got.borrow(),
            &legs.borrow(),
        );
        assert_eq!(
            (
                context.stats.open.load(Relaxed),
                context.stats.pending.load(Relaxed)
            ),
            (0, 0),
            "the ended connection still counts as open or pending"
        );
    }
}

fn judge(script: &Script, said: usize, got: &[u8], legs: &[Leg]) {
    for leg in legs {
        assert!(
            leg.got.len() <= said && script.text.starts_with(&leg.got),
            "{:?} got bytes that the client did not send: {script:?}",
            leg.name
        );
    }
    let (last, earlier) = match legs.split_last() {
        Some((last, earlier)) => (Some(last), earlier),
        None => (None, legs),
    };
    assert!(
        earlier.iter().all(|leg| leg.answered == 0),
        "the relay left an instance that had answered: {script:?}"
    );
    let speaks_first = script
        .text
        .first()
        .is_some_and(|first| *first != TLS_HANDSHAKE);
    assert!(
        !speaks_first || earlier.iter().all(|leg| leg.got.is_empty()),
        "the bytes of a client without TLS were replayed: {script:?}"
    );
    let answer = last
        .map(|last| script.answer(last.name))
        .unwrap_or_default();
    let answered = last.map_or(0, |last| last.answered);
    assert!(
        answer[..answered].starts_with(got),
        "the client got bytes that the last leg did not send: {script:?}"
    );

    // A client that resets its connection may lose the answer and further legs.
    if script.leave == Leave::Reset {
        return;
    }
    if let Some(last) = last
        && script.plans[last.name.0][last.name.1].end == End::Answer
    {
        assert!(
            last.got == script.text && got == answer,
            "{:?} or the client got only a part of the bytes: {script:?}",
            last.name
        );
    }
    // The legs due: up to the first leg that answers, or all. A client that half-closed, or
    // that cannot be replayed, may get only the first leg.
    let answers = |(at, leg): &(usize, usize)| {
        matches!(script.plans[*at][*leg].end, End::Answer | End::Break)
    };
    let mut due: Vec<_> = script.legs().collect();
    due.truncate(due.iter().position(answers).map_or(due.len(), |at| at + 1));
    let names: Vec<_> = legs.iter().map(|leg| leg.name).collect();
    assert!(
        due.starts_with(&names),
        "{names:?} and not {due:?}: {script:?}"
    );
    let least = if script.is_replayable() && script.leave == Leave::Last {
        // A client that had sent nothing at the end of a leg may get no further leg. A leg that
        // ends without a read races the client's first byte.
        let hasty = |(at, leg): &(usize, usize)| {
            script.plans[*at][*leg].read == 0 || script.text.is_empty()
        };
        let silent = script.said.unwrap_or_default() == 0;
        due.iter()
            .position(hasty)
            .filter(|_| silent)
            .map_or(due.len(), |at| at + 1)
    } else {
        due.len().min(1)
    };
    assert!(
        names.len() >= least,
        "{names:?} and not {due:?}: {script:?}"
    );
}

thread_local!(static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) });

fuzz_target!(|input: &[u8]| {
    let script = Script::of(input);
    // A complete first message stays complete, whatever bytes follow.
    let (beginning, _) = script
        .text
        .split_at(script.pieces[0].0.min(script.text.len()));
    assert!(
        !is_whole_hello(beginning) || is_whole_hello(&script.text),
        "the first message is complete after {} bytes, and incomplete after all bytes",
        beginning.len()
    );
    STAGE.with_borrow_mut(|stage| stage.get_or_insert_with(Stage::new).play(&script));
});
