//! `u4`: an unsigned 4-bit code whose zero is stored beside the scale, group by group.
//!
//! A code q of a group with zero z is worth q - z, an integer from -15 to 15. The type of AWQ, of
//! asymmetric GPTQ and of asymmetric compressed-tensors checkpoints.

use super::fragments::emit_constant;
use super::u4b8::{emit_nibbles, emit_nibbles_bf16};
use super::{Activation, Fragments, Operands, WeightFormat, ZeroBases, ZeroRule};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::B32;

/// The weight type `u4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct U4;

impl WeightFormat for U4 {
    fn name(&self) -> &'static str {
        "u4"
    }

    fn bits(&self) -> u32 {
        4
    }

    fn zero_rule(&self) -> ZeroRule {
        ZeroRule::Stored
    }

    fn decode(&self, code: u8) -> f32 {
        f32::from(code)
    }

    /// Worth zero with the zero of padding, which is 0.
    fn padding_code(&self) -> u8 {
        0
    }

    fn fragments(&self) -> Option<&'static dyn Fragments> {
        Some(&U4)
    }
}

/// The conversion of `u4b8` with the group's zeros where that has its bias: no instruction more for a word.
impl Fragments for U4 {
    fn zero_bases(&self) -> Option<ZeroBases> {
        Some(ZeroBases { f16: [1024.0, 64.0], bf16: -128.0 })
    }

    fn num_instructions(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 9,
            Activation::Bf16 => 11,
        }
    }

    fn emit_constants(&self, a: &mut Asm, activation: Activation) -> Vec<Reg<B32>> {
        match activation {
            Activation::F16 => Vec::new(),
            // 1.0
            Activation::Bf16 => vec![emit_constant(a, 0x3f80)],
        }
    }

    fn emit_fragment(&self, a: &mut Asm, operands: &Operands, words: &[Reg<B32>]) -> [Reg<B32>; 4] {
        let zeros = operands.zeros.expect("the type stores zeros");
        match operands.activation {
            Activation::F16 => emit_nibbles(a, words[0], zeros),
            Activation::Bf16 => emit_nibbles_bf16(a, words[0], operands.constants[0], zeros),
        }
    }
}
