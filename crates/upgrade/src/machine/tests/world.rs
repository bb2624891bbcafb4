//! A model of a node: a slow kubelet, pods that fail in every way, and a berth that is killed after
//! any action and started again, also by a reboot.

use super::*;
use berth_testing::states::Digest;
use std::hash::Hash;

/// The behaviour of a pod after the kubelet has seen its manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Good,
    /// The process runs and never answers.
    NeverReady,
    /// The process ends at once, as with a bad flag.
    Refuses,
    /// The process ends this many seconds after it got ready, every time.
    Crashes(u32),
    /// The kubelet cannot start the pod: no image.
    NotStarted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    /// The process gets ready after this many seconds.
    Starting(u32),
    Ready(u32),
    /// The process has ended. The kubelet starts it again after this many seconds.
    Down(u32),
    /// The process ends after this many seconds.
    Stopping(u32),
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Pod {
    version: Version,
    fate: Fate,
    life: Life,
    drained: bool,
    backoff: u32,
    process: u64,
}

/// The conditions of a run of the model: the behaviour of pods, kubelet, judge and operator.
#[derive(Debug, Clone)]
pub(super) struct Given {
    pub(super) temporary: Fate,
    pub(super) canonical: Fate,
    /// The behaviour of the pod that runs from `kube-apiserver.yaml` on the way back.
    pub(super) back: Fate,
    pub(super) same: bool,
    /// True if each pod has a shim of its own. Otherwise a single shim serves the whole node.
    pub(super) drains: bool,
    /// True if the kubelet's journal says that an image is missing.
    pub(super) journal: bool,
    /// Seconds until the kubelet sees a change, until a process is ready, and until a process has
    /// ended.
    pub(super) lag: u32,
    pub(super) start: u32,
    pub(super) stop: u32,
    /// The actions after which berth is killed, and how long it stays away.
    pub(super) kills: Vec<(usize, u32)>,
    /// The action after which the operator interrupts berth.
    pub(super) interrupt: Option<usize>,
    pub(super) reboot: Option<Reboot>,
    /// For each of the two pods, the second in which its shim stops answering, and the length of
    /// the silence.
    pub(super) silences: [Option<(u32, u32)>; 2],
    pub(super) judge: Option<Judge>,
}

/// The judge of the new version.
#[derive(Debug, Clone)]
pub(super) struct Judge {
    pub(super) emulated: bool,
    /// Seconds until a verdict.
    pub(super) takes: u32,
    /// The verdict on the instance of each of the two pods.
    pub(super) verdicts: [JudgeResult; 2],
}

impl Given {
    pub(super) fn course(&self) -> Course {
        let emulated = self.judge.as_ref().is_some_and(|judge| judge.emulated);
        Course {
            same: self.same,
            judged: self.judge.is_some(),
            emulated,
        }
    }
}

/// berth is killed, all pods end, and the pods of the present files start.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reboot {
    /// The reboot comes once `now` has reached `at` and berth has carried out `after` actions.
    pub(super) at: u32,
    pub(super) after: usize,
    /// Seconds until berth runs, and until each of the two pods is ready if its fate is good.
    pub(super) away: u32,
    pub(super) boot: [u32; 2],
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) given: Given,
    pub(super) files: [Option<Version>; 2],
    /// `known` has the manifests that the kubelet knows of, and `unknown_for` has the seconds until
    /// it sees the present files.
    known: [Option<Version>; 2],
    unknown_for: [u32; 2],
    pub(super) pods: [Option<Pod>; 2],
    ends: [u32; 2],
    processes: u64,
    /// Seconds since the start.
    pub(super) now: u32,
    /// True if the answer to the next drain is lost.
    pub(super) loses_answer: bool,
    /// True if an instance need not serve now. A reboot or a foreign manifest sets this. An
    /// instance that serves ends it, if no pod fails.
    dark: bool,
    /// For each of the two pods, true if the last answer of its shim was that the instance serves.
    pub(super) reported: [bool; 2],
    /// For each of the two pods, true if the judge has let its instance stay.
    passed: [bool; 2],
    /// For each of the two pods, the remaining seconds in which its instance is not ready although
    /// its process runs.
    pub(super) unready: [u32; 2],
    /// For each of the two manifest files, true if somebody else has written it.
    pub(super) edited: [bool; 2],
}

/// A running berth, and its position on disk.
#[derive(Clone)]
pub(super) struct Run {
    pub(super) machine: Machine,
    pub(super) disk: Position,
    pub(super) actions: usize,
    judging: u32,
}

impl Run {
    pub(super) fn new(disk: Position, course: Course) -> Self {
        Self {
            machine: Machine::new(disk.clone(), LIMITS, course),
            disk,
            actions: 0,
            judging: 0,
        }
    }
}

impl World {
    pub(super) fn new(given: Given) -> Self {
        let old = Pod {
            version: Version::Old,
            fate: Fate::Good,
            life: Life::Ready(1000),
            drained: false,
            backoff: 0,
            process: 1,
        };
        let files = [Some(Version::Old), None];
        Self {
            given,
            files,
            known: files,
            unknown_for: [0; 2],
            pods: [Some(old), None],
            ends: [0; 2],
            processes: 1,
            now: 0,
            loses_answer: false,
            dark: false,
            reported: [true, false],
            passed: [false; 2],
            unready: [0; 2],
            edited: [false; 2],
        }
    }

    /// Lets somebody else write one of the two manifest files. The pod of that manifest serves
    /// nobody.
    pub(super) fn edit_manifest_file(&mut self, slot: Slot) {
        let at = slot as usize;
        (self.edited[at], self.pods[at], self.dark) = (true, None, true);
    }

    pub(super) fn reboot(&mut self, boot: [u32; 2]) {
        (self.pods, self.known, self.unknown_for, self.dark) =
            ([None, None], self.files, [0; 2], true);
        self.unready = [0; 2];
        for (at, start) in boot.into_iter().enumerate() {
            self.start_pod(at, start);
        }
    }

    /// Starts the pod of a manifest file, as the kubelet does.
    fn start_pod(&mut self, at: usize, start: u32) {
        let Some(version) = self.known[at] else {
            return;
        };
        let fate = match (at, version) {
            (0, Version::New) => self.given.canonical,
            (0, Version::Old | Version::Emulated) => self.given.back,
            _ => self.given.temporary,
        };
        self.processes += 1;
        let life = Life::Starting(start);
        self.pods[at] = Some(Pod {
            version,
            fate,
            life,
            drained: false,
            backoff: 10,
            process: self.processes,
        });
    }

    pub(super) fn in_group(&self, slot: usize) -> bool {
        self.unready[slot] == 0 && self.serves_once_ready(slot)
    }

    /// True if the instance serves, or will serve as soon as it is ready again.
    pub(super) fn serves_once_ready(&self, slot: usize) -> bool {
        self.pods[slot].is_some_and(|pod| matches!(pod.life, Life::Ready(_)) && !pod.drained)
    }

    pub(super) fn is_silent(&self, slot: usize) -> bool {
        self.given.silences[slot].is_some_and(|(at, long)| (at..at + long).contains(&self.now))
    }

    fn instance(&self, slot: usize) -> InstanceObservation {
        let pod = self.pods[slot].filter(|pod| pod.fate != Fate::NotStarted);
        let silent = pod.is_some() && self.is_silent(slot);
        InstanceObservation {
            alive: pod.is_some(),
            drains: self.given.drains && pod.is_some(),
            in_group: self.in_group(slot) && !silent,
            silent: silent && self.reported[slot],
            process: pod
                .filter(|pod| !matches!(pod.life, Life::Down(_)))
                .map(|pod| pod.process),
            ends: self.ends[slot],
            not_started: self.pods[slot].is_some_and(|pod| {
                self.given.journal && pod.fate == Fate::NotStarted && pod.version != Version::Old
            }),
        }
    }

    pub(super) fn observe(&self) -> NodeObservation {
        let content = |at: usize| match self.files[at] {
            _ if self.edited[at] => Content::Other,
            file => file.map_or(Content::Absent, Content::Holds),
        };
        NodeObservation {
            canonical_file: content(0),
            temporary_file: content(1),
            canonical: self.instance(0),
            temporary: self.instance(1),
        }
    }

    fn carry_out_action(&mut self, action: &Action) {
        assert_eq!(self.edited, [false; 2], "{action:?} beside a foreign file");
        match action {
            Action::Place(slot, version) => {
                let at = *slot as usize;
                assert!(self.files[at].is_none(), "{slot:?} is placed over another");
                let Course { emulated, .. } = self.given.course();
                assert!(
                    !emulated || (*slot, *version) != (Slot::Canonical, Version::Old),
                    "back to what may not read it"
                );
                assert!(self.pods[at].is_none_or(|pod| pod.fate == Fate::NotStarted));
                self.files[at] = Some(*version);
                self.unknown_for[at] = self.given.lag;
            }
            Action::Remove(slot) => {
                let at = *slot as usize;
                assert!(self.files[at].is_some());
                self.check_removal(*slot);
                assert!(self.in_group(1 - at), "the other one does not serve");
                self.files[at] = None;
                self.unknown_for[at] = self.given.lag;
            }
            Action::Drain(slot) => {
                let at = *slot as usize;
                assert!(self.in_group(1 - at), "the last ready one is drained");
                self.check_removal(*slot);
                if let Some(pod) = &mut self.pods[at] {
                    pod.drained = true;
                }
            }
            _ => {}
        }
    }

    /// Checks that berth removes the old version only after the temporary instance has passed the
    /// judge, and the emulating instance only after the canonical one has passed.
    fn check_removal(&self, slot: Slot) {
        let Course {
            judged, emulated, ..
        } = self.given.course();
        let [old, new] = [self.files[slot as usize], self.files[1 - slot as usize]];
        match (slot, old, new) {
            (Slot::Canonical, Some(Version::Old), _) => {
                assert!(!judged || self.passed[1], "the old one goes");
            }
            (Slot::Temporary, _, Some(Version::New)) => {
                assert!(
                    !emulated || self.passed[0] || self.given.interrupt.is_some(),
                    "the one that emulates it goes"
                );
            }
            _ => {}
        }
    }

    /// Lets each shim that answers report whether its instance serves.
    fn report_serving_instances(&mut self) {
        for at in 0..self.pods.len() {
            if !self.is_silent(at) {
                self.reported[at] = self.in_group(at);
            }
        }
    }

    /// A second passes.
    fn pass_second(&mut self) {
        self.report_serving_instances();
        self.now += 1;
        for at in 0..self.pods.len() {
            self.unready[at] = self.unready[at].saturating_sub(1);
            if self.edited[at] {
                continue;
            }
            match self.unknown_for[at].checked_sub(1) {
                Some(left) => self.unknown_for[at] = left,
                None => self.known[at] = self.files[at],
            }
            let wanted = self.known[at];
            let Some(pod) = &mut self.pods[at] else {
                self.start_pod(at, self.given.start);
                continue;
            };
            let stays = wanted == Some(pod.version) || (self.given.same && wanted.is_some());
            if !stays && !matches!(pod.life, Life::Stopping(_)) {
                pod.life = Life::Stopping(self.given.stop);
            }
            let mut end = |pod: &mut Pod| {
                self.ends[at] += 1;
                pod.life = Life::Down(pod.backoff);
                pod.backoff = (pod.backoff * 2).min(60);
            };
            match pod.life {
                Life::Starting(_) if pod.fate == Fate::NotStarted => {}
                Life::Starting(_) if pod.fate == Fate::Refuses => end(pod),
                Life::Starting(0) if pod.fate == Fate::NeverReady => {}
                Life::Starting(0) => pod.life = Life::Ready(0),
                Life::Starting(left) => pod.life = Life::Starting(left - 1),
                Life::Ready(age) if pod.fate == Fate::Crashes(age) => end(pod),
                Life::Ready(age) => pod.life = Life::Ready(age + 1),
                Life::Down(0) => {
                    self.processes += 1;
                    pod.process = self.processes;
                    pod.life = Life::Starting(self.given.start);
                }
                Life::Down(left) => pod.life = Life::Down(left - 1),
                Life::Stopping(0) => {
                    self.pods[at] = None;
                    self.ends[at] += 1;
                }
                Life::Stopping(left) => pod.life = Life::Stopping(left - 1),
            }
        }
        let Given {
            temporary,
            canonical,
            back,
            ..
        } = self.given;
        let good = [temporary, canonical, back] == [Fate::Good; 3];
        // An instance does not count if its manifest file is gone, since the kubelet will end its
        // pod.
        let stays = |at: usize| self.in_group(at) && self.files[at].is_some();
        self.dark &= !(good && (stays(0) || stays(1)));
        // An instance that is not ready for a while counts, since `carry_out_action` does not
        // remove or drain the other one meanwhile.
        let serves = self.serves_once_ready(0) || self.serves_once_ready(1) || self.dark;
        assert!(serves, "no instance serves: {:?}", self.pods);
    }

    /// Runs berth to the end, again after each kill.
    pub(super) fn run_until_end(&mut self, disk: &mut Position) -> Action {
        let mut run = Run::new(disk.clone(), self.given.course());
        for _ in 0..10_000 {
            let due = |reboot: &mut Reboot| self.now >= reboot.at && run.actions >= reboot.after;
            if let Some(Reboot { away, boot, .. }) = self.given.reboot.take_if(due) {
                self.reboot(boot);
                self.stay_killed_for(&mut run, away);
            }
            let over = self.step_once(&mut run);
            disk.clone_from(&run.disk);
            if let Some(over) = over {
                return over;
            }
        }
        panic!("it comes to no end: {disk:?} {:?}", self.observe());
    }

    /// berth is killed, and starts again after `away` seconds.
    pub(super) fn stay_killed_for(&mut self, run: &mut Run, away: u32) {
        (0..away).for_each(|_| self.pass_second());
        // A new run knows nothing of a shim that has not answered yet.
        self.reported = [false; 2];
        run.machine = Machine::new(run.disk.clone(), LIMITS, self.given.course());
    }

    /// Carries out the next action. Returns the last action if berth has ended.
    pub(super) fn step_once(&mut self, run: &mut Run) -> Option<Action> {
        self.report_serving_instances();
        let Run {
            machine,
            disk,
            actions,
            judging,
        } = run;
        let accepted = machine.drained && machine.position.step == Step::StopOld;
        match machine.next(&self.observe(), Duration::from_secs(self.now.into())) {
            action @ (Action::Wait | Action::Judge(_)) => {
                if let (Action::Judge(slot), Some(judge)) = (&action, &self.given.judge) {
                    *judging += 1;
                    if *judging > judge.takes {
                        let verdict = judge.verdicts[*slot as usize].clone();
                        self.passed[*slot as usize] |= verdict == JudgeResult::GoOn;
                        machine.record_judge_result(verdict);
                    }
                }
                self.pass_second();
                return None;
            }
            over @ (Action::Finish(_) | Action::Halt(_)) => {
                *disk = machine.position().clone();
                return Some(over);
            }
            Action::Entered => {
                let is_back = machine.position.step == Step::Withdraw;
                assert!(
                    !accepted || !is_back,
                    "back to an instance that accepted a drain"
                );
                (*disk, *judging) = (machine.position().clone(), 0);
            }
            // A silent shim closes the connection without reading the request.
            Action::Drain(slot) if self.loses_answer && self.is_silent(slot as usize) => {
                self.loses_answer = false;
                machine.record_drain(false);
            }
            action => {
                // berth waits until a silent shim answers.
                let mut waited = false;
                while matches!(action, Action::Drain(slot) if self.is_silent(slot as usize)) {
                    self.pass_second();
                    waited = true;
                }
                // A shim may read the drain request only after the other instance has gone. The
                // shim itself decides that case, so the model does not cover it.
                if let Action::Drain(slot) = action
                    && waited
                    && !self.in_group(1 - slot as usize)
                {
                    machine.record_drain(false);
                    return None;
                }
                self.carry_out_action(&action);
                if matches!(action, Action::Drain(_)) {
                    machine.record_drain(!std::mem::take(&mut self.loses_answer));
                }
            }
        }
        *actions += 1;
        if self.given.interrupt == Some(*actions) {
            machine.interrupt();
        }
        let away = self
            .given
            .kills
            .iter()
            .find(|(after, _)| after == actions)
            .map(|(_, away)| *away);
        away.into_iter()
            .for_each(|away| self.stay_killed_for(run, away));
        None
    }

    /// Removes the cause of every failure, as an operator would.
    pub(super) fn repair_failures(&mut self) {
        (self.given.canonical, self.given.back) = (Fate::Good, Fate::Good);
        (self.edited, self.unready) = ([false; 2], [0; 2]);
        for pod in self.pods.iter_mut().flatten() {
            // The kubelet restarts a shim that has ended.
            (pod.fate, pod.drained) = (Fate::Good, false);
        }
        if let Some(judge) = &mut self.given.judge {
            judge.verdicts = [JudgeResult::GoOn, JudgeResult::GoOn];
        }
        self.given.kills.clear();
    }

    pub(super) fn is_canonical_alone(&self) -> bool {
        !self.instance(1).alive && self.files[1].is_none() && self.in_group(0)
    }

    /// Hashes the changing part of a world, with a run of berth.
    pub(super) fn digest(&self, run: &Run, digest: &mut Digest) {
        let Run {
            machine,
            disk,
            actions: _,
            judging,
        } = run;
        let Machine {
            position,
            limits: _,
            course: _,
            interrupted,
            since,
            joined,
            lost,
            stopping,
            drained,
            drains_failed,
            judged,
        } = machine;
        for Position {
            step,
            target,
            why,
            judged,
        } in [position, disk]
        {
            (step, *target as u8, why.is_some(), judged).hash(digest);
        }
        let age = |since: Duration| {
            Duration::from_secs(self.now.into())
                .saturating_sub(since)
                .as_secs()
                .min(121)
        };
        (
            interrupted,
            joined,
            lost.map(age),
            stopping.map(age),
            drained,
            drains_failed,
            judged.is_some(),
        )
            .hash(digest);
        (judging, since.map(|since| age(since.at))).hash(digest);
        let Self {
            given,
            files,
            known,
            unknown_for,
            pods,
            ends,
            processes: _,
            now,
            loses_answer,
            ..
        } = self;
        for at in 0..2 {
            let slot = [Slot::Canonical, Slot::Temporary][at];
            let before = since.map(|since| since.seen.instance(slot));
            let process = pods[at].map(|pod| pod.process);
            let is_same =
                before.map(|before| (before.process.is_some(), before.process == process));
            let ended = before.map(|before| ends[at].saturating_sub(before.ends).min(MAX_ENDS));
            let version = |version: &Option<Version>| version.map(|version| version as u8);
            (
                is_same,
                ended,
                version(&files[at]),
                version(&known[at]),
                unknown_for[at],
            )
                .hash(digest);
            let silence = given.silences[at].map(|(from, long)| (from + long).saturating_sub(*now));
            (
                silence,
                self.reported[at],
                self.passed[at],
                (self.unready[at], self.edited[at]),
                pods[at].is_some(),
            )
                .hash(digest);
            if let Some(Pod {
                version,
                fate: _,
                life,
                drained,
                backoff,
                process: _,
            }) = pods[at]
            {
                let life = match life {
                    Life::Starting(left) => (0, left),
                    Life::Ready(age) => (1, age.min(60)),
                    Life::Down(left) => (2, left),
                    Life::Stopping(left) => (3, left),
                };
                (version as u8, life, drained, backoff).hash(digest);
            }
        }
        (self.dark, loses_answer).hash(digest);
    }
}
