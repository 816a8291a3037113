//! Matrix fragments: `ldmatrix` and `mma`.
//!
//! Which lane holds which element is asked from [`crate::layout`]; nothing is re-derived here. A product
//! sums exactly in f64 over the whole k16 step and rounds once to single precision, which agrees with the
//! hardware bit for bit on integers and within the hardware's own rounding otherwise.
//! Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions".

use super::alu::canonical;
use super::{Access, Machine, isa, lanes, ptx};
use crate::asm::reg::{Out, SharedAddr, Use, Vector};
use crate::asm::types::{B32, F32, Order, Space};
use crate::layout::mma_m16n8k16 as fragment;

isa! {
    /// Matrix instructions.
    Tensor;

    /// Loads four 8x8 matrices of 16-bit elements; lane `8*j + r` gives the address of row `r` of matrix `j`.
    ldmatrix_sync_aligned_m8n8_x4_shared_b16 = LdmatrixX4 { d: Vector<Out<B32>, 4>, a: SharedAddr }
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {d}, {a};", ptx(7, 0, 75), Warp, LoadShared(16), |m, i| { ldmatrix(m, &i.d.0, i.a)?; }
    /// Loads two 8x8 matrices of 16-bit elements; lanes 0 to 15 give the row addresses.
    ldmatrix_sync_aligned_m8n8_x2_shared_b16 = LdmatrixX2 { d: Vector<Out<B32>, 2>, a: SharedAddr }
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {d}, {a};", ptx(7, 0, 75), Warp, LoadShared(16), |m, i| { ldmatrix(m, &i.d.0, i.a)?; }
    /// Stores four transposed 8x8 matrices of 16-bit elements; lane `8*j + r` gives the address of row `r` of matrix `j`.
    stmatrix_sync_aligned_m8n8_x4_trans_shared_b16 = StmatrixX4Trans { a: SharedAddr, b: Vector<Use<B32>, 4> }
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a}, {b};", ptx(7, 8, 90), Warp, StoreShared(16), |m, i| { stmatrix_trans(m, i)?; }
    /// Multiplies fp16 fragments and accumulates in single precision: `d[16][8] = a[16][16] * b[16][8] + c`.
    mma_m16n8k16_f32_f16 = MmaM16n8k16F32F16 { d: Vector<Out<F32>, 4>, a: Vector<Use<B32>, 4>, b: Vector<Use<B32>, 2>, c: Vector<Use<F32>, 4> }
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d}, {a}, {b}, {c};", ptx(7, 0, 80), Warp, Pure, |m, i| { mma(m, i.d.0, i.a.0, i.b.0, i.c.0, f16_value)?; }
    /// The same of bf16 fragments.
    mma_m16n8k16_f32_bf16 = MmaM16n8k16F32Bf16 { d: Vector<Out<F32>, 4>, a: Vector<Use<B32>, 4>, b: Vector<Use<B32>, 2>, c: Vector<Use<F32>, 4> }
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {a}, {b}, {c};", ptx(7, 0, 80), Warp, Pure, |m, i| { mma(m, i.d.0, i.a.0, i.b.0, i.c.0, bf16_value)?; }
}

/// The value of an fp16 element.
pub(super) fn f16_value(bits: u16) -> f64 {
    half::f16::from_bits(bits).to_f64()
}

/// The value of a bf16 element.
pub(super) fn bf16_value(bits: u16) -> f64 {
    half::bf16::from_bits(bits).to_f64()
}

/// Matrix `j`'s row addresses come from lanes `8*j ..`; lane `l` receives elements `2*(l%4)`, `+1` of row `l/4`.
fn ldmatrix<M: Machine>(m: &mut M, d: &[Out<B32>], a: SharedAddr) -> Result<(), M::Stop> {
    for (j, d) in d.iter().enumerate() {
        let mut rows = [[0; 16]; 8];
        for (r, row) in rows.iter_mut().enumerate() {
            let lane = (8 * j + r) as u32;
            let addr = m.get(lane, Use(a.base))?.wrapping_add_signed(a.offset);
            let access = Access {
                space: Space::Shared,
                addr: addr.into(),
                region: a.region,
                order: Order::Weak,
            };
            m.load(lane, access, row)?;
        }
        for lane in lanes(m.active()) {
            let (row, word) = (lane as usize / 4, lane as usize % 4);
            let bytes = &rows[row][4 * word..4 * word + 4];
            m.set(lane, *d, u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        }
    }
    Ok(())
}

/// Lane `8*j + r` gives the address of row `r` of stored matrix `j`, which is column `r` of the fragment in
/// register `j`: element `c` is half `r%2` of lane `4*c + r/2`.
fn stmatrix_trans<M: Machine>(m: &mut M, i: &StmatrixX4Trans) -> Result<(), M::Stop> {
    for (j, b) in i.b.0.into_iter().enumerate() {
        for r in 0..8 {
            let mut row = [0; 16];
            for c in 0..8 {
                let word = m.get(4 * c + r / 2, b)? >> (16 * (r % 2));
                row[2 * c as usize..2 * c as usize + 2]
                    .copy_from_slice(&(word as u16).to_le_bytes());
            }
            let lane = 8 * j as u32 + r;
            let at = m.shared_at(lane, i.a)?;
            let access = Access {
                space: Space::Shared,
                addr: at.addr.into(),
                region: at.region,
                order: Order::Weak,
            };
            m.store(lane, access, &row)?;
        }
    }
    Ok(())
}

fn mma<M: Machine>(
    m: &mut M,
    d: [Out<F32>; 4],
    a_regs: [Use<B32>; 4],
    b_regs: [Use<B32>; 2],
    c_regs: [Use<F32>; 4],
    value: impl Fn(u16) -> f64,
) -> Result<(), M::Stop> {
    let pair = |bits: u32| [bits, bits >> 16].map(|bits| value(bits as u16));
    let mut a = [[0.0; 16]; 16];
    let mut b = [[0.0; 8]; 16];
    for lane in 0..32 {
        for (r, reg) in a_regs.into_iter().enumerate() {
            let values = pair(m.get(lane, reg)?);
            for (half, value) in values.into_iter().enumerate() {
                let (row, k) = fragment::a(lane, r as u32, half as u32);
                a[row as usize][k as usize] = value;
            }
        }
        for (r, reg) in b_regs.into_iter().enumerate() {
            let values = pair(m.get(lane, reg)?);
            for (half, value) in values.into_iter().enumerate() {
                let (k, col) = fragment::b(lane, r as u32, half as u32);
                b[k as usize][col as usize] = value;
            }
        }
    }
    // Row by row over k, all columns side by side: the order of the sums is that of k.
    let mut sums = [[-0.0; 8]; 16];
    for (sums, a) in sums.iter_mut().zip(&a) {
        for (a, b) in a.iter().zip(&b) {
            sums.iter_mut().zip(b).for_each(|(sum, b)| *sum += a * b);
        }
    }
    let mut results = [[0.0; 4]; 32];
    for lane in 0..32 {
        for r in 0..4 {
            let (row, col) = fragment::c(lane, r);
            let c = f64::from(m.get(lane, c_regs[r as usize])?);
            let sum = sums[row as usize][col as usize];
            results[lane as usize][r as usize] = canonical((sum + c) as f32);
        }
    }
    for (lane, values) in results.into_iter().enumerate() {
        for (d, value) in d.into_iter().zip(values) {
            m.set(lane as u32, d, value);
        }
    }
    Ok(())
}
