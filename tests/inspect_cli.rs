//! `makaira inspect` and `makaira verify`, as a user or a program calls it.
#![cfg(feature = "cli")]

mod fixtures;

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn inspect<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    makaira("inspect", args)
}

fn makaira<S: AsRef<OsStr>>(subcommand: &str, args: impl IntoIterator<Item = S>) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_makaira"));
    command.current_dir(root()).env_remove("RUST_LOG").stdin(Stdio::null());
    let output = command.arg(subcommand).args(args).output().expect("it starts");
    let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
    let code = output.status.code().expect("the program ends by itself");
    Ran { code, stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// The JSON answer of a successful run.
fn answer(ran: &Ran) -> Value {
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    serde_json::from_str(&ran.stdout).unwrap_or_else(|error| panic!("{error}: {}", ran.stdout))
}

#[test]
fn inspect_says_what_is_in_a_checkpoint() {
    let ran = inspect(["assets/demo"]);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""));
    insta::assert_snapshot!("inspect_demo", ran.stdout);
    let value = answer(&inspect(["assets/demo", "--json"]));
    assert_eq!(value["found"], json!(["gptq"]));
    let layer = &value["layers"][0];
    assert_eq!(layer["layer"], "model.layers.0.self_attn.k_proj");
    assert_eq!(
        (&layer["n"], &layer["k"], &layer["group"]),
        (&128.into(), &384.into(), &128.into())
    );
    assert_eq!(layer["ranks_by_inputs"], json!([1, 3]));
    assert!(layer["refused"].is_null() && layer["does_not_run"].is_null());
    let failed = inspect(["assets/demo/config.json"]);
    assert_eq!(failed.code, 1, "{}", failed.stdout);
}

/// Bad scales with tensor and row, unused tensors and labels that lie, told to people and programs.
#[test]
fn b39_b89_inspect_lists_what_is_odd() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut file = fs::read(root().join("assets/demo/model.safetensors")).expect("shipped");
    let header_bytes = u64::from_le_bytes(file[..8].try_into().expect("eight")) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + header_bytes]).expect("a header");
    let scales = &header["model.layers.0.self_attn.k_proj.scales"];
    let start = scales["data_offsets"][0].as_u64().expect("an offset") as usize;
    // NaN, infinity, zero, a subnormal; a row has 128 scales.
    for (at, bits) in [(5, 0x7e00u16), (128 + 7, 0xfc00), (3, 0), (256 + 127, 1)] {
        let byte = 8 + header_bytes + start + 2 * at;
        file[byte..byte + 2].copy_from_slice(&bits.to_le_bytes());
    }
    fs::write(folder.path().join("model.safetensors"), &file).expect("written");
    fs::copy(root().join("assets/demo/config.json"), folder.path().join("config.json"))
        .expect("copied");
    let ran = inspect([folder.path()]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    for (place, fault) in [
        ("group 0, column 5", "NaN"),
        ("group 1, column 7", "infinite"),
        ("group 0, column 3", "zero"),
        ("group 2, column 127", "subnormal"),
    ] {
        let told = ran.stdout.lines().any(|line| {
            line.contains("k_proj.scales") && line.contains(place) && line.ends_with(fault)
        });
        assert!(told, "{place} {fault}: {}", ran.stdout);
    }
    let value = answer(&inspect([folder.path(), "--json".as_ref()]));
    let verified = makaira("verify", [folder.path()]);
    assert_eq!(verified.code, 1, "{}", verified.stdout);
    assert_eq!(verified.stdout.matches("doubt: ").count(), 5, "{}", verified.stdout);
    assert!(verified.stderr.contains("5 doubts in"), "{}", verified.stderr);
    let findings = value["layers"][0]["findings"].as_array().expect("findings");
    assert_eq!(findings.len(), 4, "{value:#}");
    assert!(findings.iter().all(|finding| finding["kind"] == "scale"));
}

#[test]
fn every_fixture_is_inspected() {
    for (name, convention) in [
        ("awq-g128", "awq"),
        ("ct-fp8-dynamic", "float-quantized"),
        ("ct-mxfp4a16", "mxfp4-pack-quantized"),
        ("ct-nvfp4a16", "nvfp4-pack-quantized"),
        ("ct-w4a16-asym-g128", "pack-quantized"),
        ("ct-w8a16", "pack-quantized"),
        ("gptq-8bit-g128", "gptq"),
        ("gptq-g128-actorder", "gptq"),
        ("gptq-g128-asym-v2", "gptq"),
        ("marlin-g128", "marlin"),
        ("tiny-llama", "plain"),
    ] {
        let Some(folder) = fixtures::fixture(name).map(fixtures::weights_of) else { continue };
        let value = answer(&inspect(["--json".as_ref(), folder.as_path()]));
        assert_eq!(value["found"], json!([convention]), "{name}");
        let layers = value["layers"].as_array().expect("layers");
        assert!(layers.len() == 3 || layers.len() == 42, "{name}: {}", layers.len());
        for layer in layers {
            assert!(layer["refused"].is_null(), "{name}: {layer:#}");
            assert_eq!(layer["findings"], json!([]), "{name}");
            assert_eq!(layer["act_order"], Value::Bool(name == "gptq-g128-actorder"), "{name}");
            assert_eq!(layer["zeros"], Value::Bool(layer["format"] == "u4"), "{name}");
        }
    }
}

/// What is right passes, by its numbers too; what is doubtful fails, and says why to programs as well.
#[test]
fn b89_verify_fails_on_anything_doubtful() {
    let args =
        ["assets/demo", "--numerics", "--device", "emu", "--m", "1,3", "--seed", "5", "--json"];
    let value = answer(&makaira("verify", args));
    assert_eq!((&value["ok"], &value["doubts"]), (&true.into(), &json!([])));
    assert_eq!(value["numerics"].as_array().expect("products").len(), 2, "{value:#}");

    let demo = root().join("assets/demo");
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::copy(demo.join("model.safetensors"), folder.path().join("model.safetensors"))
        .expect("copied");
    let config = fs::read(demo.join("config.json")).expect("shipped");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    // A layer that is said not to be quantised, and blocks that are not there.
    config["quantization_config"]["modules_to_not_convert"] = json!(["self_attn"]);
    config["num_hidden_layers"] = 2.into();
    fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let ran = makaira("verify", [folder.path(), "--json".as_ref()]);
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    let value: Value = serde_json::from_str(&ran.stdout).expect("JSON all the same");
    let doubts = value["doubts"].as_array().expect("doubts");
    let kinds: Vec<&str> = doubts.iter().filter_map(|doubt| doubt["kind"].as_str()).collect();
    assert_eq!(kinds, ["missing-block", "ignored"]);
    assert_eq!(value["ok"], Value::Bool(false));
}

/// Real layers of every convention, read, packed and multiplied on the emulator.
#[test]
fn fixtures_of_every_convention_are_right_by_their_numbers() {
    for name in [
        "awq-g128",
        "ct-fp8-dynamic",
        "ct-mxfp4a16",
        "ct-nvfp4a16",
        "ct-w4a16-asym-g128",
        "ct-w4a16-g128",
        "ct-w8a16",
        "gptq-8bit-g128",
        "gptq-channelwise",
        "gptq-g128-asym-v2",
        "gptq-g32-sym",
        "marlin-channelwise",
        "tiny-llama",
    ] {
        let Some(folder) = fixtures::fixture(name).map(fixtures::weights_of) else { continue };
        let mut args = vec![folder.as_os_str()];
        let more = ["--numerics", "--layers", "1", "--m", "1,9", "--device", "emu", "--json"];
        args.extend(more.map(OsStr::new));
        let value = answer(&makaira("verify", args));
        assert_eq!((&value["ok"], &value["doubts"]), (&true.into(), &json!([])), "{name}");
        assert_eq!(value["numerics"].as_array().expect("products").len(), 2, "{name}");
        assert_eq!(
            value["notes"].as_array().expect("notes").len(),
            usize::from(name == "ct-fp8-dynamic")
        );
    }
}
