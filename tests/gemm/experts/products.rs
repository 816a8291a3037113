//! Products with experts: every type, every height of blocks, every distribution of rows.

use half::{bf16, f16};
use makaira::backend::Stream;
use makaira::gemm::experts::Choices;
use makaira::gemm::{Gemm, Matrix};
use makaira::kernel::experts::select::{BLOCK_ROWS, COMMON_BLOCK_ROWS, ExpertProblem};
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Config, Problem, Rows};
use makaira::weights::{FORMATS, ScaleType, WeightFormat};

use super::{Batch, Product, Run, Stack, put, take};
use crate::support::{Device, Random, devices};
use crate::types::{Number, scalings};

/// A random batch of experts, some of which have no rows.
fn batch(num_experts: usize, tokens: usize, random: &mut Random) -> Batch {
    let mut among: Vec<u32> = (0..num_experts as u32).collect();
    for _ in 0..random.below(num_experts) {
        among.swap_remove(random.below(among.len()));
    }
    let top_k = 1 + random.below(among.len().min(3));
    Batch::new(tokens, top_k, &among, random)
}

fn every_scaling_of<E: Number>(format: &'static dyn WeightFormat) {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        for (raw, element) in scalings(format) {
            let shape = random.pick(&[(188, 384), (128, 512), (64, 256)]);
            let num_experts = 1 + random.below(5);
            let stack = Stack::new(format, num_experts, shape, raw, element, &mut random);
            for tokens in [1 + random.below(4), 5 + random.below(20), 30 + random.below(60)] {
                let batch = batch(num_experts, tokens, &mut random);
                let mut run = Run::new(&device, &stack, &batch);
                run.bias = random.below(2) == 0;
                run.weighted = random.below(2) == 0;
                run.in_order = random.below(2) == 0;
                run.early = random.below(2) == 0;
                let what = format!(
                    "{} group {raw} {element:?} {shape:?} experts {num_experts} tokens {tokens} seed {seed}",
                    format.name()
                );
                run.check::<E>(&mut random).unwrap_or_else(|why| panic!("{what}: {why}"));
            }
        }
    }
}

/// Two tests a format, so that they run side by side; the list is checked below.
macro_rules! formats {
    ($($name:ident),*) => {
        $(mod $name {
            use super::*;

            #[test]
            fn in_fp16() {
                every_scaling_of::<f16>(makaira::weights::format_by_name(stringify!($name)).expect("listed"));
            }

            #[test]
            fn in_bf16() {
                every_scaling_of::<bf16>(makaira::weights::format_by_name(stringify!($name)).expect("listed"));
            }
        })*

        #[test]
        fn every_format_has_its_tests() {
            let names: Vec<&str> = FORMATS.iter().map(|format| format.name()).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

formats!(e2m1, e4m3, u4, u4b8, u8, u8b128);

fn u4b8() -> &'static dyn WeightFormat {
    makaira::weights::format_by_name("u4b8").expect("listed")
}

fn ranked(problem: &ExpertProblem, device: &Device) -> Vec<Config> {
    let ranked = problem.ranked(device.backend.device()).expect("kernels take it");
    ranked.into_iter().map(|choice| choice.config).collect()
}

/// Every height of blocks with the best configuration and others; batches around the height, all rows of one expert
/// or of many, one expert between two without rows.
#[test]
fn every_height_of_blocks() {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        for tile_m in BLOCK_ROWS {
            // One scale per column is a matter of low tiles.
            let groups = if tile_m > COMMON_BLOCK_ROWS { &[128, 32][..] } else { &[-1, 128, 32] };
            let groups = if tile_m < 64 { groups } else { &[random.pick(groups)] };
            for raw in groups.iter().copied() {
                let (n, k) = random.pick(&[(128, 384), (192, 256)]);
                let stack = Stack::new(u4b8(), 5, (n, k), raw, ScaleType::F16, &mut random);
                let edge = tile_m as usize;
                let batches = [
                    Batch::new(1, 1, &[4], &mut random),
                    Batch::new(edge, 1, &[2], &mut random),
                    Batch::new(edge + 1, 2, &[0, 4], &mut random),
                    Batch::new(2 * edge + random.below(edge + 1), 2, &[1, 2, 3], &mut random),
                    Batch::new(edge.max(7) - 1, 3, &[0, 1, 2, 3, 4], &mut random),
                ];
                let few = if tile_m < 64 { 0 } else { 2 };
                for batch in &batches[few..] {
                    let gemm = Gemm::new(device.backend.clone());
                    let experts = stack.upload::<f16>(&gemm);
                    let rows = Rows::of(n, k);
                    let configs = ranked(&experts.problem(rows, tile_m, 8, Some(64)), &device);
                    let best = |family| configs.iter().find(|config| config.family == family);
                    let best = [best("sm80"), best("sm90wg")].into_iter().flatten().copied();
                    assert_eq!(best.clone().count(), 1 + usize::from((16..=64).contains(&tile_m)));
                    for config in best.chain([random.pick(&configs)]) {
                        let mut run = Run::new(&device, &stack, batch);
                        (run.tile_m, run.config) = (Some(tile_m), Some(config));
                        run.weighted = random.below(2) == 0;
                        let what = format!("{config} {:?} seed {seed}", batch.ids);
                        run.check::<f16>(&mut random).unwrap_or_else(|why| panic!("{what}: {why}"));
                    }
                }
            }
        }
    }
}

/// Odd sizes: single elements of A and C, cut runs, fewer columns than a tile.
#[test]
fn any_size() {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        for format in FORMATS {
            for (shape, gap) in [((67, 250), 1), ((133, 96), 8), ((36, 40), 4), ((1, 1), 0)] {
                let stack = Stack::new(*format, 3, shape, -1, ScaleType::F16, &mut random);
                for tokens in [1, 6, 21] {
                    let batch = batch(3, tokens, &mut random);
                    let mut run = Run::new(&device, &stack, &batch);
                    (run.gap, run.bias, run.weighted) = (gap, tokens == 6, tokens != 1);
                    let what = format!("{} {shape:?} {tokens} tokens seed {seed}", format.name());
                    run.check::<f16>(&mut random).unwrap_or_else(|why| panic!("{what}: {why}"));
                    run.check::<bf16>(&mut random).unwrap_or_else(|why| panic!("{what}: {why}"));
                }
            }
        }
    }
}

/// The bits of expert-by-expert products with the same configuration, tiles whole along K.
fn one_by_one(device: &Device, stack: &Stack, product: &Product<f16>, config: Config) -> Vec<f16> {
    let gemm = Gemm::new(device.backend.clone()).without_tuning();
    let (n, k) = stack.shape();
    let mut c = Vec::new();
    for (expert, layer) in stack.layers.iter().enumerate() {
        let rows = product.rows.iter().filter(|row| row.expert == expert);
        let a: Vec<f16> = rows.flat_map(|row| row.a.clone()).collect();
        let weight = layer.weight(&gemm, f16::ACTIVATION);
        let config = Config { kind: weight.kind(), ..config };
        let (m, group) = (a.len() / k, layer.packed.layout().group);
        let rows = config.rows;
        let problem =
            Problem { kind: config.kind, m: m as u64, n: n as u32, k: k as u32, group, rows };
        let stripe = problem.k.div_ceil(128);
        let cost = select::cost(&config, &problem, device.backend.device(), stripe);
        let prepared = gemm.prepare_choice(Choice { config, stripe, cost }).expect("legal");
        let workspace = gemm.workspace_of(0, 0).expect("nothing");
        let [a_ptr, c_ptr] = [put(device, &a), put(device, &vec![f16::NAN; m * n])];
        let matrix = |ptr, stride: usize| Matrix { ptr, stride: stride as u64 };
        gemm.matmul_with(
            &prepared,
            matrix(a_ptr, k),
            &weight,
            matrix(c_ptr, n),
            m as u64,
            &workspace,
            Stream::default(),
        )
        .expect("it runs");
        c.extend(take::<f16>(device, c_ptr, m * n));
        for ptr in [a_ptr, c_ptr] {
            device.backend.free(ptr).expect("it is ours");
        }
    }
    c
}

#[test]
fn the_same_bits_as_expert_by_expert() {
    for device in devices() {
        let seed = makaira::reference::Random::fresh_seed();
        let mut random = Random(seed);
        for (raw, tile_m) in [(-1, 8), (128, 1), (128, 16), (64, 32), (32, 64)] {
            let stack = Stack::new(u4b8(), 4, (192, 512), raw, ScaleType::F16, &mut random);
            let batch = Batch::new(3 * tile_m as usize / 2 + 1, 2, &[0, 2, 3], &mut random);
            let gemm = Gemm::new(device.backend.clone());
            let experts = stack.upload::<f16>(&gemm);
            let config =
                random.pick(&ranked(&experts.problem(Rows::Whole, tile_m, 8, Some(64)), &device));
            let mut run = Run::new(&device, &stack, &batch);
            (run.tile_m, run.config) = (Some(tile_m), Some(config));
            let what = format!("{config} seed {seed}");
            let product =
                run.check::<f16>(&mut random).unwrap_or_else(|why| panic!("{what}: {why}"));
            let expected = one_by_one(&device, &stack, &product, config);
            assert!(product.c == expected, "{what}: other bits");
        }
    }
}

/// Batches so large that Hopper's blocks are taller than the family of odd rows takes: they are cut again.
#[test]
fn odd_rows_in_tall_blocks() {
    for device in devices() {
        let mut random = Random(31);
        let stack = Stack::new(u4b8(), 2, (35, 130), -1, ScaleType::F16, &mut random);
        let batch = Batch::new(150, 2, &[0, 1], &mut random);
        let mut run = Run::new(&device, &stack, &batch);
        run.gap = 1;
        (run.early, run.weighted) = (true, true);
        let gemm = Gemm::new(device.backend.clone());
        let choices =
            Choices { ids: put(&device, &batch.ids), weights: None, tokens: batch.tokens as u64 };
        let routing = run.routing(&gemm);
        let routed = gemm.route(&routing, choices, Stream::default()).expect("it fits");
        let hopper = device.backend.device().arch.sm == 90;
        assert_eq!(routed.tile_m() > COMMON_BLOCK_ROWS, hopper);
        run.check::<f16>(&mut random).unwrap_or_else(|why| panic!("{why}"));
        device.backend.free(choices.ids).expect("it is ours");
    }
}
