//! The library under an inference engine: the engine's own device memory, stream and row strides.
//!
//! ```sh
//! cargo run --release --example own_buffers
//! ```
//!
//! On a GPU the activations, the output and the stream are made through `makaira::driver`; an engine that has
//! raw handles wraps them with `driver::DevicePtr::from_raw` and `driver::StreamRef::from_raw`, which are
//! unsafe and say what they ask for. Without a GPU the same product runs on the emulator.

use std::sync::Arc;

use half::f16;
use makaira::driver::{self, DeviceBuffer};
use makaira::reference::{Random, Reference, Tolerance};
use makaira::weights::{Dense, Group, default_threads, quantize};
use makaira::{
    Backend, EmuBackend, Gemm, GpuBackend, Matrix, PackedWeights, Result, Stream, Weight, Workspace,
};

const M: usize = 5;
const N: usize = 192;
const K: usize = 256;
/// Rows of the engine's activations are slices of wider ones.
const A_STRIDE: usize = 3 * K;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut random = Random::new(Random::fresh_seed());
    let dense: Vec<f32> = (0..N * K).map(|_| random.uniform(-0.1, 0.1) as f32).collect();
    let dense = Dense::F32(bytemuck::cast_slice(&dense));
    let quantized = quantize(dense, N, K, Group::Size(128), default_threads())?;
    let packed = PackedWeights::pack(&quantized.view(), default_threads())?;
    let wide = random.activations(M * A_STRIDE);

    let y = match GpuBackend::open(0) {
        Ok(gpu) => on_gpu(Arc::new(gpu), &packed, &wide)?,
        Err(error) if error.is_unavailable() => {
            println!("on the emulator: {error}");
            on_emulator(&packed, &wide)?
        }
        Err(error) => return Err(error.into()),
    };

    let x: Vec<f16> = wide.chunks(A_STRIDE).flat_map(|row| &row[..K]).copied().collect();
    // Kernels for tall batches may round each weight to fp16.
    let tolerance = Tolerance { half_roundings: 1 };
    let errors = Reference::of_packed(&x, &packed).compare(&y, tolerance);
    println!("{M} x {N} x {K}: {errors}");
    if errors.is_ok() { Ok(()) } else { Err("the product is wrong".into()) }
}

/// What an engine makes when it loads a layer: weight, workspace for its stream, compiled kernels.
fn load(gemm: &Gemm, packed: &PackedWeights) -> Result<(Weight, Workspace)> {
    let weight = gemm.upload(packed)?;
    let workspace = gemm.workspace(&weight, M as u64)?;
    gemm.prepare(&weight, M as u64)?;
    Ok((weight, workspace))
}

fn on_gpu(gpu: Arc<GpuBackend>, packed: &PackedWeights, wide: &[f16]) -> Result<Vec<f16>> {
    let context = gpu.context().clone();
    let gemm = Gemm::new(gpu);
    let (weight, workspace) = load(&gemm, packed)?;

    let stream = driver::Stream::new(&context)?;
    let a = DeviceBuffer::from_slice(&context, wide)?;
    let c = DeviceBuffer::<f16>::new(&context, M * N)?;
    gemm.matmul(
        Matrix { ptr: a.ptr().into(), stride: A_STRIDE as u64 },
        &weight,
        Matrix { ptr: c.ptr().into(), stride: N as u64 },
        M as u64,
        &workspace,
        stream.borrow(),
    )?;
    // The product is only enqueued so far: an engine would go on enqueuing.
    stream.synchronize()?;
    Ok(c.to_vec()?)
}

fn on_emulator(packed: &PackedWeights, wide: &[f16]) -> Result<Vec<f16>> {
    let emu = Arc::new(EmuBackend::h200_like(4));
    let gemm = Gemm::new(emu.clone());
    let (weight, workspace) = load(&gemm, packed)?;

    let a = emu.alloc(2 * wide.len() as u64)?;
    let c = emu.alloc(2 * (M * N) as u64)?;
    emu.upload(a, bytemuck::cast_slice(wide))?;
    gemm.matmul(
        Matrix { ptr: a, stride: A_STRIDE as u64 },
        &weight,
        Matrix { ptr: c, stride: N as u64 },
        M as u64,
        &workspace,
        Stream::default(),
    )?;
    let mut y = vec![f16::NAN; M * N];
    emu.download(c, bytemuck::cast_slice_mut(&mut y))?;
    Ok(y)
}
