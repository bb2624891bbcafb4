//! How Chromium shows the page.

use super::browser::Browser;
use super::fixture::*;
use berth_rehearse::data::{Instance, Report, RunOutcome, Via};
use berth_rehearse::report::{page, write};
use berth_testing::namespace;

/// Runs everywhere; prints why it checks nothing where there is no browser.
#[test]
fn the_page_fits_and_is_quiet() {
    let Some(mut browser) = Browser::start() else {
        return namespace::skipped("it needs chromium, chromium-browser or google-chrome");
    };
    let dir = tempfile::tempdir().unwrap();
    for (name, report) in reports() {
        let file = dir.path().join(format!("{name}.html"));
        write(&report, None, Some(&file)).unwrap();
        for (width, scheme) in [(360, "light"), (360, "dark"), (1280, "light"), (1280, "dark")] {
            browser.emulate(width, scheme);
            let events = browser.open(&file);
            let shown = format!("{name} at {width} px, {scheme}");
            for event in &events {
                let method = event["method"].as_str().unwrap_or_default();
                let noise = ["Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"].contains(&method);
                assert!(!noise, "{shown}: {event}");
                if method == "Network.requestWillBeSent" {
                    let url = event["params"]["request"]["url"].as_str().unwrap();
                    assert!(
                        url.starts_with("file://") && url.ends_with(&format!("{name}.html")) || url == "data:,",
                        "{shown}: {url}"
                    );
                }
            }
            looks_right(&mut browser, &shown, scheme, &report);
        }
    }
}

fn looks_right(browser: &mut Browser, shown: &str, scheme: &str, report: &Report) {
    let wider = browser.value("document.scrollingElement.scrollWidth - innerWidth");
    assert!(wider.as_f64().unwrap() <= 0.0, "{shown}: {wider} px wider than the window");
    // What sticks out of a container without a scroll bar of its own.
    let outside = "[...document.querySelectorAll('main *, header *, footer *')].filter(e => !e.closest('svg, .scroll, .plot-scroll') \
        && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80)).join()";
    assert_eq!(browser.value(outside), "", "{shown}");

    let dark =
        browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every(c => c < 60)");
    assert_eq!(dark, scheme == "dark", "{shown}");

    // The drawing is there, with a name, a description, and a label a mark.
    let marks: usize = report.runs.iter().filter_map(|run| Some(run.ran()?.marks.len())).sum();
    let visible = "[...document.querySelectorAll('.timeline .plots')].filter(e => e.offsetWidth > 0)";
    let labels = browser.value(&format!(
        "{visible}.flatMap(e => [...e.querySelectorAll('.mark .number')]).filter(t => t.textContent).length"
    ));
    assert_eq!(labels, marks, "{shown}");
    assert_eq!(browser.value("document.querySelectorAll('ol.marks li').length"), marks, "{shown}");
    let unnamed = "[...document.querySelectorAll('svg.plot')].filter(e => e.getAttribute('role') != 'img' \
        || !e.querySelector(':scope > title')?.textContent || !e.querySelector(':scope > desc')?.textContent).length";
    assert_eq!(browser.value(unnamed), 0, "{shown}");

    // Labels above a plot, as the browser's own font has them, do not cover each other.
    let covered = format!(
        "{visible}.flatMap(p => {{ const boxes = [...p.querySelectorAll('.mark rect, .mark-words')].map(e => [e.getBoundingClientRect(), e]); \
         return boxes.flatMap(([a, e], i) => boxes.slice(i + 1).filter(([b, f]) => e.parentNode != f.parentNode \
         && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)) }}).length"
    );
    assert_eq!(browser.value(&covered), 0, "{shown}");

    // Lines of marks end at titles and legends: what is behind their words is drawn after the lines.
    let crossed = format!(
        "{visible}.flatMap(p => [...p.querySelectorAll('svg.plot')]).flatMap(svg => {{ \
         const papers = [...svg.querySelectorAll('.paper')].map(e => [e.getBoundingClientRect(), e]); \
         const lines = [...svg.querySelectorAll('.mark-line')]; \
         return [...svg.querySelectorAll('.title, .key text')].filter(t => {{ const b = t.getBoundingClientRect(); \
         return !papers.some(([a, e]) => a.left <= b.left + 1 && b.right <= a.right + 1 && a.top <= b.top + 3 && b.bottom <= a.bottom + 3 \
         && lines.every(l => l.getBoundingClientRect().top >= a.bottom - 1 || l.compareDocumentPosition(e) & 4)) }}) }}).map(t => t.textContent).join()"
    );
    assert_eq!(browser.value(&crossed), "", "{shown}");

    // A kernel setting is a word.
    let broken = "[...document.querySelectorAll('dl.mono dt')].filter(e => { const words = document.createRange(); \
        words.selectNodeContents(e); return words.getClientRects().length > 1 }).map(e => e.textContent).join()";
    assert_eq!(browser.value(broken), "", "{shown}");

    // Text is not smaller than can be read.
    let small = "Math.min(99, ...[...document.querySelectorAll('.plots text')].filter(t => t.getBoundingClientRect().height > 0) \
        .map(t => t.getBoundingClientRect().height))";
    assert!(browser.value(small).as_f64().unwrap() >= 9.0, "{shown}");
}

fn reports() -> Vec<(&'static str, Report)> {
    let mut lossy = run(&Model::lossy(Via::Haproxy));
    if let RunOutcome::Ran(ran) = &mut lossy.outcome {
        ran.promises = promises();
        ran.instances.insert(1, Instance { name: "bad-flag".into(), version: String::new() });
        ran.informers = vec![informer()];
        ran.verdict.objections = vec!["old-".repeat(40)];
    }
    let mut aborted = report(vec![run(&Model::clean(Via::Berth))]);
    aborted.aborted = Some("SIGINT".into());
    aborted.command.shell = "berth rehearse --old=".to_owned() + &"x".repeat(500);
    let mut stormy = run(&Model::clean(Via::Berth));
    storm(&mut stormy);
    vec![
        ("storm", report(vec![stormy])),
        ("clean", report(vec![run(&Model::clean(Via::Berth))])),
        ("lossy", report(vec![lossy.clone()])),
        (
            "compared",
            report(vec![
                lossy,
                skipped(Via::PortSharing),
                run(&Model::clean(Via::Berth)),
                run(&Model::clean(Via::None)),
            ]),
        ),
        ("many", report(vec![run(&Model { watches: 500, cut_one_of: Some(25), ..Model::lossy(Via::Berth) })])),
        ("aborted", aborted),
        ("empty", report(Vec::new())),
    ]
}

/// `BERTH_PAGES=FOLDER cargo test --test integration pages -- --ignored` writes these pages, for people.
#[test]
#[ignore = "writes pages for people to look at"]
fn pages() {
    let directory = std::env::var("BERTH_PAGES").expect("BERTH_PAGES names a directory");
    for (name, report) in reports() {
        std::fs::write(format!("{directory}/{name}.html"), page::render(&report)).unwrap();
    }
}
