//! Judges of what [`tls-load`](super) wrote, for scripts: each reads lines `START_US CLIENT OUTCOME TOOK_US DETAIL` and prints one line.
//!
//! Some scripts write such lines of other clients (`kubectl`, leader election), so a judge does not expect more than a line has.

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Microseconds since the epoch.
type Micros = f64;

/// How long after an excuse is gone a request may still be lost because of it: gRPC, which kube-apiserver has to etcd, dials again after
/// 1 s, then after 1.6 times as long each time.
const DIALS_AGAIN: Micros = 2e6;

/// What kube-apiserver logs when it ends an HTTP/2 connection because it has not read its first frame [`FIRST_FRAME`] after the TLS
/// handshake.
const TOO_SLOW: &str = "timeout waiting for SETTINGS frames from";

/// `firstSettingsTimeout` of golang.org/x/net/http2.
const FIRST_FRAME: Micros = 2e6;

/// What the name of a client ends with in the line of a write.
pub(crate) const WRITE: &str = "/write";

#[derive(Debug, Subcommand)]
pub(crate) enum Judge {
    /// Of the requests that began in a period: their number, how many were lost, and the longest in microseconds
    Window(Window),
    /// Requests a second: their mean, and the least in any second except the first and the last
    Pace {
        /// Lines of tls-load
        file: PathBuf,
    },
    /// The longest time without a good answer, in seconds
    Silence(Window),
    /// From the first request that was lost to the next that was answered after the last lost one
    Gap(Window),
    /// How many were answered and lost, for how long, the longest, and how they were lost
    Kinds {
        /// Lines of tls-load
        file: PathBuf,
        /// From when on, in microseconds
        from: Micros,
    },
    /// The same lines, with `told` for what an instance that stops answered with 503 or 429 before it closed the connection
    Told {
        /// Lines of tls-load
        file: PathBuf,
    },
    /// The same lines, with `slow` for what kube-apiserver ended because the machine had no time for its client
    Slow {
        /// Lines of tls-load
        file: PathBuf,
        /// Logs of kube-apiserver
        logs: Vec<PathBuf>,
    },
    /// What a kill cost: lost; of these begun after the victim's end; never answered or refused in time since its successor is ready;
    /// seconds until all clients are answered again; the longest wait in seconds; lost how
    Killed(Killed),
    /// How many were lost while nothing excused it
    Unexcused {
        /// Lines `BEGAN_US ENDED_US`, each of something that was lost
        file: PathBuf,
        /// Lines `FROM_US TO_US`, each a time for which something else was away that excuses losses
        away: Vec<PathBuf>,
    },
    /// For how long something was away, and what was lost then
    Away {
        /// Lines `FROM_US TO_US`, each a time for which it was away
        file: PathBuf,
        /// Lines `BEGAN_US ENDED_US`, each of something that was lost
        lost: Vec<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Window {
    /// Lines of tls-load
    file: PathBuf,
    /// From when, in microseconds
    from: Micros,
    /// Until when
    to: Micros,
}

#[derive(Debug, Args)]
pub(crate) struct Killed {
    /// When it was killed, in microseconds
    killed: Micros,
    /// When it was gone
    gone: Micros,
    /// When its successor was ready
    back: Micros,
    /// Until when clients count
    end: Micros,
    /// How long an answer may take in the end
    bound: Micros,
    /// Lines of tls-load, a file for each way that clients go
    files: Vec<PathBuf>,
}

impl Judge {
    /// What it prints.
    pub(crate) fn run(&self) -> Result<String> {
        Ok(match self {
            Self::Window(Window { file, from, to }) => window(&requests(&read(file)?), *from, *to),
            Self::Pace { file } => pace(&requests(&read(file)?)),
            Self::Silence(Window { file, from, to }) => silence(&requests(&read(file)?), *from, *to),
            Self::Gap(Window { file, from, to }) => gap(&requests(&read(file)?), *from, *to),
            Self::Kinds { file, from } => kinds(&requests(&read(file)?), *from),
            Self::Told { file } => told(&read(file)?),
            Self::Slow { file, logs } => {
                let logs = logs.iter().map(|log| read(log)).collect::<Result<Vec<_>>>()?;
                slow(&read(file)?, logs.iter().map(|log| log.matches(TOO_SLOW).count()).sum())
            }
            Self::Killed(killed) => {
                let texts = killed.files.iter().map(|file| read(file)).collect::<Result<Vec<_>>>()?;
                killed.judge(&texts.iter().map(|text| requests(text)).collect::<Vec<_>>())
            }
            Self::Unexcused { file, away } => unexcused(&spans(&read(file)?), &all(away)?),
            Self::Away { file, lost } => away(&spans(&read(file)?), &all(lost)?),
        })
    }
}

/// A line.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Request<'a> {
    began: Micros,
    client: &'a str,
    outcome: &'a str,
    took: Micros,
    detail: &'a str,
}

impl Request<'_> {
    fn is_good(&self) -> bool {
        self.outcome == "ok"
    }
}

fn read(file: &Path) -> Result<String> {
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

fn requests(text: &str) -> Vec<Request<'_>> {
    text.lines().filter_map(request).collect()
}

/// None if it is not such a line; the last line may be incomplete.
fn request(line: &str) -> Option<Request<'_>> {
    let mut words = line.splitn(5, ' ');
    let began = words.next()?.parse().ok()?;
    let (client, outcome) = (words.next()?, words.next()?);
    let took = words.next()?.parse().ok()?;
    Some(Request { began, client, outcome, took, detail: words.next().unwrap_or_default() })
}

fn spans(text: &str) -> Vec<(Micros, Micros)> {
    let span = |line: &str| {
        let (from, to) = line.split_once(' ')?;
        Some((from.parse().ok()?, to.parse().ok()?))
    };
    text.lines().filter_map(span).collect()
}

fn all(files: &[PathBuf]) -> Result<Vec<(Micros, Micros)>> {
    let mut all = Vec::new();
    for file in files {
        all.extend(spans(&read(file)?));
    }
    Ok(all)
}

fn window(requests: &[Request<'_>], from: Micros, to: Micros) -> String {
    let within: Vec<_> = requests.iter().filter(|r| (from..to).contains(&r.began)).collect();
    let lost = within.iter().filter(|r| !r.is_good()).count();
    format!("{} {lost} {:.0}", within.len(), within.iter().map(|r| r.took).fold(0.0, f64::max))
}

fn pace(requests: &[Request<'_>]) -> String {
    let began = || requests.iter().map(|r| r.began);
    let lasted = began().fold(0.0, f64::max) - began().fold(f64::INFINITY, f64::min);
    let paced = if lasted > 0.0 { (requests.len() - 1) as f64 * 1e6 / lasted } else { 0.0 };
    let mut seconds: BTreeMap<u64, u64> = BTreeMap::new();
    for at in began() {
        *seconds.entry((at / 1e6) as u64).or_default() += 1;
    }
    // The first and the last second are no whole ones.
    seconds.pop_first();
    seconds.pop_last();
    format!("{paced:.0} {}", seconds.into_values().min().unwrap_or(0))
}

fn silence(requests: &[Request<'_>], from: Micros, to: Micros) -> String {
    let (mut last, mut longest) = (None::<Micros>, 0.0);
    let mut until =
        |last: Option<Micros>, now: Micros| longest = f64::max(longest, last.map_or(0.0, |last| now - last));
    for Request { began, took, .. } in requests.iter().filter(|r| r.is_good()) {
        if *began >= from {
            until(last, began + took);
        }
        last = Some(began + took);
    }
    until(last, to);
    format!("{:.1} s", longest / 1e6)
}

fn gap(requests: &[Request<'_>], from: Micros, to: Micros) -> String {
    let within = || requests.iter().filter(|r| (from..=to).contains(&r.began));
    let lost: Vec<_> = within().filter(|r| !r.is_good()).map(|r| r.began).collect();
    let (first, last) = (lost.first().copied().unwrap_or(0.0), lost.last().copied().unwrap_or(0.0));
    let answered = within().filter(|r| r.is_good()).map(|r| r.began);
    // Lines are in the order of their ends.
    let after: Vec<_> = answered.collect();
    let end = after.iter().rev().take_while(|began| **began > last).last().copied().unwrap_or(to);
    format!("{:.1} s, {} connections lost", (end - first) / 1e6, lost.len())
}

fn kinds(requests: &[Request<'_>], from: Micros) -> String {
    let since = || requests.iter().filter(|r| r.began >= from);
    let lost: Vec<_> = since().filter(|r| r.outcome == "lost").collect();
    let longest = since().filter(|r| matches!(r.outcome, "ok" | "lost")).map(|r| r.took).fold(0.0, f64::max);
    let lasted = match &lost[..] {
        [first, .., last] => last.began + last.took - first.began,
        [one] => one.took,
        [] => 0.0,
    };
    let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
    lost.iter().for_each(|r| *kinds.entry(kind(r.detail)).or_default() += 1);
    let kinds: Vec<_> = kinds.into_iter().map(|(kind, count)| format!("{kind} {count}")).collect();
    let ok = since().filter(|r| r.is_good()).count();
    format!("{ok:8} {:6} {:7.1}s {:8.1}s  {}", lost.len(), lasted / 1e6, longest / 1e6, kinds.join(", "))
}

impl Killed {
    fn judge(&self, ways: &[Vec<Request<'_>>]) -> String {
        let Self { killed, gone, back, end, bound, .. } = *self;
        let (mut lost, mut later, mut swallowed, mut again, mut longest) = (0, 0, 0, 0.0, 0.0);
        let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
        for way in ways {
            let mut answered = 0.0;
            for Request { began, outcome, took, detail, .. } in way {
                if began + took < killed || *began > end {
                    continue;
                }
                longest = f64::max(longest, *took);
                let is_lost = *outcome == "lost";
                if is_lost {
                    lost += 1;
                    later += u64::from(*began > gone);
                    *kinds.entry(kind(detail)).or_default() += 1;
                    answered = 0.0;
                }
                if *began > gone && *outcome == "ok" && answered == 0.0 {
                    answered = began + took - killed;
                }
                swallowed += u64::from(*began > back && (*took > bound || is_lost && kind(detail) == "unanswered"));
            }
            again = f64::max(again, answered);
        }
        let kinds: String = kinds.into_iter().map(|(kind, count)| format!(" {kind} {count}")).collect();
        format!("{lost} {later} {swallowed} {:.1} {:.1}{kinds}", again / 1e6, longest / 1e6)
    }
}

/// What kind of loss a reason is, of tls-load or of kubectl.
fn kind(why: &str) -> &str {
    let has = |words: &[&str]| words.iter().any(|word| why.contains(word));
    if has(&["refused"]) {
        "refused"
    } else if has(&["reset"]) {
        "reset"
    } else if has(&["nanswered", "Timeout", "timeout", "timed out", "deadline"]) {
        "unanswered"
    } else if has(&["closed", "EOF"]) {
        "closed"
    } else if has(&["Forbidden"]) {
        "403"
    } else {
        let status = |three: &[u8]| matches!(three[0], b'4' | b'5') && three[1..].iter().all(u8::is_ascii_digit);
        let at = why.as_bytes().windows(3).position(status);
        at.and_then(|at| why.get(at..at + 3)).unwrap_or("other")
    }
}

/// An instance that shuts down answers 503 or 429 on the connections that it has, and closes them: this announces its end to the client
/// and is no loss. It is a loss if the connection was new, or if it stays open.
fn told(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let (mut answered, mut rejected, mut ended) = (HashSet::new(), HashMap::<&str, Vec<usize>>::new(), HashSet::new());
    for (number, line) in lines.iter().enumerate() {
        let Some(Request { client, outcome, detail, .. }) = request(line) else { continue };
        let client = client.trim_end_matches(WRITE);
        match outcome {
            "ok" => {
                answered.insert(client);
                rejected.remove(client);
            }
            "lost" if answered.contains(client) && ["503", "429"].contains(&first_word(detail)) => {
                rejected.entry(client).or_default().push(number);
            }
            "ended" => ended.extend(rejected.get(client).into_iter().flatten().copied()),
            _ => {}
        }
    }
    let told = |(number, line): (usize, &&str)| match ended.contains(&number) {
        true => line.replacen(" lost ", " told ", 1),
        false => (*line).to_owned(),
    };
    lines.iter().enumerate().map(told).collect::<Vec<_>>().join("\n")
}

/// Rewrites this many lines at most: the log does not show which connection each of its own lines is about.
fn slow(text: &str, mut at_most: usize) -> String {
    let mut slow = |line: &str| {
        let ended = |r: Request<'_>| {
            r.outcome == "lost" && r.took > FIRST_FRAME && ["reset", "closed"].contains(&kind(r.detail))
        };
        if at_most == 0 || !request(line).is_some_and(ended) {
            return line.to_owned();
        }
        at_most -= 1;
        line.replacen(" lost ", " slow ", 1)
    };
    text.lines().map(&mut slow).collect::<Vec<_>>().join("\n")
}

fn first_word(detail: &str) -> &str {
    detail.split(' ').next().unwrap_or_default()
}

/// Those that neither were under way nor began while one of the excuses was away, nor for as long again and [`DIALS_AGAIN`].
fn unexcused(lost: &[(Micros, Micros)], away: &[(Micros, Micros)]) -> String {
    let excused =
        |(began, ended): &&(Micros, Micros)| away.iter().any(|span| *ended >= span.0 && *began <= excuses_until(span));
    (lost.len() - lost.iter().filter(excused).count()).to_string()
}

fn excuses_until((from, to): &(Micros, Micros)) -> Micros {
    2.0 * to - from + DIALS_AGAIN
}

fn away(away: &[(Micros, Micros)], lost: &[(Micros, Micros)]) -> String {
    let during =
        |(began, _): &(Micros, Micros)| away.iter().find(|span| *began >= span.0 && *began <= excuses_until(span));
    let after: Vec<Micros> = lost.iter().filter_map(|lost| Some(lost.0 - during(lost)?.1)).collect();
    let times = if away.len() == 1 { String::new() } else { format!("{} times, ", away.len()) };
    format!(
        "{times}{:.1} s; {} lost then, the last one {:.1} s after it was back",
        // The sum of none would be -0.
        away.iter().fold(0.0, |sum, (from, to)| sum + to - from) / 1e6,
        after.len(),
        after.into_iter().fold(0.0, f64::max) / 1e6
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = "\
1000000 10.0.0.1:1 ok 2000 -
1500000 10.0.0.2:1 lost 4000 connect: connection refused
2000000 10.0.0.1:2 ok 1000 -
2500000 10.0.0.2:2 lost 15000000 request: unanswered
2600000 10.0.0.1:3 lost 10 request: 503 Service Unavailable
3500000 10.0.0.1:4 ok 500000 -
4100000 10.0.0.2:3 ok 3000 -
";

    #[test]
    fn a_window_has_those_that_began_in_it() {
        let requests = requests(LINES);
        assert_eq!(window(&requests, 0.0, 9e18), "7 3 15000000");
        assert_eq!(window(&requests, 1_500_000.0, 2_500_000.0), "2 1 4000");
        assert_eq!(window(&requests, 9e9, 9e18), "0 0 0");
    }

    #[test]
    fn the_pace_is_that_of_the_beginnings() {
        assert_eq!(pace(&requests(LINES)), "2 1");
        assert_eq!(pace(&requests("")), "0 0");
    }

    #[test]
    fn silence_is_between_good_answers_and_to_the_end() {
        let requests = requests(LINES);
        // From 2.001 s to 4.0 s.
        assert_eq!(silence(&requests, 1e6, 4_200_000.0), "2.0 s");
        assert_eq!(silence(&requests, 1e6, 9_103_000.0), "5.0 s");
        assert_eq!(silence(&[], 0.0, 1e6), "0.0 s");
    }

    #[test]
    fn a_gap_ends_with_the_first_answer_after_the_last_loss() {
        assert_eq!(gap(&requests(LINES), 0.0, 9e6), "2.0 s, 3 connections lost");
        assert_eq!(gap(&requests(LINES), 0.0, 2_600_000.0), "1.1 s, 3 connections lost");
    }

    #[test]
    fn losses_are_counted_by_kind() {
        assert_eq!(kinds(&requests(LINES), 0.0), "       4      3     1.1s     15.0s  503 1, refused 1, unanswered 1");
        assert_eq!(kinds(&requests(LINES), 3e6), "       2      0     0.0s      0.5s  ");
        assert_eq!([kind("unexpected EOF"), kind("Error: 500"), kind("4x5")], ["closed", "500", "other"]);
    }

    #[test]
    fn a_kill_costs_what_is_lost_until_each_way_is_answered_again() {
        let kill = |bound| {
            let (killed, gone, back, end) = (1_500_000.0, 1_600_000.0, 2_400_000.0, 4e6);
            Killed { killed, gone, back, end, bound, files: Vec::new() }
        };
        let other = "1700000 10.0.0.3:1 ok 300000 -\n2000000 10.0.0.3:2 ok 1000 -\n";
        let ways = [requests(LINES), requests(other)];
        // Answered again at 4.0 s, and at 2.0 s on the other way.
        assert_eq!(kill(20e6).judge(&ways), "3 2 1 2.5 15.0 503 1 refused 1 unanswered 1");
        assert_eq!(kill(400_000.0).judge(&ways), "3 2 2 2.5 15.0 503 1 refused 1 unanswered 1");
    }

    #[test]
    fn an_answer_before_a_connections_end_announces_it() {
        let lines = "1 kept-0-1 lost 1 503\n2 kept-1-1 ok 1 -\n3 kept-1-1/write lost 1 429\n4 kept-1-1 ended 0 told, closed, idle\n\
                     5 kept-2-1 ok 1 -\n6 kept-2-1 lost 1 503\n7 kept-2-1 ok 1 -\n8 kept-2-1 ended 0 cut, reset, idle";
        let expected = lines.replace("1-1/write lost", "1-1/write told");
        assert_eq!(told(lines), expected);
    }

    #[test]
    fn what_kube_apiserver_ended_for_its_slow_client_is_not_lost() {
        let lines = "1 new-1 lost 1999999 reset\n2 new-2 lost 4000000 refused\n3 new-3 lost 4000000 reset\n4 new-4 lost 4000000 reset\n\
                     5 new-5 ok 4000000 -";
        assert_eq!(slow(lines, 0), lines);
        assert_eq!(slow(lines, 1), lines.replace("3 new-3 lost", "3 new-3 slow"));
        assert_eq!(
            slow(lines, 9),
            lines.replace("3 new-3 lost", "3 new-3 slow").replace("4 new-4 lost", "4 new-4 slow")
        );
    }

    #[test]
    fn what_was_away_excuses_for_as_long_again() {
        let away_once = [(10e6, 14e6)];
        // Under way before, began meanwhile, within as long again and 2 s; too early, too late.
        let lost = [(9e6, 10e6), (12e6, 13e6), (20e6, 20e6), (8e6, 9e6), (20.1e6, 21e6)];
        assert_eq!(unexcused(&lost, &away_once), "2");
        assert_eq!(unexcused(&lost, &[]), "5");
        assert_eq!(away(&away_once, &lost), "4.0 s; 2 lost then, the last one 6.0 s after it was back");
        assert_eq!(away(&[], &lost), "0 times, 0.0 s; 0 lost then, the last one 0.0 s after it was back");
    }
}
