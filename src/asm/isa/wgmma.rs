//! Warpgroup matrix products (`wgmma`): asynchronous, A from registers, B from shared memory by descriptor.
//!
//! Between its issue and the wait that covers its group, a product's registers are in flight: A must not be
//! written, D neither read nor written except by further products into the same D. `wgmma.fence` orders register
//! writes before the first product that uses them. B is read through the asynchronous proxy.
//! A product sums exactly in f64 over the k16 step and rounds once to single precision, as `mma` does.
//! Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".

use half::slice::HalfFloatSliceExt;

use super::alu::canonical;
use super::cluster::SM_90A;
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
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {d}, {a}, {b}, {scale_d}, 1, 1, 0;", SM_90A, Warp, LoadShared, |m, i| { product(m, i)?; }
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

/// One warp's 16 rows of a product.
fn product<M: Machine>(m: &mut M, i: &WgmmaM64K16F32F16) -> Result<(), M::Stop> {
    let first = m.active().trailing_zeros().min(31);
    let desc = m.get(first, i.b)?;
    let accumulate = m.get(first, i.scale_d)?;
    let product = Product { n: i.n.0, d: i.d.0, a: i.a.0.map(|a| a.0), desc, accumulate };
    let n = i.n.0.min(256) as usize;
    let mut columns = vec![[0; 16]; n];
    m.product(&product, &mut columns)?;
    // `b[k][column]`, so that the sums over all columns run side by side.
    let mut b = vec![0.0; 16 * n];
    let mut values = [0.0f32; 16];
    for (column, halves) in columns.iter().enumerate() {
        bytemuck::cast_slice::<u16, half::f16>(halves).convert_to_f32_slice(&mut values);
        for (k, value) in values.iter().enumerate() {
            b[k * n + column] = f64::from(*value);
        }
    }
    let mut a = [[0.0; 16]; 16];
    for lane in lanes(m.active()) {
        for (reg, a_reg) in i.a.0.into_iter().enumerate() {
            let bits = m.get(lane, a_reg)?;
            for (half, bits) in [bits, bits >> 16].into_iter().enumerate() {
                let (row, k) = fragment::a(lane, reg as u32, half as u32);
                a[row as usize][k as usize] = half::f16::from_bits(bits as u16).to_f64();
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
        for (reg, d) in i.d.0.iter().enumerate() {
            let (row, column) = fragment::d(lane, reg as u32);
            let Some(sum) = sums.get(row as usize * n + column as usize) else { continue };
            let c = if accumulate { f64::from(m.get(lane, Use(d))?) } else { 0.0 };
            m.write(lane, d.any(), u64::from(canonical((sum + c) as f32).to_bits()));
        }
    }
    Ok(())
}
