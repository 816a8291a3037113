//! What only a GPU can show: streams that overlap, and operands of gigabytes.

use std::sync::Arc;

use half::f16;
use makaira::backend::{Backend, Stream};
use makaira::jit::GpuBackend;
use makaira::kernel::{Config, Rows, select};

use crate::lane::Lane;
use crate::support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Tolerance, activations, chain, compare, gpu,
    skipped,
};

/// The GPU, or a word about what is not tested.
fn gpu_for(what: &str) -> Option<(Arc<GpuBackend>, Device)> {
    match gpu() {
        Some(gpu) => Some((gpu.clone(), Device { backend: gpu.clone(), emu: None })),
        None => {
            skipped(&format!("{what}: it takes a GPU"));
            None
        }
    }
}

#[test]
fn b40_one_weight_on_two_streams() {
    let Some((gpu, device)) = gpu_for("b40 two streams") else { return };
    let mut random = Random(40);
    let (m, n, k) = (16, 512, 8192);
    let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
    setup.gemm.prepare(&setup.weight, m as u64).expect("prepares");
    let inputs = [0, 1].map(|_| activations(m, k, Fill::Integers, &mut random));
    let lanes = [0, 1].map(|lane: usize| Lane::new(&gpu, &inputs[lane], m, n));
    let workspaces = [0, 1].map(|_| setup.gemm.workspace(&setup.weight, m as u64).expect("fits"));
    for launch in 0..1000 {
        let Lane { stream, a, c } = &lanes[launch % 2];
        let (workspace, stream) = (&workspaces[launch % 2], Stream::from(stream.borrow()));
        setup
            .gemm
            .matmul(*a, &setup.weight, *c, m as u64, workspace, stream)
            .unwrap_or_else(|error| panic!("launch {launch}: {}", chain(&error)));
    }
    for (lane, a) in lanes.iter().zip(&inputs) {
        lane.stream.synchronize().expect("nothing hangs");
        compare(&setup.layer, a, &lane.result(&gpu, m, n), Tolerance::Exact)
            .unwrap_or_else(|why| panic!("{why}"));
    }
}

/// Fault B15 at its own size: A has 2^31 bytes and one row more.
#[test]
fn b15_activations_of_two_gigabytes() {
    let Some((gpu, device)) = gpu_for("b15 at its own size") else { return };
    let mut random = Random(15);
    let (m, n, k, tail) = (131_073, 256, 8192, 64);
    let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
    let last = activations(tail, k, Fill::Integers, &mut random);
    let mut a = vec![f16::ZERO; (m - tail) * k];
    a.extend_from_slice(&last);
    let lane = Lane::new(&gpu, &a, m, n);
    let workspace = setup.gemm.workspace(&setup.weight, m as u64).expect("fits");
    setup
        .gemm
        .matmul(lane.a, &setup.weight, lane.c, m as u64, &workspace, Stream::default())
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let c = lane.result(&gpu, m, n);
    let (zeros, product) = c.split_at((m - tail) * n);
    assert!(zeros.iter().all(|c| *c == f16::ZERO), "rows of zeros");
    compare(&setup.layer, &last, product, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
    for matrix in [lane.a, lane.c] {
        gpu.free(matrix.ptr).expect("allocated above");
    }
}

/// Fault B16 at its own size: 8 slices of partial sums, 15 GB of them.
#[test]
fn b16_partial_sums_of_fifteen_gigabytes() {
    let Some((gpu, device)) = gpu_for("b16 at its own size") else { return };
    let mut random = Random(16);
    let (m, n, k) = (16384, 28672, 1024);
    let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
    let a = activations(m, k, Fill::Integers, &mut random);
    let lane = Lane::new(&gpu, &a, m, n);
    let config: Config =
        "marlin_sm80_u4b8_f16_m64n256k128_g128_w8_s3_c1_fs".parse().expect("a name");
    let prepared = setup.prepare(config, 1, m);
    let plan = select::plans(&config, &setup.problem(m, Rows::Whole), 1).next().expect("one");
    assert!(plan.scratch_bytes > 15_000_000_000, "{plan:?}");
    let workspace = setup.workspace(&prepared.choice, m);
    setup
        .gemm
        .matmul_with(
            &prepared,
            lane.a,
            &setup.weight,
            lane.c,
            m as u64,
            &workspace,
            Stream::default(),
        )
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    let c = lane.result(&gpu, m, n);
    for rows in [0..8, 10_600..10_632, 10_792..10_800, m - 8..m] {
        let (a, c) = (&a[rows.start * k..rows.end * k], &c[rows.start * n..rows.end * n]);
        compare(&setup.layer, a, c, Tolerance::Exact)
            .unwrap_or_else(|why| panic!("{rows:?}: {why}"));
    }
    for matrix in [lane.a, lane.c] {
        gpu.free(matrix.ptr).expect("allocated above");
    }
}

/// More row tiles than a grid has: several launches.
#[test]
fn more_rows_than_a_grid_covers() {
    let Some((_, device)) = gpu_for("more rows than a grid covers") else { return };
    let mut random = Random(17);
    let setup = Setup::new(&device, Layer::new(64, 256, 128, Fill::Integers, &mut random));
    let m = 2 * 65535 + 3;
    let a = activations(m, 256, Fill::Integers, &mut random);
    let config: Config = "marlin_sm80_u4b8_f16_m1n64k512_g128_w1_s3_c1".parse().expect("a name");
    let prepared = setup.prepare(config, 1, m);
    let workspace = setup.workspace(&prepared.choice, m);
    let c = setup
        .run_with(&prepared, &a, CANARIES, &workspace)
        .unwrap_or_else(|error| panic!("{}", chain(&error)));
    compare(&setup.layer, &a, &c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
}
