//! Quantised weights: what a code means, where it lies in the packed buffer, and how it gets there.
//!
//! This room owns the weight types (one file each, listed in [`FORMATS`]), the group rule
//! ([`Group`]), the packed layout ([`PackedLayout`], drawn in its module), the packer and its
//! inverse ([`PackedWeights`]), the parts that a packed weight can be cut into ([`Shard`]), the
//! conversion from and to the tensors of the original Marlin kernel, and a round-to-nearest
//! quantiser. It relies on nothing but `half` and `bytemuck`; it
//! never opens a file (`checkpoint` does) and never emits a kernel (`kernel` does).
//!
//! Invariant: unpacking what was packed gives back every code and the bits of every scale, for any
//! N and K from one up; the padding decodes to zero.
//!
//! ```
//! use makaira::weights::{Dense, Group, PackedWeights, quantize};
//! let (n, k) = (3, 40); // any size: the packer pads
//! let dense: Vec<f32> = (0..n * k).map(|i| (i as f32 - 60.0) / 60.0).collect();
//! let matrix = quantize(Dense::F32(bytemuck::cast_slice(&dense)), n, k, Group::PerColumn, 1)?;
//! let packed = PackedWeights::pack(&matrix.view(), 1)?;
//! assert_eq!(packed.layout().n_padded, 64);
//! assert_eq!(packed.dequantize().len(), n * k);
//! # Ok::<(), makaira::weights::Error>(())
//! ```

mod columns;
mod e2m1;
mod e4m3;
mod error;
mod fragments;
mod group;
mod marlin;
mod matrix;
mod order;
mod pack;
mod packed;
mod packed_layout;
mod part;
mod quantize;
mod restore;
mod scale_rule;
mod scales;
mod u4;
mod u4b8;
mod u8_stored;
mod u8b128;
mod zeros;

pub use e2m1::E2M1;
pub use e4m3::E4M3;
pub use error::Error;
pub use fragments::{Activation, Fragments, Operands, ZeroBases, emit_zeros};
pub use group::Group;
pub use marlin::MarlinTensors;
pub use matrix::{Codes, MatrixParts, QuantMatrix};
pub use order::InputOrder;
pub use pack::{Packing, default_threads};
pub use packed::{Inputs, PackedSpec, PackedView, PackedWeights, Unpacked};
pub use packed_layout::{
    CHUNK_CHANNELS, CODE_BYTES_PER_TILE, K16_STEPS_PER_HALF, LAYOUT_VERSION, PackedLayout,
    SCALE_ROW_BYTES, ScaleRow, TILE_CHANNELS, TILE_K, TileKind,
};
pub use part::{Part, Shard};
pub use quantize::{Dense, Quantized, quantize};
pub use restore::Restored;
pub use scales::{SCALE_BLOCK, ScaleOrder, ScaleType, Scales};
pub use u4::U4;
pub use u4b8::U4B8;
pub use u8_stored::U8;
pub use u8b128::U8B128;
pub use zeros::{AWQ_ORDER, ZeroOrder, Zeros};

use std::fmt::Debug;

use crate::asm::Asm;
use crate::asm::reg::Reg;
use crate::asm::types::B32;

/// How the zero of a weight type is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroRule {
    /// The zero is this code, in every group: `decode(code)` already subtracts it.
    Bias(u8),
    /// The zero of each group and channel is stored beside the scale; `decode(code)` is the bare
    /// integer and the stored zero is subtracted from it.
    Stored,
    /// The code is a float with a zero of its own.
    Float,
}

/// A weight type: what one code is worth before it is scaled.
///
/// One file in this folder implements it and one line of [`FORMATS`] lists it; the generic tests
/// run over the list.
pub trait WeightFormat: Debug + Sync {
    /// The name the field uses, for instance `u4b8`; part of every configuration's name.
    fn name(&self) -> &'static str;

    /// Bits of a code: 4 or 8.
    fn bits(&self) -> u32;

    /// Where the zero comes from.
    fn zero_rule(&self) -> ZeroRule;

    /// The exact value of `code` with a scale of one (and, for [`ZeroRule::Stored`], a zero of
    /// nought); NaN for a code that is none. Bits of `code` above [`WeightFormat::bits`] must be clear.
    fn decode(&self, code: u8) -> f32;

    /// The code that padding is filled with; it is worth zero.
    fn padding_code(&self) -> u8;

    /// The conversion that kernels emit; none while no kernel takes the type.
    fn fragments(&self) -> Option<&'static dyn Fragments> {
        None
    }

    /// The type's second conversion, if it has one.
    fn subnormal(&self) -> Option<&'static dyn Subnormal> {
        None
    }

    /// Codes in a 32-bit word.
    fn codes_per_word(&self) -> usize {
        32 / self.bits() as usize
    }

    /// Number of different codes.
    fn num_codes(&self) -> usize {
        1 << self.bits()
    }
}

/// A conversion that leaves codes where they lie in the word, as fp16 subnormals: fewer instructions, but what
/// the fragments hold is `(value + bias) * 2^-exponent`, and the kernel must make up for both.
pub trait Subnormal: Debug + Sync {
    /// How much more than its value a code is worth.
    fn bias(&self) -> u8;

    /// The exponents of channel g (fragment registers 0 and 2) and of channel g + 8 (1 and 3), at most 24,
    /// the second no larger than the first.
    fn exponents(&self) -> [u32; 2];

    /// Emits the conversion of one packed word, in the places of [`Fragments::emit_fragment`].
    fn emit_fragment(&self, a: &mut Asm, word: Reg<B32>) -> [Reg<B32>; 4];
}

/// Every weight type, by name.
pub const FORMATS: &[&'static dyn WeightFormat] = &[&E2M1, &E4M3, &U4, &U4B8, &U8, &U8B128];

/// The weight type of that name, if the crate has it.
///
/// ```
/// assert_eq!(makaira::weights::format_by_name("u4b8").unwrap().bits(), 4);
/// ```
pub fn format_by_name(name: &str) -> Option<&'static dyn WeightFormat> {
    FORMATS.iter().copied().find(|format| format.name() == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_decodes_every_code_and_pads_with_zero() {
        for format in FORMATS {
            assert_eq!(format.codes_per_word() * format.bits() as usize, 32);
            let values: Vec<f32> =
                (0..format.num_codes()).map(|code| format.decode(code as u8)).collect();
            let num_nan = if format.name() == "e4m3" { 2 } else { 0 };
            assert_eq!(values.iter().filter(|v| !v.is_finite()).count(), num_nan, "{format:?}");
            if format.zero_rule() != ZeroRule::Stored {
                assert_eq!(values[format.padding_code() as usize], 0.0, "{format:?}");
            }
            if let ZeroRule::Bias(bias) = format.zero_rule() {
                for (code, value) in values.iter().enumerate() {
                    assert_eq!(*value, code as f32 - f32::from(bias), "{format:?} code {code}");
                }
            }
            assert!(std::ptr::eq(
                format_by_name(format.name()).expect("listed").name(),
                format.name()
            ));
        }
        assert!(FORMATS.is_sorted_by_key(|format| format.name()));
    }
}
