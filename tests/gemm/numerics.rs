//! Groups, scales and rounding.

use half::f16;
use makaira::kernel::{Config, Reduction};
use makaira::layout::f16_from_f64;
use makaira::weights::{Group, PackedLayout};

use crate::support::{
    CANARIES, Fill, Layer, Random, Setup, Tolerance, activations, chain, compare, devices,
};

#[test]
fn b18_every_group_size() {
    for device in devices() {
        let mut random = Random(18);
        for k in [128, 512, 4096] {
            for group in [-1, 16, 32, 64, 128] {
                let n = device.size(if k == 4096 { 64 } else { 256 }, 256);
                let setup =
                    Setup::new(&device, Layer::new(n, k, group, Fill::Integers, &mut random));
                for m in [1, 16, 40] {
                    let what = format!("m={m} k={k} g={group}");
                    let a = activations(m, k, Fill::Integers, &mut random);
                    let c = setup
                        .run(&a, CANARIES)
                        .unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
                    compare(&setup.layer, &a, &c, Tolerance::Exact)
                        .unwrap_or_else(|why| panic!("{what}: {why}"));
                }
            }
            for group in [0, 1, 8, 48] {
                let error = Group::new(k, group).expect_err("no kernel has it");
                assert!(error.to_string().contains("16, 32, 64 or 128"), "{error}");
            }
        }
        assert!(Group::new(512, 256).is_err());
        assert!(PackedLayout::new(256, 4096, Group::Size(256)).is_err());
    }
}

/// Fault B19: more groups than a group has inputs.
#[test]
fn b19_the_129th_group() {
    for device in devices() {
        let mut random = Random(19);
        let (n, k) = (device.size(64, 256), 16512);
        let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
        let mut a = activations(1, k, Fill::Integers, &mut random);
        a[..k - 128].fill(f16::ZERO);
        let c = setup.run(&a, CANARIES).unwrap_or_else(|error| panic!("{}", chain(&error)));
        compare(&setup.layer, &a, &c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
        assert!(c.iter().filter(|c| **c != f16::ZERO).count() > n / 2, "the last group counts");
    }
}

/// Fault B21: one scale a column, written as -1 or as a group of K inputs.
#[test]
fn b21_per_column_however_it_is_written() {
    for device in devices() {
        for k in [128, 4096] {
            let mut random = Random(21);
            let layer = Layer::new(64, k, -1, Fill::Random, &mut random);
            let same =
                Layer { group: Group::new(k, k as i64).expect("K is a group"), ..layer.clone() };
            let a = activations(3, k, Fill::Random, &mut random);
            let [c, d] = [layer, same].map(|layer| {
                let setup = Setup::new(&device, layer);
                setup.run(&a, CANARIES).unwrap_or_else(|error| panic!("{}", chain(&error)))
            });
            assert_eq!(c, d);
        }
    }
}

/// Fault B34: the error does not grow with the number of CTAs that share a tile.
#[test]
fn b34_error_does_not_grow_with_slices() {
    for device in devices() {
        let mut random = Random(34);
        let (n, k, m) = (device.size(64, 256), 28672, 16);
        let layer = Layer::new(n, k, 128, Fill::Positive, &mut random);
        // Sums stay below the largest fp16.
        let a = activations(m, k, Fill::Positive, &mut random);
        let setup = Setup::new(&device, layer);
        let config: Config =
            "marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1".parse().expect("a name");
        let tolerance = Tolerance::Bound { fragments: false, hops: 0 };
        let mut errors = Vec::new();
        for slices in [1, 2, 8, 32] {
            let stripe = (k as u32 / 128).div_ceil(slices);
            let run = |config: Config| {
                let prepared = setup.prepare(config, stripe, m);
                let workspace = setup.workspace(&prepared.choice, m);
                setup
                    .run_with(&prepared, &a, CANARIES, &workspace)
                    .unwrap_or_else(|error| panic!("{slices} slices: {}", chain(&error)))
            };
            let error = compare(&setup.layer, &a, &run(config), tolerance)
                .unwrap_or_else(|why| panic!("{slices} slices: {why}"));
            errors.push(error);
            if slices == 32 {
                // The test can see what it is about: the paper's reduction rounds at every hop.
                let in_place = Config { reduction: Reduction::F16InPlace, ..config };
                let hops = Tolerance::Bound { fragments: false, hops: 33 };
                let rounded = compare(&setup.layer, &a, &run(in_place), hops)
                    .unwrap_or_else(|why| panic!("in place: {why}"));
                assert!(rounded > 2.0 * error, "in place {rounded:.2e}, else {error:.2e}");
            }
        }
        println!("relative errors of 1, 2, 8 and 32 slices: {errors:?}");
        // One rounding to fp16 is 2^-11 at most, 2.8e-4 on average at worst.
        assert!(errors.iter().all(|error| *error < 3e-4), "{errors:?}");
        assert!(errors[3] < 1.05 * errors[0], "{errors:?}");
    }
}

/// Fault B36: the sum before scaling leaves fp16, the product does not.
#[test]
fn b36_scaled_before_rounded() {
    for device in devices() {
        for group in [-1, 128] {
            let (n, k) = (64, 4096);
            let mut layer = Layer::new(n, k, group, Fill::Integers, &mut Random(36));
            layer.codes.fill(15);
            layer.scales.fill(f16_from_f64(1e-3));
            for m in [1, 16, 64] {
                let a = vec![f16_from_f64(60.0); m * k];
                let setup = Setup::new(&device, layer.clone());
                let c = setup.run(&a, CANARIES).unwrap_or_else(|error| panic!("{}", chain(&error)));
                let tolerance = Tolerance::Bound { fragments: true, hops: 0 };
                compare(&layer, &a, &c, tolerance).unwrap_or_else(|why| panic!("{why}"));
                assert!(c.iter().all(|c| (c.to_f64() - 1720.0).abs() < 3.0), "{:?}", c[0]);
            }
        }
    }
}

/// Columns do not mix: a scale that is no number spoils its column, the others stay right.
#[test]
fn b39_a_bad_scale_spoils_its_column_only() {
    for device in devices() {
        for group in [-1, 64] {
            let mut random = Random(39);
            let mut layer = Layer::new(80, 256, group, Fill::Integers, &mut random);
            // An all-zero column of codes would hide the scale.
            layer.codes.iter_mut().for_each(|code| *code |= 1);
            let (bad, subnormal) = ([(5, f16::NAN), (17, f16::INFINITY)], 40);
            for (column, scale) in bad {
                layer.scales[column] = scale;
            }
            layer.scales[33] = f16::ZERO;
            layer.scales[subnormal] = f16::from_bits(3);
            let a = activations(9, layer.k, Fill::Integers, &mut random);
            let setup = Setup::new(&device, layer.clone());
            let c = setup.run(&a, CANARIES).unwrap_or_else(|error| panic!("{}", chain(&error)));
            for row in c.chunks(layer.n) {
                for (column, c) in row.iter().enumerate() {
                    let spoilt = bad.iter().any(|(spoilt, _)| *spoilt == column);
                    assert_eq!(c.is_finite(), !spoilt, "column {column} is {c}");
                }
            }
            // The spoilt columns aside, the product is exact.
            let mut clean = layer.clone();
            let mut c = c;
            for (column, _) in bad {
                (0..clean.k).for_each(|k| clean.codes[column * clean.k + k] = 8);
                clean.scales[column] = f16::ONE;
                (0..9).for_each(|row| c[row * layer.n + column] = f16::ZERO);
            }
            compare(&clean, &a, &c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
        }
    }
}

/// Rows of a batch belong to different users: infinities in one leave the others exact.
#[test]
fn a_row_of_infinities_spoils_itself_only() {
    for device in devices() {
        for name in [
            "marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1",
            "marlin_sm80_u4b8_f16_m16n64k512_col_w1_s3_c1_sn",
            "marlin_sm90_u4b8_f16_m16n64k512_g128_w1_s3_c1_sn",
            "marlin_sm90_u4b8_f16_m8n64k512_g64_w1_s3_c1_sn",
        ] {
            let config: Config = name.parse().unwrap_or_else(|error| panic!("{error}"));
            let mut random = Random(40);
            let (n, k, m) = (64, 1024, config.tile_m as usize);
            let layer = Layer::new(n, k, config.group.raw(), Fill::Integers, &mut random);
            let mut a = activations(m, k, Fill::Integers, &mut random);
            let bad = 3;
            a[bad * k..(bad + 1) * k].fill(f16::INFINITY);
            let setup = Setup::new(&device, layer);
            let stripe = (k / 128) as u32;
            let prepared = setup.prepare(config, stripe, m);
            let workspace = setup.workspace(&prepared.choice, m);
            let mut c = setup
                .run_with(&prepared, &a, CANARIES, &workspace)
                .unwrap_or_else(|error| panic!("{name}: {}", chain(&error)));
            assert!(c[bad * n..(bad + 1) * n].iter().all(|c| !c.is_finite()), "{name}");
            a[bad * k..(bad + 1) * k].fill(f16::ZERO);
            c[bad * n..(bad + 1) * n].fill(f16::ZERO);
            let tolerance = Tolerance::of(Fill::Integers, &config, k, stripe);
            compare(&setup.layer, &a, &c, tolerance).unwrap_or_else(|why| panic!("{name}: {why}"));
        }
    }
}

/// Fault B59: the weight stream's L2 policy is a choice at run time, and both choices are right.
#[test]
fn b59_with_and_without_the_eviction_policy() {
    for device in devices() {
        let mut random = Random(59);
        let (n, k, m) = (256, 1024, 13);
        let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Random, &mut random));
        let a = activations(m, k, Fill::Random, &mut random);
        let products = ["", "_ef"].map(|flag| {
            let name = format!("marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1{flag}");
            let config: Config = name.parse().expect("a name");
            let prepared = setup.prepare(config, 3, m);
            let workspace = setup.workspace(&prepared.choice, m);
            let c = setup
                .run_with(&prepared, &a, CANARIES, &workspace)
                .unwrap_or_else(|error| panic!("{name}: {}", chain(&error)));
            compare(&setup.layer, &a, &c, Tolerance::of(Fill::Random, &config, k, 3))
                .unwrap_or_else(|why| panic!("{name}: {why}"));
            c
        });
        assert_eq!(products[0], products[1], "the policy only tunes");
    }
}
