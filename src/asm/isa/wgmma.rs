//! Warpgroup matrix products (`wgmma`): asynchronous, A from registers, B from shared memory by descriptor.
//!
//! Between its issue and the wait that covers its group, a product's registers are in flight: A must not be
//! written, D neither read nor written except by further products into the same D. `wgmma.fence` orders register
//! writes before the first product that uses them. B is read through the asynchronous proxy.
//! A product sums exactly in f64 over the k16 step and rounds once to single precision, as `mma` does.
//! Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".

use super::alu::canonical;
use super::cluster::SM_90A;
use super::tensor::{bf16_value, f16_value};
use super::{Machine, Product, ProductOp, isa, lanes};
use crate::asm::reg::{Imm, In, InOutRange, Use, Vector};
use crate::asm::types::{B32, B64, F32, Pred};
use crate::layout::wgmma_m64k16 as fragment;

isa! {
    /// Warpgroup products.
    Wgmma;

    /// `d[64][n] = a[64][16] * b[16][n] + (scale_d ? d : 0)`, fp16 operands, K-major B: `n` is 8 to 256 in steps
    /// of 8, `d` has `n / 2` registers.
    wgmma_mma_async_m64k16_f32_f16 = WgmmaM64K16F32F16 { n: Imm, d: InOutRange<F32>, a: Vector<Use<B32>, 4>, b: Use<B64>, scale_d: In<Pred> }
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {d}, {a}, {b}, {scale_d}, 1, 1, 0;", SM_90A, Warp, LoadShared, |m, i| { product(m, (i.n, i.d, i.a.0, i.b, i.scale_d), f16_value)?; }
    /// The same with bf16 operands.
    wgmma_mma_async_m64k16_f32_bf16 = WgmmaM64K16F32Bf16 { n: Imm, d: InOutRange<F32>, a: Vector<Use<B32>, 4>, b: Use<B64>, scale_d: In<Pred> }
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {d}, {a}, {b}, {scale_d}, 1, 1, 0;", SM_90A, Warp, LoadShared, |m, i| { product(m, (i.n, i.d, i.a.0, i.b, i.scale_d), bf16_value)?; }
    /// Orders this warp's register writes before the products that follow.
    wgmma_fence_sync_aligned = WgmmaFence {}
        "wgmma.fence.sync.aligned;", SM_90A, Warp, Sync, |m, _i| { m.order_products(ProductOp::Fence)?; }
    /// Closes the warp's open group of products.
    wgmma_commit_group_sync_aligned = WgmmaCommitGroup {}
        "wgmma.commit_group.sync.aligned;", SM_90A, Warp, Sync, |m, _i| { m.order_products(ProductOp::Commit)?; }
    /// Waits until at most the newest `n` groups are incomplete.
    wgmma_wait_group_sync_aligned = WgmmaWaitGroup { n: Imm }
        "wgmma.wait_group.sync.aligned {n};", SM_90A, Warp, Sync, |m, i| { m.order_products(ProductOp::Wait(i.n.0))?; }
}

/// Columns, accumulators, A, B's descriptor and whether the accumulators count.
type Operands = (Imm, InOutRange<F32>, [Use<B32>; 4], Use<B64>, In<Pred>);

/// One warp's 16 rows of a product of 16-bit elements.
fn product<M: Machine>(
    m: &mut M,
    (n, d, a_regs, desc, scale_d): Operands,
    value: impl Fn(u16) -> f64,
) -> Result<(), M::Stop> {
    let first = m.active().trailing_zeros().min(31);
    let desc = m.get(first, desc)?;
    let accumulate = m.get(first, scale_d)?;
    let product = Product { n: n.0, d: d.0, a: a_regs.map(|a| a.0), desc, accumulate };
    let n = n.0.min(256) as usize;
    let mut columns = vec![[0; 16]; n];
    m.product(&product, &mut columns)?;
    // `b[k][column]`, so that the sums over all columns run side by side.
    let mut b = vec![0.0; 16 * n];
    for (column, halves) in columns.iter().enumerate() {
        for (k, bits) in halves.iter().enumerate() {
            b[k * n + column] = value(*bits);
        }
    }
    let mut a = [[0.0; 16]; 16];
    for lane in lanes(m.active()) {
        for (reg, a_reg) in a_regs.into_iter().enumerate() {
            let bits = m.get(lane, a_reg)?;
            for (half, bits) in [bits, bits >> 16].into_iter().enumerate() {
                let (row, k) = fragment::a(lane, reg as u32, half as u32);
                a[row as usize][k as usize] = value(bits as u16);
            }
        }
    }
    let mut sums = vec![-0.0; 16 * n];
    for (a, sums) in a.iter().zip(sums.chunks_exact_mut(n.max(1))) {
        for (a, b) in a.iter().zip(b.chunks_exact(n.max(1))) {
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
    for lane in lanes(m.active()) {
        for (reg, d) in d.0.iter().enumerate() {
            let (row, column) = fragment::d(lane, reg as u32);
            let Some(sum) = sums.get(row as usize * n + column as usize) else { continue };
            let c = if accumulate { f64::from(m.get(lane, Use(d))?) } else { 0.0 };
            m.write(lane, d.any(), u64::from(canonical((sum + c) as f32).to_bits()));
        }
    }
    Ok(())
}
