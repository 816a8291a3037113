//! What is refused, what is not launched, and addresses beyond 32 bits.

use half::f16;
use makaira::backend::{DevicePtr, Stream};
use makaira::gemm::experts::{Choices, Experts, List};
use makaira::gemm::{Error, Gemm, Matrix, Workspace};
use makaira::kernel::Rows;
use makaira::kernel::select::MAX_ROW_STRIDE_BYTES;
use makaira::weights::{Activation, FORMATS, PackedWeights, ScaleType};

use super::{Batch, Product, Row, Run, Stack, put, take};
use crate::operands::rows_apart;
use crate::support::{Random, chain, devices};
use crate::types::{TypedLayer, numbers};

fn refused<T>(result: Result<T, Error>, words: &[&str]) {
    let error = result.err().expect("it must be refused");
    let text = chain(&error);
    assert!(words.iter().all(|word| text.contains(word)), "{text} says not all of {words:?}");
}

/// Fault B11: experts without rows are normal, and so is a batch without tokens: nothing is launched and C is as it
/// was.
#[test]
fn b11_experts_without_rows() {
    for device in devices() {
        let mut random = Random(11);
        let stack = Stack::new(FORMATS[3], 5, (1408, 256), 128, ScaleType::F16, &mut random);
        // All rows of one expert, whichever it is, first, last or between.
        for expert in [0, 2, 4] {
            for tokens in [1, 9] {
                let batch = Batch::new(tokens, 1, &[expert], &mut random);
                Run::new(&device, &stack, &batch)
                    .check::<f16>(&mut random)
                    .unwrap_or_else(|why| panic!("expert {expert}, {tokens} tokens: {why}"));
            }
        }
        let gemm = Gemm::new(device.backend.clone());
        let experts = stack.upload::<f16>(&gemm);
        let routing = gemm.routing(5, 0, 2).expect("it fits");
        let workspace = gemm.workspace_of(0, 0).expect("nothing");
        let c = put(&device, &[0x7d5au16; 64]);
        let nothing = Choices { ids: c, weights: None, tokens: 0 };
        let routed = gemm.route(&routing, nothing, Stream::default()).expect("it runs");
        let offsets: Vec<u32> = take(&device, routing.offsets_ptr(), 6);
        assert_eq!(offsets, [0; 6]);
        let matrix = |stride| Matrix { ptr: c, stride };
        gemm.matmul_experts(
            matrix(256),
            &experts,
            matrix(1408),
            &routed,
            &workspace,
            Stream::default(),
        )
        .expect("nothing to do");
        assert_eq!(take::<u16>(&device, c, 64), [0x7d5a; 64]);
        device.backend.free(c).expect("it is ours");
    }
}

/// Fault B15: rows of A and C more than 2^32 bytes from the first ones.
#[test]
fn b15_tokens_beyond_32_bits() {
    for device in devices() {
        let mut random = Random(15);
        let stack = Stack::new(FORMATS[3], 2, (64, 128), -1, ScaleType::F16, &mut random);
        let (n, k) = stack.shape();
        let stride = MAX_ROW_STRIDE_BYTES / 256 * 256;
        let tokens = 67;
        assert!((tokens as u64 - 1) * stride > 1 << 32);
        let batch = Batch::new(tokens, 1, &[0, 1], &mut random);
        let (a_ptr, a_rows) = rows_apart(&device, tokens as u64, stride, 256);
        let (c_ptr, c_rows) = rows_apart(&device, tokens as u64, stride, 256);
        let a: Vec<f16> = numbers(tokens * k, 1.0, &mut random);
        let backend = &device.backend;
        for (row, a) in a.chunks(k).enumerate() {
            let offset = row as u64 * stride;
            backend.upload(a_ptr.offset(offset), bytemuck::cast_slice(a)).expect("it fits");
            backend.upload(c_ptr.offset(offset), &[0xff; 256]).expect("it fits");
        }
        let gemm = Gemm::new(backend.clone());
        let experts = stack.upload::<f16>(&gemm);
        let routing = gemm.routing(2, tokens as u64, 1).expect("it fits");
        let workspace = gemm.expert_workspace(&experts, tokens as u64, 1).expect("it fits");
        let ids = put(&device, &batch.ids);
        let choices = Choices { ids, weights: None, tokens: tokens as u64 };
        let routed = gemm.route(&routing, choices, Stream::default()).expect("it runs");
        let matrix = |ptr| Matrix { ptr, stride: stride / 2 };
        gemm.matmul_experts(
            matrix(a_ptr),
            &experts,
            matrix(c_ptr),
            &routed,
            &workspace,
            Stream::default(),
        )
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
        let mut c = Vec::new();
        for row in 0..tokens as u64 {
            let bytes: Vec<u8> = take(&device, c_ptr.offset(row * stride), 256);
            let (product, canary) = bytes.split_at(2 * n);
            assert!(canary.iter().all(|byte| *byte == 0xff), "row {row} is overrun");
            c.extend(product.chunks(2).map(|half| f16::from_le_bytes([half[0], half[1]])));
        }
        let rows = batch.list(2).into_iter().map(|token| Row {
            expert: batch.ids[token] as usize,
            a: a[token * k..][..k].to_vec(),
            weight: 1.0,
        });
        Product { rows: rows.collect(), bias: None, c, n }
            .compare(&stack, None)
            .unwrap_or_else(|why| panic!("{why}"));
        for ptr in a_rows.into_iter().chain(c_rows).chain([ids]) {
            backend.free(ptr).expect("it is ours");
        }
    }
}

/// What one launch cannot do is refused with what can.
#[test]
fn experts_that_differ_are_refused() {
    for device in devices() {
        let mut random = Random(12);
        let gemm = Gemm::new(device.backend.clone());
        let mut layer = |shape, raw, format: usize| -> PackedWeights {
            TypedLayer::new(FORMATS[format], shape, raw, ScaleType::F16, &mut random).packed
        };
        let base = layer((64, 256), 128, 3);
        let upload = |packed: &[PackedWeights]| -> Result<Experts, Error> {
            gemm.upload_experts(packed, Activation::F16)
        };
        refused(upload(&[]), &["no experts", "at least one"]);
        for (other, word) in [
            (layer((128, 256), 128, 3), "128 x 256"),
            (layer((64, 128), 128, 3), "64 x 128"),
            (layer((64, 256), 64, 3), "group 64"),
            (layer((64, 256), 128, 5), "u8b128"),
        ] {
            refused(upload(&[base.clone(), other]), &["expert 1", word, "one shape and type"]);
        }
        let mut experts = upload(std::slice::from_ref(&base)).expect("one is enough");
        refused(gemm.upload_expert(&mut experts, 1, &base), &["expert 1", "last one is 0"]);
        // Activation order.
        let g_idx: Vec<i32> = (0..256).map(|i| (i * 7 % 256) / 128).collect();
        let mut random = Random(13);
        let order = Some((g_idx, 2));
        let layer =
            TypedLayer::in_order(FORMATS[3], (64, 256), 128, ScaleType::F16, order, &mut random);
        refused(upload(&[layer.packed]), &["act-order", "Gemm::matmul"]);
        let layout = base.layout();
        for count in [0, 1 << 17] {
            let reserved = gemm.reserve_experts(layout, FORMATS[3], count, Activation::F16);
            refused(reserved, &[&count.to_string(), "1 to 65536"]);
        }
    }
}

#[test]
fn lists_that_do_not_fit_are_refused() {
    for device in devices() {
        let mut random = Random(14);
        let gemm = Gemm::new(device.backend.clone());
        let stack = Stack::new(FORMATS[3], 4, (64, 128), 128, ScaleType::F16, &mut random);
        let experts = stack.upload::<f16>(&gemm);
        refused(gemm.routing(0, 4, 2), &["0 of them"]);
        refused(gemm.routing(4, 4, 0), &["0 experts for each"]);
        refused(gemm.routing(4, u64::MAX, 2), &["split the batch"]);
        refused(gemm.routing(4, 1 << 30, 2), &["1073741824 rows"]);
        let routing = gemm.routing(4, 8, 2).expect("it fits");
        refused(gemm.routing(4, 8, 2).expect("it fits").with_tile_m(48), &["blocks of 48 rows"]);
        let memory = put(&device, &[0u32; 64]);
        let choices = |ids: DevicePtr, tokens| Choices { ids, weights: None, tokens };
        let route = |choices| gemm.route(&routing, choices, Stream::default());
        refused(route(choices(memory, 9)).map(|_| ()), &["18 rows of 9 tokens", "8 times 2"]);
        refused(route(choices(memory, u64::MAX)).map(|_| ()), &["larger batch"]);
        refused(route(choices(memory.offset(2), 4)).map(|_| ()), &["ids", "multiple of 4"]);
        let list = List {
            offsets: memory.offset(1),
            token_ids: None,
            row_weights: None,
            rows: 4,
            tokens: 4,
        };
        let routed = gemm.route_list(&routing, list, Stream::default());
        refused(routed.map(|_| ()), &["offsets", "multiple of 4"]);
        let routed = route(choices(memory, 8)).expect("it fits");
        let workspace = gemm.workspace_of(0, 0).expect("nothing");
        let matrix = |ptr, stride| Matrix { ptr, stride };
        let run = |a, c, experts: &Experts| {
            gemm.matmul_experts(a, experts, c, &routed, &workspace, Stream::default())
        };
        let good = matrix(memory, 128);
        refused(run(matrix(memory.offset(1), 128), good, &experts), &["a:", "odd"]);
        refused(run(good, matrix(memory, 63), &experts), &["c:", "64 columns"]);
        let others = Stack::new(FORMATS[3], 3, (64, 128), 128, ScaleType::F16, &mut random);
        let others = others.upload::<f16>(&gemm);
        refused(run(good, good, &others), &["of 4 experts", "have 3"]);
        device.backend.free(memory).expect("it is ours");
    }
}

/// A kernel of the caller's choice must be for these experts and these blocks.
#[test]
fn kernels_for_others_are_refused() {
    for device in devices() {
        let mut random = Random(16);
        let gemm = Gemm::new(device.backend.clone());
        let stack = Stack::new(FORMATS[3], 2, (64, 128), 128, ScaleType::F16, &mut random);
        let batch = Batch::new(4, 1, &[0, 1], &mut random);
        let experts = stack.upload::<f16>(&gemm);
        let mut run = Run::new(&device, &stack, &batch);
        run.tile_m = Some(16);
        let problem = experts.problem(Rows::Whole, 8, 4, Some(64));
        let ranked = problem.ranked(device.backend.device()).expect("kernels take it");
        run.config = Some(ranked[0].config);
        let why = run.check::<f16>(&mut random).err().expect("blocks have 16 rows");
        assert!(why.contains("blocks of 16 rows"), "{why}");
    }
}

/// A kernel that wants rows in the list's order needs room for them, unless they have it.
#[test]
fn rows_in_order_need_a_workspace() {
    for device in devices().into_iter().filter(|device| device.backend.device().arch.sm == 90) {
        let mut random = Random(17);
        let gemm = Gemm::new(device.backend.clone());
        let stack = Stack::new(FORMATS[3], 2, (64, 256), 128, ScaleType::F16, &mut random);
        let experts = stack.upload::<f16>(&gemm);
        let batch = Batch::new(40, 2, &[0, 1], &mut random);
        let routing = gemm.routing(2, 40, 2).expect("it fits");
        let ids = put(&device, &batch.ids);
        let choices = Choices { ids, weights: None, tokens: 40 };
        let routed = gemm.route(&routing, choices, Stream::default()).expect("it runs");
        let rows = routed.rows();
        let problem =
            experts.problem(Rows::Whole, routed.tile_m(), routed.max_blocks(), Some(rows));
        let ranked = problem.ranked(device.backend.device()).expect("kernels take it");
        let wgmma = ranked.into_iter().find(|choice| choice.config.family == "sm90wg");
        let prepared = gemm.prepare_expert_choice(wgmma.expect("rows enough")).expect("legal");
        let a = put(&device, &numbers::<f16>(80 * 256, 1.0, &mut random));
        let c = put(&device, &vec![f16::NAN; 80 * 64]);
        let run = |routed, workspace: &Workspace| {
            let [a, c] = [(a, 256), (c, 64)].map(|(ptr, stride)| Matrix { ptr, stride });
            let stream = Stream::default();
            gemm.matmul_experts_with(&prepared, a, &experts, c, &routed, workspace, stream)
        };
        let none = gemm.workspace_of(0, 0).expect("nothing");
        let words = ["0 bytes of scratch", "m = 80", "40960", "Gemm::expert_workspace"];
        refused(run(routed, &none), &words);
        assert!(take::<f16>(&device, c, 80 * 64).iter().all(|c| c.is_nan()));
        run(routed.in_order(), &none).unwrap_or_else(|error| panic!("{}", chain(&error)));
        let enough = gemm.expert_workspace(&experts, 40, 2).expect("it fits");
        run(routed, &enough).unwrap_or_else(|error| panic!("{}", chain(&error)));
        for ptr in [ids, a, c] {
            device.backend.free(ptr).expect("it is ours");
        }
    }
}
