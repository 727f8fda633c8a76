//! The pages for readers: what they link to is there, and their lines are as long as a screen is wide.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Columns of a line of prose; tables, code and links take what they take.
const COLUMNS: usize = 120;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The pages, by their places in the repository.
fn pages() -> Vec<PathBuf> {
    let docs = std::fs::read_dir(root().join("docs")).expect("a folder").map(|entry| entry.expect("a file").path());
    let docs = docs.filter(|path| path.extension().is_some_and(|end| end == "md"));
    docs.chain(["README.md", "ARCHITECTURE.md"].map(|name| root().join(name))).collect()
}

/// The lines of `text` that are no code, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!is_fence && !in_code).then_some((at + 1, line))
    })
}

/// What the headings of `text` are called behind a `#`, as code hosts make it of their words.
fn anchors(text: &str) -> HashSet<String> {
    let headings = prose(text).filter_map(|(_, line)| line.strip_prefix('#'));
    let slug = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = words.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(slug).collect()
}

/// Where the links of a line lead, but for those to other places.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://"))
}

/// What is wrong with the page `text` at `place`, line by line.
fn complaints(place: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        for target in links(line) {
            let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
            let to = if file.is_empty() { place.to_owned() } else { place.with_file_name("").join(file) };
            let there = match (std::fs::read_to_string(&to), anchor) {
                (_, None) => to.exists(),
                (Ok(text), Some(anchor)) => anchors(&text).contains(anchor),
                (Err(_), Some(_)) => false,
            };
            if !there {
                found.push(format!("line {number}: a link to {target}, which is not there"));
            }
        }
        let is_prose = !line.trim_start().starts_with(['|', '!']);
        if is_prose && line.chars().count() > COLUMNS {
            found.push(format!("line {number}: {} columns, expected at most {COLUMNS}", line.chars().count()));
        }
    }
    found
}

#[test]
fn links_lead_somewhere_and_lines_end() {
    for page in pages() {
        let found = complaints(&page, &std::fs::read_to_string(&page).expect("a page"));
        assert!(found.is_empty(), "{}: {found:#?}", page.display());
    }
    // What it is there to find, it finds.
    let place = root().join("docs/cpu.md");
    let damaged = format!("# A `page`\n[a](gpu.md#nowhere) [b](#a-page) [c](nothing.md)\n{}\n", "word ".repeat(30));
    let found = complaints(&place, &damaged);
    assert_eq!(found.len(), 4, "{found:#?}: of this page, as it stands in its place, no link and no line is sound");
}

/// Code that sends its reader to a page sends them to one that there is.
#[test]
fn pages_that_code_names_are_there() {
    let mut folders: Vec<PathBuf> =
        ["host/src", "device/src", "shared/src", "ptx/src", "tests", "examples"].map(|name| root().join(name)).into();
    let mut named = 0;
    while let Some(folder) = folders.pop() {
        for path in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path).expect("source");
                for rest in text.split("docs/").skip(1) {
                    let is_of_a_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
                    let name = &rest[..rest.find(|c| !is_of_a_name(c)).unwrap_or(rest.len())];
                    let Some(stem) = name.find(".md").map(|end| &name[..end]) else { continue };
                    named += 1;
                    let page = root().join(format!("docs/{stem}.md"));
                    assert!(page.exists(), "{}: docs/{stem}.md is not there", path.display());
                }
            }
        }
    }
    assert!(named > 10, "{named} pages named in code");
}
