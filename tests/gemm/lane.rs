//! A stream on a GPU with operands of its own.

// Each test binary uses its part of this.
#![allow(dead_code)]

use half::f16;
use makaira::backend::Backend;
use makaira::driver;
use makaira::gemm::Matrix;
use makaira::jit::GpuBackend;

/// Operands on a GPU for launches that overlap.
pub struct Lane {
    pub stream: driver::Stream,
    pub a: Matrix,
    pub c: Matrix,
}

impl Lane {
    pub fn new(gpu: &GpuBackend, a: &[f16], m: usize, n: usize) -> Self {
        let stream = driver::Stream::new(gpu.context()).expect("a stream");
        let a_ptr = gpu.alloc(2 * a.len() as u64).expect("fits");
        gpu.upload(a_ptr, bytemuck::cast_slice(a)).expect("fits");
        let c_ptr = gpu.alloc(2 * (m * n) as u64).expect("fits");
        gpu.upload(c_ptr, &vec![0xff; 2 * m * n]).expect("fits");
        let a = Matrix { ptr: a_ptr, stride: (a.len() / m) as u64 };
        Self { stream, a, c: Matrix { ptr: c_ptr, stride: n as u64 } }
    }

    pub fn result(&self, gpu: &GpuBackend, m: usize, n: usize) -> Vec<f16> {
        let mut c = vec![f16::ZERO; m * n];
        gpu.download(self.c.ptr, bytemuck::cast_slice_mut(&mut c)).expect("fits");
        c
    }
}
