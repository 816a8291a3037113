//! What a convention reads a layer from: the configuration and the tensors that share a stem.
//!
//! Tensors of a stack of experts have one dimension more than those of a layer, the expert. A source
//! is narrowed to one expert, so that conventions see layers only.

use super::{Dtype, Error, QuantConfig, Tensor, Tensors};
use crate::weights::{Group, ScaleType};

/// The tensors of one layer and the configuration of its checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Source<'c, 'a> {
    /// The configuration.
    pub config: &'c QuantConfig,
    /// All tensors.
    pub tensors: &'a Tensors,
    /// The part of the tensors' names before their suffixes.
    pub stem: &'c str,
    /// The expert of a stack, and how many there are.
    pub expert: Option<(usize, usize)>,
}

impl<'a> Source<'_, 'a> {
    /// The layer's name: the stem, and the expert behind a dot.
    pub fn name(&self) -> String {
        match self.expert {
            None => self.stem.to_owned(),
            Some((expert, _)) => format!("{}.{expert}", self.stem),
        }
    }

    /// The tensor with that suffix, narrowed to the expert.
    ///
    /// # Errors
    /// [`Error::TensorShape`] for a tensor of another number of experts.
    pub fn get(&self, suffix: &str) -> Result<Option<Tensor<'a>>, Error> {
        let Some(tensor) = self.tensors.get(&format!("{}{suffix}", self.stem)) else {
            return Ok(None);
        };
        let Some((expert, num_experts)) = self.expert else { return Ok(Some(tensor)) };
        match tensor.shape.split_first() {
            Some((&found, shape)) if found == num_experts => {
                let bytes_each = tensor.bytes.len() / num_experts;
                let bytes = &tensor.bytes[expert * bytes_each..(expert + 1) * bytes_each];
                Ok(Some(Tensor { shape, bytes, ..tensor }))
            }
            _ => Err(shape_error(&tensor, format!("[{num_experts}, ..], one for each expert"))),
        }
    }

    /// The tensor with that suffix, which the convention needs.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] and those of [`Source::get`].
    pub fn required(&self, convention: &'static str, suffix: &str) -> Result<Tensor<'a>, Error> {
        let tensor = || format!("{}{suffix}", self.stem);
        self.get(suffix)?.ok_or_else(|| Error::MissingTensor { tensor: tensor(), convention })
    }

    /// A required tensor of one of the element types and two dimensions.
    ///
    /// # Errors
    /// [`Error::TensorDtype`], [`Error::TensorShape`] and those of [`Source::required`].
    pub fn matrix(
        &self,
        convention: &'static str,
        suffix: &str,
        dtypes: &[Dtype],
    ) -> Result<(Tensor<'a>, [usize; 2]), Error> {
        let tensor = self.required(convention, suffix)?;
        check_dtype(&tensor, dtypes)?;
        let &[rows, columns] = tensor.shape else {
            return Err(shape_error(&tensor, "two dimensions".to_owned()));
        };
        Ok((tensor, [rows, columns]))
    }

    /// The group rule of `k` inputs that the number `raw` and a tensor of `rows` scales a column mean.
    ///
    /// # Errors
    /// [`Error::Weight`] with those of [`Group::for_scale_rows`].
    pub fn group(&self, k: usize, raw: i64, rows: usize) -> Result<Group, Error> {
        Group::for_scale_rows(k, raw, rows)
            .map_err(|source| Error::Weight { layer: self.name(), source })
    }
}

/// The element types that scales of integer and fp8 weights may have.
pub(super) const SCALE_DTYPES: &[Dtype] = &[Dtype::F16, Dtype::BF16, Dtype::F32];

/// The element type of scales of a type in [`SCALE_DTYPES`], or of one byte.
pub(super) fn scale_type(dtype: Dtype) -> ScaleType {
    match dtype {
        Dtype::BF16 => ScaleType::BF16,
        Dtype::F32 => ScaleType::F32,
        Dtype::F8_E4M3 => ScaleType::E4M3,
        Dtype::F8_E8M0 | Dtype::U8 => ScaleType::E8M0,
        _ => ScaleType::F16,
    }
}

pub(crate) fn check_dtype(tensor: &Tensor<'_>, expected: &[Dtype]) -> Result<(), Error> {
    if expected.contains(&tensor.dtype) {
        return Ok(());
    }
    let (tensor, found) = (tensor.name.to_owned(), tensor.dtype);
    Err(Error::TensorDtype { tensor, expected: expected.to_vec(), found })
}

pub(crate) fn check_shape(tensor: &Tensor<'_>, expected: &[usize]) -> Result<(), Error> {
    if tensor.shape == expected {
        Ok(())
    } else {
        Err(shape_error(tensor, format!("{expected:?}")))
    }
}

pub(super) fn shape_error(tensor: &Tensor<'_>, expected: String) -> Error {
    let found = tensor.shape.to_vec();
    Error::TensorShape { tensor: tensor.name.to_owned(), expected, found }
}

/// The little-endian words of a tensor of 32-bit integers.
pub(super) fn words<'a>(tensor: &Tensor<'a>) -> impl Iterator<Item = u32> + 'a {
    tensor.bytes.as_chunks().0.iter().map(|quad| u32::from_le_bytes(*quad))
}
