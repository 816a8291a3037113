//! `u4`: an unsigned 4-bit code whose zero is stored beside the scale, group by group.
//!
//! A code q of a group with zero z is worth q - z, an integer from -15 to 15. The type of AWQ, of
//! asymmetric GPTQ and of asymmetric compressed-tensors checkpoints.

use super::{WeightFormat, ZeroRule};

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
}
