//! Checkpoints of real tools: they decode to their goldens, or are refused by name.

mod fixtures;

use std::path::Path;

use fixtures::{fixture, weights_of};
use half::f16;
use makaira::checkpoint::{CONVENTIONS, Checkpoint, Error, Finding, Tensors};
use makaira::layout::f16_from_f64;
use makaira::weights::{self, PackedWeights, QuantMatrix};

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

/// The weights `[N][K]`, exactly, in the order of the file.
fn exact(matrix: &QuantMatrix<'_>) -> Vec<f64> {
    let (n, k) = (matrix.n(), matrix.k());
    (0..n * k).map(|at| matrix.value(at % k, at / k)).collect()
}

/// x W^T in f64 from weights rounded to fp16, compared with the recorded y.
fn assert_golden_product(weights: &[f16], (n, k): (usize, usize), goldens: &Tensors, name: &str) {
    let tensor = |suffix| goldens.get(&format!("{name}.{suffix}")).expect("recorded");
    let (x, y) = (halves(tensor("x").bytes), floats(tensor("y").bytes));
    assert_eq!((x.len(), y.len()), (16 * k, 16 * n));
    let dense: Vec<f64> = weights.iter().map(|w| w.to_f64()).collect();
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
    let matrix = checkpoint.layer(&layer.name).expect("legal");
    let weights: Vec<f16> = exact(&matrix).into_iter().map(f16_from_f64).collect();
    assert_golden_product(&weights, (layer.n, layer.k), &goldens, &layer.name);
}

/// Folder, layers, convention, weight type, group, and whether groups are permuted.
const READABLE: [(&str, usize, &str, &str, i64, bool); 15] = [
    ("gptq-g128-sym", 42, "gptq", "u4b8", 128, false),
    ("gptq-g32-sym", 3, "gptq", "u4b8", 32, false),
    ("gptq-channelwise", 3, "gptq", "u4b8", -1, false),
    ("gptq-g128-actorder", 42, "gptq", "u4b8", 128, true),
    ("gptq-g128-asym", 42, "gptq", "u4", 128, false),
    ("gptq-g128-asym-v2", 3, "gptq", "u4", 128, false),
    ("gptq-8bit-g128", 3, "gptq", "u8b128", 128, false),
    ("awq-g128", 42, "awq", "u4", 128, false),
    ("ct-w4a16-g128", 42, "pack-quantized", "u4b8", 128, false),
    ("ct-w4a16-asym-g128", 42, "pack-quantized", "u4", 128, false),
    ("ct-w8a16", 3, "pack-quantized", "u8b128", 128, false),
    ("ct-fp8-dynamic", 3, "float-quantized", "e4m3", -1, false),
    ("ct-mxfp4a16", 3, "mxfp4-pack-quantized", "e2m1", 32, false),
    ("marlin-g128", 42, "marlin", "u4b8", 128, false),
    ("marlin-channelwise", 3, "marlin", "u4b8", -1, false),
];

#[test]
fn real_layers_decode_to_their_goldens_bit_for_bit() {
    for (name, num_layers, convention, format, group, permuted) in READABLE {
        let Some(folder) = fixture(name) else { continue };
        let goldens = Tensors::open(&folder.join("goldens.safetensors")).expect("recorded");
        let checkpoint = Checkpoint::open(&weights_of(folder)).expect("readable");
        assert_eq!(checkpoint.layers().len(), num_layers, "{name}");
        let unexpected = |finding: &&Finding| {
            name != "ct-fp8-dynamic" || !matches!(finding, Finding::Activations { .. })
        };
        assert_eq!(checkpoint.findings().iter().find(unexpected), None, "{name}");
        assert_eq!(checkpoint.conventions(), [convention], "{name}");
        for layer in checkpoint.layers() {
            assert_eq!(
                (layer.format.name(), layer.group.raw()),
                (format, group),
                "{name}: {layer}"
            );
            let matrix = checkpoint.layer(&layer.name).expect("a legal layer");
            assert_eq!((matrix.n(), matrix.k()), (layer.n, layer.k));
            assert_eq!(matrix.g_idx().is_some(), permuted, "{name}: {layer}");
            assert_eq!(checkpoint.inspect(&layer.name).expect("legal"), [], "{name}: {layer}");
            if !GOLDEN_LAYERS.contains(&layer.name.as_str()) {
                continue;
            }
            let golden = goldens.get(&format!("{}.weight", layer.name)).expect("recorded");
            assert_eq!(golden.shape, [layer.n, layer.k]);
            let weights: Vec<f16> = exact(&matrix).into_iter().map(f16_from_f64).collect();
            for (i, (ours, recorded)) in weights.iter().zip(halves(golden.bytes)).enumerate() {
                let place = (i / layer.k, i % layer.k);
                assert_eq!(ours.to_bits(), recorded.to_bits(), "{name} {layer} {place:?}");
            }
            assert_golden_product(&weights, (layer.n, layer.k), &goldens, &layer.name);
            if matrix.check_packable().is_ok() {
                let packed = PackedWeights::pack(&matrix, weights::default_threads());
                let packed = packed.expect("it was said to pack").dequantize();
                assert!(packed == makaira::reference::decode(&matrix), "{name}: {layer}");
            }
        }
    }
}

/// NVFP4's goldens round scale / global scale to fp32 first; ours are exact but for the reciprocal.
#[test]
fn nvfp4_layers_decode_to_their_goldens() {
    let Some(folder) = fixture("ct-nvfp4a16") else { return };
    let goldens = Tensors::open(&folder.join("goldens.safetensors")).expect("recorded");
    let checkpoint = Checkpoint::open(&weights_of(folder)).expect("readable");
    assert_eq!((checkpoint.findings(), checkpoint.layers().len()), (&[][..], 3));
    for layer in checkpoint.layers() {
        assert_eq!((layer.format.name(), layer.group.raw()), ("e2m1", 16), "{layer}");
        assert_eq!(layer.convention, "nvfp4-pack-quantized");
        let matrix = checkpoint.layer(&layer.name).expect("legal");
        let global = checkpoint.tensors().get(&format!("{}.weight_global_scale", layer.name));
        let divisor = floats(global.expect("there").bytes)[0];
        let golden = goldens.get(&format!("{}.weight", layer.name)).expect("recorded");
        let mut weights = Vec::new();
        for (i, recorded) in halves(golden.bytes).into_iter().enumerate() {
            let (n, k) = (i / layer.k, i % layer.k);
            let (code, scale) = (matrix.code(k, n), matrix.scale(k / 16, n));
            let value = f64::from(layer.format.decode(code)) * f64::from(scale / divisor);
            assert_eq!(f16_from_f64(value).to_bits(), recorded.to_bits(), "{layer} ({n}, {k})");
            // Two roundings to fp32 apart.
            let ours = matrix.value(k, n);
            assert!((ours - value).abs() <= value.abs() * 2f64.powi(-22), "{layer} ({n}, {k})");
            weights.push(recorded);
        }
        assert_golden_product(&weights, (layer.n, layer.k), &goldens, &layer.name);
    }
}

/// The same run saved in both versions of the format.
#[test]
fn both_versions_of_asymmetric_gptq_are_the_same_weights() {
    let (Some(v1), Some(v2)) = (fixture("gptq-g128-asym"), fixture("gptq-g128-asym-v2")) else {
        return;
    };
    let v1 = Checkpoint::open(&weights_of(v1)).expect("readable");
    let v2 = Checkpoint::open(&weights_of(v2)).expect("readable");
    for layer in v2.layers() {
        let matrices = [&v1, &v2].map(|checkpoint| checkpoint.layer(&layer.name).expect("legal"));
        assert_ne!(matrices[0].zeros().expect("u4").bytes, matrices[1].zeros().expect("u4").bytes);
        assert!(exact(&matrices[0]) == exact(&matrices[1]), "{layer}");
    }
}

/// A plain checkpoint is rounded when it is loaded, by the quantiser's rule.
#[test]
fn plain_checkpoints_are_rounded_when_they_are_loaded() {
    let Some(folder) = fixture("tiny-llama") else { return };
    let checkpoint = Checkpoint::open(&folder).expect("two shards with an index");
    assert_eq!(checkpoint.tensors().files().count(), 2);
    assert_eq!((checkpoint.layers().len(), checkpoint.conventions()), (42, vec!["plain"]));
    assert_eq!(checkpoint.findings(), []);
    for name in GOLDEN_LAYERS {
        assert!(matches!(checkpoint.layer(name), Err(Error::NotStored { .. })));
        assert_eq!(checkpoint.inspect(name).expect("legal"), []);
        let weight = checkpoint.load(name, 2).expect("finite");
        let matrix = weight.view();
        let dense = checkpoint.tensors().get(&format!("{name}.weight")).expect("there");
        for (i, (ours, dense)) in exact(&matrix).into_iter().zip(halves(dense.bytes)).enumerate() {
            let (n, k) = (i / matrix.k(), i % matrix.k());
            let step = f64::from(matrix.scale(matrix.group_of_input(k), n));
            assert!((ours - dense.to_f64()).abs() <= 0.51 * step, "{name} ({n}, {k})");
        }
    }
    let error = checkpoint.layer("model.embed_tokens").expect_err("an embedding").to_string();
    assert!(error.contains("no quantised layer"), "{error}");
}

#[test]
fn what_is_not_read_is_refused_by_name() {
    for (name, format) in [
        ("ct-marlin24-w4a16", "format marlin-24"),
        ("ct-sparse24-bitmask", "format sparse-24-bitmask"),
    ] {
        let Some(folder) = fixture(name) else { continue };
        let error = Checkpoint::open(&weights_of(folder)).expect_err(name);
        assert!(matches!(error, Error::Unsupported { .. }), "{name}: {error}");
        let text = error.to_string();
        assert!(text.contains("compressed-tensors") && text.contains(format), "{name}: {text}");
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
