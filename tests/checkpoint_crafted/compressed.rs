//! Packed integers of compressed-tensors: shapes, zeros, group indices, schemes and names.

use half::f16;
use makaira::checkpoint::{Dtype, Error, Finding};
use makaira::reference::Random;
use serde_json::{Value, json};

use crate::support::{Folder, Parts, load, random_bytes, refusal, values};

/// A configuration of one group, with these settings of the weights.
pub fn config(format: &str, weights: Value) -> Value {
    json!({ "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
            "quantization_status": "compressed",
            "config_groups": { "group_0": {
                "targets": ["Linear"], "input_activations": null, "weights": weights } } })
}

fn packed_config(bits: i64, group: i64, symmetric: bool) -> Value {
    let strategy = if group == -1 { "channel" } else { "group" };
    let group = if group == -1 { Value::Null } else { json!(group) };
    config(
        "pack-quantized",
        json!({ "num_bits": bits, "type": "int", "strategy": strategy, "group_size": group,
                "symmetric": symmetric }),
    )
}

/// `[N][K]` codes, packed along the rows of `[rows][columns]`, the last word filled with `fill`.
fn pack_rows(
    bits: usize,
    rows: usize,
    columns: usize,
    number: impl Fn(usize, usize) -> u32,
) -> Vec<u8> {
    let per_word = 32 / bits;
    let words = columns.div_ceil(per_word);
    (0..rows * words)
        .flat_map(|at| {
            let (row, first) = (at / words, at % words * per_word);
            let field = |i: usize| if first + i < columns { number(row, first + i) } else { 1 };
            (0..per_word).map(|i| field(i) << (bits * i)).sum::<u32>().to_le_bytes()
        })
        .collect()
}

fn i64s(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A random layer and its weights by definition.
struct Layer {
    n: usize,
    k: usize,
    bits: usize,
    groups: usize,
    codes: Vec<u8>,
    zeros: Vec<u8>,
    scales: Vec<f16>,
}

impl Layer {
    fn new((n, k): (usize, usize), bits: usize, groups: usize, random: &mut Random) -> Self {
        let mask = (0xff >> (8 - bits)) as u8;
        let below = |count: usize, random: &mut Random| -> Vec<u8> {
            random_bytes(random, count).into_iter().map(|byte| byte & mask).collect()
        };
        let codes = below(n * k, random);
        let zeros = below(n * groups, random);
        let scales = (0..n * groups).map(|_| f16::from_f64(random.uniform(1e-3, 1.0))).collect();
        Self { n, k, bits, groups, codes, zeros, scales }
    }

    fn parts(&self) -> Parts {
        let Self { n, k, bits, groups, .. } = *self;
        let packed = pack_rows(bits, n, k, |n, k_idx| u32::from(self.codes[n * k + k_idx]));
        let words = k.div_ceil(32 / bits);
        let scales = self.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let shape = i64s(&[n as i64, k as i64]);
        Parts::from([
            ("l.weight_packed".to_owned(), (Dtype::I32, vec![n, words], packed)),
            ("l.weight_scale".to_owned(), (Dtype::F16, vec![n, groups], scales)),
            ("l.weight_shape".to_owned(), (Dtype::I64, vec![2], shape)),
        ])
    }

    /// Zeros packed along the outputs.
    fn packed_zeros(&self) -> (Dtype, Vec<usize>, Vec<u8>) {
        let Self { n, bits, groups, .. } = *self;
        let rows = n.div_ceil(32 / bits);
        // `[groups][rows]` words, transposed.
        let words = pack_rows(bits, groups, n, |g, n| u32::from(self.zeros[n * groups + g]));
        let transposed = (0..rows * groups)
            .flat_map(|at| words[4 * (at % groups * rows + at / groups)..][..4].to_vec());
        (Dtype::I32, vec![rows, groups], transposed.collect())
    }

    /// Zeros in signed bytes.
    fn signed_zeros(&self) -> (Dtype, Vec<usize>, Vec<u8>) {
        let half = 1u8 << (self.bits - 1);
        let bytes = self.zeros.iter().map(|zero| zero.wrapping_sub(half)).collect();
        (Dtype::I8, vec![self.n, self.groups], bytes)
    }

    /// Every weight, with stored zeros or the middle of the codes, and the group of each input.
    fn weights(&self, stored: bool, group_of: impl Fn(usize) -> usize) -> Vec<f64> {
        let middle = 1u8 << (self.bits - 1);
        (0..self.n * self.k)
            .map(|at| {
                let scale = at / self.k * self.groups + group_of(at % self.k);
                let zero = if stored { self.zeros[scale] } else { middle };
                (f64::from(self.codes[at]) - f64::from(zero)) * self.scales[scale].to_f64()
            })
            .collect()
    }
}

#[test]
fn b87_both_forms_of_weight_shape_are_read_and_wrong_ones_refused() {
    let mut random = Random::new(Random::fresh_seed());
    let layer = Layer::new((128, 256), 4, 2, &mut random);
    let config = packed_config(4, 128, true);
    let right = layer.weights(false, |k| k / 128);
    assert!(load(&layer.parts(), &config).expect("int64") == right);
    let mut parts = layer.parts();
    let shape: Vec<u8> = [128i32, 256].iter().flat_map(|size| size.to_le_bytes()).collect();
    parts.insert("l.weight_shape".to_owned(), (Dtype::I32, vec![2], shape));
    assert!(load(&parts, &config).expect("int32") == right);
    parts.remove("l.weight_shape");
    assert!(load(&parts, &config).expect("K is a multiple of a word") == right);
    for (shape, part) in [
        ([256, 128], "[128, 32], expected [256, 16]"),
        ([128, 512], "expected [128, 64]"),
        ([127, 256], "expected [127, 32]"),
        ([0, 256], "two positive sizes"),
        ([128, -256], "two positive sizes"),
        ([i64::MIN, i64::MAX], "two positive sizes"),
        ([128, i64::MAX], "expected [128, "),
    ] {
        let mut parts = layer.parts();
        parts.get_mut("l.weight_shape").expect("there").2 = i64s(&shape);
        let text = refusal(&parts, &config);
        assert!(text.contains(part) && text.contains("l.weight"), "{shape:?}: {text}");
    }
    let mut parts = layer.parts();
    parts.insert("l.weight_shape".to_owned(), (Dtype::I64, vec![3], i64s(&[128, 256, 1])));
    assert!(refusal(&parts, &config).contains("expected [2]"));
    parts.insert("l.weight_shape".to_owned(), (Dtype::F32, vec![2], vec![0; 8]));
    assert!(refusal(&parts, &config).contains("F32, expected I64 or I32"));
}

/// Widths, zeros in both forms, one scale per column, and rows that fill no whole word.
#[test]
fn packed_integers_of_every_kind_are_read() {
    let mut random = Random::new(Random::fresh_seed());
    for bits in [4, 8] {
        for (n, k, group) in [(20, 256, 128), (128, 64, 32), (9, 21, -1)] {
            let groups = if group == -1 { 1 } else { k / group as usize };
            let group_of = |k_idx: usize| if group == -1 { 0 } else { k_idx / group as usize };
            let layer = Layer::new((n, k), bits, groups, &mut random);
            let read = load(&layer.parts(), &packed_config(bits as i64, group, true));
            assert!(read.expect("symmetric") == layer.weights(false, group_of), "{bits} {n} {k}");
            let config = packed_config(bits as i64, group, false);
            for zeros in [layer.packed_zeros(), layer.signed_zeros()] {
                let mut parts = layer.parts();
                parts.insert("l.weight_zero_point".to_owned(), zeros.clone());
                let read = load(&parts, &config).expect("asymmetric");
                assert!(read == layer.weights(true, group_of), "{bits} {n} {k} {:?}", zeros.0);
                parts.get_mut("l.weight_zero_point").expect("there").1[0] += 1;
                parts.get_mut("l.weight_zero_point").expect("there").2.extend(vec![0; 4 * groups]);
                let rows = parts["l.weight_zero_point"].1[0];
                let element = parts["l.weight_zero_point"].2.len() / rows / groups;
                let exact = rows * groups * element;
                parts.get_mut("l.weight_zero_point").expect("there").2.truncate(exact);
                if zeros.0 == Dtype::I32 {
                    assert!(refusal(&parts, &config).contains("l.weight_zero_point has shape"));
                }
            }
            assert!(refusal(&layer.parts(), &config).contains("l.weight_zero_point is missing"));
        }
    }
}

/// A symmetric layer with a tensor of zeros: harmless if they are the middle, else one of the two lies.
#[test]
fn zeros_of_a_symmetric_layer_must_be_the_middle() {
    let mut random = Random::new(Random::fresh_seed());
    let mut layer = Layer::new((16, 64), 4, 2, &mut random);
    layer.zeros.fill(8);
    let mut parts = layer.parts();
    parts.insert("l.weight_zero_point".to_owned(), layer.packed_zeros());
    let folder = Folder::new(&parts, &packed_config(4, 32, true));
    let checkpoint = folder.open().expect("legal");
    let unused = Finding::UnusedTensor { tensor: "l.weight_zero_point".to_owned() };
    assert_eq!(checkpoint.inspect("l").expect("legal"), [unused]);
    assert!(values(&checkpoint.layer("l").expect("legal")) == layer.weights(false, |k| k / 32));
    layer.zeros[2 * 5 + 1] = 9;
    parts.insert("l.weight_zero_point".to_owned(), layer.packed_zeros());
    let error = load(&parts, &packed_config(4, 32, true)).expect_err("not symmetric");
    assert!(
        matches!(error, Error::Zeros { group_idx: 1, column: 5, found: 9, expected: 8, .. }),
        "{error}"
    );
}

#[test]
fn b31_b33_group_indices_are_checked_and_used() {
    let mut random = Random::new(Random::fresh_seed());
    let (n, k, groups) = (16, 128, 4);
    let layer = Layer::new((n, k), 4, groups, &mut random);
    let config = packed_config(4, 32, true);
    let with = |indices: &[i32]| {
        let mut parts = layer.parts();
        let bytes = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
        parts.insert("l.weight_g_idx".to_owned(), (Dtype::I32, vec![indices.len()], bytes));
        parts
    };
    let mut order: Vec<i32> = (0..k as i32).map(|input| input / 32).collect();
    assert!(load(&with(&order), &config).expect("in order") == layer.weights(false, |k| k / 32));
    let unused = vec![-1; k];
    assert!(load(&with(&unused), &config).expect("not used") == layer.weights(false, |k| k / 32));
    for at in (1..k).rev() {
        order.swap(at, random.bits() as usize % (at + 1));
    }
    let read = load(&with(&order), &config).expect("permuted");
    assert!(read == layer.weights(false, |k_idx| order[k_idx] as usize));
    for (row, value) in [(0, 4), (127, -1), (5, i32::MAX)] {
        let mut order = order.clone();
        order[row] = value;
        let text = refusal(&with(&order), &config);
        assert!(text.contains(&format!("row {row}: group index {value}")), "{text}");
    }
    assert!(refusal(&with(&order[1..]), &config).contains("expected [128]"));
}

/// What the configuration says and the tensors deny.
#[test]
fn schemes_that_disagree_with_the_tensors_are_refused() {
    let mut random = Random::new(Random::fresh_seed());
    let parts = Layer::new((16, 128), 4, 4, &mut random).parts();
    for (config, part) in [
        (packed_config(8, 32, true), "8-bit codes of weight_shape [16, 128]"),
        (packed_config(4, 64, true), "needs 2 rows of scales, found 4"),
        (packed_config(4, -1, true), "needs 1 rows of scales, found 4"),
        (packed_config(3, 32, true), "num_bits 3"),
        (packed_config(4, 48, true), "group size 48"),
        (
            config("pack-quantized", json!({ "num_bits": 4, "type": "float", "group_size": 32 })),
            "4-bit float",
        ),
        (config("pack-quantized", json!({ "num_bits": 4, "strategy": "block" })), "strategy block"),
        (config("pack-quantized", json!({ "num_bits": "4" })), "num_bits is \"4\""),
        (config("pack-quantized", json!({ "group_size": 32 })), "no weights.num_bits"),
        (config("pack-quantized", json!({ "num_bits": 4, "symmetric": 1 })), "symmetric is 1"),
        (config("pack-quantized", json!(null)), "no object weights"),
        (config("int-quantized", json!({ "num_bits": 4 })), "format int-quantized"),
        (config("marlin-24", json!({ "num_bits": 4 })), "format marlin-24"),
    ] {
        // Either the error or its cause says it.
        let error = load(&parts, &config).map(|_| ()).expect_err(part);
        let cause = std::error::Error::source(&error).map_or_else(String::new, |e| e.to_string());
        assert!(
            error.to_string().contains(part) || cause.contains(part),
            "{part}: {error}: {cause}"
        );
    }
    for (field, value, part) in [
        ("quantization_status", json!("initialized"), "quantization_status initialized"),
        ("transform_config", json!({ "config_groups": {} }), "transform_config"),
        ("sparsity_config", json!({ "format": "sparse-24-bitmask" }), "sparse-24-bitmask"),
        ("config_groups", json!([]), "config_groups is []"),
        ("config_groups", json!({}), "nothing of layer l"),
        ("ignore", json!("lm_head"), "ignore is"),
    ] {
        let mut config = packed_config(4, 32, true);
        config[field] = value;
        let text = refusal(&parts, &config);
        assert!(text.contains(part), "{part}: {text}");
    }
    let mut config = packed_config(4, 32, true);
    config["sparsity_config"] = json!({ "format": "dense" });
    (config["transform_config"], config["quantization_status"]) = (json!({}), json!("frozen"));
    load(&parts, &config).expect("none of these means anything");
}

/// Two groups by name, one of them fused; the format of each layer is that of its tensors.
#[test]
fn schemes_are_chosen_by_name_and_labels_are_compared() {
    let mut random = Random::new(Random::fresh_seed());
    let four = Layer::new((16, 128), 4, 4, &mut random);
    let eight = Layer::new((16, 128), 8, 1, &mut random);
    let mut parts = Parts::new();
    let mut insert = |stem: &str, layer: &Layer| {
        for (name, part) in layer.parts() {
            parts.insert(name.replacen('l', stem, 1), part);
        }
    };
    insert("a.gate_up_proj", &four);
    insert("a.down_proj", &eight);
    insert("a.o_proj", &four);
    let weights = |bits: i64, group: Value| {
        let strategy = if group.is_null() { "channel" } else { "group" };
        json!({ "num_bits": bits, "type": "int", "strategy": strategy, "group_size": group })
    };
    let mut config = json!({
        "quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["a.o_proj"],
        "config_groups": {
            "group_0": { "targets": ["re:.*down_proj$"], "weights": weights(8, Value::Null),
                         "format": "pack-quantized" },
            "group_1": { "targets": ["a.gate_proj", "a.up_proj"], "weights": weights(4, json!(32)),
                         "format": "nvfp4-pack-quantized" },
            "group_2": { "targets": ["Linear"], "weights": weights(4, json!(32)),
                         "input_activations": { "num_bits": 8, "type": "int", "dynamic": true,
                                                "strategy": "token" } },
        } });
    let folder = Folder::new(&parts, &config);
    let checkpoint = folder.open().expect("legal");
    let bits: Vec<u32> = checkpoint.layers().iter().map(|layer| layer.format.bits()).collect();
    assert_eq!(bits, [8, 4, 4]);
    assert!(
        values(&checkpoint.layer("a.down_proj").expect("legal")) == eight.weights(false, |_| 0)
    );
    let activations = Finding::Activations {
        group: "group_2".to_owned(),
        scheme: "8-bit int, dynamic, one scale a token".to_owned(),
    };
    let label = Finding::FormatLabel {
        layer: "a.gate_up_proj".to_owned(),
        label: "nvfp4-pack-quantized".to_owned(),
        found: "pack-quantized",
    };
    let ignored = Finding::Ignored { layer: "a.o_proj".to_owned() };
    assert_eq!(checkpoint.findings(), [ignored, activations, label]);
    config["ignore"] = json!(["re:(?=x)"]);
    let folder = Folder::new(&parts, &config);
    let checkpoint = folder.open().expect("a pattern that is not understood matches nothing");
    let is_pattern = |finding: &&Finding| matches!(finding, Finding::Pattern { pattern, .. } if pattern == "(?=x)");
    assert!(checkpoint.findings().iter().any(|finding| is_pattern(&finding)));
}

/// Faults B90 and B92: there is no sparse kernel, so a 2:4 layer is refused when the checkpoint is opened, by name and
/// whatever its sizes; also where the label is that of dense layers.
#[test]
fn b90_b92_sparse_layers_are_refused_when_opened() {
    let mut random = Random::new(90);
    for (n, k) in [(640, 256), (1152, 256), (512, 256)] {
        let bytes = |random: &mut Random, count| random_bytes(random, count);
        let tensor = |suffix: &str, dtype, shape: &[usize], bytes: Vec<u8>| {
            (format!("l.{suffix}"), (dtype, shape.to_vec(), bytes))
        };
        let marlin24 = || {
            let mut random = Random::new(n as u64);
            Parts::from([
                tensor(
                    "weight_packed",
                    Dtype::I32,
                    &[k / 32, 2 * n],
                    bytes(&mut random, k * n / 4),
                ),
                tensor("scale_packed", Dtype::F16, &[2, n], bytes(&mut random, 4 * n)),
                tensor("meta", Dtype::I16, &[k / 32, 2 * n], bytes(&mut random, k * n / 8)),
            ])
        };
        let bitmask = Parts::from([
            tensor("compressed", Dtype::F16, &[n, k / 2], bytes(&mut random, n * k)),
            tensor("bitmask", Dtype::U8, &[n, k / 8], bytes(&mut random, n * k / 8)),
        ]);
        for (parts, label, name) in [
            (marlin24(), "marlin-24", "marlin-24"),
            (marlin24(), "pack-quantized", "marlin-24"),
            (bitmask, "dense", "sparse-24-bitmask"),
        ] {
            let weights = json!({ "num_bits": 4, "type": "int", "strategy": "group",
                                  "group_size": 128, "symmetric": true });
            let folder = Folder::new(&parts, &config(label, weights));
            let error = folder.open().expect_err("no kernel takes it");
            assert!(matches!(error, Error::Unsupported { .. }), "{label}: {error}");
            let text = error.to_string();
            assert!(text.contains(name) && text.contains("2:4"), "{label}: {text}");
        }
    }
}
