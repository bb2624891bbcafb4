use super::*;
use berth_testing::{Objects, Server, format_answer, serve_with};
use proptest::prelude::*;

const NAMESPACE_PATH: &str = "/api/v1/namespaces/berth-upgrade";

fn make_holder(upgrade: &str, node: &str, changed: bool) -> Holder {
    Holder {
        upgrade: upgrade.into(),
        node: node.into(),
        process: "7".into(),
        command: "berth upgrade m".into(),
        changed,
        since: String::new(),
    }
}

/// An event of the test: `berth upgrade` does something on the node with this index, or time
/// passes.
#[derive(Debug, Clone, Copy)]
enum Op {
    /// The process reads the Lease. If no process runs, a new one is started.
    Read(usize),
    /// The process carries out its decision.
    Write(usize),
    /// The process carries out its decision, but does not get the answer.
    Lose(usize),
    /// The process keeps reading for as long as another holder's lock may need to expire.
    Wait(usize),
    /// The process is killed.
    Kill(usize),
    /// The process finishes the upgrade in two events: `Release` releases the lock, and then
    /// `Remove` removes the state.
    Release(usize),
    Remove(usize),
    Pass(u64),
}

#[derive(Debug, Default)]
struct Node {
    /// UID of the upgrade in the node's `upgrade.json`.
    state: Option<String>,
    /// True if the node's manifests are neither all old nor all new.
    changed: bool,
    process: Option<Process>,
}

#[derive(Debug)]
struct Process {
    upgrade: String,
    claim: Claim,
    decided: Option<Decision>,
    phase: Phase,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    Takes,
    Marks,
    Drives,
    Released,
}

/// Three nodes, and the Lease of their lock.
#[derive(Debug, Default)]
struct World {
    lease: Option<Value>,
    version: u64,
    now: u64,
    drawn: u32,
    nodes: [Node; 3],
    /// Number of finished upgrades.
    done: u32,
}

impl World {
    fn current_times(&self) -> (Duration, SystemTime) {
        (
            Duration::from_secs(self.now),
            SystemTime::UNIX_EPOCH + Duration::from_secs(self.now),
        )
    }

    fn apply_op(&mut self, op: Op) {
        match op {
            Op::Pass(seconds) => self.now += seconds,
            Op::Read(node) => self.read_lock(node),
            Op::Write(node) => self.write_lock(node, true),
            Op::Lose(node) => self.write_lock(node, false),
            Op::Wait(node) => {
                for _ in 0..6 {
                    self.read_lock(node);
                    self.now += 9;
                }
            }
            Op::Kill(node) => self.nodes[node].process = None,
            Op::Release(node) => {
                let Some(process) = &mut self.nodes[node].process else {
                    return;
                };
                if process.phase == Phase::Drives {
                    process.phase = Phase::Released;
                    process.decided = None;
                    self.lease
                        .take_if(|lease| Holder::parse(lease).upgrade == process.upgrade);
                    self.nodes[node].changed = false;
                }
            }
            Op::Remove(node) => {
                let node = &mut self.nodes[node];
                if node
                    .process
                    .take_if(|process| process.phase == Phase::Released)
                    .is_some()
                {
                    node.state = None;
                    self.done += 1;
                }
            }
        }
    }

    fn read_lock(&mut self, at: usize) {
        let (now, time) = self.current_times();
        let node = &mut self.nodes[at];
        let process = node.process.get_or_insert_with(|| {
            self.drawn += 1;
            let upgrade = node.state.clone().unwrap_or_else(|| self.drawn.to_string());
            let claim = Claim::new(
                make_holder(&upgrade, &format!("cp-{at}"), node.state.is_some()),
                false,
            );
            Process {
                upgrade,
                claim,
                decided: None,
                phase: Phase::Takes,
            }
        });
        if process.phase == Phase::Released {
            return;
        }
        let decision = process.claim.next(now, time, self.lease.as_ref());
        match (&decision, process.phase) {
            (Decision::Refuse(_), Phase::Takes) => node.process = None,
            (Decision::Refuse(_), Phase::Marks) => (node.process, node.state) = (None, None),
            _ => process.decided = Some(decision),
        }
    }

    fn write_lock(&mut self, at: usize, answered: bool) {
        let node = &mut self.nodes[at];
        let Some(process) = &mut node.process else {
            return;
        };
        let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
        let mut object = match (process.decided.take(), &self.lease) {
            (Some(Decision::Create(object)), None) => object,
            (Some(Decision::Replace(object)), Some(there))
                if version(&object) == version(there) =>
            {
                object
            }
            // 409, 404, or no decision.
            _ => return,
        };
        self.version += 1;
        object["metadata"]["name"] = json!(LOCK_NAME);
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.lease = Some(object);
        if !answered {
            return;
        }
        process.claim.record_lock_held();
        match process.phase {
            Phase::Takes if node.state.is_none() => {
                node.state = Some(process.upgrade.clone());
                process.claim.me.changed = true;
                process.phase = Phase::Marks;
            }
            Phase::Takes | Phase::Marks => {
                process.phase = Phase::Drives;
                node.changed = true;
            }
            Phase::Drives | Phase::Released => {}
        }
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    let node = 0usize..3;
    prop_oneof![
        8 => node.clone().prop_map(Op::Read),
        8 => node.clone().prop_map(Op::Write),
        1 => node.clone().prop_map(Op::Lose),
        2 => node.clone().prop_map(Op::Wait),
        1 => node.clone().prop_map(Op::Kill),
        1 => node.clone().prop_map(Op::Release),
        1 => node.prop_map(Op::Remove),
        1 => (1u64..60).prop_map(Op::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(berth_testing::case_count(250)))]

    /// Nodes race, are killed, hang and continue in any order.
    #[test]
    fn two_nodes_are_never_changed_at_once(ops in prop::collection::vec(any_op(), 0..150)) {
        let mut world = World::default();
        for op in ops {
            world.apply_op(op);
            let changed = world.nodes.iter().filter(|node| node.changed).count();
            prop_assert!(changed <= 1, "{world:#?}");
        }
    }

    /// After any history, a resumed upgrade can be finished, and then a new upgrade can be
    /// finished.
    #[test]
    fn no_node_is_locked_out_for_ever(ops in prop::collection::vec(any_op(), 0..100)) {
        let mut world = World::default();
        ops.into_iter().for_each(|op| world.apply_op(op));
        (0..3).for_each(|node| world.apply_op(Op::Kill(node)));
        // The lock's holder goes first, because no other node can proceed.
        let holder = world.lease.as_ref().map(|lease| Holder::parse(lease).upgrade);
        let mut nodes = [0, 1, 2];
        nodes.sort_by_key(|node| world.nodes[*node].state != holder);
        for node in nodes.into_iter().chain(nodes) {
            let done = world.done;
            for op in [Op::Wait(node), Op::Write(node), Op::Read(node), Op::Write(node), Op::Release(node), Op::Remove(node)] {
                world.apply_op(op);
            }
            prop_assert!(world.done > done, "node {node}: {world:#?}");
        }
    }

    #[test]
    fn any_annotations_are_read_without_a_panic(text in "\\PC{0,30}", number in any::<u64>()) {
        let object = json!({"metadata": {"annotations": {NODE_ANNOTATION: text, CHANGED_ANNOTATION: text}, "resourceVersion": number},
            "spec": {"leaseTransitions": number, "acquireTime": text}});
        let read = Holder::parse(&object);
        let _ = (read.describe(), read.describe_refusal(&text));
        let _ = Claim::new(make_holder("a", "cp-1", false), true).next(Duration::ZERO, SystemTime::now(), Some(&object));
    }
}

#[test]
fn a_refusal_names_the_holder_and_the_fix() {
    let mut claim = Claim::new(make_holder("a", "cp-1", false), false);
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    let Decision::Create(object) = claim.next(Duration::ZERO, time, None) else {
        panic!()
    };
    let read = Holder::parse(&object);
    assert_eq!(
        read,
        Holder {
            since: "1970-01-01T00:00:01.000000Z".into(),
            ..make_holder("a", "cp-1", false)
        }
    );
    let changed = Holder {
        changed: true,
        ..read.clone()
    };
    let who = "node cp-1 since 1970-01-01T00:00:01Z (process 7 there: berth upgrade m)";
    for (holder, asks, parts) in [
        (
            &read,
            "cp-2",
            &[who, ": wait until the holder has ended"][..],
        ),
        (
            &changed,
            "cp-2",
            &[who, "run `berth upgrade` on cp-1", "--break-lock"],
        ),
        (&changed, "cp-1", &["--state-dir"]),
    ] {
        let message = holder.describe_refusal(asks);
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    // A Lease without annotations may come from a later berth, so its holder may have changed its
    // node.
    assert!(Holder::parse(&json!({})).changed);
}

/// The lock of an upgrade that has changed nothing on this node yet.
fn make_lock(server: &Server, upgrade: &str, node: &str) -> Lock {
    make_lock_for_holder(server, make_holder(upgrade, node, false), false)
}

fn make_lock_for_holder(server: &Server, holder: Holder, breaks: bool) -> Lock {
    Lock::new(
        &Client::new(&server.access).unwrap(),
        Claim::new(holder, breaks),
    )
}

/// Starts the server of an API that has the lock's namespace. Returns the API's objects, too.
async fn serve_api() -> (Objects, Server) {
    let objects = Objects::default();
    objects.set(NAMESPACE_PATH, Some(json!({})));
    let answers = objects.clone();
    (
        objects,
        serve_with(move |request| answers.answer(request)).await,
    )
}

#[tokio::test]
async fn a_lock_is_acquired_marked_and_released() {
    let (objects, server) = serve_api().await;
    // Nothing has been written by berth in this cluster yet, not even the namespace.
    objects.set(NAMESPACE_PATH, None);
    let progress = Progress::default();
    let first = make_lock(&server, "a", "cp-1");
    first.acquire(&progress).await.unwrap();
    assert!(
        objects.get(NAMESPACE_PATH).is_some(),
        "the namespace is made"
    );
    assert!(!Holder::parse(&objects.get(LOCK_PATH).unwrap()).changed);
    first.mark_node_changed(&progress).await.unwrap();
    let held = objects.get(LOCK_PATH).unwrap();
    assert!(Holder::parse(&held).changed);

    let busy = make_lock(&server, "b", "cp-2")
        .acquire(&progress)
        .await
        .unwrap_err();
    assert!(
        matches!(&busy, LockError::Busy { holder, .. } if holder.node == "cp-1"),
        "{busy}"
    );
    // The first upgrade is resumed, and still has the lock.
    make_lock_for_holder(&server, make_holder("a", "cp-1", true), false)
        .acquire(&progress)
        .await
        .unwrap();
    let again = objects.get(LOCK_PATH).unwrap();
    assert_eq!(again["spec"]["acquireTime"], held["spec"]["acquireTime"]);

    let breaker = make_lock_for_holder(&server, make_holder("b", "cp-2", false), true);
    breaker.acquire(&progress).await.unwrap();
    let broken = objects.get(LOCK_PATH).unwrap();
    assert_eq!(
        (
            Holder::parse(&broken).node.as_str(),
            &broken["spec"]["leaseTransitions"]
        ),
        ("cp-2", &json!(1))
    );
    first.release(&progress).await;
    assert!(objects.get(LOCK_PATH).is_some(), "it is another's now");
    breaker.release(&progress).await;
    assert_eq!(objects.get(LOCK_PATH), None);
}

/// A finished upgrade ends even if the cluster never accepts the release of the lock.
#[tokio::test(start_paused = true)]
async fn a_release_that_fails_is_given_up() {
    let server = serve_with(|_| format_answer("503 Service Unavailable", "{}")).await;
    let began = tokio::time::Instant::now();
    make_lock_for_holder(&server, make_holder("a", "cp-1", true), false)
        .release(&Progress::default())
        .await;
    assert!(began.elapsed() >= RELEASE_TIMEOUT);
}

/// The holder has changed nothing, so a second upgrade waits to see whether the holder lives, and
/// is refused as soon as it renews.
#[tokio::test]
async fn a_renewal_shows_at_once_that_the_holder_lives() {
    let (objects, server) = serve_api().await;
    let progress = Progress::default();
    let first = make_lock(&server, "a", "cp-1");
    first.acquire(&progress).await.unwrap();
    let second = make_lock(&server, "b", "cp-2");
    let renew = async {
        sleep(RETRY_PAUSE * 3 / 2).await;
        first.acquire(&progress).await.unwrap();
        std::future::pending::<()>().await;
    };
    let taken = tokio::select! {
        taken = second.acquire(&progress) => taken,
        () = renew => unreachable!(),
    };
    assert!(
        matches!(&taken, Err(LockError::Busy { holder, .. }) if !holder.changed),
        "{taken:?}"
    );
    assert_eq!(Holder::parse(&objects.get(LOCK_PATH).unwrap()).node, "cp-1");
}

#[tokio::test]
async fn only_one_of_two_racing_upgrades_gets_the_lock() {
    let (objects, server) = serve_api().await;
    let progress = Progress::default();
    let locks = [("a", "cp-1"), ("b", "cp-2")].map(|(upgrade, node)| {
        make_lock_for_holder(&server, make_holder(upgrade, node, true), false)
    });
    let (first, second) = tokio::join!(locks[0].acquire(&progress), locks[1].acquire(&progress));
    assert!(first.is_ok() != second.is_ok(), "{first:?} {second:?}");
    let has = Holder::parse(&objects.get(LOCK_PATH).unwrap()).node;
    assert_eq!(has, if first.is_ok() { "cp-1" } else { "cp-2" });
}

#[tokio::test]
async fn a_failing_api_is_not_reported_as_another_upgrade() {
    let progress = Progress::default();
    for status in ["403 Forbidden", "500 Internal Server Error"] {
        let server = serve_with(move |_| format_answer(status, r#"{"message": "no"}"#)).await;
        let error = make_lock(&server, "a", "cp-1")
            .acquire(&progress)
            .await
            .unwrap_err();
        assert!(
            matches!(&error, LockError::Api(error) if error.status().unwrap().to_string() == status),
            "{error}"
        );
    }
    // If another holder was seen before the API failed, the error names that holder.
    let (objects, mut first) = (Objects::default(), true);
    objects.set(NAMESPACE_PATH, Some(json!({})));
    let held = Claim::new(make_holder("b", "cp-2", false), false)
        .make_lease_object(None, SystemTime::now());
    objects.set(LOCK_PATH, Some(held));
    let server = serve_with(move |request| match std::mem::take(&mut first) {
        true => objects.answer(request),
        false => format_answer("500 Internal Server Error", "no"),
    });
    let error = make_lock(&server.await, "a", "cp-1")
        .acquire(&progress)
        .await
        .unwrap_err();
    assert!(matches!(error, LockError::Busy { .. }), "{error}");
}

/// The lock is in a namespace without rights for shims. Otherwise a node's token could write and
/// remove the lock, like every Lease that a shim may write.
#[tokio::test]
async fn no_shim_has_rights_on_the_lock() {
    let (_, mut server) = serve_api().await;
    make_lock(&server, "a", "cp-1")
        .acquire(&Progress::default())
        .await
        .unwrap();
    let asked: Vec<_> = std::iter::from_fn(|| server.asked.try_recv().ok())
        .map(|(request, _)| request)
        .collect();
    let namespace = |path: &str| {
        path.split_once("/namespaces/")?
            .1
            .split(['/', '?', ' '])
            .next()
            .map(ToOwned::to_owned)
    };
    let granted = objects::single_node_objects("cp-1")
        .into_iter()
        .chain([objects::shared_role(["cp-1"])]);
    let granted: Vec<_> = granted
        .filter_map(|object| namespace(&objects::object_path(&object)))
        .collect();
    for request in &asked {
        let of_lock = namespace(request).unwrap();
        assert!(
            !granted.contains(&of_lock),
            "shims have rights in {of_lock}: {request}"
        );
    }
}
