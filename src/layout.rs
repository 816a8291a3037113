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

/// Fragments of `wgmma` with 16-bit inputs, 64 rows and 16 k: those of one warp, which has 16 of the rows.
/// Warp `w` of the warpgroup has rows `16 * w` and on. Source: PTX ISA, "Register Fragments for
/// wgmma.mma_async.m64nNk16".
pub mod wgmma_m64k16 {
    /// `(row, k)` of half `half` of A register `reg` (0 to 3) in `lane`.
    pub fn a(lane: u32, reg: u32, half: u32) -> (u32, u32) {
        super::mma_m16n8k16::a(lane, reg, half)
    }

    /// `(row, column)` of accumulator register `reg` in `lane`: four registers for each 8 columns.
    pub fn d(lane: u32, reg: u32) -> (u32, u32) {
        let (row, column) = super::mma_m16n8k16::c(lane, reg % 4);
        (row, 8 * (reg / 4) + column)
    }
}

/// Where `wgmma` finds its second operand: a descriptor of a K-major matrix of 16-bit elements in shared
/// memory, taken apart. Source: PTX ISA, "Matrix Descriptor Format", "Strides".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Shared address of the first element, in bytes.
    pub start: u32,
    /// Bytes between the two k8 halves of a k16 step, without a swizzle.
    pub leading_bytes: u32,
    /// Bytes between two groups of 8 columns.
    pub stride_bytes: u32,
    /// Which 128-byte row of its 1024 bytes a swizzle pattern begins with.
    pub base_offset: u32,
    /// 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes.
    pub swizzle: u32,
}

impl Descriptor {
    /// No swizzle.
    pub const NONE: u32 = 0;
    /// The swizzle of 128 bytes.
    pub const B128: u32 = 1;

    /// The fields of a descriptor, `None` if a bit is set that belongs to none.
    pub fn decode(bits: u64) -> Option<Self> {
        let field = |first: u32, len: u32| (bits >> first) as u32 & ((1 << len) - 1);
        let known = Self {
            start: field(0, 14) << 4,
            leading_bytes: field(16, 14) << 4,
            stride_bytes: field(32, 14) << 4,
            base_offset: field(49, 3),
            swizzle: field(62, 2),
        };
        (known.encode() == bits).then_some(known)
    }

    /// The descriptor's bits. Addresses are cut to the 18 bits that it has room for.
    pub const fn encode(self) -> u64 {
        const fn field(bytes: u32) -> u64 {
            ((bytes & 0x3ffff) >> 4) as u64
        }
        field(self.start)
            | field(self.leading_bytes) << 16
            | field(self.stride_bytes) << 32
            | (self.base_offset as u64 & 7) << 49
            | (self.swizzle as u64 & 3) << 62
    }

    /// Shared address of the 16 bytes with k `8 * half` to `8 * half + 7` of `column`.
    pub fn address(&self, column: u32, half: u32) -> u32 {
        let (group, row) = (column / 8, column % 8);
        match self.swizzle {
            Self::B128 => {
                swizzle_128b(self.start + group * self.stride_bytes + row * 128 + 16 * half)
            }
            _ => self.start + group * self.stride_bytes + half * self.leading_bytes + row * 16,
        }
    }
}

/// Where the 128-byte swizzle puts a shared byte address: the unit of 16 bytes within 128 is xored with the
/// row of 128 bytes within 1024.
pub fn swizzle_128b(address: u32) -> u32 {
    let (row, unit) = (address / 128, address / 16 % 8);
    row * 128 + swizzle_unit(row, unit) * 16 + address % 16
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

/// `value` rounded once to bfloat16, to nearest even, with subnormals; overflow gives an infinity and a NaN the
/// canonical NaN 0x7fff that the hardware writes.
pub fn bf16_from_f64(value: f64) -> half::bf16 {
    /// 2^127 (2 - 2^-8): half way between the largest finite value and the next power of two.
    const OVERFLOW: f64 = f64::from_bits((1023 + 127) << 52 | 0xff << 44);
    if value.is_nan() {
        return half::bf16::from_bits(0x7fff);
    }
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let magnitude = value.abs();
    if magnitude >= OVERFLOW {
        return half::bf16::from_bits(sign | 0x7f80);
    }
    // As for fp16: the last place is 2^-133 among subnormals, else 2^(exponent - 7).
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(-126);
    let per_unit = f64::from_bits(((1023 + 7 - exponent) as u64) << 52);
    let units = (magnitude * per_unit + 4_503_599_627_370_496.0) - 4_503_599_627_370_496.0;
    let bits = (((exponent + 126) as u32) << 7) + units as u32;
    half::bf16::from_bits(sign | bits as u16)
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

    #[test]
    fn every_bf16_value_survives_the_round_trip_and_ties_go_to_even() {
        for bits in 0..=u16::MAX {
            let value = half::bf16::from_bits(bits);
            if value.is_nan() {
                continue;
            }
            assert_eq!(bf16_from_f64(value.to_f64()).to_bits(), bits);
            if bits & 0x7fff < 0x7f7f {
                let next = half::bf16::from_bits(bits + 1).to_f64();
                let tie = (value.to_f64() + next) / 2.0;
                assert_eq!(bf16_from_f64(tie).to_bits(), bits + bits % 2, "{bits:#06x}");
            }
        }
        let largest = half::bf16::MAX.to_f64();
        assert_eq!(bf16_from_f64(largest * (1.0 + 2f64.powi(-8))), half::bf16::INFINITY);
        assert_eq!(bf16_from_f64(largest * (1.0 + 2f64.powi(-10))), half::bf16::MAX);
    }

    #[test]
    fn warpgroup_accumulators_are_each_held_once() {
        let mut held = vec![0; 16 * 256];
        for (lane, reg) in (0..32).flat_map(|lane| (0..128).map(move |reg| (lane, reg))) {
            let (row, column) = wgmma_m64k16::d(lane, reg);
            held[(256 * row + column) as usize] += 1;
        }
        assert!(held.iter().all(|count| *count == 1));
    }

    /// The constant of the 128-byte swizzle with 1024-byte atoms, and a step of 16 k.
    #[test]
    fn descriptors_are_taken_apart() {
        let bits = 0x4000_0040_0001_0000 | 0x12_3400 >> 4 & 0x3fff;
        let descriptor = Descriptor::decode(bits).expect("no stray bits");
        let wanted = Descriptor {
            start: 0x2_3400,
            leading_bytes: 16,
            stride_bytes: 1024,
            base_offset: 0,
            swizzle: Descriptor::B128,
        };
        assert_eq!(descriptor, wanted);
        assert_eq!(descriptor.encode(), bits);
        assert_eq!(Descriptor::decode(bits | 1 << 14), None);
        // Column 11 is row 3 of the second atom: unit 1 of it lies in place 1 ^ 3.
        assert_eq!(descriptor.address(11, 1), 0x2_3400 + 1024 + 3 * 128 + (1 ^ 3) * 16);
        let next = Descriptor::decode(bits + 2).expect("no stray bits");
        // Unit 3 in place 3 ^ 3.
        assert_eq!(next.address(11, 1), 0x2_3400 + 1024 + 3 * 128);
        let plain = Descriptor { leading_bytes: 2048, swizzle: Descriptor::NONE, ..wanted };
        assert_eq!(plain.address(11, 1), 0x2_3400 + 1024 + 2048 + 3 * 16);
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
