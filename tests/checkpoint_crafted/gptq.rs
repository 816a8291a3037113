//! GPTQ's tensors, whole and broken: version 1 and 2, symmetric and not, in and out of order.

use std::collections::BTreeMap;

use half::f16;
use makaira::checkpoint::{Dtype, Error, Finding, ScaleFault};
use makaira::reference::Random;
use makaira::weights::{self, Codes, Group, PackedWeights, QuantMatrix, ScaleOrder, Scales, U4B8};
use serde_json::{Value, json};

use crate::support::{Folder, Parts, load, random_bytes, values};

/// A layer "l" of random codes in GPTQ's tensors, with every stored zero `zero`.
pub fn gptq_layer(n: usize, k: usize, groups: usize, zero: u8) -> Parts {
    let mut state = 0x9e37_79b9u32 ^ (n * k) as u32;
    let mut next = move || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        state ^ state >> 15
    };
    let qweight: Vec<u8> = (0..k / 8 * n).flat_map(|_| next().to_le_bytes()).collect();
    let scales: Vec<u8> = (0..groups * n)
        .flat_map(|_| f16::from_f32(0.001 + (next() >> 8) as f32 * 1e-9).to_le_bytes())
        .collect();
    let zero_words = groups * n.div_ceil(8);
    let g_idx: Vec<u8> = (0..k).flat_map(|row| ((row * groups / k) as i32).to_le_bytes()).collect();
    BTreeMap::from([
        ("l.qweight".to_owned(), (Dtype::I32, vec![k / 8, n], qweight)),
        ("l.scales".to_owned(), (Dtype::F16, vec![groups, n], scales)),
        (
            "l.qzeros".to_owned(),
            (Dtype::I32, vec![groups, n.div_ceil(8)], vec![zero * 0x11; 4 * zero_words]),
        ),
        ("l.g_idx".to_owned(), (Dtype::I32, vec![k], g_idx)),
    ])
}

/// The layer of [`gptq_layer`], in Marlin's tensors.
fn marlin_layer(gptq: &Parts, n: usize, k: usize, group: Group) -> Parts {
    let scales = Scales::f16(&gptq["l.scales"].2, ScaleOrder::Rows);
    let codes = Codes::GptqWords(&gptq["l.qweight"].2);
    let matrix = QuantMatrix::new(n, k, group, &U4B8, codes, scales).expect("legal");
    let marlin = PackedWeights::pack(&matrix, 1).expect("packs").to_marlin().expect("multiples");
    let (b, s) = (bytemuck::cast_slice(&marlin.b), bytemuck::cast_slice(&marlin.s));
    let groups = group.num_groups(k);
    BTreeMap::from([
        ("l.B".to_owned(), (Dtype::I32, vec![k / 16, 2 * n], b.to_vec())),
        ("l.s".to_owned(), (Dtype::F16, vec![groups, n], s.to_vec())),
    ])
}

pub fn gptq_config(group_size: i64) -> Value {
    json!({ "quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": false,
            "sym": true, "checkpoint_format": "gptq" })
}

#[test]
fn b24_symmetric_zeros_read_the_same_under_either_label() {
    let mut decoded = Vec::new();
    for (label, zero) in [("gptq", 7), ("gptq", 8), ("gptq_v2", 7), ("gptq_v2", 8)] {
        let mut config = gptq_config(128);
        config["checkpoint_format"] = label.into();
        let folder = Folder::new(&gptq_layer(64, 256, 2, zero), &config);
        let checkpoint = folder.open().expect("legal");
        let findings = checkpoint.inspect("l").expect("legal");
        if (label, zero) == ("gptq", 7) || (label, zero) == ("gptq_v2", 8) {
            assert_eq!(findings, [], "{label} {zero}");
        } else {
            let tensor = "l.qzeros".to_owned();
            assert_eq!(findings, [Finding::ZeroLabel { tensor, label, found: zero }]);
        }
        decoded.push(values(&checkpoint.layer("l").expect("legal")));
    }
    assert!(decoded.windows(2).all(|pair| pair[0] == pair[1]));
}

/// The zeros of an asymmetric layer are those of the file, in both versions and both widths, in any position.
#[test]
fn b28_asymmetric_layers_are_read_with_their_own_zeros() {
    let mut random = Random::new(Random::fresh_seed());
    let (n, k, groups) = (20, 256, 2);
    for (bits, label) in [(4, "gptq"), (4, "gptq_v2"), (8, "gptq"), (8, "gptq_v2")] {
        let per_word = 32 / bits;
        let mut config = gptq_config(128);
        (config["sym"], config["bits"]) = (false.into(), bits.into());
        config["checkpoint_format"] = label.into();
        let mut parts = gptq_layer(n, k, groups, 7);
        let row_words = n.div_ceil(per_word);
        // Zeros from 1 up: none borrows from its neighbour.
        let zeros: Vec<u64> =
            (0..groups * n).map(|_| 1 + random.bits() % ((1 << bits) - 1)).collect();
        let less = u64::from(label == "gptq");
        let field = |g: usize, column: usize| match column < n {
            true => zeros[g * n + column] - less,
            false => 2,
        };
        let words = (0..groups * row_words).flat_map(|at| {
            let (g, first) = (at / row_words, at % row_words * per_word);
            let word: u64 = (0..per_word).map(|i| field(g, first + i) << (bits * i)).sum();
            (word as u32).to_le_bytes()
        });
        parts.insert("l.qzeros".to_owned(), (Dtype::I32, vec![groups, row_words], words.collect()));
        let codes = random_bytes(&mut random, n * k * bits / 8);
        parts.insert("l.qweight".to_owned(), (Dtype::I32, vec![k / per_word, n], codes.clone()));
        let read = load(&parts, &config).expect("asymmetric");
        for (at, value) in read.into_iter().enumerate() {
            let (n_idx, k_idx) = (at / k, at % k);
            let word = 4 * (k_idx / per_word * n + n_idx);
            let word = u32::from_le_bytes(codes[word..word + 4].try_into().expect("four"));
            let code = word >> (bits * (k_idx % per_word)) & ((1 << bits) - 1);
            let at = k_idx / 128 * n + n_idx;
            let scale = &parts["l.scales"].2[2 * at..2 * at + 2];
            let scale = f16::from_le_bytes([scale[0], scale[1]]).to_f64();
            let steps = f64::from(code) - zeros[at] as f64;
            assert_eq!(value, steps * scale, "{bits} bits, {label}, input {k_idx}, output {n_idx}");
        }
    }
}

#[test]
fn b28_zeros_that_contradict_sym_are_refused() {
    for sym in [Value::Bool(true), Value::Null] {
        let mut config = gptq_config(128);
        config["sym"] = sym;
        let error = load(&gptq_layer(64, 256, 2, 5), &config).expect_err("asymmetric by content");
        let Error::Zeros { found: 5, expected: 7, group_idx: 0, column: 0, .. } = error else {
            panic!("{error}")
        };
        assert!(error.to_string().contains("must say that the weights are not symmetric"));
        // One zero differs; a row is 32 bytes of two columns each.
        for wrong in [0, 1, 11, 15, 63] {
            let mut one_zero = gptq_layer(64, 256, 2, 7);
            let bytes = &mut one_zero.get_mut("l.qzeros").expect("there").2;
            bytes[32 + wrong / 2] = if wrong % 2 == 0 { 0x73 } else { 0x37 };
            let error = load(&one_zero, &config).expect_err("one asymmetric zero");
            let Error::Zeros { found: 3, group_idx: 1, column, .. } = error else {
                panic!("{error}")
            };
            assert_eq!(column, wrong);
        }
    }
    // Twelve columns fill one and a half words: the other half is padding and may be anything.
    let mut padded = gptq_layer(12, 256, 2, 7);
    padded.get_mut("l.qzeros").expect("there").2[6..8].fill(0x31);
    load(&padded, &gptq_config(128)).expect("only padding differs");
}

/// What a careful user wants to know of stored zeros, beside their values.
#[test]
fn odd_zeros_are_reported() {
    let inspect = |zero: u8, label: &str| {
        let mut config = gptq_config(128);
        (config["sym"], config["checkpoint_format"]) = (false.into(), label.into());
        let folder = Folder::new(&gptq_layer(64, 256, 2, zero), &config);
        folder.open().expect("legal").inspect("l").expect("legal")
    };
    let tensor = || "l.qzeros".to_owned();
    assert_eq!(inspect(7, "gptq"), []);
    assert_eq!(inspect(0, "gptq_v2"), []);
    let label = |label, found| [Finding::ZeroLabel { tensor: tensor(), label, found }];
    assert_eq!(inspect(8, "gptq"), label("gptq", 8));
    assert_eq!(inspect(7, "gptq_v2"), label("gptq_v2", 7));
    assert_eq!(inspect(15, "gptq"), [Finding::ZeroBorrow { tensor: tensor(), count: 16 }]);
}

#[test]
fn b31_group_indices_are_checked_before_use() {
    let (n, k, groups) = (64, 256, 2);
    for (row, value) in [(3, 2), (255, -1), (0, i32::MAX)] {
        let mut parts = gptq_layer(n, k, groups, 7);
        let g_idx = &mut parts.get_mut("l.g_idx").expect("there").2;
        g_idx[4 * row..4 * row + 4].copy_from_slice(&i32::to_le_bytes(value));
        let error = load(&parts, &gptq_config(128)).expect_err("out of range");
        let text = error.to_string();
        assert!(matches!(error, Error::GroupIndex { num_groups: 2, .. }), "{text}");
        assert!(
            text.contains(&format!("row {row}")) && text.contains(&value.to_string()),
            "{text}"
        );
    }
    for length in [k - 1, k + 1] {
        let mut parts = gptq_layer(n, k, groups, 7);
        let g_idx = parts.get_mut("l.g_idx").expect("there");
        (g_idx.1, g_idx.2) = (vec![length], vec![0; 4 * length]);
        let error = load(&parts, &gptq_config(128)).expect_err("wrong length").to_string();
        assert!(error.contains("l.g_idx") && error.contains(&length.to_string()), "{error}");
    }
}

/// Indices decide, whatever `desc_act` says: the scale of an input is that of its own group.
#[test]
fn b33_group_indices_choose_the_scales() {
    let mut random = Random::new(Random::fresh_seed());
    let (n, k, groups) = (64, 256, 4);
    let plain_parts = gptq_layer(n, k, groups, 7);
    let plain = load(&plain_parts, &gptq_config(64)).expect("in order");
    let scale = |g: usize, n_idx: usize| {
        let bytes = &plain_parts["l.scales"].2[2 * (g * n + n_idx)..][..2];
        f16::from_le_bytes([bytes[0], bytes[1]]).to_f64()
    };
    let mut order: Vec<usize> = (0..k).map(|input| input / 64).collect();
    for at in (1..k).rev() {
        order.swap(at, random.bits() as usize % (at + 1));
    }
    let mut parts = plain_parts.clone();
    parts.get_mut("l.g_idx").expect("there").2 =
        order.iter().flat_map(|&group| (group as i32).to_le_bytes()).collect();
    for desc_act in [false, true] {
        let mut config = gptq_config(64);
        config["desc_act"] = desc_act.into();
        let folder = Folder::new(&parts, &config);
        let checkpoint = folder.open().expect("legal");
        let matrix = checkpoint.layer("l").expect("legal");
        assert!(matrix.g_idx().is_some());
        for (at, value) in values(&matrix).into_iter().enumerate() {
            let (n_idx, input) = (at / k, at % k);
            let steps = plain[at] / scale(input / 64, n_idx);
            assert_eq!(value, steps * scale(order[input], n_idx), "input {input}, output {n_idx}");
        }
    }
    let mut parts = plain_parts;
    let mut config = gptq_config(64);
    config["desc_act"] = true.into();
    let folder = Folder::new(&parts, &config);
    let checkpoint = folder.open().expect("legal");
    let matrix = checkpoint.layer("l").expect("plain indices");
    assert!(matrix.g_idx().is_none(), "desc_act with plain indices is plain order");
    parts.remove("l.g_idx");
    assert!(load(&parts, &gptq_config(64)).expect("plain order needs no indices") == plain);
    let error = load(&parts, &config).expect_err("activation order needs its indices");
    assert!(matches!(error, Error::MissingTensor { .. }), "{error}");
}

#[test]
fn b39_bad_scales_are_listed_with_tensor_and_row() {
    let mut parts = gptq_layer(64, 256, 2, 7);
    let scales = &mut parts.get_mut("l.scales").expect("there").2;
    let mut set = |group_idx: usize, column: usize, bits: u16| {
        let at = 2 * (64 * group_idx + column);
        scales[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    };
    set(0, 63, 0x0000);
    set(1, 5, 0x0001);
    let expected = |list: &[(usize, usize, ScaleFault)]| -> Vec<_> {
        list.iter().map(|&(g, column, fault)| (g, column, fault)).collect()
    };
    let found = |parts: &Parts| -> Vec<_> {
        let folder = Folder::new(parts, &gptq_config(128));
        let findings = folder.open().expect("legal headers").inspect("l").expect("legal");
        findings
            .into_iter()
            .map(|finding| match finding {
                Finding::Scale { tensor, group_idx, column, fault, .. } => {
                    assert_eq!(tensor, "l.scales");
                    (group_idx, column, fault)
                }
                other => panic!("{other}"),
            })
            .collect()
    };
    let harmless = [(0, 63, ScaleFault::Zero), (1, 5, ScaleFault::Subnormal)];
    let snapshot = parts.clone();
    assert_eq!(found(&snapshot), expected(&harmless));
    load(&snapshot, &gptq_config(128)).expect("zero and subnormal scales are legal");

    for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
        let mut parts = snapshot.clone();
        parts.get_mut("l.scales").expect("there").2[254..].copy_from_slice(&bad.to_le_bytes());
        let error = load(&parts, &gptq_config(128)).expect_err("not finite");
        assert!(matches!(error, Error::BadScales { column: 63, count: 1, .. }), "{error}");
    }
    let scales = &mut parts.get_mut("l.scales").expect("there").2;
    scales[2 * (64 + 7)..2 * (64 + 8)].copy_from_slice(&f16::NAN.to_le_bytes());
    scales[2 * (64 + 9)..2 * (64 + 10)].copy_from_slice(&f16::NEG_INFINITY.to_le_bytes());
    let mut all = harmless.to_vec();
    all.extend([(1, 7, ScaleFault::NotANumber), (1, 9, ScaleFault::Infinite)]);
    assert_eq!(found(&parts), expected(&all));
    let error = load(&parts, &gptq_config(128)).expect_err("not finite");
    let text = error.to_string();
    assert!(matches!(error, Error::BadScales { group_idx: 1, column: 7, count: 2, .. }), "{text}");
    assert!(text.contains("l.scales") && text.contains("group 1, column 7"), "{text}");
}

#[test]
fn b83_marlin_serialised_layers_are_recognised_by_either_marker() {
    let (n, k, group) = (256, 256, Group::Size(128));
    let gptq = gptq_layer(n, k, 2, 7);
    let marlin = marlin_layer(&gptq, n, k, group);
    let right = load(&gptq, &gptq_config(128)).expect("legal");
    let markers = [
        (json!(true), json!(null)),
        (json!(null), json!("marlin")),
        (json!(true), json!("marlin")),
        (json!(true), json!("gptq")),
        (json!(false), json!("marlin")),
    ];
    for (flag, format) in markers {
        let mut config = gptq_config(128);
        (config["is_marlin_format"], config["checkpoint_format"]) = (flag.clone(), format.clone());
        let folder = Folder::new(&marlin, &config);
        let checkpoint = folder.open().expect("a marker");
        assert_eq!(checkpoint.conventions(), ["marlin"]);
        let read = values(&checkpoint.layer("l").expect("legal"));
        assert!(read == right, "{flag} {format}");
        let from_gptq = load(&gptq, &config);
        if format == json!("gptq") || flag == json!(false) {
            let from_gptq = from_gptq.expect("the tensors decide between contradicting markers");
            assert!(from_gptq == right);
        } else {
            let text = from_gptq.expect_err("the marker is wrong").to_string();
            assert!(text.contains("qweight") && text.contains("Marlin"), "{text}");
        }
    }
    let error = load(&marlin, &gptq_config(128)).expect_err("no marker").to_string();
    assert!(error.contains("checkpoint_format"), "{error}");
    let mut both = gptq;
    both.extend(marlin);
    let error = load(&both, &gptq_config(128)).expect_err("ambiguous").to_string();
    assert!(error.contains("both B and qweight"), "{error}");
}

#[test]
fn settings_that_change_the_meaning_are_refused_by_name() {
    let parts = gptq_layer(64, 256, 2, 7);
    for (field, value) in [
        ("bits", json!(3)),
        ("bits", json!(null)),
        ("bits", json!("4")),
        ("group_size", json!(null)),
        ("checkpoint_format", json!("bitblas")),
        ("pack_dtype", json!("int16")),
        ("dynamic", json!({ "-:x": {}, "+:l": { "pack_dtype": "int16" } })),
        ("dynamic", json!({ "l": { "group_size": 64 }, "+:.": { "group_size": 32 } })),
        ("dynamic", json!({ "+:(?!l)": { "bits": 4 } })),
        ("dynamic", json!(["l"])),
        ("dynamic", json!({ "l": 8 })),
        ("format", json!("gptq_v2")),
        ("quant_method", json!(null)),
    ] {
        let mut config = gptq_config(128);
        config[field] = value;
        let error = load(&parts, &config).expect_err(field);
        let refused = matches!(error, Error::Unsupported { .. } | Error::Config { .. });
        assert!(refused && error.to_string().contains(field), "{field}: {error}");
    }
}

/// Modules with settings of their own beside others: each is read by its own.
#[test]
fn settings_of_a_module_are_its_own() {
    let mut random = Random::new(Random::fresh_seed());
    let (n, k) = (32, 128);
    // "l" is as the configuration says; the others are not.
    let mut parts = gptq_layer(n, k, 1, 7);
    let named = |name: &str, layer: Parts| {
        let name = name.to_owned();
        layer.into_iter().map(move |(tensor, part)| (tensor.replacen('l', &name, 1), part))
    };
    parts.extend(named("model.3.up", gptq_layer(n, k, 4, 7)));
    let eight_bits = Parts::from([
        ("l.qweight".to_owned(), (Dtype::I32, vec![k / 4, n], random_bytes(&mut random, n * k))),
        ("l.scales".to_owned(), gptq_layer(n, k, 2, 7)["l.scales"].clone()),
        ("l.qzeros".to_owned(), (Dtype::I32, vec![2, n / 4], vec![0x30; 2 * n])),
    ]);
    parts.extend(named("model.3.down", eight_bits.clone()));
    let mut config = gptq_config(128);
    config["dynamic"] = json!({
        "-:lm_head": {},
        r"+:.*\.up": { "group_size": 32, "desc_act": true, "damp_percent": 0.05 },
        r"model\.\d+\.down$": { "bits": 8, "group_size": 64, "sym": false },
        "up": { "bits": 3 },
    });
    let checkpoint = Folder::new(&parts, &config).open().expect("legal");
    let said: Vec<_> = checkpoint
        .layers()
        .iter()
        .map(|layer| (layer.name.as_str(), layer.format.name(), layer.group.raw()))
        .collect();
    assert_eq!(said, [("l", "u4b8", -1), ("model.3.down", "u8", 64), ("model.3.up", "u4b8", 32)]);
    let matrix = checkpoint.layer("model.3.down").expect("legal");
    let scales = &eight_bits["l.scales"].2;
    for (at, value) in values(&matrix).into_iter().enumerate() {
        let (k, n_idx) = (at % k, at / k);
        let code = eight_bits["l.qweight"].2[4 * (k / 4 * n + n_idx) + k % 4];
        let scale = 2 * (k / 64 * n + n_idx);
        let scale = f16::from_le_bytes([scales[scale], scales[scale + 1]]).to_f64();
        // Version 1 stores 0x31 less one.
        assert_eq!(value, (f64::from(code) - 49.0) * scale, "({k}, {n_idx})");
    }
    let up = checkpoint.layer("model.3.up").expect("legal");
    let alone = load(&gptq_layer(n, k, 4, 7), &gptq_config(32)).expect("legal");
    assert_eq!(values(&up), alone);
    // A setting of a module is refused like one of the whole.
    let mut three_bits = config.clone();
    three_bits["dynamic"]["l$"] = json!({ "bits": 3 });
    let error = Folder::new(&parts, &three_bits).open().map(|_| ()).expect_err("no such type");
    assert!(error.to_string().contains("bits 3"), "{error}");
    // Without its indices a module with activation order is refused, whatever the others have.
    parts.remove("model.3.up.g_idx");
    let error = Folder::new(&parts, &config).open().map(|_| ()).expect_err("no indices");
    assert!(error.to_string().contains("model.3.up.g_idx"), "{error}");
}

#[test]
fn b06_and_b18_group_sizes_are_refused_with_their_numbers() {
    for rows in [134, 135] {
        let error = load(&gptq_layer(8, 4304, rows, 7), &gptq_config(32)).expect_err("short group");
        let Error::Weight { layer, source } = error else { panic!("{error}") };
        assert_eq!(layer, "l");
        let text = source.to_string();
        let rows = format!("{rows} rows");
        assert!(["4304", "32", &rows].iter().all(|part| text.contains(part)), "{text}");
    }
    for raw in [0, 1, 15, 48, 256, -2] {
        let error = load(&gptq_layer(8, 768, 3, 7), &gptq_config(raw)).expect_err("no such group");
        let Error::Weight { source, .. } = error else { panic!("{error}") };
        assert_eq!(source, weights::Error::GroupSize { raw });
    }
    let error = load(&gptq_layer(8, 768, 3, 7), &gptq_config(128)).expect_err("3 rows");
    let Error::Weight { source, .. } = error else { panic!("{error}") };
    let (k, group) = (768, Group::Size(128));
    assert_eq!(source, weights::Error::ScaleRows { k, group, expected: 6, found: 3 });
}

#[test]
fn b21_minus_one_and_k_load_to_the_same_bits() {
    for k in [128, 4096] {
        let parts = gptq_layer(64, k, 1, 7);
        let per_column = load(&parts, &gptq_config(-1)).expect("legal");
        let whole_k = load(&parts, &gptq_config(k as i64)).expect("legal");
        assert!(per_column == whole_k);
        let marlin = marlin_layer(&parts, 64, k, Group::PerColumn);
        for raw in [-1, k as i64] {
            let mut config = gptq_config(raw);
            config["checkpoint_format"] = "marlin".into();
            assert!(load(&marlin, &config).expect("legal") == per_column);
        }
    }
}

#[test]
fn b89_tensors_that_nothing_uses_are_reported() {
    let mut parts = gptq_layer(64, 256, 2, 7);
    parts.insert("norm.weight".to_owned(), (Dtype::F16, vec![1], vec![0; 2]));
    parts.insert("l.bias".to_owned(), (Dtype::F16, vec![64], vec![0; 128]));
    assert_eq!(Folder::new(&parts, &gptq_config(128)).open().expect("legal").findings(), []);
    for name in ["experts.gate_up_proj_packed", "other.scales"] {
        parts.insert(name.to_owned(), (Dtype::U8, vec![3], vec![0; 3]));
    }
    let checkpoint = Folder::new(&parts, &gptq_config(128));
    let checkpoint = checkpoint.open().expect("legal");
    let unused = |tensor: &str| Finding::UnusedTensor { tensor: tensor.to_owned() };
    let expected = [unused("experts.gate_up_proj_packed"), unused("other.scales")];
    assert_eq!(checkpoint.findings(), expected);
    for tensor in ["l.scales", "l.qzeros"] {
        let mut parts = gptq_layer(64, 256, 2, 7);
        parts.remove(tensor);
        let error = load(&parts, &gptq_config(128)).expect_err("incomplete").to_string();
        assert!(error.contains(tensor) && error.contains("missing"), "{error}");
    }
}

#[test]
fn shapes_and_types_that_disagree_are_named() {
    let change = |name: &str, dtype, shape: &[usize], bytes: usize| {
        let mut parts = gptq_layer(64, 256, 2, 7);
        parts.insert(name.to_owned(), (dtype, shape.to_vec(), vec![0; bytes]));
        load(&parts, &gptq_config(128)).expect_err(name).to_string()
    };
    assert_eq!(
        change("l.scales", Dtype::I32, &[2, 64], 512),
        "tensor l.scales is I32, expected F16, BF16 or F32"
    );
    assert!(change("l.scales", Dtype::F16, &[2, 63], 252).contains("expected [2, 64]"));
    assert!(change("l.qzeros", Dtype::I32, &[2, 7], 56).contains("expected [2, 8]"));
    assert!(change("l.qweight", Dtype::I32, &[4, 8, 8, 8], 8192).contains("two dimensions"));
    assert!(change("l.qweight", Dtype::I32, &[32, 8, 8], 8192).contains("one for each expert"));
    assert!(change("l.qweight", Dtype::I32, &[0, 64], 0).contains("neither of them 0"));
    assert!(change("l.g_idx", Dtype::I64, &[256], 2048).contains("I64, expected I32"));

    let mut config = gptq_config(-1);
    config["checkpoint_format"] = "marlin".into();
    let parts = BTreeMap::from([
        ("l.B".to_owned(), (Dtype::I32, vec![16, 2 * 96], vec![0; 4 * 16 * 2 * 96])),
        ("l.s".to_owned(), (Dtype::F16, vec![1, 96], vec![0; 192])),
    ]);
    // Refused when the checkpoint is opened, before any layer is asked for.
    let error = Folder::new(&parts, &config).open().expect_err("N = 96").to_string();
    assert!(error.contains("N a multiple of 64") && error.contains("[16, 192]"), "{error}");
}

#[test]
fn the_older_configuration_file_is_read_too() {
    let parts = gptq_layer(64, 256, 2, 7);
    let right = load(&parts, &gptq_config(128)).expect("legal");
    let folder = Folder::new(&parts, &Value::Null);
    let error = folder.open().expect_err("quantised tensors without a word of it").to_string();
    assert!(error.contains("says nothing of a quantisation, but tensor l.qweight"), "{error}");
    let mut config = gptq_config(128);
    config.as_object_mut().expect("an object").remove("quant_method");
    std::fs::write(folder.file("quantize_config.json"), config.to_string()).expect("written");
    let checkpoint = folder.open().expect("legal");
    assert!(values(&checkpoint.layer("l").expect("legal")) == right);
    std::fs::write(folder.file("config.json"), "{").expect("written");
    assert!(matches!(folder.open(), Err(Error::Config { .. })));
}
