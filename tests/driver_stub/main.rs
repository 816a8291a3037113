//! The driver room against a stand-in for libcuda, and against the real one where there is a GPU.
//!
//! The stand-in (`tests/stub/libcuda.rs`) is compiled at run time with rustc; without rustc those
//! tests say that they are skipped.

#[path = "../stub/build.rs"]
mod build;
#[path = "../stub/open.rs"]
mod opened;

mod assembling;
mod exercise;
mod launches;
mod presence;

use makaira::driver::{Args, Context, Cubin, DeviceBuffer, Function, JitOptions, Module};

/// `dst[i] = src[i] + 1` for `i < n`, one CTA of at most 512 threads.
const ADD_ONE: &str = include_str!("../stub/add_one.ptx");

fn add_one(context: &Context) -> Function {
    let cubin = Cubin::assemble(context, ADD_ONE, &JitOptions::default()).expect("it assembles");
    let module = Module::from_cubin(context, &cubin).expect("it loads");
    module.function("add_one").expect("the kernel is there")
}

/// Numbers that differ from run to run.
fn fresh_numbers(count: usize) -> Vec<u32> {
    use std::hash::{BuildHasher, RandomState};
    let seed = RandomState::new();
    (0..count).map(|idx| seed.hash_one(idx) as u32).collect()
}

fn args(dst: &DeviceBuffer<u32>, src: &DeviceBuffer<u32>) -> Args {
    Args::new().with(dst.ptr()).with(src.ptr()).with(src.len() as u32)
}

fn two_buffers(context: &Context) -> (DeviceBuffer<u32>, DeviceBuffer<u32>) {
    let src = DeviceBuffer::from_slice(context, &fresh_numbers(64)).expect("an upload");
    (src, DeviceBuffer::zeroed(context, 64).expect("an allocation"))
}
