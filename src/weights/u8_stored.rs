//! `u8`: an unsigned 8-bit code whose zero is stored beside the scale, group by group.
//!
//! A code q of a group with zero z is worth q - z, an integer from -255 to 255, exact in fp16. The
//! type of asymmetric 8-bit GPTQ and compressed-tensors checkpoints.

use super::{WeightFormat, ZeroRule};

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
}
