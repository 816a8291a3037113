//! `u4b8`: an unsigned 4-bit code with a fixed bias of 8, the type of symmetric GPTQ checkpoints.
//!
//! A code q in 0..16 is worth q - 8, so the values are the integers -8..=7 and all of them are
//! exact in fp16 and bf16. The code 8 is worth zero and fills the padding.

use super::fragments::{AND_OR, emit_constant, emit_shift};
use super::{Activation, Fragments, Operands, Subnormal, WeightFormat, ZeroRule};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::B32;

/// The weight type `u4b8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct U4B8;

/// The code that is worth zero.
const BIAS: u8 = 8;

impl WeightFormat for U4B8 {
    fn name(&self) -> &'static str {
        "u4b8"
    }

    fn bits(&self) -> u32 {
        4
    }

    fn zero_rule(&self) -> ZeroRule {
        ZeroRule::Bias(BIAS)
    }

    fn decode(&self, code: u8) -> f32 {
        f32::from(code) - f32::from(BIAS)
    }

    fn padding_code(&self) -> u8 {
        BIAS
    }

    fn fragments(&self) -> Option<&'static dyn Fragments> {
        Some(&U4B8)
    }

    fn subnormal(&self) -> Option<&'static dyn Subnormal> {
        Some(&U4B8)
    }
}

impl Fragments for U4B8 {
    fn num_instructions(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 9,
            Activation::Bf16 => 11,
        }
    }

    /// 1024 + 8 and 64 + 8 in fp16; 1 and -(128 + 8) in bf16.
    fn emit_constants(&self, a: &mut Asm, activation: Activation) -> Vec<Reg<B32>> {
        let halves = match activation {
            Activation::F16 => [0x6408, 0x5480],
            Activation::Bf16 => [0x3f80, 0xc308],
        };
        halves.map(|half| emit_constant(a, half)).to_vec()
    }

    fn emit_fragment(&self, a: &mut Asm, operands: &Operands, words: &[Reg<B32>]) -> [Reg<B32>; 4] {
        let constants = &operands.constants;
        match operands.activation {
            Activation::F16 => emit_nibbles(a, words[0], [constants[0], constants[1]]),
            Activation::Bf16 => {
                emit_nibbles_bf16(a, words[0], constants[0], [constants[1], constants[1]])
            }
        }
    }
}

/// Unsigned nibbles as fp16 numbers, less those in `bases`: what channels g and g + 8 are too large by. Nine
/// instructions for eight codes, none of them a multiplication.
///
/// Or-ing a code into the low bits of 0x6400 (1024.0, last place 1) gives 1024 + q; a code four
/// bits higher, or-ed into 0x5400 (64.0, last place 1/16), gives 64 + q. Subtracting 1032.0 (0x6408)
/// or 72.0 (0x5480) leaves q - 8, exactly. Source: Marlin paper, "Dequantization and tensor cores";
/// the 64-based form of the high nibble replaces its multiplication.
pub(super) fn emit_nibbles(a: &mut Asm, word: Reg<B32>, bases: [Reg<B32>; 2]) -> [Reg<B32>; 4] {
    let shifted = a.reg();
    a.shr_u32(shifted, word, 8);
    let fragment: [Reg<B32>; 4] = a.regs();
    for (n, value) in fragment.into_iter().enumerate() {
        let source = if n < 2 { word } else { shifted };
        let (mask, base) = match n % 2 {
            0 => (0x000f_000fu32, 0x6400_6400u32),
            _ => (0x00f0_00f0, 0x5400_5400),
        };
        let biased = a.reg();
        a.lop3_b32(biased, source, mask, base, AND_OR);
        a.sub_f16x2(value, biased, bases[n % 2]);
    }
    fragment
}

/// Unsigned nibbles as bf16 numbers, plus those in `added` (of channels g and g + 8). Eleven instructions for eight
/// codes.
///
/// 128.0 (0x4300) has the last place 1, so or-ing a code into its low bits gives 128 + q. A higher nibble would reach
/// its exponent, so every nibble is moved down. There is no subtraction before sm_90: `one` makes a multiplication
/// and an addition of it.
pub(super) fn emit_nibbles_bf16(
    a: &mut Asm,
    word: Reg<B32>,
    one: Reg<B32>,
    added: [Reg<B32>; 2],
) -> [Reg<B32>; 4] {
    std::array::from_fn(|n| {
        let source = emit_shift(a, word, -4 * n as i32);
        let [biased, value] = a.regs();
        a.lop3_b32(biased, source, 0x000f_000fu32, 0x4300_4300u32, AND_OR);
        a.fma_rn_bf16x2(value, biased, one, added[n % 2]);
        value
    })
}

impl Subnormal for U4B8 {
    fn bias(&self) -> u8 {
        BIAS
    }

    /// A code in the lowest bits of a half counts 2^-24, the smallest fp16; four bits higher, 2^-20.
    fn exponents(&self) -> [u32; 2] {
        [24, 20]
    }

    /// Five instructions for eight codes.
    fn emit_fragment(&self, a: &mut Asm, word: Reg<B32>) -> [Reg<B32>; 4] {
        let shifted = a.reg();
        a.shr_u32(shifted, word, 8);
        let fragment = a.regs();
        for (n, value) in fragment.into_iter().enumerate() {
            let source = if n < 2 { word } else { shifted };
            a.and_b32(value, source, [0x000f_000fu32, 0x00f0_00f0][n % 2]);
        }
        fragment
    }
}
