//! From a checkpoint on disk to a product, compared with the f64 reference.
//!
//! ```sh
//! cargo run --release --example checkpoint_to_matmul -- [checkpoint] [layer]
//! ```
//!
//! Without arguments it takes the layer that the repository ships.

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use makaira::reference::{Random, Reference, Tolerance};
use makaira::weights::default_threads;
use makaira::{
    Backend, Checkpoint, EmuBackend, Gemm, GpuBackend, Matrix, PackedWeights, Result, Stream,
};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args_os().skip(1);
    let shipped = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo"));
    let path = args.next().map_or_else(shipped, PathBuf::from);
    let checkpoint = Checkpoint::open(&path)?;
    let first = || Some(checkpoint.layers().first()?.name.clone().into());
    let name = args.next().or_else(first).ok_or("the checkpoint has no quantised layer")?;
    let name = name.to_string_lossy();

    // The matrix borrows the memory map; packing reads each byte of it once.
    let packed = PackedWeights::pack(&checkpoint.layer(&name)?, default_threads())?;
    let layout = *packed.layout();
    println!("{name}: {} x {}, {} bytes packed", layout.n, layout.k, packed.bytes().len());

    let m = 16;
    let x = Random::new(Random::fresh_seed()).activations(m * layout.k);
    let y = multiply(open()?, &packed, &x, m)?;

    // Kernels for tall batches may round each weight to fp16.
    let tolerance = Tolerance { half_roundings: 1 };
    let errors = Reference::of_packed(&x, &packed).compare(&y, tolerance);
    println!("y[0][..4] = {:?}; {errors}", &y[..layout.n.min(4)]);
    if errors.is_ok() { Ok(()) } else { Err("the product is wrong".into()) }
}

/// The GPU if there is one, else the emulator.
fn open() -> Result<Arc<dyn Backend>> {
    match GpuBackend::open(0) {
        Ok(gpu) => Ok(Arc::new(gpu)),
        Err(error) if error.is_unavailable() => {
            println!("on the emulator: {error}");
            Ok(Arc::new(EmuBackend::h200_like(8)))
        }
        Err(error) => Err(error.into()),
    }
}

fn multiply(
    backend: Arc<dyn Backend>,
    packed: &PackedWeights,
    x: &[f16],
    m: usize,
) -> Result<Vec<f16>> {
    let (n, k) = (packed.layout().n, packed.layout().k);
    // Once per weight and per stream.
    let gemm = Gemm::new(backend.clone());
    let weight = gemm.upload(packed)?;
    let workspace = gemm.workspace(&weight, m as u64)?;
    gemm.prepare(&weight, m as u64)?;
    // Once per product.
    let a = backend.alloc(2 * x.len() as u64)?;
    let c = backend.alloc(2 * (m * n) as u64)?;
    backend.upload(a, bytemuck::cast_slice(x))?;
    let a_rows = Matrix { ptr: a, stride: k as u64 };
    let c_rows = Matrix { ptr: c, stride: n as u64 };
    gemm.matmul(a_rows, &weight, c_rows, m as u64, &workspace, Stream::default())?;
    let mut y = vec![f16::NAN; m * n];
    backend.download(c, bytemuck::cast_slice_mut(&mut y))?;
    backend.free(a)?;
    backend.free(c)?;
    Ok(y)
}
