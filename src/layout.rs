//! Pure index maths: who holds which element of a matrix fragment, swizzles, and fp16 rounding.
//!
//! Kernels, packer and emulator share these maps, so a wrong one would cancel out in every test that uses
//! only ours; each is therefore also checked against vectors recorded on hardware.
//! Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".

/// Fragments of `mma.m16n8k16` with 16-bit inputs. A register holds two elements, `half` 0 the low one.
pub mod mma_m16n8k16 {
    /// `(row, k)` of half `half` of A register `reg` (0 to 3) in `lane`.
    pub fn a(lane: u32, reg: u32, half: u32) -> (u32, u32) {
        (lane / 4 + 8 * (reg % 2), 2 * (lane % 4) + 8 * (reg / 2) + half)
    }

    /// `(k, column)` of half `half` of B register `reg` (0 or 1) in `lane`.
    pub fn b(lane: u32, reg: u32, half: u32) -> (u32, u32) {
        (2 * (lane % 4) + 8 * reg + half, lane / 4)
    }

    /// `(row, column)` of accumulator register `reg` (0 to 3) in `lane`.
    pub fn c(lane: u32, reg: u32) -> (u32, u32) {
        (lane / 4 + 8 * (reg / 2), 2 * (lane % 4) + reg % 2)
    }
}

/// The swizzled position of 16-byte unit `unit` of row `row`: its low three bits are xored with the row's,
/// so that eight consecutive rows at one logical unit lie in eight different groups of four banks. An
/// involution for each row.
pub fn swizzle_unit(row: u32, unit: u32) -> u32 {
    unit ^ (row % 8)
}

/// `value` rounded once to fp16, to nearest even, with subnormals; overflow gives an infinity and a NaN
/// the canonical NaN 0x7fff that the hardware writes.
///
/// Written out because `half::f16::from_f64` rounds through single precision on processors with F16C.
pub fn f16_from_f64(value: f64) -> half::f16 {
    if value.is_nan() {
        return half::f16::from_bits(0x7fff);
    }
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    // 65520 is half way between the largest finite value, 65504, and the next power of two.
    if magnitude >= 65520.0 {
        return half::f16::from_bits(sign | 0x7c00);
    }
    // The last place of the result: 2^-24 among subnormals, else 2^(exponent - 10).
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(-14);
    let per_unit = f64::from_bits(((1023 + 10 - exponent) as u64) << 52);
    // Adding 2^52 leaves no place for a fraction: rounds to nearest even, without a library call.
    let units = (magnitude * per_unit + 4_503_599_627_370_496.0) - 4_503_599_627_370_496.0;
    // `units` has the hidden bit in place, so adding it to the exponent field carries as it should.
    let bits = (((exponent + 14) as u32) << 10) + units as u32;
    half::f16::from_bits(sign | bits as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fragment_maps_are_bijections() {
        let mut a = [0; 256];
        let mut b = [0; 128];
        let mut c = [0; 128];
        for lane in 0..32 {
            for (reg, half) in (0..4).flat_map(|reg| [(reg, 0), (reg, 1)]) {
                let (row, k) = mma_m16n8k16::a(lane, reg, half);
                a[(16 * row + k) as usize] += 1;
                if reg < 2 {
                    let (k, col) = mma_m16n8k16::b(lane, reg, half);
                    b[(8 * k + col) as usize] += 1;
                }
            }
            for reg in 0..4 {
                let (row, col) = mma_m16n8k16::c(lane, reg);
                c[(8 * row + col) as usize] += 1;
            }
        }
        assert!(a.iter().chain(&b).chain(&c).all(|count| *count == 1));
    }

    #[test]
    fn every_fp16_value_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            let value = half::f16::from_bits(bits);
            if !value.is_nan() {
                assert_eq!(f16_from_f64(value.to_f64()).to_bits(), bits);
            }
        }
    }

    proptest! {
        #[test]
        fn swizzle_is_an_involution(row in 0u32..1024, unit in 0u32..1024) {
            prop_assert_eq!(swizzle_unit(row, swizzle_unit(row, unit)), unit);
        }

        /// Among all fp16 values the result is a nearest one, and the even one of two.
        #[test]
        fn rounding_is_to_nearest_even(value in -70000f64..70000.0, shift in 0i32..40) {
            let value = value * 2f64.powi(-shift);
            let rounded = f16_from_f64(value);
            if rounded.is_finite() {
                let error = (rounded.to_f64() - value).abs();
                let bits = rounded.to_bits();
                for other in [bits.wrapping_add(1), bits.wrapping_sub(1)].map(half::f16::from_bits) {
                    if other.is_finite() {
                        let other_error = (other.to_f64() - value).abs();
                        prop_assert!(error < other_error || (error == other_error && bits.is_multiple_of(2)));
                    }
                }
            } else {
                prop_assert!(value.abs() >= 65520.0);
            }
        }
    }
}
