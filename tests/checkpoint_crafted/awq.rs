//! AWQ's tensors: the order of eight, zeros as they are, and the layouts that share its label.

use half::f16;
use makaira::checkpoint::{Dtype, Error};
use makaira::reference::Random;
use serde_json::{Value, json};

use crate::gptq::{gptq_config, gptq_layer};
use crate::support::{Folder, Parts, load, random_bytes, refusal};

/// Where AutoAWQ puts each of eight outputs: field i holds output `ORDER[i]`.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

fn awq_config() -> Value {
    json!({ "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true,
            "version": "gemm" })
}

/// Words of eight 4-bit numbers of a matrix `[rows][n]`.
fn words(rows: usize, n: usize, number: impl Fn(usize, usize) -> u32) -> Vec<u8> {
    (0..rows * n / 8)
        .flat_map(|at| {
            let (row, first) = (at / (n / 8), at % (n / 8) * 8);
            let fields = ORDER.iter().enumerate();
            fields.map(|(i, o)| number(row, first + o) << (4 * i)).sum::<u32>().to_le_bytes()
        })
        .collect()
}

fn awq_layer(
    (n, k): (usize, usize),
    codes: impl Fn(usize, usize) -> u32,
    zeros: impl Fn(usize, usize) -> u32,
    scale: impl Fn(usize, usize) -> f16,
) -> Parts {
    let groups = k / 128;
    let scales = (0..groups * n).flat_map(|at| scale(at / n, at % n).to_le_bytes());
    Parts::from([
        ("l.qweight".to_owned(), (Dtype::I32, vec![k, n / 8], words(k, n, codes))),
        ("l.qzeros".to_owned(), (Dtype::I32, vec![groups, n / 8], words(groups, n, zeros))),
        ("l.scales".to_owned(), (Dtype::F16, vec![groups, n], scales.collect())),
    ])
}

/// A zero in the wrong place would show in its column at once.
#[test]
fn b23_every_column_subtracts_its_own_zero() {
    let (n, k) = (128, 256);
    let parts = awq_layer((n, k), |_, _| 15, |_, n| n as u32 % 16, |_, _| f16::ONE);
    for (at, value) in load(&parts, &awq_config()).expect("legal").into_iter().enumerate() {
        assert_eq!(value, 15.0 - (at / k % 16) as f64, "output {}", at / k);
    }
    // Random codes, zeros and scales.
    let mut random = Random::new(Random::fresh_seed());
    let codes = random_bytes(&mut random, n * k);
    let zeros = random_bytes(&mut random, n * 2);
    let code = |k: usize, n_idx: usize| u32::from(codes[k * n + n_idx] & 15);
    let zero = |g: usize, n_idx: usize| u32::from(zeros[g * n + n_idx] & 15);
    let scale = |g: usize, n_idx: usize| f16::from_f32((1 + g + 2 * n_idx) as f32);
    let parts = awq_layer((n, k), code, zero, scale);
    let mut older = awq_config();
    (older["w_bit"], older["q_group_size"]) = (older["bits"].take(), older["group_size"].take());
    for config in [awq_config(), older] {
        for (at, value) in load(&parts, &config).expect("legal").into_iter().enumerate() {
            let (n_idx, k_idx) = (at / k, at % k);
            let g = k_idx / 128;
            let steps = f64::from(code(k_idx, n_idx)) - f64::from(zero(g, n_idx));
            assert_eq!(value, steps * scale(g, n_idx).to_f64(), "input {k_idx}, output {n_idx}");
        }
    }
}

#[test]
fn b85_layouts_that_share_the_label_are_refused_by_name() {
    let parts = awq_layer((64, 256), |_, _| 1, |_, _| 8, |_, _| f16::ONE);
    for version in ["Marlin", "marlin", "GEMV", "gemv_fast", "exllama", "ipex"] {
        let mut config = awq_config();
        config["version"] = version.into();
        for zero_point in [false, true] {
            config["zero_point"] = zero_point.into();
            let text = refusal(&parts, &config);
            let version = version.to_lowercase();
            assert!(text.contains(&format!("quant_method awq, version {version}")), "{text}");
        }
    }
    let mut config = awq_config();
    config["version"] = "GEMM".into();
    load(&parts, &config).expect("either case");
    config["zero_point"] = false.into();
    assert!(refusal(&parts, &config).contains("zero_point false"));
    let mut no_zeros = parts.clone();
    no_zeros.remove("l.qzeros");
    assert!(refusal(&no_zeros, &config).contains("zero_point false"));
    let error = load(&no_zeros, &awq_config()).expect_err("zeros are needed");
    assert!(matches!(error, Error::MissingTensor { .. }), "{error}");
    for (field, value) in
        [("bits", json!(8)), ("backend", json!("llm-awq")), ("group_size", json!(null))]
    {
        let mut config = awq_config();
        config[field] = value;
        let text = refusal(&parts, &config);
        assert!(text.contains(field), "{field}: {text}");
    }
}

/// The tensors say which of the two it is, whatever the label says.
#[test]
fn b24_labels_of_the_other_method_are_refused_with_both_named() {
    let awq = awq_layer((64, 256), |_, _| 1, |_, _| 8, |_, _| f16::ONE);
    let text = refusal(&awq, &gptq_config(128));
    assert!(
        text.contains("says quant_method gptq, but tensor l.qweight is one of a awq layer"),
        "{text}"
    );
    let text = refusal(&gptq_layer(64, 256, 2, 7), &awq_config());
    assert!(
        text.contains("says quant_method awq, but tensor l.qweight is one of a gptq layer"),
        "{text}"
    );
    let folder = Folder::new(&awq, &json!({ "quant_method": "hqq" }));
    let text = folder.open().map(|_| ()).expect_err("unknown").to_string();
    assert!(text.contains("quant_method hqq") && text.contains("awq"), "{text}");
}

#[test]
fn shapes_that_disagree_are_named() {
    let parts = awq_layer((64, 256), |_, _| 1, |_, _| 8, |_, _| f16::ONE);
    let change = |name: &str, dtype, shape: &[usize], bytes: usize| {
        let mut parts = parts.clone();
        parts.insert(name.to_owned(), (dtype, shape.to_vec(), vec![0; bytes]));
        refusal(&parts, &awq_config())
    };
    assert!(change("l.qzeros", Dtype::I32, &[2, 7], 56).contains("expected [2, 8]"));
    assert!(change("l.qzeros", Dtype::I32, &[1, 8], 32).contains("expected [2, 8]"));
    assert!(change("l.qzeros", Dtype::F16, &[2, 8], 32).contains("F16, expected I32"));
    assert!(change("l.qweight", Dtype::I32, &[0, 8], 0).contains("neither of them 0"));
    assert!(change("l.scales", Dtype::F16, &[2, 72], 288).contains("expected [2, 64]"));
}
