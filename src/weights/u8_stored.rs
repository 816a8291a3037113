//! `u8`: an unsigned 8-bit code whose zero is stored beside the scale, group by group.
//!
//! A code q of a group with zero z is worth q - z, an integer from -255 to 255, exact in fp16. The
//! type of asymmetric 8-bit GPTQ and compressed-tensors checkpoints.

use super::fragments::emit_constant;
use super::u8b128::{emit_bytes, emit_centred_bytes};
use super::{Activation, Fragments, Operands, WeightFormat, ZeroBases, ZeroRule};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::B32;

/// The weight type `u8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct U8;

impl WeightFormat for U8 {
    fn name(&self) -> &'static str {
        "u8"
    }

    fn bits(&self) -> u32 {
        8
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
        Some(&U8)
    }
}

impl Fragments for U8 {
    fn zero_bases(&self) -> Option<ZeroBases> {
        Some(ZeroBases { f16: [1024.0, 1024.0], bf16: 128.0 })
    }

    fn num_instructions(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 8,
            Activation::Bf16 => 18,
        }
    }

    fn emit_constants(&self, a: &mut Asm, activation: Activation) -> Vec<Reg<B32>> {
        match activation {
            Activation::F16 => Vec::new(),
            // 1.0
            Activation::Bf16 => vec![emit_constant(a, 0x3f80)],
        }
    }

    /// In bf16 by way of q - 128: both that and 128 - z have eight bits, and so has the sum.
    fn emit_fragment(&self, a: &mut Asm, operands: &Operands, words: &[Reg<B32>]) -> [Reg<B32>; 4] {
        let zeros = operands.zeros.expect("the type stores zeros");
        match operands.activation {
            Activation::F16 => emit_bytes(a, words, zeros),
            Activation::Bf16 => {
                let one = operands.constants[0];
                let centred = emit_centred_bytes(a, words, one);
                std::array::from_fn(|n| {
                    let value = a.reg();
                    a.fma_rn_bf16x2(value, centred[n], one, zeros[n % 2]);
                    value
                })
            }
        }
    }
}
