//! `u8b128`: an unsigned 8-bit code with a fixed bias of 128, the type of symmetric 8-bit
//! checkpoints.
//!
//! A code q in 0..256 is worth q - 128, so the values are the integers -128..=127, all of them
//! exact in fp16 and bf16. The code 128 is worth zero and fills the padding.

use super::fragments::{AND_OR, NOT_AND_OR, emit_constant, emit_shift};
use super::{Activation, Fragments, Operands, WeightFormat, ZeroRule};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::B32;

/// The weight type `u8b128`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct U8B128;

/// The code that is worth zero.
const BIAS: u8 = 128;

impl WeightFormat for U8B128 {
    fn name(&self) -> &'static str {
        "u8b128"
    }

    fn bits(&self) -> u32 {
        8
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
        Some(&U8B128)
    }
}

impl Fragments for U8B128 {
    fn num_instructions(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 8,
            Activation::Bf16 => 14,
        }
    }

    /// 1024 + 128 in fp16; 1 in bf16.
    fn emit_constants(&self, a: &mut Asm, activation: Activation) -> Vec<Reg<B32>> {
        let half = match activation {
            Activation::F16 => 0x6480,
            Activation::Bf16 => 0x3f80,
        };
        vec![emit_constant(a, half)]
    }

    fn emit_fragment(&self, a: &mut Asm, operands: &Operands, words: &[Reg<B32>]) -> [Reg<B32>; 4] {
        let constant = operands.constants[0];
        match operands.activation {
            Activation::F16 => emit_bytes(a, words, [constant, constant]),
            Activation::Bf16 => emit_centred_bytes(a, words, constant),
        }
    }
}

/// Unsigned bytes as fp16 numbers, less those in `bases`: what channels g and g + 8 are too large by. Eight
/// instructions for eight codes: a byte below 0x64 is 1024 + q.
pub(super) fn emit_bytes(a: &mut Asm, words: &[Reg<B32>], bases: [Reg<B32>; 2]) -> [Reg<B32>; 4] {
    std::array::from_fn(|n| {
        let [biased, value] = a.regs();
        // Bytes 0 and 2 of the word for channel g, 1 and 3 for g + 8; bytes 4 and up are 0x64.
        a.prmt_b32(biased, words[n / 2], 0x6464_6464u32, [0x4240u32, 0x4341][n % 2]);
        a.sub_f16x2(value, biased, bases[n % 2]);
        value
    })
}

/// Unsigned bytes less 128 as bf16 numbers. Fourteen instructions for eight codes.
///
/// 128.0 (0x4300) has the last place 1, so or-ing the low seven bits of a code into it gives 128 + q % 128. From that
/// 128 (0xc300) is taken where the code's top bit is set, and 256 (0xc380, one bit more) where it is not.
pub(super) fn emit_centred_bytes(a: &mut Asm, words: &[Reg<B32>], one: Reg<B32>) -> [Reg<B32>; 4] {
    std::array::from_fn(|n| {
        let source = emit_shift(a, words[n / 2], -8 * (n as i32 % 2));
        let [biased, taken, value] = a.regs();
        a.lop3_b32(biased, source, 0x007f_007fu32, 0x4300_4300u32, AND_OR);
        a.lop3_b32(taken, source, 0x0080_0080u32, 0xc300_c300u32, NOT_AND_OR);
        a.fma_rn_bf16x2(value, biased, one, taken);
        value
    })
}
