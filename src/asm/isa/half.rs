//! Packed half-precision arithmetic.
//!
//! Each half of a register is an fp16 (or bf16) value; results are rounded once, to nearest even, and subnormals
//! are kept. Products and sums are formed in f64, which holds them exactly, and rounded by our own
//! conversion: going through f32 would round a fused multiply-add twice.
//! PTX takes no immediates here.
//! Source: PTX ISA, "Half Precision Floating Point Instructions".

use super::{isa, ptx};
use crate::asm::reg::{Out, Use};
use crate::asm::types::B32;
use crate::layout::{bf16_from_f64, f16_from_f64};

isa! {
    /// Packed half-precision instructions.
    Half;

    /// Adds fp16 pairs.
    add_f16x2 = AddF16x2 { d: Out<B32>, a: Use<B32>, b: Use<B32> }
        "add.f16x2 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, pairwise(a, b, 0, |a, b, _| a + b)); }
    /// Subtracts fp16 pairs.
    sub_f16x2 = SubF16x2 { d: Out<B32>, a: Use<B32>, b: Use<B32> }
        "sub.f16x2 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, pairwise(a, b, 0, |a, b, _| a - b)); }
    /// Multiplies fp16 pairs.
    mul_f16x2 = MulF16x2 { d: Out<B32>, a: Use<B32>, b: Use<B32> }
        "mul.f16x2 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, pairwise(a, b, 0, |a, b, _| a * b)); }
    /// Multiplies and adds fp16 pairs with one rounding.
    fma_rn_f16x2 = FmaRnF16x2 { d: Out<B32>, a: Use<B32>, b: Use<B32>, c: Use<B32> }
        "fma.rn.f16x2 {d}, {a}, {b}, {c};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; let c = m.get(l, i.c)?; m.set(l, i.d, pairwise(a, b, c, |a, b, c| a * b + c)); }
    /// Multiplies and adds bf16 pairs with one rounding.
    fma_rn_bf16x2 = FmaRnBf16x2 { d: Out<B32>, a: Use<B32>, b: Use<B32>, c: Use<B32> }
        "fma.rn.bf16x2 {d}, {a}, {b}, {c};", ptx(7, 0, 80), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; let c = m.get(l, i.c)?; m.set(l, i.d, fma_bf16(a, b, c)); }
}

/// `a * b + c` of bf16 pairs. The product is exact in f64; the sum need not be, as exponents may lie far apart, so it is
/// rounded to odd: then rounding it to 8 bits is as good as rounding the exact sum.
fn fma_bf16(a: u32, b: u32, c: u32) -> u32 {
    let half = |bits: u32| half::bf16::from_bits(bits as u16).to_f64();
    let fma = |shift: u32| {
        let (product, c) = (half(a >> shift) * half(b >> shift), half(c >> shift));
        u32::from(bf16_from_f64(add_to_odd(product, c)).to_bits()) << shift
    };
    fma(0) | fma(16)
}

/// A sum in f64, rounded towards the neighbour with an odd significand where it is not exact.
fn add_to_odd(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let of_b = sum - a;
    let error = (a - (sum - of_b)) + (b - of_b);
    if !sum.is_finite() || error == 0.0 || sum.to_bits() & 1 == 1 {
        return sum;
    }
    let away = (error > 0.0) == (sum > 0.0);
    f64::from_bits(if away { sum.to_bits() + 1 } else { sum.to_bits() - 1 })
}

/// Applies `f` to both halves.
///
/// Rounding twice (to f64, then to fp16) could only go wrong where f64 loses a bit that decides a tie. It
/// never does: `a * b` has 22 significant bits, so if it reaches the result's half-place 2^(e-11) its last
/// bit lies at 2^(e-32) or above; and if `c`, a multiple of 2^-24, is the small one, the result is below
/// 2^16 and everything fits in 40 bits. Both are within f64's 53.
fn pairwise(a: u32, b: u32, c: u32, f: impl Fn(f64, f64, f64) -> f64) -> u32 {
    let half = |bits: u32| half::f16::from_bits(bits as u16).to_f64();
    let lo = f16_from_f64(f(half(a), half(b), half(c)));
    let hi = f16_from_f64(f(half(a >> 16), half(b >> 16), half(c >> 16)));
    u32::from(lo.to_bits()) | u32::from(hi.to_bits()) << 16
}
