//! Whole checkpoints: stacks of experts, what is missing, what nothing uses, and plain weights.

use half::{bf16, f16};
use makaira::checkpoint::{Dtype, Error, Finding};
use makaira::reference::Random;
use makaira::weights::default_threads;
use serde_json::{Value, json};

use crate::compressed::config;
use crate::gptq::{gptq_config, gptq_layer};
use crate::support::{Folder, Parts, random_bytes, values};

/// The parts of a layer under another stem.
fn renamed(parts: &Parts, stem: &str) -> Parts {
    parts.iter().map(|(name, part)| (name.replacen('l', stem, 1), part.clone())).collect()
}

/// A stack and the same experts one by one are the same weights.
#[test]
fn stacks_of_experts_are_layers_by_number() {
    let mut random = Random::new(Random::fresh_seed());
    let (num_experts, n, k) = (3, 16, 64);
    let packed = random_bytes(&mut random, num_experts * n * k / 2);
    let scales: Vec<u8> = (0..num_experts * n * 2)
        .flat_map(|_| f16::from_f64(random.uniform(0.01, 1.0)).to_le_bytes())
        .collect();
    let weights = json!({ "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32 });
    let config = config("pack-quantized", weights);
    let stack = Parts::from([
        (
            "m.experts.w2_weight.weight_packed".to_owned(),
            (Dtype::I32, vec![num_experts, n, k / 8], packed.clone()),
        ),
        (
            "m.experts.w2_weight.weight_scale".to_owned(),
            (Dtype::F16, vec![num_experts, n, 2], scales.clone()),
        ),
    ]);
    let folder = Folder::new(&stack, &config);
    let checkpoint = folder.open().expect("a stack");
    assert_eq!(checkpoint.findings(), []);
    let names: Vec<&str> = checkpoint.layers().iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["m.experts.w2_weight.0", "m.experts.w2_weight.1", "m.experts.w2_weight.2"]);
    for expert in 0..num_experts {
        let part = |bytes: &[u8]| {
            let each = bytes.len() / num_experts;
            bytes[expert * each..(expert + 1) * each].to_vec()
        };
        let single = Parts::from([
            ("l.weight_packed".to_owned(), (Dtype::I32, vec![n, k / 8], part(&packed))),
            ("l.weight_scale".to_owned(), (Dtype::F16, vec![n, 2], part(&scales))),
        ]);
        let single = crate::support::load(&single, &config).expect("one expert");
        let name = format!("m.experts.w2_weight.{expert}");
        assert!(values(&checkpoint.layer(&name).expect("legal")) == single, "{name}");
        assert_eq!(checkpoint.layers()[expert].expert, Some((expert, num_experts)));
        assert_eq!(checkpoint.layers()[expert].stem(), "m.experts.w2_weight");
    }
    let mut fewer = stack.clone();
    let scales = scales[..2 * n * 2 * 2].to_vec();
    fewer
        .insert("m.experts.w2_weight.weight_scale".to_owned(), (Dtype::F16, vec![2, n, 2], scales));
    let text = Folder::new(&fewer, &config).open().map(|_| ()).expect_err("2 of 3").to_string();
    assert!(text.contains("[2, 16, 2], expected [3, ..], one for each expert"), "{text}");
    // Empty tensors may claim any number of experts: refused at once.
    for shape in [vec![1 << 40, 0, 8], vec![0, 16, 8]] {
        let mut empty = stack.clone();
        empty.insert(
            "m.experts.w2_weight.weight_packed".to_owned(),
            (Dtype::I32, shape, Vec::new()),
        );
        let error = Folder::new(&empty, &config).open().map(|_| ()).expect_err("empty");
        assert!(
            matches!(error, Error::TensorShape { .. } | Error::MissingTensor { .. }),
            "{error}"
        );
    }
}

/// The blocks of gpt-oss: e2m1 pairs, e8m0 scales.
#[test]
fn blocks_of_mxfp4_are_read_expert_by_expert() {
    let mut random = Random::new(Random::fresh_seed());
    let (num_experts, n, k) = (2, 12, 96);
    let blocks = random_bytes(&mut random, num_experts * n * k / 2);
    let scales: Vec<u8> =
        random_bytes(&mut random, num_experts * n * 3).into_iter().map(|b| 110 + b % 20).collect();
    let parts = Parts::from([
        (
            "m.experts.down_proj_blocks".to_owned(),
            (Dtype::U8, vec![num_experts, n, 3, 16], blocks.clone()),
        ),
        (
            "m.experts.down_proj_scales".to_owned(),
            (Dtype::U8, vec![num_experts, n, 3], scales.clone()),
        ),
        (
            "m.experts.down_proj_bias".to_owned(),
            (Dtype::BF16, vec![num_experts, n], vec![0; 2 * num_experts * n]),
        ),
    ]);
    let config =
        json!({ "quant_method": "mxfp4", "modules_to_not_convert": ["m.layers.*.self_attn"] });
    let folder = Folder::new(&parts, &config);
    let checkpoint = folder.open().expect("blocks");
    assert_eq!((checkpoint.findings(), checkpoint.layers().len()), (&[][..], 2));
    for expert in 0..num_experts {
        let matrix = checkpoint.layer(&format!("m.experts.down_proj.{expert}")).expect("legal");
        for (at, value) in values(&matrix).into_iter().enumerate() {
            let at = expert * n * k + at;
            let code = blocks[at / 2] >> (4 * (at % 2)) & 15;
            let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
            let sign = if code < 8 { 1.0 } else { -1.0 };
            let scale = 2f64.powi(i32::from(scales[at / 32]) - 127);
            assert_eq!(value, sign * magnitude * scale, "expert {expert}, {at}");
        }
    }
    let mut wrong = parts;
    wrong.insert("m.experts.down_proj_blocks".to_owned(), (Dtype::U8, vec![2, n, 6, 8], blocks));
    let text = Folder::new(&wrong, &config).open().map(|_| ()).expect_err("8 bytes").to_string();
    assert!(text.contains("expected [N, K/32, 16]"), "{text}");
}

/// Missing layers, blocks and plain ones among their likes: what a strict reader wants to know.
#[test]
fn b89_layers_that_are_left_out_are_reported() {
    let layer = gptq_layer(64, 128, 1, 7);
    let mut parts = Parts::new();
    for block in [0, 1, 2, 4] {
        for name in ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"] {
            let dropped = (block, name) == (2, "self_attn.k_proj");
            let plain = (block, name) == (1, "mlp.up_proj");
            let stem = format!("model.layers.{block}.{name}");
            if plain {
                parts.insert(
                    format!("{stem}.weight"),
                    (Dtype::F16, vec![64, 128], vec![0; 64 * 128 * 2]),
                );
            } else if !dropped {
                parts.extend(renamed(&layer, &stem));
            }
        }
    }
    parts.insert("experts.gate_up_proj_packed".to_owned(), (Dtype::U8, vec![3], vec![0; 3]));
    let folder = Folder::new(&parts, &gptq_config(128));
    let model = json!({ "num_hidden_layers": 5, "quantization_config": gptq_config(128) });
    std::fs::write(folder.file("config.json"), model.to_string()).expect("written");
    let checkpoint = folder.open().expect("all that is there is legal");
    let wanted = [
        Finding::UnusedTensor { tensor: "experts.gate_up_proj_packed".to_owned() },
        Finding::MissingLayer {
            layer: "model.layers.2.self_attn.k_proj".to_owned(),
            present: 3,
            modules: 4,
        },
        Finding::LeftPlain { tensor: "model.layers.1.mlp.up_proj.weight".to_owned() },
        Finding::MissingBlock { block: 3, num_blocks: 5 },
    ];
    assert_eq!(checkpoint.findings(), wanted);
    // The file alone is a part of a model by intent; a list may leave the plain layer out.
    let mut model = model;
    model["quantization_config"]["modules_to_not_convert"] = json!(["layers.1.mlp"]);
    std::fs::write(folder.file("config.json"), model.to_string()).expect("written");
    let file = makaira::Checkpoint::open(&folder.file("model.safetensors")).expect("legal");
    assert_eq!(file.findings(), &wanted[..2]);
}

/// Every dense type is rounded alike; what is no matrix of a linear layer is left alone.
#[test]
fn plain_weights_of_every_type_are_rounded() {
    let mut random = Random::new(Random::fresh_seed());
    let (n, k) = (24, 256);
    // Numbers that all three types hold.
    let dense: Vec<f32> = (0..n * k)
        .map(|_| bf16::from_f64(random.uniform(-1.0, 1.0)).to_f32())
        .map(|value| f16::from_f32(value).to_f32())
        .map(|value| bf16::from_f32(value).to_f32())
        .collect();
    let mut parts = Parts::from([
        (
            "a.weight".to_owned(),
            (Dtype::F32, vec![n, k], dense.iter().flat_map(|v| v.to_le_bytes()).collect()),
        ),
        (
            "b.weight".to_owned(),
            (
                Dtype::F16,
                vec![n, k],
                dense.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
            ),
        ),
        (
            "c.weight".to_owned(),
            (
                Dtype::BF16,
                vec![n, k],
                dense.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
            ),
        ),
    ]);
    for (name, shape) in [
        ("norm.weight", vec![4, 4]),
        ("embed_tokens.weight", vec![4, 4]),
        ("conv.weight", vec![4, 2, 2]),
    ] {
        parts.insert(name.to_owned(), (Dtype::F16, shape, vec![0; 32]));
    }
    let folder = Folder::new(&parts, &Value::Null);
    let checkpoint = folder.open().expect("plain");
    assert_eq!((checkpoint.conventions(), checkpoint.layers().len()), (vec!["plain"], 3));
    let rounded: Vec<Vec<f64>> = ["a", "b", "c"]
        .iter()
        .map(|name| values(&checkpoint.load(name, default_threads()).expect("finite").view()))
        .collect();
    assert!(rounded[0] == rounded[1] && rounded[0] == rounded[2]);
    let largest = rounded[0].iter().zip(&dense).map(|(ours, w)| (ours - f64::from(*w)).abs());
    assert!(largest.fold(0.0, f64::max) < 0.07, "half a step of 2/15");
    let nan = &mut parts.get_mut("b.weight").expect("there").2;
    nan[2 * 300..2 * 301].copy_from_slice(&f16::NAN.to_le_bytes());
    let folder = Folder::new(&parts, &Value::Null);
    let checkpoint = folder.open().expect("plain");
    let error = checkpoint.load("b", 1).map(|_| ()).expect_err("NaN");
    let cause = std::error::Error::source(&error).expect("a rule").to_string();
    assert!(cause.contains("row 1 (output), column 44 (input)"), "{cause}");
}
