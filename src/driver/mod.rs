//! The CUDA driver, resolved at run time: devices, contexts, streams, memory, modules, launches.
//!
//! This is the FFI room. It relies on libcuda alone (no toolkit) and sees PTX as text. Nothing
//! links against the driver: [`Driver::get`] opens it, and "no driver" is a value. What the room
//! keeps:
//!
//! - integers, never Rust enums, cross the boundary, so that any code a driver returns is
//!   representable;
//! - the primary context is shared, never a second one created; every call makes its context
//!   current on the calling thread and puts the caller's back ([`Context::bind`]);
//! - newer functions are optional, and their absence is an error at use that names the function;
//! - a launch neither allocates nor waits.
//!
//! ```no_run
//! use makaira::driver::{
//!     Args, Context, Cubin, DeviceBuffer, JitOptions, LaunchShape, Module, Stream,
//! };
//! # fn main() -> Result<(), makaira::driver::Error> {
//! # let ptx = "";
//! let context = Context::open(0)?;
//! let cubin = Cubin::assemble(&context, ptx, &JitOptions::default())?;
//! let kernel = Module::from_cubin(&context, &cubin)?.function("twice")?;
//! let data = DeviceBuffer::from_slice(&context, &[1_u32, 2, 3])?;
//! let stream = Stream::new(&context)?;
//! let args = Args::new().with(data.ptr()).with(data.len() as u32);
//! kernel.launch(stream.borrow(), &LaunchShape::linear(1, 32, 0), &args)?;
//! stream.synchronize()?;
//! println!("{:?}", data.to_vec()?);
//! # Ok(())
//! # }
//! ```
//!
//! Source: CUDA Driver API reference; its group names are those of the files here.
#![allow(unsafe_code)] // calls across the C boundary

mod buffer;
mod context;
mod device;
mod elf;
mod error;
mod event;
mod graph;
mod jit_log;
mod launch;
mod module;
mod staging;
mod stream;
mod sys;
mod tensor_map;

pub use buffer::{DeviceBuffer, DevicePtr, PinnedBuffer};
pub use context::{Context, Current};
pub use device::{Device, DeviceInfo};
pub use error::{Error, Placed, PtxLine, Result};
pub use event::Event;
pub use graph::{CaptureMode, Graph, GraphExec};
pub use launch::{Args, KernelArg, LaunchAttrs, LaunchShape};
pub use module::{Cubin, Function, FunctionAttrs, JitOptions, Module};
pub use staging::StagingRing;
pub use stream::{Stream, StreamRef};
pub use sys::{Driver, DriverVersion};
pub use tensor_map::{TensorMap, TiledMatrix};
