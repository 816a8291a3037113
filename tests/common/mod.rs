//! What several test binaries share. Each uses a part of it.
#![allow(dead_code)]

pub mod family;
pub mod oracle;
pub mod row_kernel;
pub mod row_numbers;
pub mod row_reference;
pub mod vectors;

use makaira::backend::Backend;
use makaira::emu::EmuBackend;
use makaira::jit::GpuBackend;

/// The backends to test on, each with the name that reports use: the emulator, then the GPU if there is one.
pub fn backends() -> Vec<(&'static str, Box<dyn Backend>)> {
    let mut backends: Vec<(_, Box<dyn Backend>)> =
        vec![("emulator", Box::new(EmuBackend::h200_like(2)))];
    match GpuBackend::open(0) {
        Ok(gpu) => backends.push(("GPU", Box::new(gpu))),
        Err(error) if error.is_unavailable() => {
            eprintln!("skipped: no GPU ({error}); only the emulator was tested");
        }
        Err(error) => panic!("the GPU is there and does not open: {error}"),
    }
    backends
}

/// A stream of numbers that is the same on every machine (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }
}
