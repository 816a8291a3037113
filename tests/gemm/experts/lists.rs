//! The lists that the device makes, against a sort.

use half::f16;
use makaira::backend::{DevicePtr, Stream};
use makaira::gemm::experts::{Choices, List};
use makaira::gemm::{Gemm, Matrix};
use makaira::kernel::experts::route::NO_PLACE;
use makaira::kernel::experts::select::{BLOCK_ROWS, max_blocks, tile_m};
use makaira::weights::{FORMATS, ScaleType};

use super::{Batch, Run, Stack, put, take};
use crate::support::{Random, chain, devices};

/// Rows lie by expert, then by token, then by choice; each choice knows its row. Also with numbers that are no
/// expert's, more experts than a CTA has threads, and more choices than a thread reads at a time.
#[test]
fn lists_are_sorted_by_expert_then_token() {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        let gemm = Gemm::new(device.backend.clone());
        for (num_experts, tokens, top_k) in
            [(1, 1, 1), (4, 7, 2), (3, 600, 3), (8, 33, 8), (300, 5, 4), (2, 0, 2)]
        {
            let among: Vec<u32> = (0..num_experts).collect();
            let mut batch = Batch::new(tokens, top_k, &among, &mut random);
            for id in batch.ids.iter_mut().skip(1) {
                if random.below(8) == 0 {
                    *id = random.pick(&[num_experts, num_experts + 7, u32::MAX, 1 << 31]);
                }
            }
            let what = format!("{num_experts} experts, {tokens} x {top_k}, seed {seed}");
            let routing = gemm.routing(num_experts, tokens as u64, top_k as u32).expect("it fits");
            let [ids, weights] = [put(&device, &batch.ids), put(&device, &batch.weights)];
            let tokens = tokens as u64;
            // Twice: the counter must be zero again.
            for _ in 0..2 {
                gemm.route(
                    &routing,
                    Choices { ids, weights: Some(weights), tokens },
                    Stream::default(),
                )
                .unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
                let list = batch.list(num_experts as usize);
                let offsets: Vec<u32> =
                    take(&device, routing.offsets_ptr(), num_experts as usize + 1);
                let expected: Vec<u32> = (0..=num_experts)
                    .map(|expert| list.iter().filter(|at| batch.ids[**at] < expert).count() as u32)
                    .collect();
                assert_eq!(offsets, expected, "{what}");
                let rows: Vec<u32> = take(&device, routing.token_ids_ptr(), list.len());
                let expected: Vec<u32> = list.iter().map(|at| (at / top_k) as u32).collect();
                assert_eq!(rows, expected, "{what}");
                let row_weights: Vec<f32> = take(&device, routing.row_weights_ptr(), list.len());
                let expected: Vec<f32> = list.iter().map(|at| batch.weights[*at]).collect();
                assert_eq!(row_weights, expected, "{what}");
                let places: Vec<u32> = take(&device, routing.places_ptr(), batch.ids.len());
                let place = |at| list.iter().position(|row| *row == at);
                let expected: Vec<u32> = (0..batch.ids.len())
                    .map(|at| place(at).map_or(NO_PLACE, |place| place as u32))
                    .collect();
                assert_eq!(places, expected, "{what}");
            }
            for ptr in [ids, weights] {
                device.backend.free(ptr).expect("it is ours");
            }
        }
    }
}

/// Choices of no expert have no row in the product either.
#[test]
fn choices_of_no_expert_have_no_row() {
    for device in devices() {
        let mut random = Random(77);
        let stack = Stack::new(FORMATS[3], 3, (64, 128), 128, ScaleType::F16, &mut random);
        for (keep, tokens) in [(0, 4), (2, 9), (5, 40)] {
            let mut batch = Batch::new(tokens, 2, &[0, 1, 2], &mut random);
            for (at, id) in batch.ids.iter_mut().enumerate() {
                if keep == 0 || at % keep != 0 {
                    *id = u32::MAX;
                }
            }
            let run = Run::new(&device, &stack, &batch);
            let product =
                run.check::<f16>(&mut random).unwrap_or_else(|why| panic!("keep {keep}: {why}"));
            assert_eq!(product.rows.len(), batch.ids.iter().filter(|id| **id < 3).count());
        }
    }
}

/// A list of the caller's own: the same product.
#[test]
fn lists_of_the_callers() {
    for device in devices() {
        let mut random = Random(78);
        let stack = Stack::new(FORMATS[3], 4, (64, 256), 128, ScaleType::F16, &mut random);
        let (n, k) = stack.shape();
        for (tokens, indirect) in [(3, true), (20, true), (20, false), (90, true)] {
            let batch = Batch::new(tokens, 2, &[0, 1, 3], &mut random);
            let list = batch.list(4);
            let token_ids: Vec<u32> = list.iter().map(|at| (at / 2) as u32).collect();
            let row_weights: Vec<f32> = list.iter().map(|at| batch.weights[*at]).collect();
            let offsets: Vec<u32> = (0..5)
                .map(|expert| list.iter().filter(|at| batch.ids[**at] < expert).count() as u32)
                .collect();
            let a: Vec<f16> = crate::types::numbers(
                k * if indirect { tokens } else { list.len() },
                1.0,
                &mut random,
            );
            let gemm = Gemm::new(device.backend.clone());
            let experts = stack.upload::<f16>(&gemm);
            let routing = gemm.routing(4, tokens as u64, 2).expect("it fits");
            let workspace = gemm.expert_workspace(&experts, tokens as u64, 2).expect("it fits");
            let ptrs: [DevicePtr; 5] = [
                put(&device, &offsets),
                put(&device, &token_ids),
                put(&device, &row_weights),
                put(&device, &a),
                put(&device, &vec![f16::NAN; list.len() * n]),
            ];
            let [offsets, token_ids, row_weights, a_ptr, c_ptr] = ptrs;
            let rows = list.len() as u64;
            let list_of = List {
                offsets,
                token_ids: indirect.then_some(token_ids),
                row_weights: Some(row_weights),
                rows,
                tokens: (a.len() / k) as u64,
            };
            let routed = gemm
                .route_list(&routing, list_of, Stream::default())
                .unwrap_or_else(|error| panic!("{}", chain(&error)))
                .weighted();
            let matrix = |ptr, stride: usize| Matrix { ptr, stride: stride as u64 };
            gemm.matmul_experts(
                matrix(a_ptr, k),
                &experts,
                matrix(c_ptr, n),
                &routed,
                &workspace,
                Stream::default(),
            )
            .unwrap_or_else(|error| panic!("{}", chain(&error)));
            let rows = list
                .iter()
                .enumerate()
                .map(|(at, choice)| {
                    let row = if indirect { choice / 2 } else { at };
                    super::Row {
                        expert: batch.ids[*choice] as usize,
                        a: a[row * k..][..k].to_vec(),
                        weight: batch.weights[*choice].into(),
                    }
                })
                .collect();
            let c = take(&device, c_ptr, list.len() * n);
            super::Product { rows, bias: None, c, n }
                .compare(&stack, None)
                .unwrap_or_else(|why| panic!("{tokens} tokens: {why}"));
            for ptr in ptrs {
                device.backend.free(ptr).expect("it is ours");
            }
        }
    }
}

/// Lists that are no lists stay inside the memory that there is: the emulator would tell.
#[test]
fn wrong_lists_reach_no_foreign_memory() {
    for device in devices() {
        let mut random = Random(79);
        let stack = Stack::new(FORMATS[3], 4, (64, 128), 128, ScaleType::F16, &mut random);
        let (n, k) = stack.shape();
        for offsets in [[9, 3, 7, 1, 2], [0, 1, 2, 3, 1 << 31], [u32::MAX; 5], [0, 6, 0, 6, 0]] {
            let gemm = Gemm::new(device.backend.clone());
            let experts = stack.upload::<f16>(&gemm);
            let routing = gemm.routing(4, 6, 1).expect("it fits");
            let workspace = gemm.expert_workspace(&experts, 6, 1).expect("it fits");
            let token_ids = [0, 5, u32::MAX, 6, 1 << 30, 2];
            let a: Vec<f16> = crate::types::numbers(6 * k, 1.0, &mut random);
            let ptrs = [
                put(&device, &offsets),
                put(&device, &token_ids),
                put(&device, &a),
                put(&device, &vec![f16::NAN; 6 * n]),
            ];
            let [offsets, token_ids, a, c] = ptrs;
            let list =
                List { offsets, token_ids: Some(token_ids), row_weights: None, rows: 6, tokens: 6 };
            let routed = gemm.route_list(&routing, list, Stream::default()).expect("it runs");
            let matrix = |ptr, stride: usize| Matrix { ptr, stride: stride as u64 };
            let result = gemm.matmul_experts(
                matrix(a, k),
                &experts,
                matrix(c, n),
                &routed,
                &workspace,
                Stream::default(),
            );
            // Two experts with the same row write it both, which is a race and nothing worse.
            if let Err(error) = result {
                let why = chain(&error);
                assert!(why.contains("race"), "{why}");
            }
            for ptr in ptrs {
                device.backend.free(ptr).expect("it is ours");
            }
        }
    }
}

/// There is always room for the blocks of a list, and the bound is met.
#[test]
fn the_bound_of_blocks_holds_and_is_met() {
    let mut random = Random(80);
    for _ in 0..2000 {
        let num_experts = 1 + random.below(40);
        let rows = random.below(300);
        let mut counts = vec![0usize; num_experts];
        (0..rows).for_each(|_| counts[random.below(num_experts)] += 1);
        for tile_m in BLOCK_ROWS {
            let blocks: usize = counts.iter().map(|rows| rows.div_ceil(tile_m as usize)).sum();
            assert!(blocks as u64 <= max_blocks(rows as u64, num_experts as u32, tile_m));
        }
    }
    assert_eq!(max_blocks(0, 8, 16), 0);
    assert_eq!(max_blocks(3, 8, 16), 3);
    // Eight experts of 17 rows each.
    assert_eq!(max_blocks(8 * 17, 8, 16), 16);
    // Blocks are as high as the batch wants them.
    assert_eq!(tile_m(8, 1, 128, 256), 1);
    assert_eq!(tile_m(128, 16, 128, 256), 8);
    assert_eq!(tile_m(1024, 512, 8, 64), 64);
    assert_eq!(tile_m(1024, 512, 8, 256), 64);
    assert_eq!(tile_m(300, 150, 4, 256), 64);
    assert_eq!(tile_m(4000, 2000, 8, 256), 128);
    assert_eq!(tile_m(9000, 3000, 8, 256), 256);
    assert_eq!(tile_m(3000, 100, 10, 256), 128);
    assert_eq!(tile_m(0, 0, 8, 64), 1);
}
