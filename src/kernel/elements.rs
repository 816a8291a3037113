//! Elements of activations, outputs, biases and residuals: 16 bits in memory, single precision in registers.

use crate::asm::Asm;
use crate::asm::reg::{Reg, Use};
use crate::asm::types::{B16, B32, B64, F32, Pred};
use crate::weights::Activation;

/// Emits the two elements of a word, the lower half first, in single precision.
pub(super) fn emit_widen(a: &mut Asm, activation: Activation, word: Reg<B32>) -> [Reg<F32>; 2] {
    let values: [Reg<F32>; 2] = a.regs();
    match activation {
        Activation::F16 => {
            let halves: [Reg<B16>; 2] = a.regs();
            a.mov_b32_unpack(halves, word);
            a.cvt_f32_f16(values[0], halves[0]);
            a.cvt_f32_f16(values[1], halves[1]);
        }
        // bf16 is the upper half of single precision.
        Activation::Bf16 => {
            let [low, high] = a.regs();
            a.shl_b32(low, word, 16);
            a.and_b32(high, word, 0xffff_0000u32);
            a.mov_b32_to_f32(values[0], low);
            a.mov_b32_to_f32(values[1], high);
        }
    }
    values
}

/// Emits two single-precision values rounded to elements, `low` in the lower half.
pub(super) fn emit_round_pair(
    a: &mut Asm,
    activation: Activation,
    high: Reg<F32>,
    low: Reg<F32>,
) -> Reg<B32> {
    let word = a.reg();
    emit_round_into(a, activation, word, high, low);
    word
}

/// The same, into a register of the caller's.
pub(super) fn emit_round_into(
    a: &mut Asm,
    activation: Activation,
    word: Reg<B32>,
    high: Reg<F32>,
    low: Reg<F32>,
) {
    match activation {
        Activation::F16 => a.cvt_rn_f16x2_f32(word, Use(high), Use(low)),
        Activation::Bf16 => a.cvt_rn_bf16x2_f32(word, Use(high), Use(low)),
    }
}

/// Emits a single-precision value rounded to an element.
pub(super) fn emit_round(a: &mut Asm, activation: Activation, value: Reg<F32>) -> Reg<B16> {
    let half = a.reg();
    match activation {
        Activation::F16 => a.cvt_rn_f16_f32(half, value),
        Activation::Bf16 => a.cvt_rn_bf16_f32(half, value),
    }
    half
}

/// Emits the load of an element where `guard` holds, zero elsewhere, in single precision.
pub(super) fn emit_load_element(
    a: &mut Asm,
    activation: Activation,
    guard: Reg<Pred>,
    from: Reg<B64>,
    offset: i32,
) -> Reg<F32> {
    let zero: Reg<B32> = a.reg();
    a.mov_b32(zero, 0);
    let [half, other]: [Reg<B16>; 2] = a.regs();
    a.mov_b32_unpack([half, other], zero);
    a.when(guard, |a| a.ld_global_b16(half, from.at(offset)));
    match activation {
        Activation::F16 => {
            let value = a.reg();
            a.cvt_f32_f16(value, half);
            value
        }
        Activation::Bf16 => {
            let word = a.reg();
            a.mov_b32_pack(word, [half, half]);
            emit_widen(a, activation, word)[1]
        }
    }
}

/// Emits the load of four neighbouring elements, at a multiple of 8 bytes, where `guard` holds, zeros elsewhere.
pub(super) fn emit_load_quad(
    a: &mut Asm,
    activation: Activation,
    guard: Reg<Pred>,
    from: Reg<B64>,
) -> [Reg<F32>; 4] {
    let words: [Reg<B32>; 2] = a.regs();
    words.into_iter().for_each(|word| a.mov_b32(word, 0));
    a.when(guard, |a| a.ld_global_v2_b32(words, from));
    let [low, high] = words.map(|word| emit_widen(a, activation, word));
    [low[0], low[1], high[0], high[1]]
}
