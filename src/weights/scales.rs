//! The scales of a weight as a file holds them: element type, order and a global factor.
//!
//! Every element is decoded to f32, which is exact for all five types.

use half::{bf16, f16};

use super::e4m3::decode_e4m3;
use super::{Error, Group};

/// The element type of a scale tensor, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// fp8 of 4 exponent and 3 mantissa bits, without infinities (see [`super::E4M3`]).
    E4M3,
    /// A power of two: a byte e is worth 2^(e - 127), and 255 is NaN.
    E8M0,
}

impl ScaleType {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
            Self::E4M3 | Self::E8M0 => 1,
        }
    }

    /// The name that messages use.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F32 => "f32",
            Self::E4M3 => "e4m3",
            Self::E8M0 => "e8m0",
        }
    }

    /// The type of that name.
    pub fn by_name(name: &str) -> Option<Self> {
        let all = [Self::F16, Self::BF16, Self::F32, Self::E4M3, Self::E8M0];
        all.into_iter().find(|element| element.name() == name)
    }

    /// The smallest positive number with all significant bits.
    pub(crate) fn min_normal(self) -> f32 {
        match self {
            Self::F16 => 2f32.powi(-14),
            Self::BF16 | Self::F32 => f32::MIN_POSITIVE,
            Self::E4M3 => 2f32.powi(-6),
            Self::E8M0 => 0.0, // It has one significant bit everywhere.
        }
    }

    /// The exact value of the element that starts `bytes`.
    pub(super) fn decode(self, bytes: &[u8]) -> f32 {
        match self {
            Self::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            Self::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            Self::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            Self::E4M3 => decode_e4m3(bytes[0]),
            // f32 has the same bias; 2^-127 is a subnormal of it.
            Self::E8M0 => match bytes[0] {
                0 => f32::from_bits(0x0040_0000),
                255 => f32::NAN,
                exponent => f32::from_bits(u32::from(exponent) << 23),
            },
        }
    }
}

/// The order of a scale tensor. `groups` are those of [`Group::num_groups`], or as many as the
/// tensor has rows if the matrix has group indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleOrder {
    /// `[groups][N]`.
    Rows,
    /// `[N][groups]`.
    Columns,
    /// `[groups][N]` with the columns permuted as the original Marlin kernel wants them.
    Marlin,
    /// `[N/128][K/128]`, rounded up: one scale for each block of 128 x 128 weights. The group size
    /// is 128.
    Blocks,
    /// A single scale. The group is the whole column.
    PerTensor,
}

impl ScaleOrder {
    /// The name that messages use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Columns => "columns",
            Self::Marlin => "marlin",
            Self::Blocks => "blocks",
            Self::PerTensor => "per tensor",
        }
    }
}

/// Outputs, and inputs, that a scale of [`ScaleOrder::Blocks`] is for.
pub const SCALE_BLOCK: usize = 128;

/// The scales of a weight.
#[derive(Clone, Copy, Debug)]
pub struct Scales<'a> {
    /// The elements, of any alignment.
    pub bytes: &'a [u8],
    /// What an element is.
    pub element: ScaleType,
    /// Where the element of (group, output) lies.
    pub order: ScaleOrder,
    /// A factor of every scale; 1 where the file has none.
    pub global: f32,
}

impl<'a> Scales<'a> {
    /// Scales without a global factor.
    pub fn new(bytes: &'a [u8], element: ScaleType, order: ScaleOrder) -> Self {
        Self { bytes, element, order, global: 1.0 }
    }

    /// fp16 scales without a global factor.
    pub fn f16(bytes: &'a [u8], order: ScaleOrder) -> Self {
        Self::new(bytes, ScaleType::F16, order)
    }

    /// Whether every element is a finite number.
    pub(crate) fn are_finite(&self) -> bool {
        // On the bits: a loop without a branch is a vector loop.
        let pairs = || self.bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair));
        !match self.element {
            ScaleType::F16 => pairs().fold(false, |bad, bits| bad | (bits & 0x7c00 == 0x7c00)),
            ScaleType::BF16 => pairs().fold(false, |bad, bits| bad | (bits & 0x7f80 == 0x7f80)),
            ScaleType::F32 => {
                let quads = self.bytes.as_chunks().0.iter().map(|quad| f32::from_le_bytes(*quad));
                quads.fold(false, |bad, value| bad | !value.is_finite())
            }
            ScaleType::E4M3 => {
                self.bytes.iter().fold(false, |bad, byte| bad | (byte & 0x7f == 0x7f))
            }
            ScaleType::E8M0 => self.bytes.contains(&255),
        }
    }

    /// Number of groups of an `n` x `k` weight, by the size of the tensor where group indices make
    /// it free.
    ///
    /// # Errors
    /// [`Error::ScaleRows`] and [`Error::SourceBytes`] where the sizes disagree,
    /// [`Error::OrderShape`] and [`Error::ScaleGroup`] where the order cannot hold the shape, and
    /// [`Error::GlobalScale`].
    pub(super) fn check(
        &self,
        (n, k): (usize, usize),
        group: Group,
        free_groups: bool,
    ) -> Result<usize, Error> {
        if !self.global.is_normal() {
            return Err(Error::GlobalScale { value: self.global });
        }
        let whole_blocks = match self.order {
            ScaleOrder::Blocks => group == Group::Size(SCALE_BLOCK as u32) || k <= SCALE_BLOCK,
            ScaleOrder::PerTensor => group == Group::PerColumn,
            ScaleOrder::Rows | ScaleOrder::Columns | ScaleOrder::Marlin => true,
        };
        if !whole_blocks {
            return Err(Error::ScaleGroup { order: self.order, group });
        }
        if self.order == ScaleOrder::Marlin && !n.is_multiple_of(64) {
            let (n_multiple, k_multiple) = (64, 1);
            return Err(Error::OrderShape { order: "Marlin's s", n_multiple, k_multiple, n, k });
        }
        let expected = group.num_groups(k);
        // Bytes of the scales of one group.
        let row_bytes = match self.order {
            ScaleOrder::Rows | ScaleOrder::Columns | ScaleOrder::Marlin => n,
            ScaleOrder::Blocks => n.div_ceil(SCALE_BLOCK),
            ScaleOrder::PerTensor => 1,
        } * self.element.bytes();
        let found = self.bytes.len() / row_bytes;
        if !self.bytes.len().is_multiple_of(row_bytes) || found == 0 {
            let (expected, found) = (expected * row_bytes, self.bytes.len());
            return Err(Error::SourceBytes { what: "scales", n, k, expected, found });
        }
        if found != expected && !free_groups {
            return Err(Error::ScaleRows { k, group, expected, found });
        }
        Ok(found)
    }

    /// Index of the element of group `group_idx` and output `n`.
    pub(super) fn element_idx(&self, shape: &ScaleShape, group_idx: usize, n: usize) -> usize {
        let ScaleShape { n: num_columns, num_groups, group } = *shape;
        match self.order {
            ScaleOrder::Rows => group_idx * num_columns + n,
            ScaleOrder::Columns => n * num_groups + group_idx,
            ScaleOrder::Marlin => group_idx * num_columns + super::marlin::scale_column(group, n),
            ScaleOrder::Blocks => n / SCALE_BLOCK * num_groups + group_idx,
            ScaleOrder::PerTensor => 0,
        }
    }

    /// The element of group `group_idx` and output `n`, without the global factor.
    pub(super) fn get(&self, shape: &ScaleShape, group_idx: usize, n: usize) -> f32 {
        let at = self.element.bytes() * self.element_idx(shape, group_idx, n);
        self.element.decode(&self.bytes[at..])
    }

    /// The bits of an f16 element.
    pub(super) fn get_half(&self, shape: &ScaleShape, group_idx: usize, n: usize) -> f16 {
        debug_assert_eq!(self.element, ScaleType::F16, "only f16 elements are halves");
        let at = 2 * self.element_idx(shape, group_idx, n);
        f16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }
}

/// What the place of a scale depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScaleShape {
    /// Outputs.
    pub(super) n: usize,
    /// Groups of a column.
    pub(super) num_groups: usize,
    /// The group rule.
    pub(super) group: Group,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_decode_exactly() {
        for (element, bytes, value) in [
            (ScaleType::F16, &[0x01, 0x00][..], 2f32.powi(-24)),
            (ScaleType::BF16, &[0x80, 0x3f], 1.0),
            (ScaleType::BF16, &[0x80, 0x0d], 2f32.powi(-100)),
            (ScaleType::F32, &[0, 0, 0, 0xc0], -2.0),
            (ScaleType::E4M3, &[0x7e], 448.0),
            (ScaleType::E8M0, &[127], 1.0),
            (ScaleType::E8M0, &[254], 2f32.powi(127)),
        ] {
            assert_eq!(element.decode(bytes), value, "{element:?} {bytes:?}");
            assert_eq!(element.bytes(), bytes.len());
        }
        for exponent in 0..=254u8 {
            let value = f64::from(ScaleType::E8M0.decode(&[exponent]));
            assert_eq!(value, 2f64.powi(i32::from(exponent) - 127), "{exponent}");
        }
        assert!(ScaleType::E8M0.decode(&[255]).is_nan());
    }
}
