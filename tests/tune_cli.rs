//! `makaira tune` as a user calls it, without a card: what it refuses, what it lists, and that wrong products
//! never win (on the stand-in for libcuda, whose kernels compute nothing).
#![cfg(feature = "cli")]

#[path = "stub/build.rs"]
mod build;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use makaira::jit::{TuneKey, TuneStore, Winner};
use serde_json::Value;

/// Exit code, stdout and stderr of a run with this store and this driver.
fn run(
    folder: &Path,
    driver: &str,
    args: &str,
    variables: &[(&str, &str)],
) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_makaira"));
    for variable in ["RUST_LOG", "MAKAIRA_NO_CACHE", "MAKAIRA_NO_TUNING", "CUDA_CACHE_DISABLE"] {
        command.env_remove(variable);
    }
    let output = command
        .args(args.split_whitespace())
        .env("MAKAIRA_CACHE_DIR", folder)
        .env("MAKAIRA_LIBCUDA", driver)
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .output()
        .expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
    let code = output.status.code().expect("the program ends by itself");
    (code, text(output.stdout), text(output.stderr))
}

/// A library that is not there.
const NO_DRIVER: &str = "/nonexistent/libcuda.so";

#[test]
fn without_a_card_or_a_store_it_refuses() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let fails = |args: &str, variables: &[(&str, &str)], code: i32, part: &str| {
        let (found, stdout, stderr) = run(folder.path(), NO_DRIVER, args, variables);
        assert_eq!((found, stdout.as_str()), (code, ""), "{args}: {stderr}");
        assert!(stderr.contains(part), "{args}: {stderr}");
    };
    let shapes = "tune --shapes 4096x4096 --ms 1";
    fails(&format!("{shapes} --device emu"), &[], 1, "means nothing on the emulator");
    fails(shapes, &[], 1, "needs a GPU");
    fails(&format!("{shapes} --json"), &[], 1, "needs a GPU");
    for variable in ["MAKAIRA_NO_TUNING", "MAKAIRA_NO_CACHE"] {
        fails(shapes, &[(variable, "1")], 1, "measure with --dry-run");
        fails(&format!("{shapes} --dry-run"), &[(variable, "1")], 1, "needs a GPU");
    }
    fails("tune", &[], 2, "--shapes");
    fails("tune --shapes 4096", &[], 2, "outputs x inputs");
    fails("tune --shapes 64x64 --ms 0", &[], 2, "0 is not in");
    fails("tune --list --forget", &[], 2, "cannot be used with");
    assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 0, "nothing was written");
}

#[test]
fn winners_are_listed_counted_and_forgotten() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let of = |args: &str, variables: &[(&str, &str)]| {
        let (code, stdout, stderr) = run(folder.path(), NO_DRIVER, args, variables);
        assert_eq!((code, stderr.as_str()), (0, ""), "{args}: {stdout}");
        stdout
    };
    assert!(of("tune --list", &[]).ends_with(": 0 winners\n"));
    let store = TuneStore::open(folder.path());
    let winner = Winner { config: "marlin_x".into(), plan: "stripe 4".into(), us: 4.125 };
    for problem in ["u4b8 m 1", "u4b8 m 2"] {
        let key = TuneKey::new("a card", problem, problem.ends_with('2'), ["a".to_owned()]);
        store.put(&key, &winner).expect("writable");
    }
    let listed = of("tune --list", &[]);
    assert!(listed.contains("u4b8 m 1, in order; a card\n    4.12 us  marlin_x (stripe 4)\n"));
    assert!(listed.contains("u4b8 m 2, early; a card\n"), "{listed}");
    assert!(listed.ends_with(": 2 winners\n"), "{listed}");
    let value: Value = serde_json::from_str(&of("tune --list --json", &[])).expect("JSON");
    assert_eq!(value["winners"][0]["config"], "marlin_x");

    let damaged = fs::read_dir(folder.path()).expect("readable").next().expect("one");
    fs::write(damaged.expect("readable").path(), "nothing").expect("writable");
    assert!(of("tune --list", &[]).contains("is no tuning record of this version: ignored"));
    let told = of("doctor", &[]);
    let line =
        "\ntuning     1 measured winner, 1 damaged record ignored; `makaira tune` measures\n";
    assert!(told.contains(line), "{told}");
    let value: Value = serde_json::from_str(&of("doctor --json", &[])).expect("JSON");
    assert_eq!((&value["tuning"]["winners"], &value["tuning"]["damaged"]), (&1.into(), &1.into()));
    for variable in ["MAKAIRA_NO_TUNING", "MAKAIRA_NO_CACHE"] {
        let told = of("doctor", &[(variable, "1")]);
        assert!(told.contains("\ntuning     off: predictions alone choose kernels\n"), "{told}");
    }
    assert!(of("tune --forget", &[]).ends_with(": 2 winners forgotten\n"));
    assert!(of("tune --list", &[]).ends_with(": 0 winners\n"));
}

/// On a card whose kernels compute nothing no candidate is right: the command says so, fails, keeps nothing.
#[test]
fn a_wrong_product_never_wins() {
    let Some(library) = build::stub("tune", &["full"], &[]) else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = library.to_str().expect("a plain path");
    for (of, config) in [
        ("", "u4b8_f16_m1"),
        (" --type u8 --activation bf16 --group 32", "u8_bf16_m1"),
        (" --type nvfp4", "e2m1_f16_m1"),
    ] {
        let args = format!("tune --shapes 256x1024 --ms 1,9 --candidates 2 --seed 3 --json{of}");
        let (code, stdout, stderr) = run(folder.path(), library, &args, &[]);
        assert_eq!(code, 1, "{stderr}");
        all_are_wrong(&stdout, &stderr, config);
        assert_eq!(TuneStore::open(folder.path()).list().expect("readable").len(), 0);
    }
}

/// Every candidate, of one kind of layer, was found to be wrong.
fn all_are_wrong(stdout: &str, stderr: &str, config: &str) {
    let value: Value = serde_json::from_str(stdout).expect("JSON");
    assert_eq!((&value["kept"], value["rows"].as_array().map(Vec::len)), (&0.into(), Some(0)));
    let wrong = value["wrong"].as_array().expect("a list");
    assert!(wrong.len() >= 4, "{stdout}");
    let is_told = |line: &Value| line.as_str().is_some_and(|line| line.ends_with("is not written"));
    assert!(wrong.iter().all(is_told), "{stdout}");
    assert!(stderr.contains("candidates failed, the first: m=1 marlin_"), "{stderr}");
    assert!(wrong.iter().any(|line| line.as_str().is_some_and(|l| l.contains(config))), "{stdout}");
    // Not on a terminal: a line for each step.
    assert!(stderr.contains("] 256x1024: making the layer\n"), "{stderr}");
    assert!(stderr.contains("] 256x1024 m=16 marlin_"), "{stderr}");
}
