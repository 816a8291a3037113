//! Warpgroup matrix products (`wgmma`): asynchronous, A from registers, B from shared memory by descriptor.
//!
//! Between its issue and the wait that covers its group, a product's registers are in flight: A must not be
//! written, D neither read nor written except by further products into the same D. `wgmma.fence` orders register
//! writes before the first product that uses them. B is read through the asynchronous proxy.
//! Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".

use super::cluster::SM_90A;
use super::isa;
use crate::asm::reg::{Imm, In, InOutRange, Use, Vector};
use crate::asm::types::{B32, B64, F32, Pred};

isa! {
    /// Warpgroup products.
    Wgmma;

    /// `d[64][n] = a[64][16] * b[16][n] + (scale_d ? d : 0)`, fp16 operands, K-major B: `n` is 8 to 256 in steps
    /// of 8, `d` has `n / 2` registers.
    wgmma_mma_async_m64k16_f32_f16 = WgmmaM64K16F32F16 { n: Imm, d: InOutRange<F32>, a: Vector<Use<B32>, 4>, b: Use<B64>, scale_d: In<Pred> }
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {d}, {a}, {b}, {scale_d}, 1, 1, 0;", SM_90A, Warp, LoadShared, |m, _i| { m.unmodelled()?; }
    /// Orders this warp's register writes before the products that follow.
    wgmma_fence_sync_aligned = WgmmaFence {}
        "wgmma.fence.sync.aligned;", SM_90A, Warp, Sync, |m, _i| { m.unmodelled()?; }
    /// Closes the warp's open group of products.
    wgmma_commit_group_sync_aligned = WgmmaCommitGroup {}
        "wgmma.commit_group.sync.aligned;", SM_90A, Warp, Sync, |m, _i| { m.unmodelled()?; }
    /// Waits until at most the newest `n` groups are incomplete.
    wgmma_wait_group_sync_aligned = WgmmaWaitGroup { n: Imm }
        "wgmma.wait_group.sync.aligned {n};", SM_90A, Warp, Sync, |m, _i| { m.unmodelled()?; }
}
