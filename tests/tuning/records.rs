//! The store alone: what it keeps, what it finds wrong, many processes at once.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fs, io, thread};

use makaira::jit::{Finding, TuneKey, TuneStore, Winner};
use tempfile::TempDir;

const DEVICE: &str = "NVIDIA H200, sm_90, 132 SMs, driver of CUDA 13.0";
const PROBLEM: &str = "u4b8 m 16, n 4096, k 14336, group 128, rows by whole runs of 128";

fn candidates() -> Vec<String> {
    ["a stripe 3", "b stripe 4", "c stripe 5"].map(str::to_owned).to_vec()
}

fn key(problem: &str) -> TuneKey {
    TuneKey::new(DEVICE, problem, false, candidates())
}

fn winner(number: usize) -> Winner {
    let (config, plan) = (format!("config_{number}"), format!("stripe {}", number + 1));
    Winner { config, plan, us: 1.0 / (number + 3) as f64 }
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// The only record of a folder.
fn only_file(folder: &Path) -> PathBuf {
    let mut files = fs::read_dir(folder).expect("the folder is there");
    let path = files.next().expect("a file").expect("readable").path();
    assert!(files.next().is_none(), "one file per record, nothing beside it");
    path
}

#[test]
fn a_winner_is_found_again_by_others_until_a_later_one_replaces_it() {
    let folder = folder();
    let store = TuneStore::open(folder.path());
    assert_eq!(store.get(&key(PROBLEM)), None);
    assert_eq!(store.list().expect("a listing").len(), 0);
    store.put(&key(PROBLEM), &winner(1)).expect("writable");
    assert_eq!(store.get(&key(PROBLEM)), Some(winner(1)));
    let other = TuneStore::open(folder.path());
    assert_eq!(other.get(&key(PROBLEM)), Some(winner(1)));
    let path = only_file(folder.path());
    let name = path.file_name().and_then(|name| name.to_str()).expect("a plain name");
    assert!(name.starts_with("u4b8_m_16__n_4096__k_14336__group_128_") && name.ends_with(".tuned"));

    store.put(&key(PROBLEM), &winner(2)).expect("writable");
    assert_eq!(store.get(&key(PROBLEM)), Some(winner(2)));
    assert_eq!(other.read(&key(PROBLEM)).expect("sound"), Some(winner(2)));
    // Workspaces are sized by what was told: a process is told the same until it ends.
    assert_eq!(other.get(&key(PROBLEM)), Some(winner(1)));

    let records = store.list().expect("a listing");
    let record = records[0].as_ref().expect("sound");
    assert_eq!((records.len(), &record.path, &record.winner), (1, &path, &winner(2)));
    assert_eq!(record.key, key(PROBLEM).text());
    fs::write(folder.path().join("mine.tuned"), "mine").expect("writable");
    assert_eq!(store.clear().expect("removable"), 1);
    assert_eq!(store.get(&key(PROBLEM)), None);
    assert!(folder.path().join("mine.tuned").exists(), "files of others stay");
}

/// Fault B71: whatever times depend on is part of the key.
#[test]
fn b71_every_ingredient_changes_the_key() {
    let folder = folder();
    let store = TuneStore::open(folder.path());
    store.put(&key(PROBLEM), &winner(0)).expect("writable");
    let fewer = || candidates().into_iter().skip(1);
    let others = [
        TuneKey::new("NVIDIA H100, sm_90, 132 SMs", PROBLEM, false, candidates()),
        TuneKey::new(DEVICE, &PROBLEM.replace("m 16", "m 8"), false, candidates()),
        TuneKey::new(DEVICE, PROBLEM, true, candidates()),
        TuneKey::new(DEVICE, PROBLEM, false, fewer()),
        TuneKey::new(DEVICE, PROBLEM, false, fewer().chain(["a stripe 4".to_owned()])),
    ];
    for other in &others {
        assert_ne!(*other, key(PROBLEM));
        assert_eq!(store.get(other), None, "{}", other.text());
    }
    let reversed = candidates().into_iter().rev();
    assert_eq!(store.get(&TuneKey::new(DEVICE, PROBLEM, false, reversed)), Some(winner(0)));
    assert!(key(PROBLEM).text().contains(concat!("makaira ", env!("CARGO_PKG_VERSION"))));
    let odd = TuneKey::new("a\"\nproblem \"b", "c", false, candidates());
    assert_eq!(odd.text().lines().filter(|line| line.starts_with("problem ")).count(), 1);
}

/// Fault B68: a file that is no sound record of its key is a finding, answers nothing, harms nothing, and
/// is replaced by the next winner.
#[test]
fn b68_damaged_records_are_findings() {
    let folder = folder();
    let path = {
        let store = TuneStore::open(folder.path());
        store.put(&key(PROBLEM), &winner(3)).expect("writable");
        only_file(folder.path())
    };
    let sound = fs::read(&path).expect("readable");
    let text = String::from_utf8(sound.clone()).expect("records are text");
    let other = {
        let folder = self::folder();
        TuneStore::open(folder.path()).put(&key("another"), &winner(4)).expect("writable");
        fs::read(only_file(folder.path())).expect("readable")
    };
    let mut damages: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "is no tuning record of this version"),
        (sound[..sound.len() / 2].to_vec(), "has a wrong checksum"),
        (sound[..30].to_vec(), "ends in its head"),
        (text.replace("tuning 1", "tuning 2").into_bytes(), "is no tuning record of this version"),
        (text.replace("config_3", "config_4").into_bytes(), "has a wrong checksum"),
        ([&sound[..], b"more\n"].concat(), "has a wrong checksum"),
        (vec![0xff; 200], "is no text"),
        (other, "belongs to another problem or device"),
    ];
    for at in (0..sound.len()).step_by(7) {
        let mut flipped = sound.clone();
        flipped[at] ^= 1;
        damages.push((flipped, ""));
    }
    for (bytes, wanted) in damages {
        fs::write(&path, &bytes).expect("writable");
        let store = TuneStore::open(folder.path());
        match store.read(&key(PROBLEM)) {
            Err(Finding::Damaged { path: named, why }) => {
                assert_eq!(named, path);
                assert!(wanted.is_empty() || why == wanted, "{why}, not {wanted}");
            }
            other => panic!("{wanted}: {other:?}"),
        }
        assert_eq!(store.get(&key(PROBLEM)), None);
        assert_eq!(store.list().expect("a listing").len(), 1);
        store.put(&key(PROBLEM), &winner(5)).expect("replaces it");
        assert_eq!(TuneStore::open(folder.path()).get(&key(PROBLEM)), Some(winner(5)));
    }
    fs::remove_file(&path).expect("removable");
    fs::create_dir_all(path.join("inside")).expect("a folder in its place");
    let store = TuneStore::open(folder.path());
    let finding = store.read(&key(PROBLEM)).expect_err("a folder is no record");
    assert!(matches!(finding, Finding::Unreadable { .. }), "{finding}");
    assert!(finding.to_string().ends_with("cannot be read: ignored"), "{finding}");
    assert_eq!(store.get(&key(PROBLEM)), None);
    store.put(&key(PROBLEM), &winner(6)).expect("moves it aside");
    assert_eq!(TuneStore::open(folder.path()).get(&key(PROBLEM)), Some(winner(6)));
}

#[test]
fn what_is_no_record_is_not_written() {
    let folder = folder();
    let store = TuneStore::open(folder.path());
    let wrong = [
        Winner { us: 0.0, ..winner(1) },
        Winner { us: f64::NAN, ..winner(1) },
        Winner { us: f64::INFINITY, ..winner(1) },
        Winner { config: "two\nlines".into(), ..winner(1) },
        Winner { config: String::new(), ..winner(1) },
        Winner { plan: "x\nconfig y".into(), ..winner(1) },
    ];
    for winner in &wrong {
        let error = store.put(&key(PROBLEM), winner).expect_err("no record");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
    assert_eq!(store.list().expect("a listing").len(), 0);
    assert_eq!(store.get(&key(PROBLEM)), None);
}

/// Fault B70: a folder that cannot be used is an error of the writer and nothing to the reader.
#[test]
fn b70_an_unusable_folder_serves_nothing_and_says_so_to_the_writer() {
    let folder = folder();
    let file = folder.path().join("file");
    fs::write(&file, "a file").expect("writable");
    let store = TuneStore::open(file.join("inside"));
    assert_eq!(store.read(&key(PROBLEM)).expect("nothing there"), None);
    store.put(&key(PROBLEM), &winner(1)).expect_err("no folder");
    assert_eq!(store.get(&key(PROBLEM)), None);
}

/// Fault B72: switched off, nothing is read or written.
#[test]
fn b72_the_environment_switches_it_off() {
    let folder = folder();
    let path = folder.path().to_str().expect("a plain path");
    let with = |variables: &[(&str, &str)]| {
        let variables: Vec<(String, OsString)> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), value.into())).collect();
        TuneStore::resolve(move |name| {
            let found = variables.iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value.clone())
        })
    };
    let on = with(&[("MAKAIRA_CACHE_DIR", path), ("MAKAIRA_NO_TUNING", "0")]);
    assert_eq!(on.folder(), Some(folder.path()));
    on.put(&key(PROBLEM), &winner(1)).expect("writable");
    for variable in ["MAKAIRA_NO_TUNING", "MAKAIRA_NO_CACHE"] {
        let off = with(&[("MAKAIRA_CACHE_DIR", path), (variable, "1")]);
        assert_eq!(off.folder(), None, "{variable}");
        assert_eq!(off.get(&key(PROBLEM)), None);
        off.put(&key("another"), &winner(2)).expect("kept for this process");
        assert_eq!(off.list().expect("a listing").len(), 0);
        assert_eq!(off.clear().expect("nothing to do"), 0);
    }
    assert_eq!(on.list().expect("a listing").len(), 1);
    assert_eq!(with(&[]).folder(), None);
}

/// Keys that every process writes, and as many of its own.
const KEYS: usize = 40;
const PROCESSES: usize = 8;

/// Run here it says that it is skipped; started by the test below it writes and reads records.
#[test]
fn tuning_child() {
    let Some(number) = env::var_os("MAKAIRA_TEST_CHILD") else {
        eprintln!("skipped: tuning_child is started by b66_processes_lose_nothing_of_each_other");
        return;
    };
    let number: usize = number.to_str().and_then(|text| text.parse().ok()).expect("a number");
    let folder = PathBuf::from(env::var_os("MAKAIRA_TEST_FOLDER").expect("given"));
    let store = TuneStore::open(folder);
    for round in 0..KEYS {
        store.put(&key(&format!("shared {round}")), &winner(number)).expect("writable");
        store.put(&key(&format!("own {number} {round}")), &winner(round)).expect("writable");
        for known in 0..=round {
            let shared = store.read(&key(&format!("shared {known}"))).expect("never half a record");
            assert!((0..PROCESSES).any(|number| shared == Some(winner(number))), "{shared:?}");
        }
    }
}

/// Fault B66: processes that write into one empty folder together.
#[test]
fn b66_processes_lose_nothing_of_each_other() {
    let folder = folder();
    let place = folder.path().join("made by the first");
    let start = |number: usize| -> Child {
        Command::new(env::current_exe().expect("this test has a path"))
            .args(["--exact", "records::tuning_child"])
            .env("MAKAIRA_TEST_CHILD", number.to_string())
            .env("MAKAIRA_TEST_FOLDER", &place)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("this test starts again")
    };
    let children: Vec<Child> = (0..PROCESSES).map(start).collect();
    let waits = children.into_iter().map(|child| thread::spawn(|| child.wait_with_output()));
    for wait in waits.collect::<Vec<_>>() {
        let output = wait.join().expect("no panic").expect("it ends");
        assert!(output.status.success(), "{output:?}");
    }
    let store = TuneStore::open(&place);
    let records = store.list().expect("a listing");
    assert!(records.iter().all(Result::is_ok), "{records:?}");
    assert_eq!(records.len(), KEYS * (1 + PROCESSES));
    for round in 0..KEYS {
        for number in 0..PROCESSES {
            let own = store.get(&key(&format!("own {number} {round}")));
            assert_eq!(own, Some(winner(round)), "lost: {number} {round}");
        }
    }
    let names =
        fs::read_dir(&place).expect("readable").map(|entry| entry.expect("one").file_name());
    assert!(names.into_iter().all(|name| name.to_string_lossy().ends_with(".tuned")));
}
