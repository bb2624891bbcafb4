//! The lock of `berth upgrade`, with a real kube-apiserver.

use crate::grant::Cluster;
use berth_cluster::Client;
use berth_cluster::client::none_if_missing;
use berth_upgrade::lock::{Claim, Holder, LOCK_PATH, Lock, LockError};
use berth_upgrade::progress::Progress;
use libtest_mimic::Failed;

fn make_lock(client: &Client, node: &str, break_lock: bool) -> Lock {
    let holder = Holder {
        upgrade: format!("uid-{node}"),
        node: node.into(),
        process: "7".into(),
        command: "berth upgrade".into(),
        changed: false,
        since: String::new(),
    };
    Lock::new(client, Claim::new(holder, break_lock))
}

pub(crate) fn lock_of_a_cluster(apiserver: &str, etcd: &str) -> Result<(), Failed> {
    let temp = tempfile::tempdir()?;
    let cluster = Cluster::start(temp.path(), apiserver, etcd)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(cluster.ready())?;
    let client = Client::from_kubeconfig(&cluster.admin)?;
    let (first, second, say) = (
        make_lock(&client, "cp-1", false),
        make_lock(&client, "cp-2", false),
        Progress::default(),
    );
    let held = || {
        runtime
            .block_on(client.get(LOCK_PATH))
            .map(|lease| Holder::parse(&lease))
    };

    // The Lease does not exist yet. Of two claims at the same time, exactly one gets the lock.
    let (one, other) = runtime.block_on(async {
        tokio::join!(
            acquire_and_mark(&first, &say),
            acquire_and_mark(&second, &say)
        )
    });
    let (has, refused) = if one.is_ok() {
        ("cp-1", other)
    } else {
        ("cp-2", one)
    };
    assert!(
        matches!(&refused, Err(LockError::Busy { holder, .. }) if holder.node == has),
        "{refused:?}"
    );
    let holder = held()?;
    assert!(holder.changed && holder.node == has, "{holder:?}");

    // A third node breaks the lock. Afterwards only this new holder can release the lock.
    let breaker = make_lock(&client, "cp-3", true);
    runtime.block_on(acquire_and_mark(&breaker, &say))?;
    assert_eq!(held()?.node, "cp-3");
    for (lock, left) in [(&first, true), (&second, true), (&breaker, false)] {
        runtime.block_on(lock.release(&say));
        let lease = runtime.block_on(client.get(LOCK_PATH));
        assert_eq!(none_if_missing(lease)?.is_some(), left);
    }
    Ok(())
}

async fn acquire_and_mark(lock: &Lock, say: &Progress) -> Result<(), LockError> {
    lock.acquire(say).await?;
    lock.mark_node_changed(say).await
}
