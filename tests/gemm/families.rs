//! Laws that hold whatever family computes a product.
//!
//! Every family that takes a problem gives the f64 sum within the bound of its numerics. A configuration gives a
//! row the same bits whatever the other rows hold, in every run, whether or not its launches begin early.

use std::collections::BTreeMap;

use half::f16;
use makaira::backend::{Enqueue, Stream};
use makaira::emu::{EmuBackend, Options};
use makaira::gemm::Matrix;
use makaira::kernel::select::{self, Choice};
use makaira::kernel::{Rows, Scaling};

use crate::support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Tolerance, activations, chain, compare,
};

/// Choices of each family for a problem: its best one and two others.
fn choices(setup: &Setup, m: usize, random: &mut Random) -> Vec<Choice> {
    let problem = setup.problem(m, Rows::Whole);
    let mut families = BTreeMap::<&str, Vec<Choice>>::new();
    for choice in select::ranked(&problem, setup.device.backend.device()) {
        families.entry(choice.config.family).or_default().push(choice);
    }
    let pick = |of: Vec<Choice>| [of[0], of[random.below(of.len())], of[random.below(of.len())]];
    families.into_values().flat_map(pick).collect()
}

/// A device on which launches begin before earlier ones have ended.
fn overlapping() -> Device {
    let options = Options { overlap: true, ..Options::default() };
    Device::emulated(EmuBackend::h200_like(4).with_options(options))
}

/// Two launches without a wait of the host between them; the second one's product.
fn second_of_two(setup: &Setup, choice: &Choice, a: &[f16], order: Enqueue) -> Vec<f16> {
    let backend = &setup.device.backend;
    let (n, k) = (setup.layer.n, setup.layer.k);
    let m = a.len() / k;
    let prepared = setup.gemm.prepare_choice(*choice).expect("it compiles");
    let workspace = setup.workspace(choice, m);
    let alloc = |elements: usize| backend.alloc(2 * elements as u64).expect("it fits");
    let a_matrix = Matrix { ptr: alloc(m * k), stride: k as u64 };
    backend.upload(a_matrix.ptr, bytemuck::cast_slice(a)).expect("it fits");
    let c_matrix = Matrix { ptr: alloc(m * n), stride: n as u64 };
    backend.upload(c_matrix.ptr, &vec![0xff; 2 * m * n]).expect("it fits");
    for _ in 0..2 {
        let (gemm, weight) = (&setup.gemm, &setup.weight);
        gemm.matmul_with(&prepared, a_matrix, weight, c_matrix, m as u64, &workspace, order)
            .unwrap_or_else(|error| panic!("{}: {}", choice.config, chain(&error)));
    }
    let mut c = vec![f16::ZERO; m * n];
    backend.download(c_matrix.ptr, bytemuck::cast_slice_mut(&mut c)).expect("it ran");
    for matrix in [a_matrix, c_matrix] {
        backend.free(matrix.ptr).expect("it is allocated");
    }
    c
}

/// All laws for a layer and a batch, and the families that took part.
fn holds(m: usize, n: usize, k: usize, group: i64, seed: u64) -> Vec<&'static str> {
    let mut random = Random(seed);
    let layer = Layer::new(n, k, group, Fill::Random, &mut random);
    let setup = Setup::new(&Device::hopper(), layer.clone());
    let overlapping = Setup::new(&overlapping(), layer);
    let a = activations(m, k, Fill::Random, &mut random);
    // One row stays.
    let row = random.below(m);
    let mut others = activations(m, k, Fill::Random, &mut random);
    others[row * k..(row + 1) * k].copy_from_slice(&a[row * k..(row + 1) * k]);
    let mut families = Vec::new();
    for choice in choices(&setup, m, &mut random) {
        let config = choice.config;
        let what =
            format!("{config} stripe={} m={m} n={n} k={k} row={row} seed={seed}", choice.stripe);
        let prepared = setup.gemm.prepare_choice(choice).expect("it compiles");
        let workspace = setup.workspace(&choice, m);
        let run = |a: &[f16]| {
            setup
                .run_with(&prepared, a, CANARIES, &workspace)
                .unwrap_or_else(|error| panic!("{what}: {}", chain(&error)))
        };
        let c = run(&a);
        let fragments = config.scaling == Scaling::Fragment;
        compare(&setup.layer, &a, &c, Tolerance::Bound { fragments, hops: 0 })
            .unwrap_or_else(|why| panic!("{what}: {why}"));
        assert!(run(&a) == c, "{what}: other bits in the second run");
        let of_row = |c: &[f16]| c[row * n..(row + 1) * n].to_vec();
        let beside_others = run(&others);
        assert!(beside_others != c, "{what}: other rows count for nothing");
        assert!(of_row(&beside_others) == of_row(&c), "{what}: the row depends on others");
        for (order, how) in
            [(Stream::default().into(), "in order"), (Stream::default().early(), "early")]
        {
            let later = second_of_two(&overlapping, &choice, &a, order);
            assert!(later == c, "{what}: other bits where launches overlap, called {how}");
        }
        families.push(config.family);
    }
    families.dedup();
    families
}

#[test]
fn families_agree_for_short_batches() {
    for (m, n, k, group, seed) in [
        (16, 256, 1024, 128, 71),
        (13, 188, 1024, 128, 72),
        (9, 128, 1536, -1, 73),
        (16, 320, 512, 64, 74),
    ] {
        assert_eq!(holds(m, n, k, group, seed), ["sm80", "sm90", "sm90wg"], "m={m} n={n} k={k}");
    }
}

#[test]
fn families_agree_for_longer_batches() {
    for (m, n, k, group, seed) in
        [(40, 256, 1024, 128, 75), (61, 188, 512, 32, 76), (150, 256, 512, 128, 77)]
    {
        assert_eq!(holds(m, n, k, group, seed), ["sm80", "sm90wg"], "m={m} n={n} k={k}");
    }
}
