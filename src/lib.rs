//! Marlin W4A16 kernels from Rust: an assembler, an emulator and a driver-API runtime.
//!
//! A 4-bit layer of a checkpoint goes through these stages, each a function that can be called on its own:
//!
//! | stage | from | to | module |
//! |---|---|---|---|
//! | open | checkpoint on disk | borrowed quantised matrices | [`checkpoint`] |
//! | pack | codes and scales | one buffer in tile order | [`weights`] |
//! | store | checkpoint on disk | packed weights on disk, mapped | [`store`] |
//! | choose | problem, device | configuration, stripe length | [`kernel::select`] |
//! | emit | configuration | program as data | [`kernel`], [`mod@asm`] |
//! | verify, print | program | PTX text | [`mod@asm`] |
//! | compile | PTX text | function | [`jit`], [`driver`] |
//! | load | checkpoint or store on disk | packed weights on a device | [`load`] |
//! | run | function, addresses, stream | product | [`gemm`], [`backend`] |
//! | emulate | program, addresses | product, figures or a fault | [`emu`] |
//! | compare | activations, weights, product | errors against f64 | [`reference`](mod@reference) |
//!
//! Inference code needs [`Gemm`], a [`Backend`] and its own device memory:
//!
//! ```
//! use std::sync::Arc;
//!
//! use half::f16;
//! use makaira::{Backend, Checkpoint, EmuBackend, Gemm, Matrix, PackedWeights, Stream};
//!
//! // `GpuBackend::open(0)?` where there is a GPU.
//! let backend: Arc<dyn Backend> = Arc::new(EmuBackend::h200_like(8));
//! let checkpoint = Checkpoint::open("assets/demo".as_ref())?;
//! let layer = &checkpoint.layers()[0];
//! let packed = PackedWeights::pack(&checkpoint.layer(&layer.name)?, 1)?;
//!
//! let gemm = Gemm::new(backend.clone());
//! let weight = gemm.upload(&packed)?;
//! let workspace = gemm.workspace(&weight, 16)?;
//! gemm.prepare(&weight, 16)?;
//!
//! let m = 3;
//! let x = vec![f16::ONE; m * layer.k];
//! let a = backend.alloc(2 * x.len() as u64)?;
//! let c = backend.alloc(2 * (m * layer.n) as u64)?;
//! backend.upload(a, bytemuck::cast_slice(&x))?;
//! // Allocates nothing, waits for nothing.
//! gemm.matmul(
//!     Matrix { ptr: a, stride: layer.k as u64 },
//!     &weight,
//!     Matrix { ptr: c, stride: layer.n as u64 },
//!     m as u64,
//!     &workspace,
//!     Stream::default(),
//! )?;
//! let mut y = vec![f16::NAN; m * layer.n];
//! backend.download(c, bytemuck::cast_slice_mut(&mut y))?;
//!
//! let errors = makaira::reference::Reference::of_packed(&x, &packed).compare(&y, Default::default());
//! assert!(errors.is_ok(), "{errors}");
//! # for ptr in [a, c] { backend.free(ptr)?; }
//! # Ok::<(), makaira::Error>(())
//! ```
//!
//! Features: `cuda-driver-sys` (default) takes the type aliases of the driver API from that crate; a program
//! that links libcuda by another route switches it off. `cli` (default) is the command line.

pub mod asm;
pub mod backend;
pub mod checkpoint;
pub mod driver;
pub mod emu;
pub mod error;
pub mod gemm;
pub mod jit;
pub mod kernel;
pub mod layout;
pub mod load;
pub mod reference;
pub mod store;
pub mod target;
pub mod weights;

pub use backend::{Backend, DevicePtr, Enqueue, Stream};
pub use checkpoint::Checkpoint;
pub use emu::EmuBackend;
pub use error::{Error, Result};
pub use gemm::{Gemm, Matrix, Weight, Workspace};
pub use jit::GpuBackend;
pub use store::PackedStore;
pub use weights::PackedWeights;

/// The README's example compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
