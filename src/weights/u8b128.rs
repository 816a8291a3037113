//! `u8b128`: an unsigned 8-bit code with a fixed bias of 128, the type of symmetric 8-bit
//! checkpoints.
//!
//! A code q in 0..256 is worth q - 128, so the values are the integers -128..=127, all of them
//! exact in fp16 and bf16. The code 128 is worth zero and fills the padding.

use super::{WeightFormat, ZeroRule};

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
}
