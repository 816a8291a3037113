//! Checkpoints of real tools: they decode to their goldens or are refused by name.

mod fixtures;

use std::path::Path;

use fixtures::{fixture, weights_of};
use half::f16;
use makaira::checkpoint::{CONVENTIONS, Checkpoint, Error, Tensors};
use makaira::weights::{self, PackedWeights};

const GOLDEN_LAYERS: [&str; 3] = [
    "model.layers.0.self_attn.k_proj",
    "model.layers.2.mlp.gate_proj",
    "model.layers.5.mlp.down_proj",
];

fn halves(bytes: &[u8]) -> Vec<f16> {
    bytes.chunks_exact(2).map(|pair| f16::from_le_bytes([pair[0], pair[1]])).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|q| f32::from_le_bytes([q[0], q[1], q[2], q[3]])).collect()
}

fn packed(checkpoint: &Checkpoint, name: &str) -> PackedWeights {
    let matrix = checkpoint.layer(name).expect("a legal layer");
    PackedWeights::pack(&matrix, weights::default_threads()).expect("4-bit codes")
}

/// x W^T in f64 from the decoded weight rounded to fp16, compared with the recorded y.
fn assert_golden_product(weight: &PackedWeights, goldens: &Tensors, name: &str) {
    let tensor = |suffix| goldens.get(&format!("{name}.{suffix}")).expect("recorded");
    let (x, y) = (halves(tensor("x").bytes), floats(tensor("y").bytes));
    let (n, k) = (weight.layout().n, weight.layout().k);
    assert_eq!((x.len(), y.len()), (16 * k, 16 * n));
    let dense: Vec<f64> = weight.dequantize().iter().map(|&w| f16::from_f32(w).to_f64()).collect();
    for (i, &recorded) in y.iter().enumerate() {
        let (row, column) = (i / n, i % n);
        let terms = (0..k).map(|k_idx| x[row * k + k_idx].to_f64() * dense[column * k + k_idx]);
        let (sum, size) = terms.fold((0.0, 0.0), |(s, a), term: f64| (s + term, a + term.abs()));
        let error = (sum - f64::from(recorded)).abs();
        // The recording was rounded to f32; both sums are f64.
        assert!(error <= f64::from(recorded).abs() * 6e-8 + size * 1e-14, "({row}, {column})");
    }
}

#[test]
fn the_demonstration_layer_decodes_to_its_goldens() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let checkpoint = Checkpoint::open(&folder).expect("the shipped layer");
    assert!(checkpoint.findings().is_empty());
    let [layer] = checkpoint.layers() else { panic!("one layer: {:?}", checkpoint.layers()) };
    assert_eq!(
        layer.to_string(),
        "model.layers.0.self_attn.k_proj: 128 x 384, u4b8, group 128, gptq"
    );
    assert_eq!(checkpoint.inspect(&layer.name).expect("legal"), []);
    let goldens = Tensors::open(&folder.join("goldens.safetensors")).expect("recorded");
    assert_golden_product(&packed(&checkpoint, &layer.name), &goldens, &layer.name);
}

#[test]
fn real_layers_decode_to_their_goldens_bit_for_bit() {
    let folders = [
        ("gptq-g128-sym", 42, 128),
        ("gptq-g32-sym", 3, 32),
        ("gptq-channelwise", 3, -1),
        ("marlin-g128", 42, 128),
        ("marlin-channelwise", 3, -1),
    ];
    for (name, num_layers, group) in folders {
        let Some(folder) = fixture(name) else { continue };
        let goldens = Tensors::open(&folder.join("goldens.safetensors")).expect("recorded");
        let checkpoint = Checkpoint::open(&weights_of(folder)).expect("readable");
        assert_eq!(checkpoint.layers().len(), num_layers, "{name}");
        assert_eq!(checkpoint.findings(), [], "{name}");
        assert_eq!(checkpoint.convention(), name.split('-').next().expect("a first word"));
        for layer in checkpoint.layers() {
            assert_eq!(layer.group.raw(), group, "{name}: {layer}");
            let weight = packed(&checkpoint, &layer.name);
            assert_eq!((weight.layout().n, weight.layout().k), (layer.n, layer.k));
            if !GOLDEN_LAYERS.contains(&layer.name.as_str()) {
                continue;
            }
            let golden = goldens.get(&format!("{}.weight", layer.name)).expect("recorded");
            assert_eq!(golden.shape, [layer.n, layer.k]);
            let decoded = weight.dequantize().into_iter().map(f16::from_f32);
            for (i, (ours, recorded)) in decoded.zip(halves(golden.bytes)).enumerate() {
                let place = (i / layer.k, i % layer.k);
                assert_eq!(ours.to_bits(), recorded.to_bits(), "{name} {layer} {place:?}");
            }
            assert_golden_product(&weight, &goldens, &layer.name);
        }
    }
}

#[test]
fn what_is_not_supported_yet_is_refused_by_name() {
    let cases: [(&str, &[&str]); 11] = [
        ("gptq-g128-asym", &["sym false"]),
        ("gptq-g128-asym-v2", &["sym false"]),
        ("gptq-8bit-g128", &["bits 8"]),
        ("awq-g128", &["quant_method awq", "version gemm"]),
        ("ct-w4a16-g128", &["compressed-tensors", "pack-quantized"]),
        ("ct-w4a16-asym-g128", &["compressed-tensors", "pack-quantized"]),
        ("ct-w8a16", &["compressed-tensors", "pack-quantized"]),
        ("ct-fp8-dynamic", &["compressed-tensors", "float-quantized"]),
        ("ct-nvfp4a16", &["compressed-tensors", "nvfp4"]),
        ("ct-mxfp4a16", &["compressed-tensors", "mxfp4"]),
        ("ct-marlin24-w4a16", &["compressed-tensors", "marlin-24"]),
    ];
    for (name, parts) in cases {
        let Some(folder) = fixture(name) else { continue };
        let error = Checkpoint::open(&weights_of(folder)).expect_err(name);
        assert!(matches!(error, Error::Unsupported { .. }), "{name}: {error}");
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{name}: {text}");
    }
    if let Some(folder) = fixture("gptq-g128-actorder") {
        let checkpoint = Checkpoint::open(&folder).expect("the headers are those of plain GPTQ");
        for layer in checkpoint.layers() {
            let error = checkpoint.layer(&layer.name).expect_err("permuted");
            assert!(matches!(error, Error::ActOrder { .. }), "{}: {error}", layer.name);
        }
    }
    if let Some(folder) = fixture("tiny-llama") {
        let tensors = Tensors::open(&folder).expect("two shards with an index");
        assert_eq!(tensors.files().count(), 2);
        assert_eq!(tensors.get("model.embed_tokens.weight").expect("there").shape, [4096, 384]);
        assert!(matches!(Checkpoint::open(&folder), Err(Error::NotQuantised { .. })));
    }
}

#[test]
fn the_registry_is_sorted_and_its_names_are_unique() {
    let names: Vec<_> = CONVENTIONS.iter().map(|convention| convention.name()).collect();
    assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
}

#[test]
fn a_layer_that_is_not_there_gets_a_suggestion() {
    let checkpoint = Checkpoint::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo"));
    let checkpoint = checkpoint.expect("the shipped layer");
    let error = checkpoint.layer("layers.0.self_attn.k_proj").expect_err("a prefix is missing");
    assert_eq!(
        error.to_string(),
        "no quantised layer layers.0.self_attn.k_proj; did you mean \
         model.layers.0.self_attn.k_proj?"
    );
}
