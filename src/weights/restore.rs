//! From the packed layout back to what a source holds: the inverse of packing, for whoever wants another layout.
//!
//! Packing moves codes and zeros, and rounds no scales but those of f32; so everything else comes back bit for bit. What
//! does not: scales and zeros of groups that no input belongs to, and the sign of a zero among scales of one byte.

use half::bf16;

use super::{Error, Group, PackedView, ScaleType};
use crate::layout::f16_from_f64;

/// What [`PackedView::restore`] gives back.
#[derive(Clone, Debug, PartialEq)]
pub struct Restored {
    /// One code a byte, `[K][N]`.
    pub codes: Vec<u8>,
    /// Groups of the source.
    pub num_groups: usize,
    /// Scales, little endian, `[groups][N]`.
    pub scales: Vec<u8>,
    /// Zeros, `[groups][N]`, if the type stores zeros.
    pub zeros: Option<Vec<u8>>,
    /// The group of each input, where it does not follow from its place.
    pub g_idx: Option<Vec<u32>>,
}

impl PackedView<'_> {
    /// The weight as a source of scales of type `element` and a global scale `global` held it. Exact if the packer said
    /// that it was ([`Packing::scales_are_exact`](super::Packing::scales_are_exact)).
    ///
    /// # Errors
    /// [`Error::ScaleRange`] for a scale that the type does not have: the source was another.
    pub fn restore(&self, element: ScaleType, global: f32) -> Result<Restored, Error> {
        let layout = *self.spec().layout();
        let (n, order) = (layout.n, self.spec().input_order());
        let packed_groups = layout.num_groups();
        let group_of = |packed: usize| order.map_or(packed, |o| o.groups()[packed] as usize);
        let num_groups = (0..packed_groups).map(group_of).max().map_or(0, |last| last + 1);
        let size = match layout.group {
            Group::PerColumn => layout.k,
            Group::Size(size) => size as usize,
        };
        let unit = f64::from(self.spec().factor()) / f64::from(global);
        let element_bytes = element.bytes();
        let mut scales = vec![0; num_groups * n * element_bytes];
        let mut zeros = vec![0; num_groups * n];
        let stored = self.zero(0, 0).is_some();
        for packed in 0..packed_groups {
            let group_idx = group_of(packed);
            for column in 0..n {
                let at = group_idx * n + column;
                let row = self.scale(packed, column);
                let bytes = match element {
                    // Rows of such scales are copies; so NaNs keep their bits.
                    ScaleType::F16 if unit == 1.0 => Some(row.to_bits().into()),
                    _ => encode(element, row.to_f64() * unit),
                };
                let Some(bytes) = bytes else {
                    let rule = "the type that it is wanted in does not have it";
                    let value = (row.to_f64() * unit) as f32;
                    return Err(Error::ScaleRange { group_idx, n: column, value, rule });
                };
                scales[at * element_bytes..(at + 1) * element_bytes]
                    .copy_from_slice(&bytes.to_le_bytes()[..element_bytes]);
                zeros[at] = self.zero(packed * size, column).unwrap_or(0);
            }
        }
        let g_idx = order.map(|_| {
            let groups = self
                .spec()
                .places()
                .into_iter()
                .map(|place| place.map_or(0, |place| group_of(place / size) as u32));
            groups.collect()
        });
        let (codes, zeros) = (self.codes(), stored.then_some(zeros));
        Ok(Restored { codes, num_groups, scales, zeros, g_idx })
    }
}

/// The bits of a number in a type, if it has it.
fn encode(element: ScaleType, value: f64) -> Option<u32> {
    let bits = match element {
        ScaleType::F16 => f16_from_f64(value).to_bits().into(),
        ScaleType::BF16 => bf16::from_f64(value).to_bits().into(),
        ScaleType::F32 => (value as f32).to_bits(),
        ScaleType::E4M3 | ScaleType::E8M0 => {
            let same = |code: &u32| {
                let decoded = element.decode(&[*code as u8]);
                decoded.to_bits() == (value as f32).to_bits() || decoded.is_nan() && value.is_nan()
            };
            return (0..256).find(same);
        }
    };
    let decoded = element.decode(&bits.to_le_bytes());
    (f64::from(decoded) == value || decoded.is_nan() && value.is_nan()).then_some(bits)
}
