//! Checks of the documents: links between them, and the index.

use berth::cli::Cli;
use berth_os::explained::{EXPLAINED, Explained};
use berth_testing::pages::expect_table;
use clap::CommandFactory;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the files below a directory that have the ending in their names.
fn list_files(directory: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![root().join(directory)];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => directories.push(path),
                false if path.to_string_lossy().ends_with(ending) => found.push(path),
                false => {}
            }
        }
    }
    found.sort();
    found
}

fn read_documents() -> BTreeMap<PathBuf, String> {
    let of_root = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let of_root = of_root.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
    let found = ["docs", "examples", "charts"]
        .iter()
        .flat_map(|directory| list_files(directory, ".md"));
    of_root
        .chain(found)
        .map(|path| (path.clone(), fs::read_to_string(path).unwrap()))
        .collect()
}

/// Returns the lines outside of fenced blocks.
fn lines_of_prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced
    })
}

/// Returns the anchors of a document's headings, as GitHub makes them.
fn anchors_of(text: &str) -> BTreeSet<String> {
    let headings = lines_of_prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Removes `.` and `..` from a path, so that the path can be looked up.
fn plain_path(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(plain.pop()),
            part => plain.push(part),
        }
    }
    plain
}

/// Returns the targets of the links in a text.
fn links_in(text: &str) -> impl Iterator<Item = &str> {
    let links = text.split("](").skip(1);
    links.filter_map(|rest| rest.split(')').next())
}

#[test]
fn links_lead_somewhere() {
    let documents = read_documents();
    let (mut broken, mut seen) = (Vec::new(), 0);
    for (path, text) in &documents {
        let links = lines_of_prose(text).flat_map(links_in);
        for link in links.filter(|link| !link.contains("://")) {
            seen += 1;
            let (file, anchor) = link
                .split_once('#')
                .map_or((link, None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() {
                path.clone()
            } else {
                plain_path(&path.with_file_name("").join(file))
            };
            let known = |anchor: &str| {
                documents
                    .get(&target)
                    .is_none_or(|text| anchors_of(text).contains(anchor))
            };
            if !target.exists() || !anchor.is_none_or(known) {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(seen > 0, "no links: are they written in another way?");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_index_has_every_page() {
    let index = fs::read_to_string(root().join("docs/index.md")).unwrap();
    let names = read_documents().into_keys().filter_map(|path| {
        let name = path.strip_prefix(root().join("docs")).ok()?;
        Some(name.to_string_lossy().into_owned())
    });
    let missing: Vec<_> = names
        .filter(|name| name != "index.md" && !index.contains(&format!("]({name})")))
        .collect();
    assert!(missing.is_empty(), "docs/index.md lacks {missing:?}");
}

#[test]
fn the_table_of_commands_is_made_from_the_code() {
    let cli = Cli::command();
    let shown = cli
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    let row = |command: &clap::Command| {
        let about = command.get_about().map(ToString::to_string);
        format!(
            "| `{}` | {} |",
            command.get_name(),
            about.unwrap_or_default()
        )
    };
    expect_table(
        "docs/reference.md",
        "| command | purpose |",
        &shown.map(row).collect::<Vec<_>>(),
    );
}

/// Pages with measured figures.
const MEASURED: [&str; 2] = ["measured.md", "bench.md"];

/// Returns the sentences, list items and table cells of a page's prose.
fn sentences_of(text: &str) -> Vec<String> {
    let mut paragraphs = vec![String::new()];
    for line in lines_of_prose(text).map(str::trim) {
        let is_item = line.starts_with("- ") || line.starts_with("> ");
        if line.is_empty() || line.starts_with(['#', '|']) || is_item {
            paragraphs.push(String::new());
        }
        if line.starts_with('|') {
            paragraphs.extend(line.split('|').map(str::to_owned));
        } else if let Some(last) = paragraphs.last_mut() {
            *last += line;
            last.push(' ');
        }
    }
    let ends = [". ", "? ", "! "];
    let split = |paragraph: String| -> Vec<String> {
        let mut sentences = vec![String::new()];
        for word in paragraph.split_inclusive(' ') {
            if let Some(last) = sentences.last_mut() {
                *last += word;
            }
            if ends.iter().any(|end| word.ends_with(end)) {
                sentences.push(String::new());
            }
        }
        sentences
    };
    paragraphs.into_iter().flat_map(split).collect()
}

/// Removes the commas of numbers.
fn without_commas(text: &str) -> String {
    let all: Vec<char> = text.chars().collect();
    let is_digit = |at: usize| all.get(at).is_some_and(char::is_ascii_digit);
    let kept = all
        .iter()
        .enumerate()
        .filter(|(at, c)| **c != ',' || !(*at > 0 && is_digit(at - 1) && is_digit(at + 1)));
    kept.map(|(_, c)| c).collect()
}

/// Returns the words of a text. A word has no punctuation at its ends.
fn words_of(text: &str) -> Vec<String> {
    let text = without_commas(text);
    let words = text.split(|c: char| c.is_whitespace() || "()|/–".contains(c));
    let trim = |word: &str| {
        let is_edge = |c: char| !c.is_alphanumeric() && !"#:".contains(c);
        word.trim_matches(is_edge).trim_end_matches(':').to_owned()
    };
    words.map(trim).filter(|word| !word.is_empty()).collect()
}

/// Returns the figures of a sentence: every "N of M", and every number of three or more digits.
/// Code, the targets of links, versions, ports and dates are no figures.
fn figures_of(sentence: &str) -> Vec<String> {
    let prose: String = sentence.split('`').step_by(2).collect();
    let mut parts = prose.split("](");
    let mut shown = parts.next().unwrap_or_default().to_owned();
    for rest in parts {
        shown += rest.split_once(')').map_or("", |(_, after)| after);
    }
    let words = words_of(&shown);
    let is_number = |word: &str| word.parse::<f64>().is_ok() && !word.starts_with('-');
    let mut figures: Vec<_> = words
        .windows(3)
        .filter(|three| three[1] == "of" && is_number(&three[0]) && is_number(&three[2]))
        .map(|three| three.join(" "))
        .collect();
    let is_long = |word: &&String| {
        is_number(word) && word.split('.').next().is_some_and(|whole| whole.len() > 2)
    };
    figures.extend(words.iter().filter(is_long).cloned());
    figures
}

/// Returns the text below the heading with this anchor, to the next heading of its level.
fn section_of<'a>(text: &'a str, anchor: &str) -> Option<&'a str> {
    let level = |line: &str| line.bytes().take_while(|byte| *byte == b'#').count();
    let heading = text
        .lines()
        .find(|line| level(line) > 0 && anchors_of(line).contains(anchor))?;
    let begin = text.find(&format!("{heading}\n"))? + heading.len();
    let mut end = begin;
    for line in text[begin..].split_inclusive('\n') {
        if (1..=level(heading)).contains(&level(line)) {
            break;
        }
        end += line.len();
    }
    Some(&text[begin..end])
}

/// Returns the figures beside the links to sections with measurements that these sections lack.
fn find_figures_elsewhere(
    page: &str,
    sections: &dyn Fn(&str, &str) -> Option<String>,
) -> Vec<String> {
    let mut wrong = Vec::new();
    for sentence in sentences_of(page) {
        let sections: Vec<_> = links_in(&sentence)
            .filter_map(|target| target.split_once('#'))
            .filter_map(|(file, anchor)| sections(file, anchor))
            .collect();
        if sections.is_empty() {
            continue;
        }
        let measured = format!(" {} ", words_of(&sections.join(" ")).join(" "));
        for figure in figures_of(&sentence) {
            if !measured.contains(&format!(" {figure} ")) {
                wrong.push(format!("{figure}: {}", sentence.trim()));
            }
        }
    }
    wrong
}

/// A figure stands in the section to which the link beside the figure leads.
#[test]
fn figures_are_where_their_links_lead() {
    let documents = read_documents();
    let linked = Cell::new(0);
    for (path, text) in &documents {
        let sections = |file: &str, anchor: &str| {
            let target = match file {
                "" => path.clone(),
                file => plain_path(&path.with_file_name("").join(file)),
            };
            let name = target.file_name()?.to_str()?.to_owned();
            (MEASURED.contains(&&*name) && target != *path).then_some(())?;
            linked.set(linked.get() + 1);
            section_of(documents.get(&target)?, anchor).map(str::to_owned)
        };
        let wrong = find_figures_elsewhere(text, &sections);
        assert!(wrong.is_empty(), "{}: {wrong:#?}", path.display());
    }
    assert!(linked.get() > 20, "{} links to measurements", linked.get());
}

#[test]
fn a_figure_that_is_elsewhere_is_found() {
    let measured = "# Measured\n## One\n| lost | 12 of 3,456 |\n\n## Two\n789 s\n";
    let sections = |_: &str, anchor: &str| section_of(measured, anchor).map(str::to_owned);
    let right = "Berth lost [12 of 3456](m.md#one) with `--rate 999` at v1.36.3. Then 5,555.";
    let cells = "| a | 777 | [789 s](m.md#two) |";
    for (page, wrong) in [
        (right, 0),
        (cells, 0),
        ("[11 of 3,456](m.md#one)", 1),
        ("[789 s](m.md#one).", 1),
        ("It took 1,234 ms, or [789 s](m.md#two).", 1),
        ("| [788 s](m.md#two) |", 1),
    ] {
        let found = find_figures_elsewhere(page, &sections);
        assert_eq!(found.len(), wrong, "{page}: {found:?}");
    }
}

/// Returns the files of Rust in these directories.
fn list_sources(directories: &[&str]) -> Vec<PathBuf> {
    let files = directories.iter().map(|it| list_files(it, ".rs"));
    files.flatten().collect()
}

fn read_all(paths: &[PathBuf]) -> String {
    let texts = paths.iter().map(|path| fs::read_to_string(path).unwrap());
    texts.collect()
}

/// A line with each code is logged.
#[test]
fn each_code_of_a_log_line_is_explained() {
    let row = |line: &Explained| {
        format!(
            "| `{}` | {} | {} | {} |",
            line.code, line.message, line.cause, line.action
        )
    };
    expect_table(
        "docs/troubleshooting.md",
        "| code | message | cause | what to do |",
        &EXPLAINED.iter().map(row).collect::<Vec<_>>(),
    );
    assert!(EXPLAINED.is_sorted_by(|one, next| one.code < next.code));
    let sources = read_all(&list_sources(&["crates", "src"]));
    let unused: Vec<_> = EXPLAINED
        .iter()
        .filter(|line| !sources.contains(&format!("code = %explained::{},", line.name)))
        .collect();
    assert!(unused.is_empty(), "{unused:#?}");
}

/// The files and tests in ARCHITECTURE.md exist. The page leaves out `crates/` and `src/` of a
/// path, and the end of a test's name.
#[test]
fn the_architecture_names_files_and_tests_that_exist() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let paths = list_sources(&["crates", "src", "tests"]);
    let sources = read_all(&paths);
    let shorten = |path: String| path.replace("/src/", "/");
    let files: String = paths
        .iter()
        .map(|path| shorten(format!("/{}\n", path.display())))
        .collect();
    let is_missing = |name: &&str| match name.strip_suffix('…') {
        Some(test) => !sources.contains(&format!("fn {test}")),
        None => name.ends_with(".rs") && !files.contains(&shorten(format!("/{name}\n"))),
    };
    let names = page.split('`').skip(1).step_by(2);
    let missing: Vec<_> = names.filter(is_missing).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
