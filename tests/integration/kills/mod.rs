//! Kills, errors and reboots at every call of a command with a side effect: at each of these calls
//! the command is killed, the call fails with ENOSPC or EIO, or the node goes down. After each
//! fault the node is whole, and running the command again completes or reverts the work.
//!
//! The suite tries a sample, by `BERTH_TEST_SEED` or a printed seed. `BERTH_TEST_KILLS=all` tries
//! all points but most of the repeated calls: of a call with one name that comes more than 12
//! times, such as the connect(2) of a command that polls, it tries the first two and ten by the
//! seed, and prints how many calls are left out. Any other value tries the points whose name
//! contains the value, such as `kill rename manifests/kube-apiserver.yaml #1`, and leaves none out.

mod files;

use crate::support::print_skipped;
use crate::support::process::Running;
use berth_testing::supervise::{Act, Effect, find_obstacle, supervise_program};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Display};
use std::fs::{self, File};
use std::hash::BuildHasher;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Most runs of a command after a fault until its work is done. An upgrade that goes back ends with
/// a failure first.
const AGAIN: usize = 3;

/// Most calls of one name that are tried. Of more calls, the first ones and some by the seed are
/// tried.
const REPEATS: usize = 12;
const FIRST: usize = 2;

/// Environment variable that marks the processes of a command.
const TREE: &str = "BERTH_TEST_KILLS_TREE";

/// A node, and a command that changes the node.
pub(super) trait Scene {
    /// Number of nodes that are tried at the same time. Each node has directories and addresses of
    /// its own.
    const AT_ONCE: usize = 1;

    /// Returns the directory with all files of the node.
    fn root(&self) -> PathBuf;

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

    /// Restarts the node after a power loss: memory is lost, and no process of the node runs.
    fn reboots(&mut self) {}

    /// Returns the output of commands that diagnose the node: `berth doctor`, `berth bridge
    /// status`.
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
}

const FAULTS: [Fault; 4] = [
    Fault::Kill,
    Fault::Error(Errno::ENOSPC),
    Fault::Error(Errno::EIO),
    Fault::Reboot,
];

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
        }
    }
}

/// Record of a supervised command.
#[derive(Debug, Default)]
struct Seen {
    points: Vec<Point>,
    counts: BTreeMap<String, usize>,
    /// Files that were written and not synced.
    unsynced: BTreeSet<PathBuf>,
    was_hit: bool,
}

/// Tries the points of a command, each on a fresh node.
pub(super) fn every_kill<S: Scene>(sample: usize, node: impl Fn() -> S + Sync) {
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
    let expected = list_files(&scene);
    drop(scene);
    let seed = std::env::var("BERTH_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| RandomState::new().hash_one(0) % 1_000_000);
    let Seen {
        points: calls,
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
    // A signal cannot fail for lack of disk.
    points.retain(|(fault, point)| {
        !(matches!(fault, Fault::Error(_)) && point.call.starts_with("kill "))
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
    let points = draw_sample(points, tries, seed);
    let (queue, ended) = (
        Mutex::new(points.into_iter()),
        Mutex::new((0, 0, Vec::new())),
    );
    let next = || queue.lock().unwrap().next();
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

/// Tries one point. Returns true if the command reached the point.
fn try_point(mut scene: impl Scene, fault: Fault, point: &Point, expected: &[String]) -> bool {
    let before = list_files(&scene);
    let (seen, code, mut log) = run(&scene, Some((fault, point.clone())));
    scene.settles();
    if fault == Fault::Reboot && seen.lock().unwrap().was_hit {
        for file in seen
            .lock()
            .unwrap()
            .unsynced
            .iter()
            .filter(|file| file.starts_with(scene.root()))
        {
            let _ = File::options()
                .write(true)
                .open(file)
                .and_then(|file| file.set_len(0));
        }
        scene.reboots();
    }
    scene.is_whole();
    let was_hit = seen.lock().unwrap().was_hit;
    if code == Some(0) {
        scene.is_done();
    } else {
        assert!(
            !was_hit || code.is_none() || !log.trim().is_empty(),
            "{code:?}, and no word"
        );
    }
    log += &scene.diagnosis();
    let mut codes = vec![code];
    // If the command has done its work in spite of the fault, it runs again only to remove leftover
    // files.
    let is_clean = list_files(&scene)
        .iter()
        .all(|file| expected.contains(file));
    while codes.len() <= AGAIN && codes.last() != Some(&Some(0)) || codes.len() == 1 && !is_clean {
        let (_, code, more) = run(&scene, None);
        scene.is_whole();
        log += &more;
        codes.push(code);
    }
    assert_eq!(
        codes.last(),
        Some(&Some(0)),
        "the same command does not end well ({codes:?}): {log}"
    );
    scene.is_done();
    let mut left = list_files(&scene);
    for file in before
        .iter()
        .chain(expected.iter().filter(|it| !before.contains(it)))
    {
        if let Some(at) = left.iter().position(|it| it == file) {
            left.swap_remove(at);
        }
    }
    let unnamed: Vec<_> = left
        .iter()
        .filter(|it| !normalize(&log).contains(it.rsplit('/').next().unwrap_or(it)))
        .collect();
    assert!(
        unnamed.is_empty(),
        "left, and not named: {unnamed:?}: {log}"
    );
    was_hit
}

/// Runs the command, with a fault at a point. Returns the effects of the command's processes, its
/// exit status and its log.
fn run(scene: &impl Scene, at: Option<(Fault, Point)>) -> (Arc<Mutex<Seen>>, Option<i32>, String) {
    let (root, all) = (scene.root(), Arc::new(Mutex::new(Seen::default())));
    let mut command = scene.command();
    let mark = format!("{TREE}={}", root.display());
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
        seen.points.push(point);
        seen.was_hit |= fault.is_some();
        match fault {
            None => {
                seen.syncs(effect);
                return Act::Continue;
            }
            Some(Fault::Error(errno)) => return Act::Fail(errno),
            Some(Fault::Kill) => {
                let _ = kill(Pid::from_raw(effect.process), Signal::SIGKILL);
            }
            Some(Fault::Reboot) => find_tree(&mark).into_iter().for_each(|process| {
                let _ = kill(process, Signal::SIGKILL);
            }),
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

impl Seen {
    fn syncs(&mut self, effect: &Effect) {
        let path = PathBuf::from(&effect.object);
        match effect.call {
            "write" | "truncate" => drop(self.unsynced.insert(path)),
            "sync" | "unlink" => drop(self.unsynced.remove(&path)),
            "rename"
                if effect
                    .from
                    .as_ref()
                    .is_some_and(|from| self.unsynced.remove(from)) =>
            {
                self.unsynced.insert(path);
            }
            _ => {}
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
                (_, None) => all + "127.*" + part.find([':', '/']).map_or("", |end| &part[end..]),
            }
        })
}

/// Returns all files and directories in the directories that a command writes, by names that are
/// the same in each run.
fn list_files(scene: &impl Scene) -> Vec<String> {
    let (root, mut all) = (scene.root(), Vec::new());
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
