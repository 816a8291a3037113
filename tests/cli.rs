//! The command line: every command, as a user or a program calls it.
//!
//! Where a card matters the emulator is asked for, or a driver that is not there, so that texts are the same
//! everywhere; `demo` also runs on whatever the machine has. Snapshots of texts are written anew with
//! `INSTA_UPDATE=always cargo test --test cli`.
#![cfg(feature = "cli")]

mod fixtures;
#[path = "stub/build.rs"]
mod stub;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A library that is not there.
const NO_DRIVER: &str = "/nonexistent/libcuda.so";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The program in a temporary folder's environment: no store of the user's is touched.
fn makaira(store: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_makaira"));
    command.current_dir(root()).env("MAKAIRA_CACHE_DIR", store).stdin(Stdio::null());
    for variable in ["RUST_LOG", "MAKAIRA_NO_CACHE", "MAKAIRA_LIBCUDA", "CUDA_CACHE_DISABLE"] {
        command.env_remove(variable);
    }
    command
}

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

fn ran(output: Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
    let code = output.status.code().expect("the program ends by itself");
    Ran { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs without any driver.
fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    let store = tempfile::tempdir().expect("a temporary folder");
    let mut command = makaira(store.path());
    ran(command.args(args).env("MAKAIRA_LIBCUDA", NO_DRIVER).output().expect("it starts"))
}

/// As [`run`], with arguments between spaces.
fn line(args: &str) -> Ran {
    run(args.split_whitespace())
}

/// The JSON answer of a successful run.
fn answer(ran: &Ran) -> Value {
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout))
}

/// Exit code and stderr of a run that fails, for snapshots.
fn failure(args: &str) -> String {
    let Ran { code, stdout, stderr } = line(args);
    assert!(code != 0 && stdout.is_empty(), "{args}: exit {code}, {stdout}");
    format!("exit {code}\n{stderr}")
}

fn text<'v>(value: &'v Value, pointer: &str) -> &'v str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_else(|| panic!("{pointer}: {value}"))
}

/// Every product of an answer, checked: its comparisons are there, right and not trivially so.
fn check_products(products: &Value) -> usize {
    let products = products.as_array().expect("products");
    for product in products {
        assert_eq!(product["ok"], true, "{product}");
        assert!(text(product, "/config").starts_with("marlin_"), "{product}");
        for check in product["checks"].as_array().expect("comparisons") {
            let number = |name: &str| check[name].as_f64().expect("a number");
            assert!(number("max_abs") > 0.0 && number("max_of_bound") <= 1.0, "{check}");
            assert!(number("rel_frobenius") <= number("rel_frobenius_limit"), "{check}");
            assert!(number("rel_frobenius_limit") < 2e-3, "the limit is stated: {check}");
        }
    }
    products.len()
}

#[test]
fn the_demo_multiplies_a_real_layer_on_the_emulator() {
    let demo = line("demo");
    assert_eq!(demo.code, 0, "{}", demo.stderr);
    for part in [
        "layer     model.layers.0.self_attn.k_proj: 128 x 384, u4b8, group 128, gptq",
        "device    emulator, standing in for NVIDIA H200",
        "no GPU    no CUDA driver: /nonexistent/libcuda.so",
        "recorded inputs against golden",
        "warp instructions",
    ] {
        assert!(demo.stdout.contains(part), "{part}\n{}", demo.stdout);
    }
    assert!(demo.stdout.ends_with("ok: 7 products, each within its bound\n"), "{}", demo.stdout);
    assert!(!demo.stdout.contains("WRONG"));
}

#[test]
fn the_demo_answers_programs_and_repeats_with_a_seed() {
    let args = "demo --json --seed 77 --m 1,16,33 --device emu --device-like a100";
    let (first, second) = (answer(&line(args)), answer(&line(args)));
    assert_eq!(check_products(&first["products"]), 5);
    assert_eq!(first["device"]["kind"], "emulator");
    assert_eq!(first["device"]["target"], "sm_80");
    assert_eq!(first["seed"], 77);
    assert_eq!(first["ok"], true);
    let errors = |answer: &Value| {
        let products = answer["products"].as_array().expect("products").clone();
        products.iter().map(|product| product["checks"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(errors(&first), errors(&second));
    let other = answer(&line("demo --json --m 1,16,33 --device emu --device-like a100"));
    assert_ne!(errors(&first), errors(&other), "fresh activations each time");
}

/// On the card if there is one.
#[test]
fn the_demo_runs_on_what_the_machine_has() {
    let store = tempfile::tempdir().expect("a temporary folder");
    let output = makaira(store.path()).args(["demo", "--json"]).output().expect("it starts");
    let answer = answer(&ran(output));
    check_products(&answer["products"]);
    if answer["device"]["kind"] == "emulator" {
        eprintln!("skipped: the demo on a GPU: {}", text(&answer, "/device/why_emulated"));
    }
}

#[test]
fn a_checkpoint_runs_layer_by_layer() {
    let ran = line("run assets/demo --all --m 1,17 --seed 5");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.stdout.ends_with("ok: 2 products, each within its bound\n"), "{}", ran.stdout);
    assert!(ran.stderr.contains("[2/2] model.layers.0.self_attn.k_proj, m 17"), "{}", ran.stderr);
    let file = "run assets/demo/model.safetensors --layer model.layers.0.self_attn.k_proj --json";
    let value = answer(&line(file));
    assert_eq!(check_products(&value["layers"][0]["products"]), 2);
    let list = answer(&line("run assets/demo --list --json"));
    assert_eq!(list["layers"][0]["n"], 128);
    assert_eq!(list["layers"][0]["convention"], "gptq");
    let empty = line("run assets/demo --all --m 0");
    assert_eq!(empty.code, 0, "a product of no rows is one: {}", empty.stderr);
}

#[test]
fn larger_checkpoints_run() {
    for (name, layer) in [
        ("gptq-g128-sym", "model.layers.2.mlp.gate_proj"),
        ("gptq-channelwise", "model.layers.5.mlp.down_proj"),
        ("gptq-g32-sym", "model.layers.0.self_attn.k_proj"),
        ("marlin-g128", "model.layers.5.mlp.down_proj"),
    ] {
        let Some(folder) = fixtures::fixture(name) else { continue };
        let path = fixtures::weights_of(folder);
        let path = path.to_str().expect("a plain path");
        let value = answer(&run(["run", path, "--layer", layer, "--m", "1,33", "--json"]));
        assert_eq!(check_products(&value["layers"][0]["products"]), 2, "{name}");
    }
}

#[test]
fn ptx_is_what_the_library_prints() {
    let name = "marlin_sm80_u4b8_f16_m8n64k512_g128_w1_s4_c1";
    let ptx = line(&format!("ptx {name}"));
    let golden = fs::read_to_string(root().join("ptx").join(format!("{name}.ptx")));
    assert_eq!(ptx.stdout, golden.expect("the golden is there"));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("kernel.ptx");
    let path = file.to_str().expect("a plain path");
    let problem = "ptx --m 16 --n 4096 --k 4096 --group -1 --target sm_90";
    let to_file = line(&format!("{problem} --lineinfo -o {path}"));
    assert_eq!(to_file.code, 0, "{}", to_file.stderr);
    let written = fs::read_to_string(&file).expect("written");
    // Hopper itself, or its asynchronous copies.
    let version = |kernel: &str| if kernel.contains("marlin_sm80_") { "7.8" } else { "8.0" };
    let header = format!(".version {}\n.target sm_90\n", version(&written));
    assert!(written.starts_with(&header), "{written}");
    assert!(written.contains("\n.file 1 \"src/kernel/") && written.contains("  .loc 1 "));
    let value = answer(&line(&format!("{problem} --json --sms 16")));
    let config = text(&value, "/config");
    assert!(config.contains("_col_"), "{config}");
    assert!(text(&value, "/ptx").contains(&format!(".visible .entry {config}(")));
    assert_eq!(text(&value, "/version"), version(config));
}

/// `ptx --all` and the folder of goldens are the same set of the same texts.
#[test]
fn the_golden_set_is_the_folder_of_goldens() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_str().expect("a plain path");
    let value = answer(&run(["ptx", "--all", path, "--json"]));
    let names = |folder: &Path| -> BTreeSet<_> {
        let entries = fs::read_dir(folder).expect("a folder");
        entries.map(|entry| entry.expect("an entry").file_name()).collect()
    };
    let written = names(folder.path());
    assert_eq!(value["files"].as_array().map(Vec::len), Some(written.len()));
    assert_eq!(written, names(&root().join("ptx")));
    for name in written {
        let read = |folder: &Path| fs::read_to_string(folder.join(&name)).expect("readable");
        assert!(read(folder.path()) == read(&root().join("ptx")), "{}", name.display());
    }
}

#[test]
fn explain_says_why() {
    let h200 = line("explain --m 16 --n 4096 --k 4096 --device-like h200 --top 2");
    assert_eq!(h200.code, 0, "{}", h200.stderr);
    insta::assert_snapshot!("explain_h200", h200.stdout);
    let odd = line("explain --m 3 --n 1000 --k 1001 --group -1 --device-like rtx4090 --top 0");
    insta::assert_snapshot!("explain_rtx4090", odd.stdout);
}

#[test]
fn explain_answers_programs() {
    // Without a GPU the card is an h200.
    let value = answer(&line("explain --m 64 --n 28672 --k 8192 --json"));
    assert_eq!(text(&value, "/device/name"), "NVIDIA H200");
    let total = |choice: &Value| choice["predicted_us"]["total"].as_f64().expect("a time");
    let others = value["others"].as_array().expect("others");
    assert_eq!(others.len(), 4);
    assert!(others.iter().all(|other| total(other) >= total(&value["choice"])), "{value}");
    let names: BTreeSet<&str> = others.iter().map(|other| text(other, "/config")).collect();
    assert!(names.len() == 4 && !names.contains(text(&value, "/choice/config")), "{value}");
    // The weight alone takes longer than that at any speed of today's memory.
    assert!(total(&value["choice"]) > 10.0);
}

/// Every weight type with both types of activations: the kernel is one of that type, and `ptx` prints it.
#[test]
fn explain_and_ptx_know_every_weight_type() {
    let types = [
        ("u4b8", "", "u4b8", "g128", 128),
        ("u4", "--group 64", "u4", "g64", 64),
        ("u8", "", "u8", "g128", 128),
        ("u8b128", "--group -1", "u8b128", "col", -1),
        ("e4m3", "", "e4m3", "g128", 128),
        ("e2m1", "--group 32", "e2m1", "g32", 32),
        ("nvfp4", "", "e2m1", "g16e5m3", 16),
        ("mxfp4", "", "e2m1", "g32e5m3", 32),
    ];
    for (idx, (name, group, format, groups, raw)) in types.into_iter().enumerate() {
        let activation = ["f16", "bf16"][idx % 2];
        let args =
            format!("--m 9 --n 1024 --k 2048 --type {name} --activation {activation} {group}");
        let value = answer(&line(&format!("explain {args} --top 0 --json")));
        assert_eq!(
            (text(&value, "/problem/type"), &value["problem"]["group"]),
            (name, &raw.into())
        );
        assert_eq!(text(&value, "/problem/activation"), activation);
        let config = text(&value, "/choice/config");
        let kind = format!("_{format}_{activation}_m");
        assert!(config.contains(&kind) && config.contains(&format!("_{groups}_")), "{config}");
        let ptx = line(&format!("ptx {args}"));
        assert_eq!(ptx.code, 0, "{}", ptx.stderr);
        assert!(ptx.stdout.contains(&kind), "{name}: the entry names its type");
    }
    for (args, why) in [
        ("--type int4", "there are e2m1, e4m3, u4, u4b8, u8, u8b128, nvfp4, mxfp4"),
        ("--type nvfp4 --group 32", "groups of nvfp4 have 16 inputs"),
        ("--activation f32", "`f32` is neither f16 nor bf16"),
    ] {
        for command in ["explain", "ptx"] {
            let told = failure(&format!("{command} --m 1 --n 256 --k 256 {args}"));
            assert!(told.contains(why), "{told}");
        }
        for command in ["bench", "tune --shapes 256x256 --ms 1"] {
            assert_ne!(line(&format!("{command} {args}")).code, 0, "{command} {args}");
        }
    }
}

#[test]
fn the_doctor_works_without_a_driver() {
    let doctor = line("doctor");
    assert_eq!(doctor.code, 0, "{}", doctor.stderr);
    assert!(
        doctor.stdout.starts_with("driver     none to use: no CUDA driver"),
        "{}",
        doctor.stdout
    );
    assert!(doctor.stdout.contains("\nemulator   runs every kernel"), "{}", doctor.stdout);
    let value = answer(&line("doctor --json"));
    assert_eq!(value["driver"]["usable"], false);
    assert_eq!(value["store"]["entries"], 0);
}

#[test]
fn the_doctor_tells_what_a_driver_lacks_and_what_then_runs() {
    let doctor = |library: &Path, json: &[&str]| {
        let store = tempfile::tempdir().expect("a temporary folder");
        let mut command = makaira(store.path());
        command.arg("doctor").args(json).env("MAKAIRA_LIBCUDA", library);
        ran(command.output().expect("it starts"))
    };
    let Some(new) = stub::stub("cli_new", &["full"], &[]) else { return };
    let value = answer(&doctor(&new, &["--json"]));
    assert_eq!(text(&value, "/driver/version"), "13.0");
    assert_eq!(text(&value, "/driver/ptx_ceiling"), "9.0");
    assert_eq!(value["devices"].as_array().map(Vec::len), Some(2));
    assert_eq!(value["devices"][1]["families"][0]["runs"], true);
    let old = [("STUB_DRIVER_VERSION", "11040"), ("STUB_PTX_CEILING", "74")];
    let Some(old) = stub::stub("cli_old", &[], &old) else { return };
    let told = doctor(&old, &[]);
    assert_eq!(told.code, 0, "{}", told.stderr);
    for part in [
        "CUDA 11.4, assembles PTX up to 7.4",
        "cuGraphLaunch: products cannot be timed as graphs",
        "none that a product needs",
        "family sm80 does not run: it needs PTX 7.8, the driver assembles 7.4; update the driver",
    ] {
        assert!(told.stdout.contains(part), "{part}\n{}", told.stdout);
    }
}

#[test]
fn the_cache_is_listed_and_cleared() {
    let store = tempfile::tempdir().expect("a temporary folder");
    let entry = store.path().join("marlin_sm80_x-0123456789abcdef0123456789abcdef.cubin");
    let other = store.path().join("notes.txt");
    fs::write(&entry, [0; 100]).expect("written");
    fs::write(&other, "mine").expect("written");
    let cache = |args: &[&str]| {
        ran(makaira(store.path()).arg("cache").args(args).output().expect("it starts"))
    };
    let list = cache(&["list"]);
    assert!(list.stdout.starts_with("0123456789ab      100 B      0 h  marlin_sm80_x\n"));
    assert!(list.stdout.ends_with(": 1 kernel, 100 B\n"), "{}", list.stdout);
    let value = answer(&cache(&["list", "--json"]));
    assert_eq!(text(&value, "/entries/0/name"), "marlin_sm80_x");
    assert_eq!(answer(&cache(&["clear", "--json"]))["num_entries"], 1);
    assert!(!entry.exists() && other.exists(), "files of others stay");
    assert!(cache(&["list"]).stdout.ends_with(": 0 kernels, 0 B\n"));
}

/// `--no-cache` reaches the process that works: its store is off, its exit code comes through.
#[test]
fn no_cache_turns_the_store_off() {
    let store = tempfile::tempdir().expect("a temporary folder");
    let run = |args: &[&str]| {
        let mut command = makaira(store.path());
        ran(command.args(args).env("MAKAIRA_LIBCUDA", NO_DRIVER).output().expect("it starts"))
    };
    assert!(answer(&run(&["doctor", "--json"]))["store"]["folder"].is_string());
    assert!(answer(&run(&["--no-cache", "doctor", "--json"]))["store"]["folder"].is_null());
    assert!(answer(&run(&["doctor", "--json", "--no-cache"]))["store"]["folder"].is_null());
    assert_eq!(run(&["--no-cache", "run", "/nonexistent", "--all"]).code, 1);
}

/// Rule, value and remedy, on stderr alone; exit code 1 for failures, 2 for wrong usage.
#[test]
fn errors_say_what_to_do() {
    let cases = [
        "run /nonexistent --all",
        "run assets/demo --layer k_proj",
        "run assets/demo --all --device gpu",
        "ptx marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s12_c1",
        "ptx marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s4_c1 --target sm_75",
        "ptx --m 16 --n 4096 --k 4096 --target sm_75",
        "ptx --m 16 --n 4096 --k 4096 --group 48",
        "ptx --m 0 --n 4096 --k 4096",
        "ptx --all /dev/null/folder",
    ];
    let texts: Vec<String> =
        cases.iter().map(|args| format!("$ makaira {args}\n{}", failure(args))).collect();
    insta::assert_snapshot!("failures", texts.join("\n"));
}

#[test]
fn wrong_usage_is_told_and_exits_with_two() {
    let cases = [
        "fly",
        "run assets/demo",
        "demo --device tpu",
        "demo --device-like voodoo2",
        "ptx",
        "ptx --m 16",
        "ptx marlin_sm80 --m 16",
        "ptx marlin_sm81_u4b8",
        "explain",
        "cache",
    ];
    for args in cases {
        assert_eq!(line(args).code, 2, "{args}");
    }
    let texts = ["demo --device-like voodoo2", "ptx marlin_sm81_u4b8", "ptx --m 16"]
        .map(|args| format!("$ makaira {args}\n{}", failure(args)));
    insta::assert_snapshot!("usage", texts.join("\n"));
}

/// A reader that goes away early ends the program quietly.
#[test]
fn a_closed_pipe_is_no_failure() {
    let store = tempfile::tempdir().expect("a temporary folder");
    let mut child = makaira(store.path())
        .args(["ptx", "marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s4_c1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    drop(child.stdout.take());
    let ended = ran(child.wait_with_output().expect("it ends"));
    assert_eq!((ended.code, ended.stderr.as_str()), (0, ""));
}

#[test]
fn help_names_every_command() {
    let help = line("--help");
    assert_eq!(help.code, 0);
    for command in ["demo", "run", "ptx", "explain", "bench", "tune", "doctor", "cache"] {
        assert!(help.stdout.contains(&format!("\n  {command} ")), "{command}\n{}", help.stdout);
    }
}

#[test]
fn bench_says_what_it_cannot_do() {
    for (args, why) in [
        ("", "bench times a GPU; without one `makaira explain` predicts times"),
        ("--chain 8b,70b --ms 1,16,64", "bench times a GPU"),
        ("--chain 13b", "`13b` is no model; write 8b, 70b or"),
        ("--chain 2x512x512", "one product, which would overwrite its own input"),
        ("--chain 2x512x512+256x512", "256 outputs cannot feed 512 inputs"),
        ("--chain 8b --shapes 8b_o", "'--chain <MODEL>' cannot be used with '--shapes <SHAPES>'"),
        ("--chain 8b --sweep 3", "'--chain <MODEL>' cannot be used with '--sweep <N>'"),
        ("--moe mixtral,qwen3-30b-a3b,deepseek-v3,4x64x128x2 --ms 1,16", "bench times a GPU"),
        (
            "--moe gpt",
            "`gpt` is no mixture of experts; write mixtral, qwen3-30b-a3b, deepseek-v3 or",
        ),
        ("--moe 4x64x128x5", "5 of 4 experts"),
        ("--moe mixtral --chain 8b", "cannot be used with"),
        ("--shapes 8b_out", "`8b_out` is no shape"),
        ("--ms 0", "invalid value '0' for '--ms <MS>'"),
        ("--config marlin_sm80", "the weight type is missing"),
        ("--type u8b128 --activation bf16 --group -1", "bench times a GPU"),
        ("--type fp8", "`fp8` is no weight type; there are e2m1"),
    ] {
        let text = failure(&format!("bench {args}"));
        assert!(text.contains(why), "bench {args}: {why}\n{text}");
    }
    let help = line("bench --help");
    for option in
        ["--shapes", "--ms", "--chain", "--moe", "--no-early", "--no-ceiling", "--fp16", "--plot"]
    {
        assert!(help.stdout.contains(option), "{option}\n{}", help.stdout);
    }
}
