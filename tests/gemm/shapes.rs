//! Sizes that users met faults at: odd N and K, batches at the edges of tiles, batches of nothing.
//!
//! On the emulator the dimension that plays no part in a fault is cut down.

use makaira::gemm::Error;
use makaira::kernel::{Kind, Problem, Rows, select};
use makaira::weights::{Group, PackedLayout};

use crate::support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Spread, Tolerance, activations, chain, compare,
    devices,
};

/// The product of a fresh layer at several batches, by the library call.
fn check(device: &Device, n: usize, k: usize, group: i64, batches: &[usize], seed: u64) {
    let mut random = Random(seed);
    for fill in [Fill::Integers, Fill::Random] {
        let setup = Setup::new(device, Layer::new(n, k, group, fill, &mut random));
        for m in batches {
            let what = format!("m={m} n={n} k={k} g={group} {fill:?} seed={seed}");
            let a = activations(*m, k, fill, &mut random);
            let c = setup
                .run(&a, Spread { c_gap: 4, ..CANARIES })
                .unwrap_or_else(|error| panic!("{what}: {}", chain(&error)));
            let tolerance = match fill {
                Fill::Integers => Tolerance::Exact,
                _ => Tolerance::Bound { fragments: true, hops: 0 },
            };
            compare(&setup.layer, &a, &c, tolerance).unwrap_or_else(|why| panic!("{what}: {why}"));
        }
    }
}

/// One verdict for every batch, from the layout and from the selection, for all row layouts.
fn verdict(device: &Device, n: usize, k: usize, group: i64) {
    let group = Group::new(k, group).expect("a legal group");
    PackedLayout::new(n, k, group).expect("every size is padded");
    for m in [1, 2, 7, 16, 17, 33, 64, 65, 4096, 1 << 33] {
        for rows in [Rows::Whole, Rows::Vector, Rows::Element] {
            let problem = Problem { kind: Kind::U4B8, m, n: n as u32, k: k as u32, group, rows };
            select::choose(&problem, device.backend.device()).expect("one verdict for every batch");
        }
    }
}

#[test]
fn b01_k_of_171_halves_of_a_tile() {
    for device in devices() {
        verdict(&device, 2048, 10944, 64);
        check(&device, device.size(64, 2048), 10944, 64, &[1, 16, 17, 64], 1);
    }
}

#[test]
fn b02_one_verdict_for_every_batch() {
    for device in devices() {
        for (n, k, group) in [(384, 256, 128), (256, 192, -1)] {
            verdict(&device, n, k, group);
            check(&device, n, k, group, &[1, 16, 17, 33, 64], 2);
        }
    }
}

#[test]
fn b03_k_of_row_parallel_shards() {
    for device in devices() {
        for group in [-1, 32] {
            verdict(&device, 256, 7392, group);
            check(&device, device.size(96, 256), 7392, group, &[1, 16, 128], 3);
        }
    }
}

#[test]
fn b04_outputs_below_the_tile() {
    for device in devices() {
        for n in [8, 32, 96, 160] {
            verdict(&device, n, 2048, 128);
            check(&device, n, 2048, 128, &[1, 17], 4);
        }
        for n in [1, 2, 3, 5, 31, 63] {
            check(&device, n, 384, 128, &[1, 9], 40);
        }
    }
}

#[test]
fn b06_a_short_last_group_is_refused() {
    let error = PackedLayout::new(1152, 4304, Group::Size(32)).expect_err("134.5 groups");
    let text = error.to_string();
    assert!(text.contains("4304") && text.contains("32"), "{text}");
}

#[test]
fn b07_groups_of_64_in_k_of_129_halves() {
    for device in devices() {
        verdict(&device, 256, 8256, 64);
        check(&device, device.size(64, 256), 8256, 64, &[1, 16, 33], 7);
    }
}

#[test]
fn b08_outputs_that_are_no_multiple_of_the_tile() {
    for device in devices() {
        for n in [100, 264, 320] {
            verdict(&device, n, 128, -1);
            check(&device, n, 128, -1, &[1, 16, 33], 8);
        }
    }
}

#[test]
fn b11_no_rows_no_launch() {
    for device in devices() {
        let layer = Layer::new(1408, 2048, 128, Fill::Integers, &mut Random(11));
        let setup = Setup::new(&device, layer);
        // `run` compares all of C with its poison.
        let c = setup.run(&[], CANARIES).expect("an empty product is a product");
        assert!(c.is_empty());
        let choice = select::choose(&setup.problem(1, Rows::Whole), device.backend.device());
        let prepared = setup.gemm.prepare_choice(choice.expect("chosen")).expect("builds");
        let nothing = setup.gemm.workspace_of(0, 0).expect("nothing to allocate");
        setup.run_with(&prepared, &[], CANARIES, &nothing).expect("nor with a kernel named");
        if let Some(emu) = &device.emu {
            assert!(emu.last_report().is_none(), "something was launched");
        }
    }
}

#[test]
fn b13_second_row_tile_of_the_second_column_tile() {
    for device in devices() {
        for n in [256, 384] {
            check(&device, n, 512, 128, &[32, 33, 48, 64, 65], 13);
        }
    }
}

#[test]
fn b14_batches_at_the_edges_of_row_tiles() {
    let batches = [1, 15, 16, 17, 31, 63, 64, 65, 79, 127, 129, 1023, 1024, 1025, 1040, 2049];
    for device in devices() {
        check(&device, device.size(72, 512), 256, 128, &batches, 14);
    }
}

/// Every batch up to a tile and a little more, with odd everything.
#[test]
fn every_small_batch() {
    for device in devices() {
        let batches: Vec<usize> = (1..=70).collect();
        check(&device, 68, 320, 64, &batches, 70);
        check(&device, 67, 161, -1, &batches, 71);
    }
}

/// A workspace that is too small is an error that says what is needed.
#[test]
fn a_small_workspace_is_refused_before_the_launch() {
    for device in devices() {
        let mut random = Random(45);
        let layer = Layer::new(64, 8192, 128, Fill::Integers, &mut random);
        let a = activations(3, layer.k, Fill::Integers, &mut random);
        let setup = Setup::new(&device, layer);
        let nothing = setup.gemm.workspace_of(0, 0).expect("nothing to allocate");
        let config = "marlin_sm80_u4b8_f16_m16n64k512_g128_w1_s3_c1".parse().expect("a name");
        let prepared = setup.prepare(config, 9, 3);
        let error = setup.run_with(&prepared, &a, CANARIES, &nothing).expect_err("CTAs share K");
        assert!(matches!(error, Error::Workspace { have_locks: 0, need_locks: 1, .. }), "{error}");
        assert!(error.to_string().contains("Gemm::workspace"), "{error}");
    }
}

/// A batch that no memory holds is refused by every call that takes one, before anything is computed from it.
#[test]
fn an_absurd_batch_is_refused() {
    for device in devices() {
        let mut random = Random(64);
        let setup = Setup::new(&device, Layer::new(64, 256, 128, Fill::Integers, &mut random));
        for m in [(1 << 40) + 1, u64::MAX - 1, u64::MAX] {
            let errors = [
                setup.gemm.workspace(&setup.weight, m).err(),
                setup.gemm.prepare(&setup.weight, m).err(),
            ];
            for error in errors {
                let error = error.expect("refused");
                assert!(matches!(error, Error::Operand { operand: "m", .. }), "{error}");
                assert!(error.to_string().contains(&m.to_string()), "{error}");
            }
            let problem = Problem { m, ..setup.problem(1, Rows::Whole) };
            let error = select::choose(&problem, device.backend.device()).expect_err("refused");
            assert!(error.to_string().contains("at most 1099511627776 rows"), "{error}");
        }
        let wide = Problem { n: u32::MAX, ..setup.problem(1, Rows::Whole) };
        assert!(select::choose(&wide, device.backend.device()).is_err());
    }
}
