//! What only a GPU can show: streams that overlap, graphs, and operands of gigabytes.

use std::sync::Arc;

use half::f16;
use makaira::backend::{Backend, Stream};
use makaira::driver::{self, CaptureMode, StreamRef};
use makaira::gemm::{Error, Gemm, Matrix, Weight};
use makaira::jit::GpuBackend;
use makaira::kernel::{Config, Rows, select};

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

/// Operands on a GPU for launches that overlap.
struct Lane {
    stream: driver::Stream,
    a: Matrix,
    c: Matrix,
}

impl Lane {
    fn new(gpu: &GpuBackend, a: &[f16], m: usize, n: usize) -> Self {
        let stream = driver::Stream::new(gpu.context()).expect("a stream");
        let a_ptr = gpu.alloc(2 * a.len() as u64).expect("fits");
        gpu.upload(a_ptr, bytemuck::cast_slice(a)).expect("fits");
        let c_ptr = gpu.alloc(2 * (m * n) as u64).expect("fits");
        gpu.upload(c_ptr, &vec![0xff; 2 * m * n]).expect("fits");
        let a = Matrix { ptr: a_ptr, stride: (a.len() / m) as u64 };
        Self { stream, a, c: Matrix { ptr: c_ptr, stride: n as u64 } }
    }

    fn result(&self, gpu: &GpuBackend, m: usize, n: usize) -> Vec<f16> {
        let mut c = vec![f16::ZERO; m * n];
        gpu.download(self.c.ptr, bytemuck::cast_slice_mut(&mut c)).expect("fits");
        c
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

/// An error of either side inside a capture.
#[derive(Debug)]
enum Captured {
    Gemm(Error),
    Driver(driver::Error),
}

impl From<driver::Error> for Captured {
    fn from(error: driver::Error) -> Self {
        Self::Driver(error)
    }
}

fn enqueue(
    gemm: &Gemm,
    weight: &Weight,
    lane: &Lane,
    m: usize,
    workspace: &makaira::gemm::Workspace,
    stream: StreamRef<'_>,
) -> Result<(), Captured> {
    gemm.matmul(lane.a, weight, lane.c, m as u64, workspace, stream.into()).map_err(Captured::Gemm)
}

/// Fault B43: the first product of a shape inside a capture works or is refused, and breaks nothing.
#[test]
fn b43_first_call_inside_a_capture() {
    let Some((gpu, device)) = gpu_for("b43 first call in a capture") else { return };
    let mut random = Random(43);
    let (m, n, k) = (16, 256, 1024);
    let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
    let a = activations(m, k, Fill::Integers, &mut random);
    let lane = Lane::new(&gpu, &a, m, n);
    let workspace = setup.gemm.workspace(&setup.weight, m as u64).expect("fits");
    for mode in [CaptureMode::ThreadLocal, CaptureMode::Relaxed] {
        // A new object each time: nothing is prepared.
        let gemm = Gemm::new(device.backend.clone());
        let captured = lane
            .stream
            .capture(mode, |stream| enqueue(&gemm, &setup.weight, &lane, m, &workspace, stream));
        match captured {
            Ok(graph) => {
                graph.instantiate().expect("a graph").launch(lane.stream.borrow()).expect("runs");
                lane.stream.synchronize().expect("runs");
                compare(&setup.layer, &a, &lane.result(&gpu, m, n), Tolerance::Exact)
                    .unwrap_or_else(|why| panic!("{mode:?}: {why}"));
            }
            Err(error) => println!("{mode:?}: refused: {error:?}"),
        }
        let c = setup.run(&a, CANARIES).expect("the context is not left broken");
        compare(&setup.layer, &a, &c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
    }
}

/// Fault B45: a captured product still runs when the same weight has been loaded again.
#[test]
fn b45_replay_after_a_reload() {
    let Some((gpu, device)) = gpu_for("b45 replay after a reload") else { return };
    let mut random = Random(45);
    let (m, n, k) = (16, 256, 4096);
    let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
    let a = activations(m, k, Fill::Integers, &mut random);
    let lane = Lane::new(&gpu, &a, m, n);
    setup.gemm.prepare(&setup.weight, m as u64).expect("prepares");
    let workspace = setup.gemm.workspace(&setup.weight, m as u64).expect("fits");
    let graph = lane
        .stream
        .capture(CaptureMode::ThreadLocal, |stream| {
            enqueue(&setup.gemm, &setup.weight, &lane, m, &workspace, stream)
        })
        .expect("a prepared product can be captured");
    let graph = graph.instantiate().expect("a graph");
    for replay in 0..3 {
        let reloaded = setup.gemm.upload(&setup.layer.packed()).expect("fits");
        gpu.upload(lane.c.ptr, &vec![0xff; 2 * m * n]).expect("fits");
        graph.launch(lane.stream.borrow()).expect("replays");
        lane.stream.synchronize().expect("replays");
        compare(&setup.layer, &a, &lane.result(&gpu, m, n), Tolerance::Exact)
            .unwrap_or_else(|why| panic!("replay {replay}: {why}"));
        drop(reloaded);
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
    assert!(plan.scratch_bytes > 15 << 30, "{plan:?}");
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
