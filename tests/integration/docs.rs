//! Checks of the documents: links between them, and the index.

use berth_os::explained::EXPLAINED;
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

#[test]
fn links_lead_somewhere() {
    let documents = read_documents();
    let (mut broken, mut seen) = (Vec::new(), 0);
    for (path, text) in &documents {
        let links = lines_of_prose(text)
            .flat_map(|line| line.split("](").skip(1))
            .filter_map(|rest| rest.split(')').next());
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

/// Returns the files of Rust in these directories.
fn list_sources(directories: &[&str]) -> Vec<PathBuf> {
    let files = directories.iter().map(|it| list_files(it, ".rs"));
    files.flatten().collect()
}

fn read_all(paths: &[PathBuf]) -> String {
    let texts = paths.iter().map(|path| fs::read_to_string(path).unwrap());
    texts.collect()
}

/// docs/troubleshooting.md is made from the table of codes, and a line with each code is logged.
#[test]
fn each_code_of_a_log_line_is_explained() {
    let page = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let shown: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("| `BERTH"))
        .collect();
    let rows: Vec<_> = EXPLAINED
        .iter()
        .map(|line| {
            format!(
                "| `{}` | {} | {} | {} |",
                line.code, line.message, line.cause, line.action
            )
        })
        .collect();
    assert_eq!(shown, rows, "the table should be:\n{}", rows.join("\n"));
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
