//! `e2m1`: a 4-bit float of 1 sign, 2 exponent and 1 mantissa bits, the type of NVFP4 and MXFP4.
//!
//! The eight magnitudes are 0, 1/2, 1, 3/2, 2, 3, 4 and 6; bit 3 is the sign. There is neither an
//! infinity nor a NaN. NVFP4 has an e4m3 scale for each 16 inputs and a global one, MXFP4 an e8m0
//! scale for each 32. Source: OCP Microscaling Formats Specification.

use super::fragments::{emit_float, emit_power_bf16, emit_shift, emit_times_bf16};
use super::{Activation, Fragments, Operands, WeightFormat, ZeroRule};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::B32;

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

    fn fragments(&self) -> Option<&'static dyn Fragments> {
        Some(&E2M1)
    }
}

/// A half of a packed word, from the top: the signs of codes 0, 2, 3 and 1, then the three other bits of codes 0, 1, 2
/// and 3. Code 0 then is an fp16 number as it lies, 2^14 too small (the difference of the exponents' biases, 15 and
/// 1), whose subnormals come out right; code 1 is one when shifted; the others need two shifts.
impl Fragments for E2M1 {
    /// bf16 numbers would be 2^126 too small: that is put right at once.
    fn exponent(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 14,
            Activation::Bf16 => 0,
        }
    }

    fn arrange(&self, word: u32) -> u32 {
        (word & 0x0008_0008) << 12
            | (word & 0x0800_0800) << 3
            | (word >> 2 & 0x2000_2000)
            | (word & 0x0080_0080) << 5
            | (word & 0x0007_0007) << 9
            | (word & 0x0070_0070) << 2
            | (word >> 5 & 0x0038_0038)
            | (word >> 12 & 0x0007_0007)
    }

    fn restore(&self, word: u32) -> u32 {
        (word >> 12 & 0x0008_0008)
            | (word >> 3 & 0x0800_0800)
            | (word & 0x2000_2000) << 2
            | (word >> 5 & 0x0080_0080)
            | (word >> 9 & 0x0007_0007)
            | (word >> 2 & 0x0070_0070)
            | (word & 0x0038_0038) << 5
            | (word & 0x0007_0007) << 12
    }

    fn num_instructions(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 11,
            Activation::Bf16 => 18,
        }
    }

    fn emit_constants(&self, a: &mut Asm, activation: Activation) -> Vec<Reg<B32>> {
        match activation {
            Activation::F16 => Vec::new(),
            Activation::Bf16 => emit_power_bf16(a, 127 - 1),
        }
    }

    /// Eleven instructions for eight codes in fp16, 18 in bf16.
    fn emit_fragment(&self, a: &mut Asm, operands: &Operands, words: &[Reg<B32>]) -> [Reg<B32>; 4] {
        /// Where the sign of each code lies below the top bit of its half.
        const SIGNS: [i32; 4] = [0, 3, 1, 2];
        let word = words[0];
        std::array::from_fn(|n| {
            let code = n as i32;
            match operands.activation {
                // Sign and magnitude lie as far apart as in the number.
                Activation::F16 if n < 2 => {
                    let (moved, value) = (emit_shift(a, word, 3 * code), a.reg());
                    a.and_b32(value, moved, 0x8e00_8e00u32);
                    value
                }
                Activation::F16 => {
                    let moved = emit_shift(a, word, 3 * code);
                    let signs = emit_shift(a, word, SIGNS[n]);
                    emit_float(a, moved, 0x0e00_0e00, signs)
                }
                Activation::Bf16 => {
                    let moved = emit_shift(a, word, 3 * code - 3);
                    let signs = emit_shift(a, word, SIGNS[n]);
                    let value = emit_float(a, moved, 0x01c0_01c0, signs);
                    emit_times_bf16(a, value, [operands.constants[0], operands.constants[1]])
                }
            }
        })
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
