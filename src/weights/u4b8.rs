//! `u4b8`: an unsigned 4-bit code with a fixed bias of 8, the type of symmetric GPTQ checkpoints.
//!
//! A code q in 0..16 is worth q - 8, so the values are the integers -8..=7 and all of them are
//! exact in fp16 and bf16. The code 8 is worth zero and fills the padding.

use super::{Fragments, Subnormal, WeightFormat, ZeroRule};
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
    fn emit_constants(&self, a: &mut Asm) -> Vec<Reg<B32>> {
        [0x6408_6408u32, 0x5480_5480]
            .map(|bits| {
                let constant = a.reg();
                a.mov_b32(constant, bits);
                constant
            })
            .to_vec()
    }

    /// Nine instructions for eight codes, none of them a multiplication.
    ///
    /// Or-ing a code into the low bits of 0x6400 (1024.0, last place 1) gives 1024 + q; a code four
    /// bits higher, or-ed into 0x5400 (64.0, last place 1/16), gives 64 + q. Subtracting 1032.0 (0x6408)
    /// or 72.0 (0x5480) leaves q - 8, exactly. Source: Marlin paper, "Dequantization and tensor cores";
    /// the 64-based form of the high nibble replaces its multiplication.
    fn emit_fragment(&self, a: &mut Asm, constants: &[Reg<B32>], word: Reg<B32>) -> [Reg<B32>; 4] {
        /// `(a & b) | c`.
        const AND_OR: u32 = 0xea;
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
            a.sub_f16x2(value, biased, constants[n % 2]);
        }
        fragment
    }
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
