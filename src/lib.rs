//! Marlin W4A16 kernels from Rust: an assembler, an emulator and a driver-API runtime.

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
pub mod reference;
pub mod target;
pub mod weights;
