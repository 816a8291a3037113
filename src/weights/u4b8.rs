//! `u4b8`: an unsigned 4-bit code with a fixed bias of 8, the type of symmetric GPTQ checkpoints.
//!
//! A code q in 0..16 is worth q - 8, so the values are the integers -8..=7 and all of them are
//! exact in fp16 and bf16. The code 8 is worth zero and fills the padding.

use super::{WeightFormat, ZeroRule};

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
}
