//! Products in CUDA graphs, on a GPU.
//!
//! A program of its own, because waiting for the context (which every download does) is refused while any
//! stream of the context is being captured.

#[path = "gemm/lane.rs"]
mod lane;
#[path = "gemm/support.rs"]
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

use makaira::backend::{Backend, Stream};
use makaira::driver::{CaptureMode, StreamRef};
use makaira::gemm::{Gemm, Weight, Workspace};

use lane::Lane;
use support::{
    CANARIES, Device, Fill, Layer, Random, Setup, Tolerance, activations, chain, compare, gpu,
    skipped,
};

/// One capture at a time; see the module's documentation.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error of either side inside a capture.
type Captured = Box<dyn std::error::Error>;

fn enqueue(
    gemm: &Gemm,
    weight: &Weight,
    lane: &Lane,
    m: usize,
    workspace: &Workspace,
    stream: StreamRef<'_>,
) -> Result<(), Captured> {
    let stream = Stream::from(stream);
    gemm.matmul(lane.a, weight, lane.c, m as u64, workspace, stream).map_err(Captured::from)
}

/// Fault B43: the first product of a shape inside a capture works or is refused, and breaks nothing.
#[test]
fn b43_first_call_inside_a_capture() {
    let _alone = alone();
    let Some(gpu) = gpu() else {
        return skipped("b43 first call in a capture: it takes a GPU");
    };
    let device = Device { backend: gpu.clone(), emu: None };
    let mut random = Random(43);
    let (m, n, k) = (16, 256, 1024);
    let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
    let a = activations(m, k, Fill::Integers, &mut random);
    let lane = Lane::new(gpu, &a, m, n);
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
                compare(&setup.layer, &a, &lane.result(gpu, m, n), Tolerance::Exact)
                    .unwrap_or_else(|why| panic!("{mode:?}: {why}"));
            }
            Err(error) => eprintln!("{mode:?}: refused: {}", chain(&*error)),
        }
        let c = setup.run(&a, CANARIES).expect("the context is not left broken");
        compare(&setup.layer, &a, &c, Tolerance::Exact).unwrap_or_else(|why| panic!("{why}"));
    }
}

/// Fault B45: a captured product still runs when the same weight has been loaded again.
#[test]
fn b45_replay_after_a_reload() {
    let _alone = alone();
    let Some(gpu) = gpu() else {
        return skipped("b45 replay after a reload: it takes a GPU");
    };
    let device = Device { backend: gpu.clone(), emu: None };
    let mut random = Random(45);
    let (m, n, k) = (16, 256, 4096);
    let setup = Setup::new(&device, Layer::new(n, k, 128, Fill::Integers, &mut random));
    let a = activations(m, k, Fill::Integers, &mut random);
    let lane = Lane::new(gpu, &a, m, n);
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
        compare(&setup.layer, &a, &lane.result(gpu, m, n), Tolerance::Exact)
            .unwrap_or_else(|why| panic!("replay {replay}: {why}"));
        drop(reloaded);
    }
}
