//! Kills, errors and reboots at every call of a command with a side effect: at each of these calls
//! the command is killed, the call fails with ENOSPC or EIO, or the node goes down. After each
//! fault the node is whole, and running the command again completes or reverts the work.
//! The node goes down after the last call, too: the work that a command reported survives.
//!
//! The suite tries a sample, by `BERTH_TEST_SEED` or a printed seed. `BERTH_TEST_KILLS=all` tries
//! all points but most of the repeated calls: of a call with one name that comes more than 12
//! times, such as the connect(2) of a command that polls, it tries the first two and ten by the
//! seed, and prints how many calls are left out. Any other value tries the points with the value in
//! their names, such as `kill rename manifests/kube-apiserver.yaml #1`, and leaves none out.

mod disk;
mod files;

use self::disk::Disk;
use crate::support::print_skipped;
use crate::support::process::Running;
use berth_testing::supervise::{Act, Effect, find_obstacle, supervise_program};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::fs;
use std::hash::BuildHasher;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Most calls of one name that are tried. Of more calls, the first ones and some by the seed are
/// tried.
const REPEATS: usize = 12;
const FIRST: usize = 2;

/// Failed points after which no other point is tried. A scene may have one node for all points.
const MOST_FAILED: usize = 10;

/// Environment variable that marks the processes of a command.
const TREE: &str = "BERTH_TEST_KILLS_TREE";

/// A node, and a command that changes the node.
pub(super) trait Scene {
    /// Number of nodes that are tried at the same time. Each node has directories and addresses of
    /// its own.
    const AT_ONCE: usize = 1;

    /// Most runs after a fault until the work is done.
    const AGAIN: usize = 1;

    /// Most points of a whole run that may not come again, in percent: how often a command polls
    /// differs from run to run.
    const MISSED: usize = 0;

    /// Returns the directory with all files of the node.
    fn root(&self) -> PathBuf;

    /// Returns the directories and files that are in memory.
    fn memory(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Returns the directories in which the command must leave no unexpected file.
    fn directories(&self) -> Vec<PathBuf> {
        vec![self.root()]
    }

    fn command(&self) -> Command;

    /// Waits for background work after the end of the command.
    fn settles(&self) {}

    /// Panics unless the node is whole: the command has not run, was interrupted, or has ended.
    fn is_whole(&mut self);

    /// Panics unless the command has done its work.
    fn is_done(&mut self);

    /// Returns what the work consists of beside the names of files, such as objects of the cluster:
    /// after each fault, it must be as after a run without a fault.
    fn work(&self) -> String {
        String::new()
    }

    /// Restarts the node after a power loss: memory is lost, and no process of the node runs.
    fn reboots(&mut self) {}

    /// Returns the output of commands that diagnose the node after the last run: `berth doctor`,
    /// `berth bridge status`.
    fn diagnosis(&self) -> String {
        String::new()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// SIGKILL of the process that makes the call.
    Kill,
    Error(Errno),
    /// A power loss: each file that was not synced is empty afterwards.
    Reboot,
    /// A power loss that also takes the entries of directories that were not synced: an old name is
    /// back, and a new file is gone. Tried only where an entry was not synced.
    Loss,
}

const FAULTS: [Fault; 5] = [
    Fault::Kill,
    Fault::Error(Errno::ENOSPC),
    Fault::Error(Errno::EIO),
    Fault::Reboot,
    Fault::Loss,
];

/// Name of the point after the last call. Only the power can fail there, and the work of a command
/// that has reported success must survive.
const END: &str = "end";

/// A call, by its name and its number among the calls of the name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Point {
    call: String,
    number: usize,
}

impl Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.call, self.number)
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill => write!(f, "kill"),
            Self::Error(errno) => write!(f, "{errno:?}"),
            Self::Reboot => write!(f, "reboot"),
            Self::Loss => write!(f, "loss"),
        }
    }
}

/// Record of a supervised command.
#[derive(Debug)]
struct Seen {
    points: Vec<Point>,
    /// Points at which a power loss would take entries of directories.
    losing: Vec<Point>,
    counts: BTreeMap<String, usize>,
    disk: Disk,
    was_hit: bool,
}

/// Tries the points of a command, each on a fresh node. A whole run must hit at least `least`
/// points.
pub(super) fn every_kill<S: Scene>(sample: usize, least: usize, node: impl Fn() -> S + Sync) {
    if let Some(why) = find_obstacle() {
        return print_skipped(&why);
    }
    let which = std::env::var("BERTH_TEST_KILLS");
    let only = which.as_ref().ok().filter(|which| *which != "all");
    let mut scene = node();
    let (seen, code, log) = run(&scene, None);
    assert_eq!(code, Some(0), "without a fault: {log}");
    scene.is_whole();
    scene.is_done();
    let expected = Expected {
        files: list_files(&scene),
        work: work_of(&scene),
        messages: messages_of(&log, &scene),
    };
    drop(scene);
    let seed = std::env::var("BERTH_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| RandomState::new().hash_one(0) % 1_000_000);
    let Seen {
        points: calls,
        losing,
        counts,
        ..
    } = &*seen.lock().unwrap();
    let kept: Vec<_> = match only {
        Some(_) => calls.iter().collect(),
        None => some_repeats(calls, counts, seed),
    };
    let mut points: Vec<_> = FAULTS
        .into_iter()
        .flat_map(|fault| kept.iter().map(move |it| (fault, *it)))
        .collect();
    let end = Point {
        call: END.to_owned(),
        number: 1,
    };
    points.extend([(Fault::Reboot, &end), (Fault::Loss, &end)]);
    // A signal cannot fail for lack of disk.
    points.retain(|(fault, Point { call, .. })| {
        !(matches!(fault, Fault::Error(_)) && call.starts_with("kill "))
    });
    points.retain(|(fault, point)| {
        *fault != Fault::Loss || losing.contains(point) || point.call == END
    });
    points
        .retain(|(fault, point)| only.is_none_or(|only| format!("{fault} {point}").contains(only)));
    let (name, left_out) = (
        berth_testing::namespace::test_name(),
        calls.len() - kept.len(),
    );
    let of = format!(
        "{} points at {} calls, {left_out} repeated calls left out",
        points.len(),
        kept.len()
    );
    let tries = if which.is_ok() { points.len() } else { sample };
    eprintln!("{name}: {tries} of {of}, by BERTH_TEST_SEED={seed}");
    let all = points.len();
    let points = draw_sample(points, all, seed);
    let (queue, ended) = (
        Mutex::new(points.into_iter()),
        Mutex::new((0, 0, Vec::new())),
    );
    // A point of a sample that does not come again is replaced by another one.
    let next = || {
        let (hit, _, failed) = &*ended.lock().unwrap();
        let is_enough = hit + failed.len() >= tries || failed.len() >= MOST_FAILED;
        (!is_enough).then(|| queue.lock().unwrap().next()).flatten()
    };
    let tries_points = || {
        while let Some((fault, point)) = next() {
            let tried = catch_unwind(AssertUnwindSafe(|| {
                try_point(node(), fault, point, &expected)
            }));
            let (hit, missed, failed) = &mut *ended.lock().unwrap();
            match tried {
                Ok(true) => *hit += 1,
                Ok(false) => {
                    eprintln!("{name}: did not come again: {fault} {point}");
                    *missed += 1;
                }
                Err(panic) => {
                    let why = panic.downcast_ref::<String>().map_or("", String::as_str);
                    eprintln!("{name}: failed at: {fault} {point}: {why}");
                    failed.push(format!("{fault} {point}"));
                }
            }
        }
    };
    std::thread::scope(|scope| (0..S::AT_ONCE).for_each(|_| drop(scope.spawn(tries_points))));
    let (hit, missed, failed) = ended.into_inner().unwrap();
    eprintln!(
        "{name}: {hit} points passed, {missed} did not come again, {} failed",
        failed.len()
    );
    assert!(failed.is_empty(), "failed at:\n{}", failed.join("\n"));
    if only.is_none() {
        let least = if which.is_ok() { least } else { tries };
        let tried = hit + missed;
        assert!(hit >= least, "hit only {hit} points, and not {least}");
        assert!(
            which.is_err() || missed * 100 <= S::MISSED * tried,
            "{missed} of {tried} points did not come again, more than {} %",
            S::MISSED
        );
    }
}

/// Returns all calls of a name with few calls. Of a name with many calls, such as the connects of a
/// poll, returns the first calls and some by the seed.
fn some_repeats<'a>(
    calls: &'a [Point],
    counts: &BTreeMap<String, usize>,
    seed: u64,
) -> Vec<&'a Point> {
    let is_first = |point: &&Point| point.number <= FIRST || counts[&point.call] <= REPEATS;
    let (mut kept, later): (Vec<_>, Vec<_>) = calls.iter().partition(is_first);
    for call in counts.keys() {
        kept.extend(draw_sample(
            later
                .iter()
                .filter(|it| it.call == *call)
                .copied()
                .collect(),
            REPEATS - FIRST,
            seed,
        ));
    }
    kept
}

/// Returns a random sample, by a linear congruential generator.
fn draw_sample<T>(mut all: Vec<T>, count: usize, mut seed: u64) -> Vec<T> {
    let mut some = Vec::new();
    while some.len() < count && !all.is_empty() {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        some.push(all.swap_remove((seed >> 33) as usize % all.len()));
    }
    some
}

/// A node after a run without a fault.
struct Expected {
    files: Vec<String>,
    work: String,
    messages: BTreeSet<String>,
}

/// Tries one point. Returns true if the command reached the point.
fn try_point<S: Scene>(mut scene: S, fault: Fault, point: &Point, expected: &Expected) -> bool {
    let before = list_files(&scene);
    let (seen, code, mut log) = run(&scene, Some((fault, point.clone())));
    scene.settles();
    if point.call == END {
        assert_eq!(code, Some(0), "without a fault: {log}");
        seen.lock().unwrap().was_hit = true;
    }
    if matches!(fault, Fault::Reboot | Fault::Loss) && seen.lock().unwrap().was_hit {
        let disk = &seen.lock().unwrap().disk;
        if fault == Fault::Loss {
            disk.lose_entries();
        }
        disk.lose_contents();
        scene.reboots();
    }
    scene.is_whole();
    let was_hit = seen.lock().unwrap().was_hit;
    if code == Some(0) {
        scene.is_done();
    } else {
        assert!(
            !was_hit || code.is_none() || !messages_of(&log, &scene).is_subset(&expected.messages),
            "{code:?}, and no word about it: {log}"
        );
    }
    let (mut codes, mut later) = (vec![code], String::new());
    let find_left = |scene: &_| {
        let mut left = list_files(scene);
        for file in before
            .iter()
            .chain(expected.files.iter().filter(|it| !before.contains(it)))
        {
            if let Some(at) = left.iter().position(|it| it == file) {
                left.swap_remove(at);
            }
        }
        left
    };
    // If the command has done its work in spite of the fault, it runs again only to remove leftover
    // files.
    let is_clean = find_left(&scene).is_empty();
    while codes.len() <= S::AGAIN && codes.last() != Some(&Some(0)) || codes.len() == 1 && !is_clean
    {
        let (_, code, more) = run(&scene, None);
        scene.is_whole();
        later += &more;
        codes.push(code);
    }
    log += &later;
    assert_eq!(
        codes.last(),
        Some(&Some(0)),
        "the same command does not end well ({codes:?}): {log}"
    );
    scene.is_done();
    assert_eq!(work_of(&scene), expected.work, "{codes:?}: {log}");
    // The run with the fault may have named a file and not come to its removal.
    let named = mark_root(&(later + &scene.diagnosis()), &scene.root());
    let mut left = find_left(&scene);
    left.retain(|file| !is_named(&named, file));
    assert!(left.is_empty(), "left, and not named: {left:?}: {log}");
    was_hit
}

/// Runs the command, with a fault at a point. Returns the effects of the command's processes, its
/// exit status and its log.
fn run(scene: &impl Scene, at: Option<(Fault, Point)>) -> (Arc<Mutex<Seen>>, Option<i32>, String) {
    let root = scene.root();
    let all = Arc::new(Mutex::new(Seen {
        points: Vec::new(),
        losing: Vec::new(),
        counts: BTreeMap::new(),
        disk: Disk::new(&root, scene.memory()),
        was_hit: false,
    }));
    let mut command = scene.command();
    command.env(TREE, &root);
    let seen = all.clone();
    supervise_program(&mut command, move |effect| {
        let Some(call) = name_of_call(effect, &root) else {
            return Act::Continue;
        };
        let mut seen = seen.lock().unwrap();
        let number = *seen
            .counts
            .entry(call.clone())
            .and_modify(|number| *number += 1)
            .or_insert(1);
        let point = Point { call, number };
        let fault = at
            .as_ref()
            .filter(|(_, at)| *at == point && !seen.was_hit)
            .map(|(fault, _)| *fault);
        if seen.disk.has_unsynced_entries() {
            seen.losing.push(point.clone());
        }
        seen.points.push(point);
        seen.was_hit |= fault.is_some();
        match fault {
            None => {
                seen.disk.note(effect);
                return Act::Continue;
            }
            Some(Fault::Error(errno)) => return Act::Fail(errno),
            Some(Fault::Kill) => {
                let _ = kill(Pid::from_raw(effect.process), Signal::SIGKILL);
            }
            Some(Fault::Reboot | Fault::Loss) => end_tree(&root),
        }
        Act::Never
    });
    let mut running = Running::start(&mut command);
    let status = running.ended();
    let log = format!("{}\n{}", running.log(), running.out());
    assert!(
        status.code().is_some() || status.signal() == Some(Signal::SIGKILL as i32),
        "{status}: {log}"
    );
    (all, status.code(), log)
}

/// Kills the processes of a node's command, and those that they start meanwhile. A process inside
/// execve(2) shows no environment, so the search must find nothing twice.
fn end_tree(root: &Path) {
    let mark = format!("{TREE}={}", root.display());
    let mut empty = 0;
    while empty < 2 {
        let tree = find_tree(&mark);
        empty = if tree.is_empty() { empty + 1 } else { 0 };
        for process in tree {
            let _ = kill(process, Signal::SIGKILL);
        }
    }
}

/// Returns the processes with `mark` in their environment.
fn find_tree(mark: &str) -> Vec<Pid> {
    let processes = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let environment = fs::read(entry.path().join("environ")).ok()?;
            environment
                .split(|byte| *byte == 0)
                .any(|it| it == mark.as_bytes())
                .then_some(())?;
            entry.file_name().to_str()?.parse().ok().map(Pid::from_raw)
        });
    processes.collect()
}

/// Returns the name of a call, without the parts that differ from run to run. `None` for the calls
/// of other programs, such as a bridge's COMMAND.
fn name_of_call(
    Effect {
        process,
        call,
        object,
        ..
    }: &Effect,
    root: &Path,
) -> Option<String> {
    let line = fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    let others = [&b"stand-in"[..], b"sh", b"stand_in::process"];
    let is_other = |argument: &[u8]| others.contains(&argument) || argument.ends_with(b"etcd");
    if line.split(|byte| *byte == 0).any(is_other)
        && !line.split(|byte| *byte == 0).any(|it| it == b"bridge")
    {
        return None;
    }
    let object = object
        .strip_prefix(root.to_str()?)
        .map_or(object.as_str(), |object| object.trim_start_matches('/'));
    Some(format!("{call} {}", normalize(object)))
}

/// Mark of a scene's root in a log.
const ROOT: char = '\0';

/// Returns a log with paths as `list_files` has them, behind the mark of the root.
fn mark_root(log: &str, root: &Path) -> String {
    normalize(&log.replace(&format!("{}/", root.display()), &ROOT.to_string()))
}

fn work_of(scene: &impl Scene) -> String {
    mark_root(&scene.work(), &scene.root())
}

/// Returns the lines of a log, without the times at which lines of progress begin.
fn messages_of(log: &str, scene: &impl Scene) -> BTreeSet<String> {
    let log = mark_root(log, &scene.root());
    let text = |line: &str| {
        line.split_once(" s  ")
            .map_or(line, |(_, text)| text)
            .to_owned()
    };
    log.lines().map(text).collect()
}

/// True if a log has the path of this file, and not only the path of a file with a longer name or
/// of a file below.
fn is_named(log: &str, file: &str) -> bool {
    let goes_on = |c: char| c.is_alphanumeric() || "-_/*".contains(c);
    log.split(ROOT).skip(1).any(|path| {
        path.strip_prefix(file).is_some_and(|rest| {
            // A full stop ends a sentence, or is a part of the name.
            !rest.strip_prefix('.').unwrap_or(rest).starts_with(goes_on)
        })
    })
}

#[test]
fn a_leftover_file_is_named_only_by_its_whole_path() {
    let log = mark_root(
        "kept /r/a.old-20260504T030201Z, /r/b/c: /r/d.",
        Path::new("/r"),
    );
    for (file, named) in [
        ("a.old-20260101T000000Z", true),
        ("a.old", false),
        ("b", false),
        ("c", false),
        ("b/c", true),
        ("d", true),
    ] {
        assert_eq!(is_named(&log, &normalize(file)), named, "{file} in {log}");
    }
}

/// Returns a text without numbers, times and other words that differ from run to run.
fn normalize(text: &str) -> String {
    let mut shown = String::new();
    for part in text.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let word = part.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        let digits = word.chars().filter(char::is_ascii_digit).count();
        // A word with digits may be a time, such as 20260504T030201 or 123Z.
        let is_number = word.starts_with(|c: char| c.is_ascii_digit());
        let is_hex = word.chars().all(|c| c.is_ascii_hexdigit());
        let differs = word != "127"
            && digits > 0
            && (word.len() >= 16 || is_hex && word.len() >= 4 || is_number && digits >= 3);
        shown.push_str(if differs { "*" } else { word });
        shown.push_str(&part[word.len()..]);
    }
    // Replace the rest of an instance's address.
    shown
        .split("127.")
        .enumerate()
        .fold(String::new(), |all, (at, part)| {
            match (at, part.strip_prefix("0.0.1:")) {
                (0, _) => part.to_owned(),
                (_, Some(_)) => all + "127." + part,
                (_, None) => {
                    all + "127.*"
                        + part.trim_start_matches(|c: char| c.is_ascii_digit() || ".*".contains(c))
                }
            }
        })
}

/// Returns all files and directories in the directories that a command writes, and the mounts below
/// the node's directory, by names that are the same in each run. BPF programs are not listed: the
/// kernel detaches a program when the process that attached it ends. Cgroups are not listed: the
/// nodes of one kernel share them, and the next bridge enters an empty cgroup.
fn list_files(scene: &impl Scene) -> Vec<String> {
    let (root, mut all) = (scene.root(), Vec::new());
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    for at in mounts.lines().filter_map(|line| line.split(' ').nth(4)) {
        if let Ok(at) = Path::new(at).strip_prefix(&root) {
            all.push(normalize(&format!("mount at {}", at.display())));
        }
    }
    let mut left = scene.directories();
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            all.push(normalize(
                &entry
                    .path()
                    .strip_prefix(&root)
                    .unwrap()
                    .display()
                    .to_string(),
            ));
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            }
        }
    }
    all
}
