//! An apiserver's stand-in that a test binary can be itself: it gives back what it gets; after SIGTERM, SIGINT, SIGHUP or SIGQUIT
//! it listens no more, and ends when its last connection has ended.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// The flags that the stand-in was started with. Set: this process is one.
const FLAGS: &str = "STAND_IN_FLAGS";

/// With which exit status it ends, if not 0.
const STATUS: &str = "STAND_IN_STATUS";

/// For a shell: runs the stand-in with the flags that berth adds, and hides them from the test harness.
pub(crate) const STAND_IN: &str = r#"STAND_IN_FLAGS="$*" exec "$TEST_BINARY" --exact stand_in::process --nocapture"#;

/// Not a test but the stand-in, if this process was started as one.
#[test]
fn process() {
    let Ok(flags) = std::env::var(FLAGS) else { return };
    let value = |name: &str| {
        let found = flags.split(' ').find_map(|flag| flag.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {name} in {flags}")).to_owned()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let [mut term, mut int, mut hup, mut quit] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()]
                .map(|kind| signal(kind).unwrap());
        let listener = TcpListener::bind(format!("{}:{}", value("--bind-address"), value("--secure-port")));
        let listener = listener.await.unwrap();
        println!("listening, pid {}", std::process::id());
        let mut connections = tokio::task::JoinSet::new();
        let by = loop {
            tokio::select! {
                _ = term.recv() => break "SIGTERM",
                _ = int.recv() => break "SIGINT",
                _ = hup.recv() => break "SIGHUP",
                _ = quit.recv() => break "SIGQUIT",
                Ok((mut stream, _)) = listener.accept() => {
                    connections.spawn(async move {
                        let mut buffer = [0; 1024];
                        while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                            stream.write_all(&buffer[..length]).await.unwrap();
                        }
                    });
                }
            }
        };
        println!("told to end by {by}");
        drop(listener);
        loop {
            tokio::select! {
                _ = term.recv() => println!("told again"),
                _ = int.recv() => println!("told again"),
                _ = hup.recv() => println!("told again"),
                _ = quit.recv() => println!("told again"),
                ended = connections.join_next() => if ended.is_none() { break },
            }
        }
    });
    std::process::exit(std::env::var(STATUS).map_or(0, |status| status.parse().unwrap()));
}
