//! Checkpoints that are wrong in any way: whatever tensors and configurations say, opening, reading and packing
//! end in a value or a typed refusal, never in a panic.

use half::f16;
use makaira::checkpoint::Dtype;
use makaira::reference::Random;
use makaira::weights::PackedWeights;
use serde_json::{Value, json};

use crate::compressed::config;
use crate::fuzz::{SEEDS, read_all};
use crate::gptq::{gptq_config, gptq_layer};
use crate::support::{Folder, Parts, random_bytes};

/// A small checkpoint of each convention, legal as it is.
fn seeds(random: &mut Random) -> Vec<(&'static str, Parts, Value)> {
    let (n, k, groups) = (16, 128, 4);
    let mut tensor = |name: &str, dtype: Dtype, shape: &[usize]| {
        let count = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        // Bytes that are finite numbers in every float type.
        let mut bytes: Vec<u8> =
            random_bytes(random, count).into_iter().map(|byte| byte & 0x3f).collect();
        if dtype == Dtype::F32 {
            // Not so small that the reciprocal of one is infinite.
            bytes.iter_mut().skip(3).step_by(4).for_each(|byte| *byte |= 0x30);
        }
        (format!("l{name}"), (dtype, shape.to_vec(), bytes))
    };
    let int4 = json!({ "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                       "symmetric": false });
    let float8 = json!({ "num_bits": 8, "type": "float", "strategy": "channel" });
    let float4 = json!({ "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32 });
    let nvfp4 =
        json!({ "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16 });
    let mut asymmetric = gptq_config(32);
    (asymmetric["sym"], asymmetric["desc_act"]) = (false.into(), true.into());
    let mut marlin = gptq_config(32);
    marlin["checkpoint_format"] = "marlin".into();
    let shape = [n as i64, k as i64].iter().flat_map(|size| size.to_le_bytes()).collect();
    vec![
        ("gptq", gptq_layer(n, k, groups, 7), gptq_config(32)),
        ("gptq-asymmetric", gptq_layer(n, k, groups, 3), asymmetric),
        (
            "awq",
            Parts::from([
                tensor(".qweight", Dtype::I32, &[k, n / 8]),
                tensor(".qzeros", Dtype::I32, &[groups, n / 8]),
                tensor(".scales", Dtype::F16, &[groups, n]),
            ]),
            json!({ "quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm" }),
        ),
        (
            "marlin",
            Parts::from([
                tensor(".B", Dtype::I32, &[k / 16, 128]),
                tensor(".s", Dtype::F16, &[groups, 64]),
            ]),
            marlin,
        ),
        (
            "ct-int4",
            Parts::from([
                tensor(".weight_packed", Dtype::I32, &[n, k / 8]),
                tensor(".weight_scale", Dtype::BF16, &[n, groups]),
                tensor(".weight_zero_point", Dtype::I32, &[n / 8, groups]),
                ("l.weight_shape".to_owned(), (Dtype::I64, vec![2], shape)),
            ]),
            config("pack-quantized", int4),
        ),
        (
            "ct-fp8",
            Parts::from([
                tensor(".weight", Dtype::F8_E4M3, &[n, k]),
                tensor(".weight_scale", Dtype::F32, &[n, 1]),
            ]),
            config("float-quantized", float8),
        ),
        (
            "fp8-blocks",
            Parts::from([
                tensor(".weight", Dtype::F8_E4M3, &[n, k]),
                tensor(".weight_scale_inv", Dtype::F32, &[1, 1]),
            ]),
            json!({ "quant_method": "fp8", "weight_block_size": [128, 128] }),
        ),
        (
            "ct-mxfp4",
            Parts::from([
                tensor(".weight_packed", Dtype::U8, &[n, k / 2]),
                tensor(".weight_scale", Dtype::U8, &[n, k / 32]),
            ]),
            config("mxfp4-pack-quantized", float4),
        ),
        (
            "ct-nvfp4",
            Parts::from([
                tensor(".weight_packed", Dtype::U8, &[n, k / 2]),
                tensor(".weight_scale", Dtype::F8_E4M3, &[n, k / 16]),
                tensor(".weight_global_scale", Dtype::F32, &[1]),
            ]),
            config("nvfp4-pack-quantized", nvfp4),
        ),
        (
            "mxfp4-blocks",
            Parts::from([
                tensor("_blocks", Dtype::U8, &[2, n, k / 32, 16]),
                tensor("_scales", Dtype::U8, &[2, n, k / 32]),
            ]),
            json!({ "quant_method": "mxfp4", "modules_to_not_convert": ["a.*.b"] }),
        ),
        ("plain", Parts::from([tensor(".weight", Dtype::BF16, &[n, k])]), Value::Null),
    ]
}

const DTYPES: [Dtype; 12] = [
    Dtype::F16,
    Dtype::BF16,
    Dtype::F32,
    Dtype::F64,
    Dtype::I8,
    Dtype::U8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::F8_E4M3,
    Dtype::F8_E5M2,
    Dtype::F8_E8M0,
];

fn below(random: &mut Random, bound: usize) -> usize {
    (random.bits() >> 20) as usize % bound
}

/// Changes one tensor: its type, its shape, its contents, its name, or whether it is there.
fn spoil_tensor(parts: &mut Parts, random: &mut Random) {
    let names: Vec<String> = parts.keys().cloned().collect();
    let name = names[below(random, names.len())].clone();
    let (dtype, shape, bytes) = parts.get_mut(&name).expect("listed");
    match below(random, 7) {
        0 => {
            parts.remove(&name);
            return;
        }
        1 => {
            let part = parts.remove(&name).expect("listed");
            let other = &names[below(random, names.len())];
            parts.insert(other.replacen('l', ["l", "l.0", "m", ""][below(random, 4)], 1), part);
            return;
        }
        2 => *dtype = DTYPES[below(random, DTYPES.len())],
        3 => {
            let at = below(random, shape.len() + 1);
            shape.insert(at, [0, 1, 2, 3][below(random, 4)]);
        }
        4 if !shape.is_empty() => {
            let at = below(random, shape.len());
            shape[at] =
                [0, 1, shape[at] + 1, shape[at].saturating_sub(1), 2 * shape[at]][below(random, 5)];
        }
        5 => shape.reverse(),
        _ => {
            for _ in 0..1 + below(random, 8) {
                if !bytes.is_empty() {
                    let at = below(random, bytes.len());
                    bytes[at] = [0, 0xff, 0x7f, 0x80, 0x7c][below(random, 5)];
                }
            }
        }
    }
    // Keep the file itself legal: it is the room behind the header that is tested here.
    let wanted = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    bytes.resize(wanted, 0x3a);
}

/// Replaces or removes one value of the configuration, however deep.
fn spoil_config(value: &mut Value, random: &mut Random) {
    let replacement = |random: &mut Random| {
        [
            json!(null),
            json!(0),
            json!(-1),
            json!(i64::MIN),
            json!(u64::MAX),
            json!(1e300),
            json!(16),
            json!(128),
            json!("gptq_v2"),
            json!("group"),
            json!("re:(["),
            json!("re:.*"),
            json!([]),
            json!([128, 128]),
            json!([["x"]]),
            json!({}),
            json!(true),
            json!(false),
        ][below(random, 18)]
        .clone()
    };
    match value {
        Value::Object(map) if !map.is_empty() => {
            let keys: Vec<String> = map.keys().cloned().collect();
            let key = &keys[below(random, keys.len())];
            match below(random, 4) {
                0 => drop(map.remove(key)),
                1 => drop(map.insert(key.clone(), replacement(random))),
                _ => spoil_config(map.get_mut(key).expect("listed"), random),
            }
        }
        Value::Array(list) if !list.is_empty() && below(random, 2) == 0 => {
            let at = below(random, list.len());
            spoil_config(&mut list[at], random);
        }
        other => *other = replacement(random),
    }
}

/// What fuzzers start from is one of each of these; written with `MAKAIRA_BLESS=1`.
#[test]
fn fuzzers_start_from_a_checkpoint_of_each_convention() {
    let seeds = seeds(&mut Random::new(1));
    if std::env::var_os("MAKAIRA_BLESS").is_some() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
        for (name, parts, config) in &seeds {
            let written = Folder::new(parts, config);
            for (from, to) in [("config.json", "json"), ("model.safetensors", "safetensors")] {
                let to = folder.join(format!("{name}.{to}"));
                std::fs::copy(written.file(from), to).expect("writable");
            }
        }
    }
    let mut names: Vec<&str> = seeds.iter().map(|(name, ..)| *name).collect();
    names.sort_unstable();
    assert_eq!(names, SEEDS.iter().map(|(name, ..)| *name).collect::<Vec<_>>());
}

#[test]
fn legal_seeds_are_accepted() {
    let mut random = Random::new(Random::fresh_seed());
    for (_, parts, config) in seeds(&mut random) {
        let folder = Folder::new(&parts, &config);
        let checkpoint = folder.open().unwrap_or_else(|error| panic!("{config}: {error}"));
        assert!(!checkpoint.layers().is_empty(), "{config}");
        for layer in checkpoint.layers() {
            checkpoint.load(&layer.name, 1).unwrap_or_else(|error| panic!("{config}: {error}"));
        }
    }
}

#[test]
fn b31_b39_b75_b87_b89_spoilt_checkpoints_never_panic() {
    let seed = Random::fresh_seed();
    eprintln!("seed {seed}");
    let mut random = Random::new(seed);
    let seeds = seeds(&mut random);
    let (mut num_accepted, mut num_refused) = (0, 0);
    for round in 0..1500 {
        let (_, mut parts, mut config) = seeds[round % seeds.len()].clone();
        for _ in 0..1 + below(&mut random, 2) {
            if config.is_null() || below(&mut random, 2) == 0 {
                if !parts.is_empty() {
                    spoil_tensor(&mut parts, &mut random);
                }
            } else {
                spoil_config(&mut config, &mut random);
            }
        }
        let folder = Folder::new(&parts, &config);
        match folder.open() {
            Ok(checkpoint) if read_all(&checkpoint) => num_accepted += 1,
            Ok(_) => num_refused += 1,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                num_refused += 1;
            }
        }
    }
    // The test is about both sides of the border.
    assert!(
        num_accepted > 150 && num_refused > 300,
        "{num_accepted} accepted, {num_refused} refused"
    );
}

/// Header text of odd lengths: tensors start at any byte of the file, words at odd addresses.
#[test]
fn b77_tensors_at_any_offset_are_read_alike() {
    let parts = gptq_layer(16, 128, 4, 7);
    let right = crate::support::load(&parts, &gptq_config(32)).expect("legal");
    for padding in 1..=8 {
        let folder = Folder::new(&parts, &gptq_config(32));
        let path = folder.file("model.safetensors");
        let file = std::fs::read(&path).expect("written");
        let header_bytes = u64::from_le_bytes(file[..8].try_into().expect("eight")) as usize;
        let text = String::from_utf8(file[8..8 + header_bytes].to_vec()).expect("text");
        let text = format!("{}{}", text.trim_end(), " ".repeat(padding));
        let mut moved = (text.len() as u64).to_le_bytes().to_vec();
        moved.extend_from_slice(text.as_bytes());
        moved.extend_from_slice(&file[8 + header_bytes..]);
        std::fs::write(&path, moved).expect("written");
        let checkpoint = folder.open().expect("alignment is nobody's promise");
        let matrix = checkpoint.layer("l").expect("legal");
        assert!(crate::support::values(&matrix) == right, "{} bytes of header", text.len());
        assert!(PackedWeights::pack(&matrix, 1).is_ok());
    }
}

/// A shard that another process cuts while it is mapped: a refusal, not the end of this process.
#[test]
fn b73_a_checkpoint_that_shrinks_while_it_is_open_is_refused() {
    let (n, k) = (512, 1024);
    let folder = Folder::new(&gptq_layer(n, k, 8, 7), &gptq_config(128));
    let checkpoint = folder.open().expect("legal");
    let matrix = checkpoint.layer("l").expect("legal");
    checkpoint.check_unchanged().expect("nothing happened");
    let file = std::fs::OpenOptions::new().write(true).open(folder.file("model.safetensors"));
    file.expect("there").set_len(4096).expect("shorter");
    // The view is still there; what it reads is worth nothing, and the checkpoint says so.
    let packed = PackedWeights::pack(&matrix, 2).expect("codes of any kind");
    assert_eq!(packed.layout().n, n);
    for error in [checkpoint.check_unchanged().err(), checkpoint.layer("l").err()] {
        let text = error.expect("it changed").to_string();
        assert!(text.contains("changed while it was read") && text.contains("4096 now"), "{text}");
    }
}

/// A part of a layer's inputs refers to the scales of the whole: the shards of a row-parallel layer with
/// activation order add up to it.
#[test]
fn b29_shards_of_an_act_order_layer_share_the_whole_scale_table() {
    use makaira::weights::{Codes, Group, MatrixParts, QuantMatrix, ScaleOrder, Scales, U4B8};
    let mut random = Random::new(Random::fresh_seed());
    let (n, k, groups, ranks) = (24, 1024, 32, 4);
    let parts = gptq_layer(n, k, groups, 7);
    let mut order: Vec<i32> = (0..k as i32).map(|input| input / 32).collect();
    for at in (1..k).rev() {
        order.swap(at, below(&mut random, at + 1));
    }
    let g_idx: Vec<u8> = order.iter().flat_map(|group| group.to_le_bytes()).collect();
    let (codes, scales) = (&parts["l.qweight"].2, &parts["l.scales"].2);
    let matrix = |k: usize, codes, g_idx| {
        let (format, zeros) = (&U4B8, None);
        let scales = Scales::f16(scales, ScaleOrder::Rows);
        let (group, codes, g_idx) = (Group::Size(32), Codes::GptqWords(codes), Some(g_idx));
        let parts = MatrixParts { n, k, group, format, codes, scales, zeros, g_idx };
        QuantMatrix::from_parts(parts).expect("a part of the inputs, all of the scales")
    };
    let whole = matrix(k, codes, &g_idx);
    let each = k / ranks;
    for rank in 0..ranks {
        let (first, end) = (rank * each, (rank + 1) * each);
        let shard = matrix(each, &codes[first * n / 2..end * n / 2], &g_idx[4 * first..4 * end]);
        assert_eq!(shard.num_groups(), groups);
        for at in 0..n * each {
            let (k_idx, n_idx) = (at % each, at / each);
            assert_eq!(shard.value(k_idx, n_idx), whole.value(first + k_idx, n_idx), "rank {rank}");
        }
    }
    // And the scale is the one of the input's own group.
    let scale = |g: usize, n_idx: usize| {
        f16::from_le_bytes([scales[2 * (g * n + n_idx)], scales[2 * (g * n + n_idx) + 1]]).to_f64()
    };
    let code = f64::from(whole.code(7, 3)) - 8.0;
    assert_eq!(whole.value(7, 3), code * scale(order[7] as usize, 3));
}
