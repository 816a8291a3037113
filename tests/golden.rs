//! The PTX of a few configurations, byte by byte: `ptx/<name>.ptx`.
//!
//! One file for each aspect of the design. They are there to be read, and to show in review what a change
//! of an emitter does to the programs. `MAKAIRA_BLESS=1 cargo test --test golden` writes them anew; nobody
//! writes them by hand, and no file stays that is not listed here.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use makaira::asm::Module;
use makaira::kernel::{Config, GOLDENS, select};
use makaira::target::SmArch;

/// Lines shown of each side of a difference.
const MAX_SHOWN: usize = 12;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("ptx")
}

fn module(name: &str, target: SmArch) -> Module {
    let config: Config = name.parse().unwrap_or_else(|error| panic!("{error}"));
    select::check(&config, target).unwrap_or_else(|error| panic!("{error}"));
    select::family_of(&config).build(&config, target)
}

/// Where two texts differ: the lines between what they have in common at both ends.
fn difference(golden: &str, now: &str) -> Option<String> {
    if golden == now {
        return None;
    }
    let [old, new] = [golden, now].map(|text| text.split('\n').collect::<Vec<_>>());
    let same = |(a, b): &(&&str, &&str)| a == b;
    let before = old.iter().zip(&new).take_while(same).count();
    let rest = old.len().min(new.len()) - before;
    let after = old.iter().rev().zip(new.iter().rev()).take(rest).take_while(same).count();
    let mut text = format!("@@ line {} @@\n", before + 1);
    let mut show = |sign: char, lines: &[&str]| {
        for line in lines.iter().take(MAX_SHOWN) {
            writeln!(text, "{sign}{line}").expect("a string takes everything");
        }
        if lines.len() > MAX_SHOWN {
            writeln!(text, "{sign}… {} more lines", lines.len() - MAX_SHOWN).expect("as above");
        }
    };
    show(' ', &old[before.saturating_sub(3)..before]);
    show('-', &old[before..old.len() - after]);
    show('+', &new[before..new.len() - after]);
    show(' ', &old[old.len() - after..][..after.min(3)]);
    Some(text)
}

/// Compares a module with its golden, or writes the golden.
fn check(name: &str, module: &Module, bless: bool) -> Result<(), String> {
    let path = folder().join(format!("{name}.ptx"));
    let now = module.to_string();
    if bless {
        std::fs::create_dir_all(folder()).map_err(|error| error.to_string())?;
        return std::fs::write(&path, now).map_err(|error| format!("{}: {error}", path.display()));
    }
    let remedy =
        "if it is meant, run `MAKAIRA_BLESS=1 cargo test --test golden` and review the files";
    let golden = std::fs::read_to_string(&path)
        .map_err(|error| format!("ptx/{name}.ptx cannot be read: {error}; {remedy}"))?;
    match difference(&golden, &now) {
        Some(difference) => Err(format!("ptx/{name}.ptx differs; {remedy}\n{difference}")),
        None => Ok(()),
    }
}

/// Whether the goldens are to be written anew.
fn blessing() -> bool {
    std::env::var_os("MAKAIRA_BLESS").is_some_and(|value| value != "0")
}

#[test]
fn goldens_are_what_is_printed() {
    let bless = blessing();
    let failed: Vec<String> = GOLDENS
        .iter()
        .filter_map(|(name, target, _)| check(name, &module(name, *target), bless).err())
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let listed: BTreeSet<String> = GOLDENS.iter().map(|(name, ..)| format!("{name}.ptx")).collect();
    for entry in std::fs::read_dir(folder()).expect("the folder of the goldens") {
        let entry = entry.expect("an entry of the folder");
        let name = entry.file_name().into_string().expect("names are plain");
        if bless && !listed.contains(&name) {
            std::fs::remove_file(entry.path()).expect("the file can go");
            continue;
        }
        assert!(listed.contains(&name), "ptx/{name} is not listed in tests/golden.rs: delete it");
    }
}

/// A golden that is not what is printed is told, with the lines and the remedy.
#[test]
fn a_changed_instruction_is_told() {
    if blessing() {
        return eprintln!("skipped: the goldens are being written");
    }
    let (name, target, _) = GOLDENS[0];
    let mut changed = module(name, target);
    let last = changed.entry.items.len() / 2;
    changed.entry.items.swap(last, last + 1);
    let dropped = changed.entry.items.pop().expect("the module is not empty");
    let told = check(name, &changed, false).expect_err("it is another program");
    assert!(
        told.contains("MAKAIRA_BLESS=1") && told.contains("\n-") && told.contains("\n+"),
        "{told}"
    );
    changed.entry.items.push(dropped);
    changed.entry.items.swap(last, last + 1);
    assert_eq!(check(name, &changed, false), Ok(()));
    let told = check("marlin_none", &changed, false).expect_err("there is no such file");
    assert!(told.contains("cannot be read"), "{told}");
}

#[test]
fn differences_show_the_lines_between_what_is_common() {
    assert_eq!(difference("a\nb\nc\n", "a\nb\nc\n"), None);
    let told = difference("a\nb\nc\nd\n", "a\nx\ny\nc\nd\n").expect("they differ");
    assert_eq!(told, "@@ line 2 @@\n a\n-b\n+x\n+y\n c\n d\n \n");
    let told = difference("a\n", "a\na\n").expect("one is longer");
    assert_eq!(told, "@@ line 2 @@\n a\n+a\n \n");
    let long = "x\n".repeat(40);
    let told = difference(&long, "").expect("one is empty");
    assert!(told.contains("-… 28 more lines"), "{told}");
}

/// Emission has no hidden state: the same program every time.
#[test]
fn emission_is_a_function() {
    for (name, target, _) in GOLDENS {
        let text = || module(name, *target).to_string();
        assert_eq!(text(), text(), "{name}");
    }
}
