//! Striped partitioning: every stripe length, chains of CTAs, and the same bits every time.

use makaira::kernel::select::family_of;
use makaira::kernel::{Config, Reduction, Rows};

use crate::support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Tolerance, activations, chain, compare, devices,
    gpu, skipped,
};

fn config(name: &str) -> Config {
    name.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// Three output tiles of eight runs: stripes of 1 to 24 runs make every chain from 1 to 8 CTAs a tile,
/// stripes that begin in one tile and end in the next or the one after, and whole tiles. Where stripes cover the
/// row tiles there are more of them.
#[test]
fn every_stripe_length_is_exact() {
    for device in devices() {
        for (name, m) in [
            ("marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1", 1),
            ("marlin_sm80_u4b8_f16_m8n128k256_g64_w2_s2_c1", 7),
            ("marlin_sm80_u4b8_f16_m16n64k512_col_w1_s3_c1", 16),
            ("marlin_sm80_u4b8_f16_m32n64k512_g128_w2_s2_c1_fs", 40),
            ("marlin_sm80_u4b8_f16_m16n64k512_g128_w2_s2_c1_sn", 13),
            ("marlin_sm90_u4b8_f16_m1n64k512_g128_w1_s2_c1", 1),
            ("marlin_sm90_u4b8_f16_m8n96k256_g64_w3_s3_c1_sr_sn", 7),
            ("marlin_sm90_u4b8_f16_m16n128k256_g128_w1_s2_c1_sn", 9),
            ("marlin_sm90_u4b8_f16_m2n80k256_g128_w5_s6_c1", 2),
            ("marlin_sm90_u4b8_f16_m16n64k512_col_w2_s2_c1_sn", 16),
            // Three row tiles: nine tiles, of which long stripes deal some out whole.
            ("marlin_sm90wg_u4b8_f16_m8n64k128_g128_w4_s3_c1", 20),
            ("marlin_sm90wg_u4b8_f16_m16n128k128_g64_w4_s3_c1_fs", 45),
        ] {
            for reduction in [Reduction::F32, Reduction::F16InPlace] {
                let config = Config { reduction, ..config(name) };
                if family_of(&config).broken_rule(&config).is_some() {
                    continue;
                }
                let mut random = Random(42);
                let n = 3 * config.tile_n as usize;
                let layer = Layer::new(n, 8 * 128, config.group.raw(), Fill::Integers, &mut random);
                let a = activations(m, layer.k, Fill::Integers, &mut random);
                let setup = Setup::new(&device, layer);
                for stripe in 1..=24 * m.div_ceil(config.tile_m as usize) as u32 {
                    let prepared = setup.prepare(config, stripe, m);
                    let workspace = setup.workspace(&prepared.choice, m);
                    let c = setup
                        .run_with(&prepared, &a, CANARIES, &workspace)
                        .unwrap_or_else(|e| panic!("{config} stripe {stripe}: {}", chain(&e)));
                    let tolerance = Tolerance::of(Fill::Integers, &config, setup.layer.k, stripe);
                    compare(&setup.layer, &a, &c, tolerance)
                        .unwrap_or_else(|why| panic!("{config} stripe {stripe}: {why}"));
                }
            }
        }
    }
}

/// Fault B47: the same bits from run to run, whatever the order in which CTAs and warps run.
#[test]
fn b47_the_same_bits_in_every_order() {
    let mut random = Random(7);
    for (name, m, stripe) in [
        ("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1", 16, 3),
        ("marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1", 1, 1),
        ("marlin_sm80_u4b8_f16_m32n128k256_g64_w4_s2_c1_fs", 50, 5),
        ("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1_r16", 16, 3),
        ("marlin_sm90_u4b8_f16_m16n128k512_g128_w2_s2_c1_sn", 16, 3),
        ("marlin_sm90_u4b8_f16_m4n64k512_g128_w1_s3_c1", 3, 5),
    ] {
        let config = config(name);
        let n = 3 * config.tile_n as usize - 20;
        let layer = Layer::new(n, 8 * 128, config.group.raw(), Fill::Random, &mut random);
        let a = activations(m, layer.k, Fill::Random, &mut random);
        let mut first = None;
        for seed in 0..12 {
            let setup = Setup::new(&Device::hopper_seeded(seed), layer.clone());
            let prepared = setup.prepare(config, stripe, m);
            let workspace = setup.workspace(&prepared.choice, m);
            for launch in 0..2 {
                let what = format!("{name}, order {seed}, launch {launch}");
                let c = setup
                    .run_with(&prepared, &a, CANARIES, &workspace)
                    .unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
                let tolerance = Tolerance::of(Fill::Random, &config, layer.k, stripe);
                compare(&layer, &a, &c, tolerance).unwrap_or_else(|why| panic!("{what}: {why}"));
                assert_eq!(first.get_or_insert_with(|| c.clone()), &c, "{what} differs");
            }
        }
    }
}

/// Fault B47 at its own sizes, 12 runs each.
#[test]
fn b47_the_same_bits_at_real_sizes() {
    if gpu().is_none() {
        return skipped("b47 at real sizes: it takes a GPU");
    }
    let mut random = Random(470);
    for device in devices().into_iter().filter(Device::is_gpu) {
        for (m, n, k) in [(16, 512, 3584), (16, 1024, 8192), (64, 512, 8192), (1, 512, 8192)] {
            let layer = Layer::new(n, k, 128, Fill::Random, &mut random);
            let a = activations(m, k, Fill::Random, &mut random);
            let setup = Setup::new(&device, layer);
            let first = setup.run(&a, CANARIES).expect("runs");
            compare(&setup.layer, &a, &first, Tolerance::Bound { fragments: true, hops: 0 })
                .unwrap_or_else(|why| panic!("({m}, {n}, {k}): {why}"));
            for run in 1..12 {
                let again = setup.run(&a, CANARIES).expect("runs");
                assert_eq!(first, again, "run {run} of ({m}, {n}, {k}) differs");
            }
        }
    }
}

/// Stripes at the level of the library call: each choice that is considered for a small problem.
#[test]
fn every_ranked_choice_of_a_small_problem_is_right() {
    use makaira::kernel::select;
    for device in devices() {
        let mut random = Random(99);
        let layer = Layer::new(136, 1152, 128, Fill::Integers, &mut random);
        let a = activations(5, layer.k, Fill::Integers, &mut random);
        let setup = Setup::new(&device, layer);
        let ranked = select::ranked(&setup.problem(5, Rows::Whole), device.backend.device());
        assert!(ranked.len() > 100, "{} choices", ranked.len());
        // The first ones, which are what users get, and a sample of the others.
        for (rank, choice) in ranked.iter().enumerate().filter(|(n, _)| *n < 12 || n % 61 == 0) {
            let prepared = setup.gemm.prepare_choice(*choice).expect("a candidate is legal");
            let workspace = setup.workspace(choice, 5);
            let what = format!("rank {rank}: {} stripe {}", choice.config, choice.stripe);
            let c = setup
                .run_with(&prepared, &a, CANARIES, &workspace)
                .unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
            compare(&setup.layer, &a, &c, Tolerance::Exact)
                .unwrap_or_else(|why| panic!("{what}: {why}"));
        }
    }
}
