//! `e2m1`: a 4-bit float of 1 sign, 2 exponent and 1 mantissa bits, the type of NVFP4 and MXFP4.
//!
//! The eight magnitudes are 0, 1/2, 1, 3/2, 2, 3, 4 and 6; bit 3 is the sign. There is neither an
//! infinity nor a NaN. NVFP4 has an e4m3 scale for each 16 inputs and a global one, MXFP4 an e8m0
//! scale for each 32. Source: OCP Microscaling Formats Specification.

use super::{WeightFormat, ZeroRule};

/// The weight type `e2m1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct E2M1;

/// What the low three bits are worth.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

impl WeightFormat for E2M1 {
    fn name(&self) -> &'static str {
        "e2m1"
    }

    fn bits(&self) -> u32 {
        4
    }

    fn zero_rule(&self) -> ZeroRule {
        ZeroRule::Float
    }

    fn decode(&self, code: u8) -> f32 {
        let magnitude = MAGNITUDES[usize::from(code & 7)];
        if code & 8 == 0 { magnitude } else { -magnitude }
    }

    fn padding_code(&self) -> u8 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: exponent bias 1, exponent field 0 is subnormal.
    #[test]
    fn every_code_is_worth_what_the_specification_says() {
        for code in 0..16u8 {
            let (exponent, mantissa) = (i32::from(code >> 1 & 3), f32::from(code & 1));
            let magnitude = match exponent {
                0 => mantissa / 2.0,
                _ => (1.0 + mantissa / 2.0) * 2f32.powi(exponent - 1),
            };
            assert_eq!(E2M1.decode(code).abs(), magnitude, "{code:#03x}");
            assert_eq!(E2M1.decode(code).is_sign_negative(), code >= 8, "{code:#03x}");
        }
    }
}
