//! Integer, logic, single-precision, conversion, comparison and data-movement instructions.
//!
//! Integer arithmetic wraps. Single precision is IEEE round-to-nearest-even with subnormals, as PTX
//! defines `.f32` without `.ftz` on every target we emit for.
//! Source: PTX ISA, "Integer Arithmetic Instructions", "Floating Point Instructions", "Logic and Shift
//! Instructions", "Comparison and Selection Instructions", "Data Movement and Conversion Instructions".

use super::{isa, ptx};
use crate::asm::reg::{Imm, In, Out, Param, Use, Vector};
use crate::asm::types::{B16, B32, B64, Cmp, F32, Pred, Special};
use crate::layout::{bf16_from_f64, f16_from_f64};

isa! {
    /// Integer, logic, conversion and comparison instructions.
    Alu;

    /// Moves 32 bits.
    mov_b32 = MovB32 { d: Out<B32>, a: In<B32> }
        "mov.b32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, a); }
    /// Moves 64 bits.
    mov_b64 = MovB64 { d: Out<B64>, a: In<B64> }
        "mov.b64 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, a); }
    /// Moves a single-precision value.
    mov_f32 = MovF32 { d: Out<F32>, a: In<F32> }
        "mov.f32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, a); }
    /// The single-precision value of 32 bits.
    mov_b32_to_f32 = MovB32ToF32 { d: Out<F32>, a: Use<B32> }
        "mov.b32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, f32::from_bits(a)); }
    /// Reads a 32-bit special register.
    mov_u32_special = MovU32Special { d: Out<B32>, a: Special }
        "mov.u32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.special(l, i.a); m.set(l, i.d, a); }
    /// The address of the CTA's dynamic shared memory in the shared window.
    mov_u32_smem = MovU32Smem { d: Out<B32> }
        "mov.u32 {d}, smem;", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.smem_base(); m.set(l, i.d, a); }
    /// Loads a 32-bit entry parameter.
    ld_param_u32 = LdParamU32 { d: Out<B32>, a: Param }
        "ld.param.u32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.param(i.a)?; m.set(l, i.d, a as u32); }
    /// Loads a 64-bit entry parameter.
    ld_param_u64 = LdParamU64 { d: Out<B64>, a: Param }
        "ld.param.u64 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.param(i.a)?; m.set(l, i.d, a); }
    /// Packs two 16-bit registers, the first in the low half.
    mov_b32_pack = MovB32Pack { d: Out<B32>, a: Vector<Use<B16>, 2> }
        "mov.b32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let lo = m.get(l, i.a.0[0])?; let hi = m.get(l, i.a.0[1])?; m.set(l, i.d, u32::from(lo) | u32::from(hi) << 16); }
    /// Splits 32 bits into two 16-bit registers, the low half first.
    mov_b32_unpack = MovB32Unpack { d: Vector<Out<B16>, 2>, a: Use<B32> }
        "mov.b32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d.0[0], a as u16); m.set(l, i.d.0[1], (a >> 16) as u16); }

    /// Adds.
    add_u32 = AddU32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "add.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.wrapping_add(b)); }
    /// Adds 64-bit values.
    add_u64 = AddU64 { d: Out<B64>, a: In<B64>, b: In<B64> }
        "add.u64 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.wrapping_add(b)); }
    /// Subtracts.
    sub_u32 = SubU32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "sub.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.wrapping_sub(b)); }
    /// Multiplies, low 32 bits.
    mul_lo_u32 = MulLoU32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "mul.lo.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.wrapping_mul(b)); }
    /// Multiplies, high 32 bits.
    mul_hi_u32 = MulHiU32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "mul.hi.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, ((u64::from(a) * u64::from(b)) >> 32) as u32); }
    /// Multiplies to 64 bits.
    mul_wide_u32 = MulWideU32 { d: Out<B64>, a: In<B32>, b: In<B32> }
        "mul.wide.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, u64::from(a) * u64::from(b)); }
    /// Multiplies and adds, low 32 bits.
    mad_lo_u32 = MadLoU32 { d: Out<B32>, a: In<B32>, b: In<B32>, c: In<B32> }
        "mad.lo.u32 {d}, {a}, {b}, {c};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; let c = m.get(l, i.c)?; m.set(l, i.d, a.wrapping_mul(b).wrapping_add(c)); }
    /// Multiplies 32-bit values to 64 bits and adds.
    mad_wide_u32 = MadWideU32 { d: Out<B64>, a: In<B32>, b: In<B32>, c: In<B64> }
        "mad.wide.u32 {d}, {a}, {b}, {c};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; let c = m.get(l, i.c)?; m.set(l, i.d, (u64::from(a) * u64::from(b)).wrapping_add(c)); }
    /// The smaller unsigned value.
    min_u32 = MinU32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "min.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.min(b)); }
    /// The larger unsigned value.
    max_u32 = MaxU32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "max.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.max(b)); }
    /// The smaller signed value.
    min_s32 = MinS32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "min.s32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)? as i32; let b = m.get(l, i.b)? as i32; m.set(l, i.d, a.min(b) as u32); }
    /// The larger signed value.
    max_s32 = MaxS32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "max.s32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)? as i32; let b = m.get(l, i.b)? as i32; m.set(l, i.d, a.max(b) as u32); }

    /// Bitwise and.
    and_b32 = AndB32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "and.b32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a & b); }
    /// Bitwise or.
    or_b32 = OrB32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "or.b32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a | b); }
    /// Bitwise exclusive or.
    xor_b32 = XorB32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "xor.b32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a ^ b); }
    /// Any bitwise function of three inputs: bit `a*4 + b*2 + c` of the look-up table is the result.
    lop3_b32 = Lop3B32 { d: Out<B32>, a: In<B32>, b: In<B32>, c: In<B32>, lut: Imm }
        "lop3.b32 {d}, {a}, {b}, {c}, {lut};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; let c = m.get(l, i.c)?; m.set(l, i.d, lop3(a, b, c, i.lut.0)); }
    /// Shifts left; amounts above 31 give 0.
    shl_b32 = ShlB32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "shl.b32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.checked_shl(b).unwrap_or(0)); }
    /// Shifts right, filling with zeros; amounts above 31 give 0.
    shr_u32 = ShrU32 { d: Out<B32>, a: In<B32>, b: In<B32> }
        "shr.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a.checked_shr(b).unwrap_or(0)); }
    /// Picks four of the eight bytes of `{b, a}`; nibble `n` of the selector names byte `n` of the result.
    prmt_b32 = PrmtB32 { d: Out<B32>, a: In<B32>, b: In<B32>, sel: In<B32> }
        "prmt.b32 {d}, {a}, {b}, {sel};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; let sel = m.get(l, i.sel)?; m.set(l, i.d, prmt(a, b, sel)); }

    /// Compares unsigned 32-bit values.
    setp_u32 = SetpU32 { d: Out<Pred>, cmp: Cmp, a: In<B32>, b: In<B32> }
        "setp.{cmp}.u32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, i.cmp.holds(a, b)); }
    /// Compares signed 32-bit values.
    setp_s32 = SetpS32 { d: Out<Pred>, cmp: Cmp, a: In<B32>, b: In<B32> }
        "setp.{cmp}.s32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)? as i32; let b = m.get(l, i.b)? as i32; m.set(l, i.d, i.cmp.holds(a, b)); }
    /// Both predicates.
    and_pred = AndPred { d: Out<Pred>, a: Use<Pred>, b: Use<Pred> }
        "and.pred {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a && b); }
    /// Either predicate.
    or_pred = OrPred { d: Out<Pred>, a: Use<Pred>, b: Use<Pred> }
        "or.pred {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, a || b); }
    /// The opposite predicate.
    not_pred = NotPred { d: Out<Pred>, a: Use<Pred> }
        "not.pred {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, !a); }
    /// `a` where the predicate holds, else `b`.
    selp_b32 = SelpB32 { d: Out<B32>, a: In<B32>, b: In<B32>, p: Use<Pred> }
        "selp.b32 {d}, {a}, {b}, {p};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let v = if m.get(l, i.p)? { m.get(l, i.a)? } else { m.get(l, i.b)? }; m.set(l, i.d, v); }
    /// `a` where the predicate holds, else `b`, in single precision.
    selp_f32 = SelpF32 { d: Out<F32>, a: In<F32>, b: In<F32>, p: Use<Pred> }
        "selp.f32 {d}, {a}, {b}, {p};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let v = if m.get(l, i.p)? { m.get(l, i.a)? } else { m.get(l, i.b)? }; m.set(l, i.d, v); }

    /// Adds in single precision.
    add_f32 = AddF32 { d: Out<F32>, a: In<F32>, b: In<F32> }
        "add.f32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, canonical(a + b)); }
    /// Multiplies in single precision.
    mul_f32 = MulF32 { d: Out<F32>, a: In<F32>, b: In<F32> }
        "mul.f32 {d}, {a}, {b};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; m.set(l, i.d, canonical(a * b)); }
    /// Multiplies and adds in single precision with one rounding.
    fma_rn_f32 = FmaRnF32 { d: Out<F32>, a: In<F32>, b: In<F32>, c: In<F32> }
        "fma.rn.f32 {d}, {a}, {b}, {c};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; let b = m.get(l, i.b)?; let c = m.get(l, i.c)?; m.set(l, i.d, canonical(a.mul_add(b, c))); }

    /// Widens 32 bits to 64.
    cvt_u64_u32 = CvtU64U32 { d: Out<B64>, a: Use<B32> }
        "cvt.u64.u32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, u64::from(a)); }
    /// Widens fp16 to single precision, exactly; of a NaN's payload nothing is kept.
    cvt_f32_f16 = CvtF32F16 { d: Out<F32>, a: Use<B16> }
        "cvt.f32.f16 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, canonical(half::f16::from_bits(a).to_f32())); }
    /// Rounds single precision to fp16, to nearest even.
    cvt_rn_f16_f32 = CvtRnF16F32 { d: Out<B16>, a: Use<F32> }
        "cvt.rn.f16.f32 {d}, {a};", ptx(7, 0, 70), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, f16_from_f64(a.into()).to_bits()); }
    /// Rounds two single-precision values to fp16; `a` goes to the high half, `b` to the low one.
    cvt_rn_f16x2_f32 = CvtRnF16x2F32 { d: Out<B32>, a: Use<F32>, b: Use<F32> }
        "cvt.rn.f16x2.f32 {d}, {a}, {b};", ptx(7, 0, 80), Lane, Pure, |m, l, i| {
            let hi = m.get(l, i.a)?; let lo = m.get(l, i.b)?;
            m.set(l, i.d, u32::from(f16_from_f64(lo.into()).to_bits()) | u32::from(f16_from_f64(hi.into()).to_bits()) << 16);
        }
    /// Rounds single precision to bf16, to nearest even.
    cvt_rn_bf16_f32 = CvtRnBf16F32 { d: Out<B16>, a: Use<F32> }
        "cvt.rn.bf16.f32 {d}, {a};", ptx(7, 0, 80), Lane, Pure, |m, l, i| { let a = m.get(l, i.a)?; m.set(l, i.d, bf16_from_f64(a.into()).to_bits()); }
    /// Rounds two single-precision values to bf16; `a` goes to the high half, `b` to the low one.
    cvt_rn_bf16x2_f32 = CvtRnBf16x2F32 { d: Out<B32>, a: Use<F32>, b: Use<F32> }
        "cvt.rn.bf16x2.f32 {d}, {a}, {b};", ptx(7, 0, 80), Lane, Pure, |m, l, i| {
            let hi = m.get(l, i.a)?; let lo = m.get(l, i.b)?;
            m.set(l, i.d, u32::from(bf16_from_f64(lo.into()).to_bits()) | u32::from(bf16_from_f64(hi.into()).to_bits()) << 16);
        }
}

/// A single-precision result: every NaN is the one that PTX defines, 0x7fffffff.
pub(super) fn canonical(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(0x7fff_ffff) } else { value }
}

/// Bit `a*4 + b*2 + c` of `lut`, for each bit position.
fn lop3(a: u32, b: u32, c: u32, lut: u32) -> u32 {
    (0..8).filter(|case| lut >> case & 1 != 0).fold(0, |bits, case| {
        let pick = |value: u32, set: bool| if set { value } else { !value };
        bits | (pick(a, case & 4 != 0) & pick(b, case & 2 != 0) & pick(c, case & 1 != 0))
    })
}

/// `prmt` in its default mode: the selector's nibble picks a byte, its high bit replicates the sign.
fn prmt(a: u32, b: u32, sel: u32) -> u32 {
    let bytes = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |result, n| {
        let nibble = sel >> (4 * n) & 0xf;
        let byte = (bytes >> (8 * (nibble & 7))) as u8;
        let byte = if nibble & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        result | u32::from(byte) << (8 * n)
    })
}
