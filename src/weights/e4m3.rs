//! `e4m3`: an 8-bit float of 1 sign, 4 exponent and 3 mantissa bits, the type of fp8 checkpoints.
//!
//! The variant without infinities (`float8_e4m3fn`): exponent bias 7, largest value 448, smallest
//! 2^-9; all seven bits set is NaN, whatever the sign. Every value is exact in fp16 and bf16.
//! Source: OCP 8-bit Floating Point Specification.

use super::{WeightFormat, ZeroRule};

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
