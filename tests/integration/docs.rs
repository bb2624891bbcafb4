//! The documents are right about the code and about one another.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files below a directory with this ending.
fn files(directory: &str, ending: &str) -> Vec<PathBuf> {
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

fn documents() -> BTreeMap<PathBuf, String> {
    let of_root = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let of_root = of_root.filter(|path| path.extension().is_some_and(|ending| ending == "md"));
    let found = ["docs", "examples", "charts"].iter().flat_map(|directory| files(directory, ".md"));
    of_root.chain(found).map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

/// Lines that are not in a fenced block.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced
    })
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Without `.` and `..`, so that it can be looked up.
fn plain(path: &Path) -> PathBuf {
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
    let documents = documents();
    let mut broken = Vec::new();
    let mut seen = 0;
    for (path, text) in &documents {
        let links = prose(text).flat_map(|line| line.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
        for link in links.filter(|link| !link.contains("://")) {
            seen += 1;
            let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { path.clone() } else { plain(&path.with_file_name("").join(file)) };
            let known = |anchor: &str| documents.get(&target).is_none_or(|text| anchors(text).contains(anchor));
            if !target.exists() || !anchor.is_none_or(known) {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(seen > 20, "only {seen} links: are they written in another way?");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_index_has_every_page() {
    let index = fs::read_to_string(root().join("docs/index.md")).unwrap();
    let names = documents().into_keys().filter_map(|path| {
        let name = path.strip_prefix(root().join("docs")).ok()?;
        Some(name.to_string_lossy().into_owned())
    });
    let missing: Vec<_> = names.filter(|name| name != "index.md" && !index.contains(&format!("]({name})"))).collect();
    assert!(missing.is_empty(), "docs/index.md lacks {missing:?}");
}

/// The pieces of a message between its placeholders: words in capitals, and what is left out.
fn pieces(message: &str) -> Vec<String> {
    let placeholder = |word: &str| {
        let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
        let capitals = !bare.is_empty() && bare.chars().all(|c| c.is_ascii_uppercase());
        word.contains('…') || (capitals && !["TLS", "HTTP"].contains(&bare))
    };
    let mut pieces = vec![String::new()];
    for word in message.split(' ') {
        match pieces.last_mut() {
            Some(piece) if !placeholder(word) => {
                piece.push_str(if piece.is_empty() { "" } else { " " });
                piece.push_str(word);
            }
            _ => pieces.push(String::new()),
        }
    }
    pieces.retain(|piece| piece.len() >= 8);
    pieces
}

/// Files of the source; a string that goes on in the next line is one string.
fn sources() -> impl Iterator<Item = (PathBuf, String)> {
    // The messages of the benchmark and the soak are not for operators.
    let of_crates = files("crates", ".rs").into_iter().filter(|path| !path.starts_with(root().join("crates/bench")));
    files("src", ".rs").into_iter().chain(of_crates).map(|path| {
        let text = fs::read_to_string(&path).unwrap();
        let text = text.split("\\\n").map(str::trim_start).collect::<String>().replace("\\\"", "\"");
        (path, text)
    })
}

#[test]
fn messages_that_are_explained_are_printed() {
    let said: String = sources().map(|(_, text)| text).collect();
    let text = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    let (mut seen, mut missing) = (0, Vec::new());
    for row in rows {
        let cell = row.split(" | ").next().unwrap();
        for message in cell.split('`').skip(1).step_by(2).filter(|message| message.contains(' ')) {
            seen += 1;
            let unsaid = pieces(message).into_iter().filter(|piece| !said.contains(piece.as_str()));
            missing.extend(unsaid.map(|piece| format!("{message}: nothing says {piece:?}")));
        }
    }
    assert!(seen > 50, "only {seen} messages: are they written in another way?");
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The string literals that are sentences, up to the first part that varies or explains.
fn sentences(call: &str) -> impl Iterator<Item = &str> {
    let literals = call.split('"').skip(1).step_by(2).filter(|literal| literal.contains(' '));
    literals.map(|literal| literal.split(['{', ':', ';', '(', ',']).next().unwrap_or_default().trim())
}

/// What is before the parenthesis that closes the one which was opened before.
fn inside(text: &str) -> &str {
    let mut open = 1;
    let end = text.find(|c| {
        open += i32::from(c == '(') - i32::from(c == ')');
        open == 0
    });
    end.map_or(text, |end| &text[..end])
}

#[test]
fn warnings_and_errors_of_a_shim_are_explained() {
    let explained = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let (mut seen, mut missing) = (0, Vec::new());
    // A rehearsal's log is read by those who rehearse, with what it did.
    for (path, text) in sources().filter(|(path, _)| !path.starts_with(root().join("crates/rehearse"))) {
        let calls = ["tracing::warn!(", "tracing::error!("].into_iter().flat_map(|macro_| text.split(macro_).skip(1));
        for call in calls {
            for sentence in sentences(inside(call)).filter(|sentence| sentence.len() > 8) {
                seen += 1;
                if !explained.contains(sentence) {
                    missing.push(format!("{}: {sentence}", path.display()));
                }
            }
        }
    }
    assert!(seen > 30, "only {seen} messages: are they said in another way?");
    assert!(missing.is_empty(), "docs/troubleshooting.md explains none of these: {missing:#?}");
}
