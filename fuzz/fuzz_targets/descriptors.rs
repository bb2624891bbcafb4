//! Messages with file descriptors, over real sockets. No descriptor stays open, whatever the
//! messages and the number of descriptors. A guard from a sibling is accepted only if the guard is
//! the listener with the cookie and the address in the message.
//!
//! The first byte of the input chooses the receiver: the socket for requests, or a sibling.
//! Messages follow. Each message has three bytes (the kind of the descriptors, the number of
//! descriptors, and 0xff if the message is too long), and a text up to a zero byte. In the text,
//! `@C` and `@A` stand for the cookie and the address of a real listener.
#![no_main]

use berth_node::ipc::Server;
use berth_node::ipc::wire::Reply;
use berth_node::terms::{Cookie, ShimId};
use berth_os::{self, seqpacket, socket};
use berth_shim::handover::peers::{PeerEvent, PublishedState, exchange_updates};
use libfuzzer_sys::fuzz_target;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair,
};
use std::cell::RefCell;
use std::io::{IoSlice, pipe};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

/// Maximum number of descriptors in a message (SCM_MAX_FD in the kernel).
const MOST: usize = 253;

/// Maximum number of messages in an input.
const MESSAGES: usize = 6;

/// Descriptors to send, and the server that receives descriptors; made once for all inputs.
struct Stage {
    runtime: Runtime,
    listener: OwnedFd,
    address: SocketAddr,
    cookie: u64,
    /// Descriptors of other kinds: a file, both ends of a pipe, a connected socket, and a listener
    /// that is not shared.
    others: Vec<OwnedFd>,
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let listener =
            socket::bind("127.0.0.1:0".parse().expect("an address"), false).expect("a free port");
        let address = socket::local_address(listener.as_fd()).expect("it is bound");
        let cookie = socket::read_cookie(listener.as_fd()).expect("it is a socket");
        let plain = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let client =
            TcpStream::connect(plain.local_addr().expect("it is bound")).expect("it listens");
        let (reader, writer) = pipe().expect("a pipe");
        let others = vec![
            client.into(),
            reader.into(),
            writer.into(),
            plain.into(),
            std::fs::File::open("/dev/null")
                .expect("it is there")
                .into(),
        ];
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.sock");
        let server = runtime
            .block_on(async { Server::bind(&path) })
            .expect("a socket in a new directory");
        runtime.spawn(server.serve(|asked| async move {
            for descriptor in &asked.descriptors {
                let _ = socket::check_connection(descriptor.as_fd());
            }
            let reply = Reply::Refused(format!("{:?} with {} bytes", asked.ask, asked.rest.len()));
            asked.reply(&reply).await;
        }));
        Self {
            runtime,
            listener,
            address,
            cookie,
            others,
            path,
            _directory: directory,
        }
    }

    /// Sends a message that may break the protocol's rules. Returns false if the send fails.
    fn send(&self, to: &OwnedFd, message: &Message<'_>) -> bool {
        let text = String::from_utf8_lossy(message.text);
        let text = text
            .replace("@C", &self.cookie.to_string())
            .replace("@A", &self.address.to_string());
        let mut bytes = text.into_bytes();
        if message.too_long {
            bytes.resize(seqpacket::MAX_MESSAGE + 1, b' ');
        }
        let descriptors: Vec<RawFd> = (0..message.descriptors)
            .map(|at| match message.kinds.checked_sub(1) {
                None => self.listener.as_raw_fd(),
                Some(kind) => self.others[(usize::from(kind) + at) % self.others.len()].as_raw_fd(),
            })
            .collect();
        // The kernel joins the two control messages.
        let (first, second) = descriptors.split_at(descriptors.len() / 2);
        let parts: Vec<_> = [first, second]
            .into_iter()
            .filter(|part| !part.is_empty())
            .map(ControlMessage::ScmRights)
            .collect();
        sendmsg::<()>(
            to.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            &parts,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
        .is_ok()
    }

    /// Sends a message to the socket for requests, and reads until the connection ends.
    async fn ask(&self, message: &Message<'_>) {
        let client = seqpacket::dial_path(&self.path).expect("it listens");
        let client = berth_os::make_awaitable(client, Interest::READABLE)
            .expect("a socket can be waited for");
        if !self.send(client.get_ref(), message) {
            return;
        }
        let mut buffer = vec![0; seqpacket::MAX_MESSAGE];
        loop {
            let heard = client
                .async_io(Interest::READABLE, |socket| {
                    seqpacket::receive_message(socket.as_fd(), &mut buffer)
                })
                .await;
            if !heard.is_ok_and(|received| received.length > 0) {
                return;
            }
        }
    }

    /// Sends messages to a shim's exchange of updates, as a sibling does.
    async fn tell(&self, messages: &[Message<'_>]) {
        let (ours, theirs) = pair();
        let (events, mut heard) = mpsc::unbounded_channel();
        let desk = Arc::new(Mutex::new(PublishedState::default()));
        let talk = tokio::spawn(exchange_updates(
            theirs,
            ShimId(1),
            [self.address].into(),
            desk,
            Arc::default(),
            events,
        ));
        for message in messages {
            if !self.send(&ours, message) {
                break;
            }
        }
        drop(ours);
        talk.await.expect("it does not panic");
        while let Some(event) = heard.recv().await {
            if let PeerEvent::Updated(_, _, guards) = event {
                for (cookie, address, guard) in guards {
                    assert_eq!((cookie, address), (Cookie(self.cookie), self.address));
                    assert_eq!(socket::read_cookie(guard.as_fd()).ok(), Some(self.cookie));
                }
            }
        }
    }
}

struct Message<'a> {
    kinds: u8,
    descriptors: usize,
    too_long: bool,
    text: &'a [u8],
}

/// Splits an input into the first message and the rest. `None` if fewer than three bytes are left.
fn message(input: &[u8]) -> Option<(Message<'_>, &[u8])> {
    let ([kinds, descriptors, flags], rest) = input.split_first_chunk()?;
    let end = rest
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(rest.len());
    let message = Message {
        kinds: *kinds,
        descriptors: usize::from(*descriptors).min(MOST),
        too_long: *flags == 0xff,
        text: &rest[..end],
    };
    Some((message, rest.get(end + 1..).unwrap_or_default()))
}

fn pair() -> (OwnedFd, AsyncFd<OwnedFd>) {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
        .expect("a pair of sockets");
    (
        ours,
        berth_os::make_awaitable(theirs, Interest::READABLE | Interest::WRITABLE)
            .expect("a socket can be waited for"),
    )
}

/// Returns the number of this process's open descriptors.
fn open() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .expect("/proc is there")
        .count()
}

thread_local!(static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) });

fuzz_target!(|input: &[u8]| {
    STAGE.with_borrow_mut(|stage| {
        let stage = stage.get_or_insert_with(Stage::new);
        let Some((how, mut rest)) = input.split_first() else {
            return;
        };
        let mut messages = Vec::new();
        while messages.len() < MESSAGES
            && let Some((message, left)) = message(rest)
        {
            messages.push(message);
            rest = left;
        }
        let Some(first) = messages.first() else {
            return;
        };
        let before = open();
        stage.runtime.block_on(async {
            if how & 1 == 0 {
                stage.ask(first).await
            } else {
                stage.tell(&messages).await
            }
            // The server's task may need further turns to close its descriptors.
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        });
        assert_eq!(open(), before, "descriptors stay open");
    });
});
