//! fp8 and fp4: scales of every shape, global scales, and values that no weight may have.

use makaira::checkpoint::{Dtype, Error, Finding, ScaleFault};
use makaira::reference::Random;
use serde_json::{Value, json};

use crate::compressed::config;
use crate::support::{Folder, Parts, load, random_bytes, refusal};

fn e4m3(code: u8) -> f64 {
    let (sign, exponent) = (if code < 128 { 1.0 } else { -1.0 }, i32::from(code >> 3 & 15));
    let mantissa = f64::from(code & 7) / 8.0;
    sign * if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) }
}

fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Random e4m3 numbers, none of them NaN.
fn numbers(random: &mut Random, count: usize) -> Vec<u8> {
    random_bytes(random, count)
        .into_iter()
        .map(|b| if b & 127 == 127 { b & 126 } else { b })
        .collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn fp8_config(block: Value) -> Value {
    json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": block, "modules_to_not_convert": ["lm_head"] })
}

/// The shape and the suffix of the scales, the block size stated, and which scale output and input have.
type Case<'f> = (Vec<usize>, &'static str, Value, &'f dyn Fn(usize, usize) -> usize);

/// Blocks at sizes that are no multiple of one, and the other shapes of scales, under both labels.
#[test]
fn fp8_scales_of_every_shape_reach_their_weights() {
    let mut random = Random::new(Random::fresh_seed());
    for (n, k) in [(256, 256), (300, 384), (130, 200), (64, 96)] {
        let codes = numbers(&mut random, n * k);
        let columns = k.div_ceil(128);
        let block = |n: usize, k: usize| n / 128 * columns + k / 128;
        let cases: [Case<'_>; 5] = [
            (vec![n.div_ceil(128), columns], ".weight_scale_inv", json!([128, 128]), &block),
            (vec![], ".weight_scale", Value::Null, &|_, _| 0),
            (vec![1], ".weight_scale_inv", Value::Null, &|_, _| 0),
            (vec![n, 1], ".weight_scale", Value::Null, &|n, _| n),
            (vec![n], ".weight_scale", Value::Null, &|n, _| n),
        ];
        for (shape, suffix, block_size, scale_of) in cases {
            let count = shape.iter().product();
            let scales: Vec<f32> = (0..count).map(|_| random.uniform(1e-4, 1.0) as f32).collect();
            let mut parts = Parts::from([
                ("l.weight".to_owned(), (Dtype::F8_E4M3, vec![n, k], codes.clone())),
                (format!("l{suffix}"), (Dtype::F32, shape.clone(), floats(&scales))),
            ]);
            let wanted: Vec<f64> = (0..n * k)
                .map(|at| e4m3(codes[at]) * f64::from(scales[scale_of(at / k, at % k)]))
                .collect();
            let read = load(&parts, &fp8_config(block_size.clone())).expect("fp8");
            assert!(read == wanted, "{n} x {k}, {shape:?}");
            // The same scales under compressed-tensors.
            let Some(scale) = parts.remove("l.weight_scale_inv").or(parts.remove("l.weight_scale"))
            else {
                panic!("there is one")
            };
            let shape = scale.1.clone();
            parts.insert("l.weight_scale".to_owned(), scale);
            let weights = match (shape.as_slice(), &block_size) {
                (_, Value::Array(_)) => {
                    json!({ "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128] })
                }
                ([] | [1], _) => json!({ "num_bits": 8, "type": "float", "strategy": "tensor" }),
                _ => json!({ "num_bits": 8, "type": "float", "strategy": "channel" }),
            };
            let read = load(&parts, &config("float-quantized", weights)).expect("float-quantized");
            assert!(read == wanted, "{n} x {k}, {shape:?}, compressed-tensors");
        }
    }
}

#[test]
fn fp8_layers_that_disagree_with_their_label_are_refused() {
    let (n, k) = (256, 384);
    let block = json!([128, 128]);
    let layer = |dtype, scale: (Dtype, &[usize])| {
        let count: usize = scale.1.iter().product();
        Parts::from([
            ("l.weight".to_owned(), (dtype, vec![n, k], vec![1; n * k])),
            (
                "l.weight_scale_inv".to_owned(),
                (scale.0, scale.1.to_vec(), floats(&vec![1.0; count])),
            ),
        ])
    };
    let right = layer(Dtype::F8_E4M3, (Dtype::F32, &[2, 3]));
    load(&right, &fp8_config(block.clone())).expect("2 x 3 blocks");
    for (parts, config, part) in [
        (&right, fp8_config(json!([64, 128])), "weight_block_size [64,128]"),
        (&right, fp8_config(json!(128)), "weight_block_size is 128"),
        (&right, fp8_config(Value::Null), "no block size is stated"),
        (
            &layer(Dtype::F8_E4M3, (Dtype::F32, &[3, 2])),
            fp8_config(block.clone()),
            "expected [2, 3]",
        ),
        (
            &layer(Dtype::F8_E5M2, (Dtype::F32, &[2, 3])),
            fp8_config(block.clone()),
            "F8_E5M2, expected F8_E4M3",
        ),
        (
            &layer(Dtype::F8_E4M3FNUZ, (Dtype::F32, &[2, 3])),
            fp8_config(block.clone()),
            "expected F8_E4M3",
        ),
        (
            &layer(Dtype::F8_E4M3, (Dtype::I32, &[2, 3])),
            fp8_config(block.clone()),
            "I32, expected F32",
        ),
        (
            &right,
            config("float-quantized", json!({ "num_bits": 8, "type": "float" })),
            "one of a fp8 layer",
        ),
    ] {
        let text = refusal(parts, &config);
        assert!(text.contains(part), "{part}: {text}");
    }
    let mut config = fp8_config(block.clone());
    config["fmt"] = "e5m2".into();
    assert!(refusal(&right, &config).contains("fmt e5m2"));
    let mut parts = right.clone();
    parts.remove("l.weight_scale_inv");
    assert!(refusal(&parts, &fp8_config(block.clone())).contains("l.weight_scale is missing"));
    // b39: one bad block is named by its first row.
    let mut parts = right;
    parts.get_mut("l.weight_scale_inv").expect("there").2[16..20]
        .copy_from_slice(&f32::NAN.to_le_bytes());
    let error = load(&parts, &fp8_config(block)).expect_err("NaN");
    assert!(
        matches!(error, Error::BadScales { group_idx: 1, column: 128, count: 1, .. }),
        "{error}"
    );
}

/// An fp4 layer: pairs of codes, and scales of one byte.
fn fp4_layer(
    n: usize,
    k: usize,
    group: usize,
    dtype: Dtype,
    random: &mut Random,
) -> (Parts, Vec<u8>, Vec<u8>) {
    let pairs = random_bytes(random, n * k / 2);
    let scales: Vec<u8> =
        random_bytes(random, n * k / group).into_iter().map(|byte| 100 + byte % 20).collect();
    let parts = Parts::from([
        ("l.weight_packed".to_owned(), (Dtype::U8, vec![n, k / 2], pairs.clone())),
        ("l.weight_scale".to_owned(), (dtype, vec![n, k / group], scales.clone())),
    ]);
    (parts, pairs, scales)
}

fn fp4_config(format: &str, group: i64) -> Value {
    let strategy = if group == 16 { "tensor_group" } else { "group" };
    config(
        format,
        json!({ "num_bits": 4, "type": "float", "strategy": strategy, "group_size": group,
                "symmetric": true }),
    )
}

#[test]
fn fp4_layers_of_both_kinds_are_read_and_bad_scales_refused() {
    let mut random = Random::new(Random::fresh_seed());
    let (n, k) = (24, 96);
    let code = |pairs: &[u8], at: usize| pairs[at / 2] >> (4 * (at % 2)) & 15;

    let (mut parts, pairs, scales) = fp4_layer(n, k, 16, Dtype::F8_E4M3, &mut random);
    parts.insert("l.weight_global_scale".to_owned(), (Dtype::F32, vec![1], floats(&[2048.0])));
    let nvfp4 = fp4_config("nvfp4-pack-quantized", 16);
    let read = load(&parts, &nvfp4).expect("NVFP4");
    for (at, value) in read.into_iter().enumerate() {
        assert_eq!(value, e2m1(code(&pairs, at)) * e4m3(scales[at / 16]) / 2048.0, "{at}");
    }
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::from_bits(1)] {
        let mut parts = parts.clone();
        parts.get_mut("l.weight_global_scale").expect("there").2 = floats(&[bad]);
        let error = load(&parts, &nvfp4).expect_err("no divisor");
        assert!(matches!(error, Error::GlobalScale { .. }), "{error}");
        assert!(error.to_string().contains("l.weight_global_scale"), "{error}");
    }
    let mut missing = parts.clone();
    missing.remove("l.weight_global_scale");
    assert!(refusal(&missing, &nvfp4).contains("l.weight_global_scale is missing"));
    let mut two = parts.clone();
    two.insert("l.weight_global_scale".to_owned(), (Dtype::F32, vec![2], floats(&[1.0; 2])));
    assert!(refusal(&two, &nvfp4).contains("expected [1]"));
    let wrong_group = fp4_config("nvfp4-pack-quantized", 32);
    assert!(refusal(&parts, &wrong_group).contains("NVFP4 has groups of 16"));
    let mut nan = parts;
    nan.get_mut("l.weight_scale").expect("there").2[7] = 0x7f;
    assert!(matches!(load(&nan, &nvfp4), Err(Error::BadScales { group_idx: 1, column: 1, .. })));

    let (parts, pairs, scales) = fp4_layer(n, k, 32, Dtype::U8, &mut random);
    let mxfp4 = fp4_config("mxfp4-pack-quantized", 32);
    let read = load(&parts, &mxfp4).expect("MXFP4");
    for (at, value) in read.into_iter().enumerate() {
        let scale = 2f64.powi(i32::from(scales[at / 32]) - 127);
        assert_eq!(value, e2m1(code(&pairs, at)) * scale, "{at}");
    }
    let mut nan = parts.clone();
    nan.get_mut("l.weight_scale").expect("there").2[5] = 255;
    assert!(matches!(load(&nan, &mxfp4), Err(Error::BadScales { group_idx: 2, column: 1, .. })));
    // The tensors decide between the two, and the label is reported.
    let folder = Folder::new(&parts, &fp4_config("nvfp4-pack-quantized", 32));
    let checkpoint = folder.open().expect("legal");
    let [Finding::FormatLabel { label, found, .. }] = checkpoint.findings() else {
        panic!("{:?}", checkpoint.findings())
    };
    assert_eq!((label.as_str(), *found), ("nvfp4-pack-quantized", "mxfp4-pack-quantized"));
}

/// Codes that are NaN are values to the packer and a finding to a strict reader.
#[test]
fn b39_weights_that_are_nan_are_found_by_place() {
    let mut random = Random::new(Random::fresh_seed());
    let (n, k) = (12, 40);
    let mut parts = Parts::from([
        ("l.weight".to_owned(), (Dtype::F8_E4M3, vec![n, k], numbers(&mut random, n * k))),
        ("l.weight_scale".to_owned(), (Dtype::F32, vec![1], floats(&[1.0]))),
    ]);
    let check = |parts: &Parts| {
        let folder = Folder::new(parts, &fp8_config(Value::Null));
        folder.open().expect("legal").check_codes("l", 1).expect("readable")
    };
    assert_eq!(check(&parts), None);
    let codes = &mut parts.get_mut("l.weight").expect("there").2;
    (codes[7 * k + 13], codes[9 * k]) = (0xff, 0x7f);
    let layer = "l".to_owned();
    assert_eq!(check(&parts), Some(Finding::NotANumber { layer, row: 7, column: 13, count: 2 }));
}

/// b39 for scales of one byte: what is zero or subnormal in its own type.
#[test]
fn b39_odd_scales_of_one_byte_are_listed() {
    let mut random = Random::new(1);
    let (mut parts, ..) = fp4_layer(8, 32, 16, Dtype::F8_E4M3, &mut random);
    parts.insert("l.weight_global_scale".to_owned(), (Dtype::F32, vec![1], floats(&[1.0])));
    let scales = &mut parts.get_mut("l.weight_scale").expect("there").2;
    (scales[0], scales[3], scales[15]) = (0, 1, 0x7f);
    let folder = Folder::new(&parts, &fp4_config("nvfp4-pack-quantized", 16));
    let findings = folder.open().expect("legal").inspect("l").expect("legal");
    let found: Vec<_> = findings
        .into_iter()
        .map(|finding| match finding {
            Finding::Scale { group_idx, column, fault, .. } => (group_idx, column, fault),
            other => panic!("{other}"),
        })
        .collect();
    let wanted =
        [(0, 0, ScaleFault::Zero), (1, 1, ScaleFault::Subnormal), (1, 7, ScaleFault::NotANumber)];
    assert_eq!(found, wanted);
}
