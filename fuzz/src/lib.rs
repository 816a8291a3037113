//! What a fuzzer feeds with bytes: everything that is read from files of strangers.
//!
//! Each target takes any input and ends with whether it was accepted; a panic, or a promise that is not kept, is a
//! find. `cargo +nightly fuzz run header` looks for new inputs; `tests/fuzz.rs` of the crate feeds those that are kept
//! in `corpus/`, and mutations of them, without any tool.

use std::fs;
use std::path::Path;

use makaira::checkpoint::Checkpoint;
use makaira::store::PackedStore;
use makaira::weights::{
    Codes, Group, InputOrder, MatrixParts, PackedWeights, QuantMatrix, ScaleOrder, Scales, U4,
    ZeroOrder, Zeros,
};

/// A legal checkpoint: its name, the configuration, the file of tensors.
pub type Seed = (&'static str, &'static [u8], &'static [u8]);

macro_rules! seeds {
    ($($name:literal),* $(,)?) => {
        &[$((
            $name,
            include_bytes!(concat!("../seeds/", $name, ".json")),
            include_bytes!(concat!("../seeds/", $name, ".safetensors")),
        )),*]
    };
}

/// A small checkpoint of each convention.
pub const SEEDS: &[Seed] = seeds![
    "awq",
    "ct-fp8",
    "ct-int4",
    "ct-mxfp4",
    "ct-nvfp4",
    "fp8-blocks",
    "gptq",
    "gptq-asymmetric",
    "marlin",
    "mxfp4-blocks",
    "plain",
];

/// Takes an input; whether it was accepted.
pub type Target = fn(&[u8]) -> bool;

/// Every target by name.
pub const TARGETS: &[(&str, Target)] = &[
    ("config", config),
    ("group_indices", group_indices),
    ("header", header),
    ("index", index),
    ("store", store),
];

/// The seed that the first byte picks, and the rest.
fn picked(input: &[u8]) -> Option<(&'static Seed, &[u8])> {
    let (first, rest) = input.split_first()?;
    Some((&SEEDS[usize::from(*first) % SEEDS.len()], rest))
}

/// Runs something in a folder that holds these files.
fn in_folder<R>(files: &[(&str, &[u8])], run: impl FnOnce(&Path) -> R) -> R {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).expect("room for a small file");
    }
    run(folder.path())
}

fn open(folder: &Path) -> bool {
    match Checkpoint::open(folder) {
        Ok(checkpoint) => read_all(&checkpoint),
        Err(error) => is_told(&error),
    }
}

/// A refusal says why.
fn is_told(error: &dyn std::error::Error) -> bool {
    assert!(!error.to_string().is_empty());
    false
}

/// Reads everything that a checkpoint offers; whether all of it was accepted.
pub fn read_all(checkpoint: &Checkpoint) -> bool {
    let mut accepted = true;
    for finding in checkpoint.findings() {
        assert!(!finding.to_string().is_empty());
    }
    for info in checkpoint.layers() {
        assert!(!info.to_string().is_empty() && info.ranks_by_inputs(false).contains(&1));
        let findings = checkpoint.inspect(&info.name);
        let weight = checkpoint.load(&info.name, 1);
        accepted &= findings.is_ok() && weight.is_ok();
        let Ok(weight) = weight else { continue };
        let matrix = weight.view();
        assert_eq!((matrix.n(), matrix.k()), (info.n, info.k));
        for at in 0..matrix.n() * matrix.k() {
            let (k, n) = (at % matrix.k(), at / matrix.k());
            // NaN codes of fp8 are values too; scales are finite by now.
            let _ = matrix.value(k, n);
            assert!(matrix.scale(matrix.group_of_input(k), n).is_finite());
        }
        match (matrix.check_packable(), PackedWeights::pack(&matrix, 1)) {
            (Ok(()), Ok(packed)) => {
                assert_eq!((packed.layout().n, packed.source_inputs()), (info.n, info.k));
            }
            (Ok(()), Err(error)) => panic!("said to pack: {error}"),
            (Err(_), packed) => assert!(packed.is_err(), "said not to pack"),
        }
    }
    accepted
}

/// A file of tensors, its header among them, with a legal configuration of some convention.
pub fn header(input: &[u8]) -> bool {
    let Some(((_, config, _), tensors)) = picked(input) else { return false };
    in_folder(&[("config.json", config), ("model.safetensors", tensors)], open)
}

/// A configuration, with the tensors of some convention.
pub fn config(input: &[u8]) -> bool {
    let Some(((_, _, tensors), config)) = picked(input) else { return false };
    in_folder(&[("config.json", config), ("model.safetensors", tensors)], open)
}

/// An index of two shards, one of which holds numbers that are not quantised.
pub fn index(input: &[u8]) -> bool {
    let [(_, config, first), (_, _, second)] =
        ["gptq", "plain"].map(|name| *SEEDS.iter().find(|seed| seed.0 == name).expect("listed"));
    let files = [
        ("config.json", config),
        ("model-00001-of-00002.safetensors", first),
        ("model-00002-of-00002.safetensors", second),
        ("model.safetensors.index.json", input),
    ];
    in_folder(&files, open)
}

/// Group indices of a layer, as many as there are inputs or not. The first byte says how many groups there are. Those
/// that are accepted come back from the packed order, each input once.
pub fn group_indices(input: &[u8]) -> bool {
    let Some((first, g_idx)) = input.split_first() else { return false };
    let (n, num_groups) = (8, 1 + usize::from(first % 16));
    let k = (g_idx.len() / 4).max(1);
    let codes: Vec<u8> = (0..n * k).map(|at| (at * 7 % 16) as u8).collect();
    let zeros: Vec<u8> = (0..n * num_groups).map(|at| (at % 16) as u8).collect();
    // From 1 on, neighbours differ.
    let scales: Vec<u8> =
        (0..n * num_groups).flat_map(|at| (0x3c00 + at as u16).to_le_bytes()).collect();
    let group = if first & 0x80 == 0 { Group::PerColumn } else { Group::Size(32) };
    let parts = MatrixParts {
        n,
        k,
        group,
        format: &U4,
        codes: Codes::ByInput(&codes),
        scales: Scales::f16(&scales, ScaleOrder::Rows),
        zeros: Some(Zeros { bytes: &zeros, order: ZeroOrder::Rows }),
        g_idx: Some(g_idx),
    };
    let matrix = match QuantMatrix::from_parts(parts) {
        Ok(matrix) => matrix,
        Err(error) => return is_told(&error),
    };
    let packed = match PackedWeights::pack(&matrix, 1) {
        Ok(packed) => packed,
        Err(error) => return is_told(&error),
    };
    if let Some(order) = packed.input_order() {
        let inputs = order.inputs().iter().filter(|input| **input != InputOrder::NONE);
        let mut inputs: Vec<u32> = inputs.copied().collect();
        inputs.sort_unstable();
        assert!(inputs.into_iter().eq(0..k as u32), "each input once");
    }
    for (at, weight) in packed.dequantize().into_iter().enumerate() {
        assert_eq!(f64::from(weight), matrix.value(at % k, at / k), "input {}", at % k);
    }
    true
}

/// A file of a packed store. Whatever is accepted is decoded, and has a layout that fits its bytes.
pub fn store(input: &[u8]) -> bool {
    in_folder(&[("packed.safetensors", input)], |folder| {
        let store = match PackedStore::open(&folder.join("packed.safetensors")) {
            Ok(store) => store,
            Err(error) => return is_told(&error),
        };
        for layer in store.layers() {
            let packed = match store.packed(&layer.name) {
                Ok(packed) => packed,
                Err(error) => panic!("opened, but {error}"),
            };
            let spec = packed.spec();
            assert_eq!(packed.bytes().len(), spec.layout().total_bytes);
            assert_eq!(packed.dequantize().len(), spec.layout().n * spec.source_inputs());
            packed.unpack();
            // A bias was checked with the layer.
            store.bias(&layer.name).unwrap_or_else(|error| panic!("opened, but {error}"));
        }
        store.check(1).map_or_else(|error| is_told(&error), |()| true)
    })
}
