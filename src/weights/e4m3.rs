//! `e4m3`: an 8-bit float of 1 sign, 4 exponent and 3 mantissa bits, the type of fp8 checkpoints.
//!
//! The variant without infinities (`float8_e4m3fn`): exponent bias 7, largest value 448, smallest
//! 2^-9; all seven bits set is NaN, whatever the sign. Every value is exact in fp16 and bf16.
//! Source: OCP 8-bit Floating Point Specification.

use super::fragments::{emit_float, emit_power_bf16, emit_shift, emit_times_bf16};
use super::{Activation, Fragments, Operands, WeightFormat, ZeroRule};
use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::B32;

/// The weight type `e4m3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct E4M3;

/// The exact value of an e4m3 number.
pub(super) fn decode_e4m3(bits: u8) -> f32 {
    let sign = u32::from(bits & 0x80) << 24;
    if bits & 0x7f == 0x7f {
        return f32::from_bits(sign | 0x7fc0_0000);
    }
    // The seven bits below f32's exponent count 2^(7 - 127) of what they are worth; the product is
    // exact, and makes normal numbers of subnormal ones.
    let magnitude = f32::from_bits(u32::from(bits & 0x7f) << 20) * 2f32.powi(127 - 7);
    f32::from_bits(magnitude.to_bits() | sign)
}

impl WeightFormat for E4M3 {
    fn name(&self) -> &'static str {
        "e4m3"
    }

    fn bits(&self) -> u32 {
        8
    }

    fn zero_rule(&self) -> ZeroRule {
        ZeroRule::Float
    }

    fn decode(&self, code: u8) -> f32 {
        decode_e4m3(code)
    }

    fn padding_code(&self) -> u8 {
        0
    }

    fn fragments(&self) -> Option<&'static dyn Fragments> {
        Some(&E4M3)
    }
}

/// A half of a packed word, from the top: the sign of channel g, the sign of channel g + 8, the seven other bits of
/// channel g, those of channel g + 8. The first code then is an fp16 number as it lies, 2^8 too small (the difference
/// of the exponents' biases, 15 and 7), whose subnormals come out right. The two NaNs become 480 and -480.
impl Fragments for E4M3 {
    /// bf16 numbers would be 2^120 too small: that is put right at once.
    fn exponent(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 8,
            Activation::Bf16 => 0,
        }
    }

    fn arrange(&self, word: u32) -> u32 {
        (word & 0x0080_0080) << 8
            | (word >> 1 & 0x4000_4000)
            | (word & 0x007f_007f) << 7
            | (word >> 8 & 0x007f_007f)
    }

    fn restore(&self, word: u32) -> u32 {
        (word >> 8 & 0x0080_0080)
            | (word & 0x4000_4000) << 1
            | (word >> 7 & 0x007f_007f)
            | (word & 0x007f_007f) << 8
    }

    fn num_instructions(&self, activation: Activation) -> u32 {
        match activation {
            Activation::F16 => 10,
            Activation::Bf16 => 18,
        }
    }

    fn emit_constants(&self, a: &mut Asm, activation: Activation) -> Vec<Reg<B32>> {
        match activation {
            Activation::F16 => Vec::new(),
            Activation::Bf16 => emit_power_bf16(a, 127 - 7),
        }
    }

    /// Ten instructions for eight codes in fp16, 18 in bf16.
    fn emit_fragment(&self, a: &mut Asm, operands: &Operands, words: &[Reg<B32>]) -> [Reg<B32>; 4] {
        std::array::from_fn(|n| {
            let word = words[n / 2];
            match (operands.activation, n % 2) {
                (Activation::F16, 0) => {
                    let value = a.reg();
                    a.and_b32(value, word, 0xbf80_bf80u32);
                    value
                }
                (Activation::F16, _) => {
                    let (moved, signs) = (emit_shift(a, word, 7), emit_shift(a, word, 1));
                    emit_float(a, moved, 0x3f80_3f80, signs)
                }
                (Activation::Bf16, high) => {
                    let moved = emit_shift(a, word, [-3, 4][high]);
                    let signs = emit_shift(a, word, high as i32);
                    let value = emit_float(a, moved, 0x07f0_07f0, signs);
                    emit_times_bf16(a, value, [operands.constants[0], operands.constants[1]])
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition: exponent field 0 is subnormal, `S.1111.111` NaN.
    #[test]
    fn every_code_is_worth_what_the_specification_says() {
        for code in 0..=u8::MAX {
            let (exponent, mantissa) = (i32::from(code >> 3 & 0xf), f64::from(code & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let value = E4M3.decode(code);
            if code & 0x7f == 0x7f {
                assert!(value.is_nan(), "{code:#04x}");
                continue;
            }
            assert_eq!(f64::from(value.abs()), magnitude, "{code:#04x}");
            assert_eq!(value.is_sign_negative(), code >= 0x80, "{code:#04x}");
            assert_eq!(half::f16::from_f32(value).to_f32(), value, "exact in fp16");
        }
        assert_eq!((E4M3.decode(0x7e), E4M3.decode(0x01)), (448.0, 2f32.powi(-9)));
    }
}
