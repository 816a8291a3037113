//! Fault B43: the first product of a shape while its stream is being captured.
//!
//! The same conversation with the stand-in for libcuda, whose products compute nothing, and with a GPU if
//! there is one, where the replayed graphs must give the bits of the plain calls.

#[path = "stub/build.rs"]
mod build;
#[path = "stub/open.rs"]
mod opened;

use std::error::Error as _;
use std::sync::Arc;

use build::stub;
use half::f16;
use makaira::backend::{Backend, Stream};
use makaira::driver::{self, CaptureMode, StreamRef};
use makaira::gemm::{Error, Gemm, Matrix};
use makaira::jit::{self, GpuBackend, Loader, Store};
use makaira::weights::{Dense, Group, PackedWeights, quantize};
use opened::{context, open};

/// Of the driver or of a product.
type Failure = Box<dyn std::error::Error>;

const N: usize = 256;
const K: usize = 1024;
/// A batch whose kernel is prepared, and one whose kernel is not and differs.
const READY: usize = 1;
const FIRST: usize = 64;

/// Numbers from -1 to 1 without 0 that differ from run to run.
fn fresh(count: usize) -> Vec<f32> {
    use std::hash::{BuildHasher, RandomState};
    let seed = RandomState::new();
    (0..count).map(|i| (seed.hash_one(i) % 2000) as f32 / 1000.0 - 0.9995).collect()
}

fn first_product_inside_a_capture(gpu: Arc<GpuBackend>, mode: CaptureMode, computes: bool) {
    let dense = fresh(N * K);
    let group = Group::new(K, 128).expect("a group size that kernels have");
    let matrix = quantize(Dense::F32(bytemuck::cast_slice(&dense)), N, K, group, 1);
    let packed = PackedWeights::pack(&matrix.expect("finite").view(), 1).expect("it fits");
    let gemm = Gemm::new(gpu.clone());
    let weight = gemm.upload(&packed).expect("it fits");
    let workspace = gemm.workspace(&weight, FIRST as u64).expect("it fits");
    let activations: Vec<f16> = fresh(FIRST * K).into_iter().map(f16::from_f32).collect();
    let buffer = |bytes: &[u8]| {
        let ptr = gpu.alloc(bytes.len() as u64).expect("memory");
        gpu.upload(ptr, bytes).expect("it fits");
        ptr
    };
    let a = Matrix { ptr: buffer(bytemuck::cast_slice(&activations)), stride: K as u64 };
    let c = Matrix { ptr: buffer(&vec![0xff; 2 * FIRST * N]), stride: N as u64 };
    let product = |gemm: &Gemm, m: usize, stream: StreamRef<'_>| {
        gemm.matmul(a, &weight, c, m as u64, &workspace, Stream::from(stream))
    };
    // What is in C now; then NaN everywhere.
    let take = |m: usize| {
        let mut bytes = vec![0; 2 * m * N];
        gpu.download(c.ptr, &mut bytes).expect("it is there");
        gpu.upload(c.ptr, &vec![0xff; 2 * FIRST * N]).expect("it fits");
        bytes
    };

    let stream = driver::Stream::new(gpu.context()).expect("a stream");
    gemm.prepare(&weight, READY as u64).expect("it compiles");
    let kept = gpu.loader().store().list().expect("a listing").len();
    let graph = stream
        .capture(mode, |stream| {
            let error = product(&gemm, FIRST, stream).expect_err("this is no time to compile");
            let Error::Backend(error) = &error else { panic!("{error}") };
            let cause = error.source.downcast_ref::<jit::Error>().expect("the loader's refusal");
            assert!(matches!(cause, jit::Error::Capturing { .. }), "{cause}");
            assert!(cause.to_string().contains("prepare it before the capture begins"), "{cause}");
            assert!(gpu.context().is_capturing(stream)?, "{mode:?}: the capture goes on");
            product(&gemm, READY, stream)?;
            // Another object over the same backend finds the kernel loaded.
            product(&Gemm::new(gpu.clone()), READY, stream)?;
            Ok::<(), Failure>(())
        })
        .unwrap_or_else(|error| panic!("{mode:?}: {error}"));
    assert_eq!(
        graph.num_nodes().expect("a count"),
        2,
        "{mode:?}: the refused product left nothing"
    );
    let list = gpu.loader().store().list().expect("a listing");
    assert_eq!(list.len(), kept, "{mode:?}: nothing was compiled");
    let replay = |graph: driver::Graph| {
        let graph = graph.instantiate().expect("a graph");
        graph.launch(stream.borrow()).expect("a replay");
        stream.synchronize().expect("it ran");
    };
    replay(graph);
    let replayed = take(READY);
    product(&gemm, READY, stream.borrow()).expect("a plain call");
    stream.synchronize().expect("it ran");
    let plain = take(READY);
    assert!(replayed == plain, "{mode:?}: the replay gives other bits");
    assert!(!computes || plain.iter().any(|byte| *byte != 0xff), "{mode:?}: nothing was computed");

    // The remedy helps.
    gemm.prepare(&weight, FIRST as u64).expect("it compiles");
    let graph = stream
        .capture(mode, |stream| Ok::<(), Failure>(product(&gemm, FIRST, stream)?))
        .unwrap_or_else(|error| panic!("{mode:?}: {error}"));
    replay(graph);
    let replayed = take(FIRST);
    product(&gemm, FIRST, stream.borrow()).expect("a plain call");
    stream.synchronize().expect("it ran");
    assert!(replayed == take(FIRST), "{mode:?}: the replay gives other bits");
    gpu.context().synchronize().unwrap_or_else(|error| panic!("{error}: {:?}", error.source()));
    for matrix in [a, c] {
        gpu.free(matrix.ptr).expect("allocated above");
    }
}

const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

#[test]
fn b43_first_product_inside_a_capture_of_the_stand_in() {
    let Some(driver) = open(stub("capture", &["full"], &[])) else { return };
    for mode in MODES {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let gpu = GpuBackend::new(context(driver, 0), Loader::new(Store::at(folder.path())));
        first_product_inside_a_capture(Arc::new(gpu), mode, false);
    }
}

#[test]
fn b43_first_product_inside_a_capture_on_a_gpu() {
    for mode in MODES {
        let gpu = match GpuBackend::open(0) {
            Ok(gpu) => gpu,
            Err(error) => {
                assert!(error.is_unavailable(), "{error}");
                eprintln!("skipped: the first product inside a capture on a GPU: {error}");
                return;
            }
        };
        let folder = tempfile::tempdir().expect("a temporary folder");
        let gpu = GpuBackend::new(gpu.context().clone(), Loader::new(Store::at(folder.path())));
        first_product_inside_a_capture(Arc::new(gpu), mode, true);
    }
}
