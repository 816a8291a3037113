//! `makaira synth`, `pack`, `inspect`, `verify` and `load`, one after the other, as a user or a program calls them.
#![cfg(feature = "cli")]

use std::path::Path;
use std::process::{Command, Stdio};

use makaira::checkpoint::Checkpoint;
use serde_json::Value;

/// A library that is not there.
const NO_DRIVER: &str = "/nonexistent/libcuda.so";

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn run(folder: &Path, line: &str) -> Ran {
    let output = Command::new(env!("CARGO_BIN_EXE_makaira"))
        .args(line.split_whitespace())
        .current_dir(folder)
        .env("MAKAIRA_LIBCUDA", NO_DRIVER)
        .env("MAKAIRA_CACHE_DIR", folder)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
    Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The JSON answer of a successful run.
fn answer(folder: &Path, line: &str) -> Value {
    let ran = run(folder, &format!("{line} --json"));
    assert_eq!(ran.code, Some(0), "{line}: {}", ran.stderr);
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout))
}

/// The message of a run that fails.
fn failure(folder: &Path, line: &str) -> String {
    let ran = run(folder, line);
    assert_eq!(ran.code, Some(1), "{line}: {}", ran.stdout);
    ran.stderr
}

#[test]
fn a_checkpoint_is_made_packed_looked_at_checked_and_loaded() {
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let folder = temporary.path();
    let made = answer(folder, "synth model --model 5x256x128+128x256 --vocabulary 64 --act-order");
    assert_eq!(made["layers"], 10);
    let checkpoint = Checkpoint::open(&folder.join("model")).expect("as tools write it");
    assert_eq!((checkpoint.layers().len(), checkpoint.findings().len()), (10, 0));
    assert_eq!(checkpoint.tensors().files().count(), 3);

    let packed = answer(folder, "pack model --output store --file-size 60KB");
    assert_eq!((&packed["layers"], &packed["carried"]), (&10.into(), &3.into()));
    assert!(packed["files"].as_u64() > Some(2), "{packed}");
    let ran = run(folder, "pack model -o again");
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(ran.stdout.contains("packed    10 layers, 3 tensors carried over"), "{}", ran.stdout);
    assert!(ran.stderr.lines().all(|line| line.starts_with('[')), "{}", ran.stderr);

    let found = answer(folder, "inspect store");
    let layers = found["layers"].as_array().expect("layers");
    assert_eq!((layers.len(), found["layout"].as_str()), (10, Some("2")));
    assert!(layers.iter().all(|layer| layer["exact"] == true && layer["convention"] == "gptq"));
    // One group is no order; two are.
    let ordered = layers.iter().filter(|layer| layer["act_order"] == true).count();
    assert_eq!(ordered, 5);

    let checked = answer(folder, "verify store --numerics --layers 3 --device emu");
    assert_eq!(checked["ok"], true);
    assert_eq!(checked["numerics"].as_array().map(Vec::len), Some(6));
    for (path, num_ways) in [("store", 4), ("model", 3)] {
        let line =
            format!("load {path} --device emu --runs 2 --others --threads 2 --buffer-size 64KiB");
        let loaded = answer(folder, &line);
        let ways = loaded["ways"].as_array().expect("ways");
        assert_eq!((ways.len(), loaded["kind"] == "store"), (num_ways, path == "store"));
        for way in ways {
            assert_eq!(way["warm"].as_array().map(Vec::len), Some(2), "{way}");
            assert!(way["cold"]["gb_per_s"].as_f64() > Some(0.0), "{way}");
            assert!(way["bytes"].as_u64() > Some(10 * 128 * 256 / 2), "{way}");
        }
    }
}

#[test]
fn what_cannot_be_is_refused_with_a_remedy() {
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let folder = temporary.path();
    answer(folder, "synth model --model 1x128x128+128x128 --vocabulary 8");
    answer(folder, "pack model -o store");
    for (line, part) in [
        ("pack model -o store", "already; choose an empty directory"),
        ("pack model -o model", "it holds the checkpoint itself"),
        ("pack store -o other", "is packed already"),
        ("run store --all", "open it as a packed store"),
        ("synth model", "is not empty"),
        ("load model --way reads --device emu", "`reads` is for stores"),
        ("load store --threads 64 --buffer-size 64MiB --device emu", "268435456 bytes in all"),
        ("load store --buffer-size 1KiB --device emu", "at least 65536 bytes"),
        ("verify nowhere", "cannot open nowhere"),
    ] {
        let text = failure(folder, line);
        assert!(text.starts_with("error: ") && text.contains(part), "{line}: {text}");
    }
    let weights = folder.join("store/model-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&weights).expect("there");
    *bytes.last_mut().expect("long") ^= 0x40;
    std::fs::write(&weights, bytes).expect("written");
    let text = failure(folder, "verify store");
    assert!(text.contains("it is damaged"), "{text}");
    let ran = run(folder, "pack model -o x --file-size 5XB");
    assert!(ran.code == Some(2) && ran.stderr.contains("unit XB"), "{}", ran.stderr);
}
